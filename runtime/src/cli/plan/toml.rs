//! A plan as a topology that `consort serve` takes.

use std::fmt::Write;

use consort_parallel::plan::{Plan, RankPlan};
use toml::Value;

use super::{
    Usage,
    report::not_served,
    request::{Asked, Served, Source},
};
use crate::topology::{Isolation, Overrides};

/// Steps of a utilization that is written.
const UTILIZATION_STEPS: f64 = 1000.0;

pub(super) fn topology(plan: &Plan, asked: &Asked) -> anyhow::Result<String> {
    let planned_only = not_served(&plan.request);
    if !planned_only.is_empty() {
        return Err(Usage(format!(
            "no topology says this: {}; plan with --dtype bfloat16 and without --kv-cache-dtype",
            planned_only.join(", and ")
        ))
        .into());
    }
    let mut out = String::new();
    let not_run = asked.not_run.as_ref().map(|note| format!("{note}; `consort serve` refuses it"));
    let comments = [Some(plan.verdict()), not_run];
    for comment in comments.into_iter().flatten() {
        let _ = writeln!(out, "# {}", comment.replace(|c: char| c.is_control(), " "));
    }
    match &asked.source {
        Source::Served(source) => out.push_str(&settled(plan, source)?),
        Source::Shape { model_path } => written(&mut out, plan, model_path),
    }
    Ok(out)
}

/// The topology that was planned, with what flags changed of it. Nothing that it says besides is lost: it is read once
/// more, with its server as the file has it. This machine's keys and `CONSORT_SERVER__*` are another server's.
fn settled(plan: &Plan, source: &Served) -> anyhow::Result<String> {
    let overrides = Overrides {
        dtype: Some(plan.request.format.name().to_owned()),
        max_model_len: Some(plan.request.limits.max_model_len),
        gpu_memory_utilization: is_on_cards(plan).then(|| utilization(plan)),
        without_server: false,
        server_as_written: true,
        ..source.overrides.clone()
    };
    Ok(source.topology(&overrides)?.to_toml())
}

/// A topology of a model that is not here, on the first cards of some machine.
fn written(out: &mut String, plan: &Plan, model_path: &str) {
    let (request, limits) = (&plan.request, &plan.request.limits);
    let text = |text: &str| Value::String(text.to_owned()).to_string();
    let ranks = request.devices.len();
    let devices = (0..ranks * request.replicas).map(|at| Value::String(format!("cuda:{at}"))).collect();
    let _ = writeln!(out, "[model]\npath = {}", text(model_path));
    let _ = writeln!(out, "dtype = {}", text(request.format.name()));
    let _ = writeln!(out, "max_model_len = {}", limits.max_model_len);
    let _ = writeln!(
        out,
        "[parallel]\ntensor_parallel_size = {ranks}\ndata_parallel_size = {}",
        request.replicas
    );
    let _ = writeln!(out, "isolation = {}", text(Isolation::Process.name()));
    let _ = writeln!(out, "[[node]]\ndevices = {}", Value::Array(devices));
    let _ = writeln!(out, "[cache]\nblock_size = {}", limits.block_size);
    if let Some(bytes) = request.kv_bytes {
        let _ = writeln!(out, "kv_cache_memory_bytes = {bytes}");
    }
    let _ = writeln!(out, "gpu_memory_utilization = {}", Value::Float(utilization(plan)));
    let _ = writeln!(
        out,
        "[scheduler]\nmax_num_seqs = {}\nmax_num_batched_tokens = {}",
        limits.max_num_seqs, limits.max_num_batched_tokens
    );
}

fn is_on_cards(plan: &Plan) -> bool {
    plan.request.devices.iter().any(|device| device.gpu().is_some())
}

/// What was asked for, or all but the reserves, rounded down.
fn utilization(plan: &Plan) -> f64 {
    let of_rank = |rank: &RankPlan| Some(rank.usable_bytes? as f64 / rank.memory_bytes?.max(1) as f64);
    let all = plan.ranks.iter().filter_map(of_rank).fold(1.0, f64::min);
    // A topology takes no 0.
    let written = (all * UTILIZATION_STEPS).floor().max(1.0) / UTILIZATION_STEPS;
    plan.request.utilization.unwrap_or(written)
}
