//! Probes and metrics: what an operator's tools read. None of them asks for a key.

use std::sync::{Arc, atomic::Ordering};

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use consort_actors::{EnsembleState, RankStatus, ReplicaStatus};
use serde::Serialize;

use super::{AppState, error::ApiError};
use crate::engine::{Engine, EngineStatus};

/// Whether starting this process anew would not help: 200, unless the engine has failed for good.
pub(super) async fn livez(State(state): State<Arc<AppState>>) -> Response {
    match state.attached().and_then(Engine::failure) {
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("failed: {reason}")).into_response(),
        None => "ok".into_response(),
    }
}

/// Whether to send requests here.
pub(super) async fn readyz(State(state): State<Arc<AppState>>) -> Response {
    let (status, word) =
        readiness(&state, state.attached().map(|engine| engine.status().ensemble.state).as_ref());
    (status, word).into_response()
}

/// The same as `/readyz`, with details.
pub(super) async fn health(State(state): State<Arc<AppState>>) -> Response {
    let engine = state.attached().map(|engine| engine.status());
    let (status, word) = readiness(&state, engine.as_ref().map(|status| &status.ensemble.state));
    (status, Json(Health { status: word, engine: engine.as_ref().map(EngineHealth::from) })).into_response()
}

/// Prometheus text.
pub(super) async fn metrics(State(state): State<Arc<AppState>>) -> Result<Response, ApiError> {
    let engine = state.attached().ok_or_else(|| ApiError::unavailable("the model is still loading"))?;
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    Ok((kind, engine.render_metrics()).into_response())
}

fn readiness(state: &AppState, ensemble: Option<&EnsembleState>) -> (StatusCode, &'static str) {
    let word = if state.draining.load(Ordering::Acquire) { "draining" } else { state_word(ensemble) };
    let status = if word == "ready" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, word)
}

fn state_word(state: Option<&EnsembleState>) -> &'static str {
    match state {
        None => "loading",
        Some(EnsembleState::Starting) => "starting",
        Some(EnsembleState::Ready) => "ready",
        Some(EnsembleState::Restarting { .. }) => "restarting",
        Some(EnsembleState::Draining) => "draining",
        Some(EnsembleState::Stopped) => "stopped",
        Some(EnsembleState::Failed { .. }) => "failed",
    }
}

#[derive(Serialize)]
struct Health {
    status: &'static str,
    #[serde(flatten)]
    engine: Option<EngineHealth>,
}

#[derive(Serialize)]
struct EngineHealth {
    model: String,
    reason: Option<String>,
    epoch: u64,
    steps: u64,
    running: usize,
    waiting: usize,
    open_requests: usize,
    oldest_request_seconds: Option<f64>,
    preemptions: u64,
    kv_blocks_used: usize,
    /// Of those that nobody uses, the ones whose content is kept.
    kv_blocks_cached: usize,
    kv_blocks_total: usize,
    prefix_cache_queries: u64,
    prefix_cache_hits: u64,
    ranks: Vec<RankHealth>,
    replicas: Vec<ReplicaHealth>,
}

/// One replica; its ranks are those of the same number in `ranks`.
#[derive(Serialize)]
struct ReplicaHealth {
    replica: u16,
    status: &'static str,
    reason: Option<String>,
    epoch: u64,
    steps: u64,
    running: usize,
    waiting: usize,
    kv_blocks_used: usize,
    kv_blocks_total: usize,
}

impl From<&ReplicaStatus> for ReplicaHealth {
    fn from(status: &ReplicaStatus) -> Self {
        Self {
            replica: status.replica.0,
            status: state_word(Some(&status.state)),
            reason: reason(&status.state),
            epoch: status.epoch,
            steps: status.steps,
            running: status.running,
            waiting: status.waiting,
            kv_blocks_used: status.used_blocks,
            kv_blocks_total: status.total_blocks,
        }
    }
}

/// Why it does not serve.
fn reason(state: &EnsembleState) -> Option<String> {
    match state {
        EnsembleState::Restarting { reason, .. } | EnsembleState::Failed { reason } => Some(reason.clone()),
        _ => None,
    }
}

#[derive(Serialize)]
struct RankHealth {
    replica: u16,
    rank: u16,
    query_heads: [usize; 2],
    kv_heads: [usize; 2],
    weight_bytes: u64,
    kv_bytes: u64,
    kv_blocks: usize,
    restarts: u32,
    state: String,
}

impl From<&EngineStatus> for EngineHealth {
    fn from(status: &EngineStatus) -> Self {
        let ensemble = &status.ensemble;
        let of_replica = |replica: &ReplicaStatus| {
            let number = replica.replica.0;
            replica.ranks.iter().map(move |rank| RankHealth::new(number, rank)).collect::<Vec<_>>()
        };
        let ranks = ensemble.replicas.iter().flat_map(of_replica);
        Self {
            model: status.model_name.clone(),
            reason: reason(&ensemble.state),
            epoch: ensemble.epoch,
            steps: ensemble.steps,
            running: ensemble.running,
            waiting: ensemble.waiting,
            open_requests: status.requests.len(),
            oldest_request_seconds: status
                .requests
                .iter()
                .map(|request| request.age.as_secs_f64())
                .reduce(f64::max),
            preemptions: ensemble.preemptions,
            kv_blocks_used: ensemble.used_blocks,
            kv_blocks_cached: ensemble.cached_blocks,
            kv_blocks_total: ensemble.total_blocks,
            prefix_cache_queries: ensemble.prefix_cache_queries,
            prefix_cache_hits: ensemble.prefix_cache_hits,
            ranks: ranks.collect(),
            replicas: ensemble.replicas.iter().map(ReplicaHealth::from).collect(),
        }
    }
}

impl RankHealth {
    fn new(replica: u16, rank: &RankStatus) -> Self {
        Self {
            replica,
            rank: rank.rank.0,
            query_heads: [rank.query_heads.start, rank.query_heads.end],
            kv_heads: [rank.kv_heads.start, rank.kv_heads.end],
            weight_bytes: rank.weight_bytes,
            kv_bytes: rank.kv_bytes,
            kv_blocks: rank.kv_blocks,
            restarts: rank.restarts,
            state: format!("{:?}", rank.state).to_lowercase(),
        }
    }
}
