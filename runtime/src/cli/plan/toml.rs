//! A plan as a topology that `consort serve` takes.

use std::fmt::Write;

use consort_parallel::plan::{KvFormat, Plan, RankDevice};
use toml::Value;

use super::{Usage, report::is_served, request::Asked};

/// Steps of a utilization that is written.
const UTILIZATION_STEPS: f64 = 1000.0;

pub(super) fn topology(plan: &Plan, asked: &Asked) -> anyhow::Result<String> {
    let request = &plan.request;
    if !is_served(request.format) || request.kv_format == KvFormat::Fp8 {
        let format = request.format;
        let problem = format!(
            "no topology says this: `consort serve` holds weights, keys and values in bfloat16 or float32, and the \
             plan is for weights in {format}, keys and values in {}; plan with --dtype bfloat16",
            request.kv_format.name()
        );
        return Err(Usage(problem).into());
    }
    let on_cards = request.devices.iter().any(|device| device.gpu().is_some());
    let device = |(at, device): (usize, &RankDevice)| match device {
        RankDevice::Card(_) => format!("cuda:{at}"),
        RankDevice::Seen { label, .. } => label.clone(),
        RankDevice::Host { .. } => "cpu".to_owned(),
    };
    let named = request.devices.iter().enumerate().map(device).collect();
    let devices = asked.devices.clone().unwrap_or(named);
    let limits = &request.limits;
    let mut out = String::new();
    let text = |text: &str| Value::String(text.to_owned()).to_string();
    let _ = writeln!(out, "# {}", plan.verdict().replace(|c: char| c.is_control(), " "));
    let _ = writeln!(out, "[model]\npath = {}", text(&asked.model_path));
    let _ = writeln!(out, "dtype = {}", text(request.format.name()));
    let _ = writeln!(out, "max_model_len = {}", limits.max_model_len);
    let _ = writeln!(out, "[parallel]\ntensor_parallel_size = {}", devices.len());
    if let Some(shares) = &request.shares {
        let list = Value::Array(shares.iter().map(|share| Value::Float(f64::from(*share))).collect());
        let _ = writeln!(out, "weights = {list}");
    }
    let list = Value::Array(devices.into_iter().map(Value::String).collect());
    let _ = writeln!(out, "[[node]]\ndevices = {list}");
    let _ = writeln!(out, "[cache]\nblock_size = {}", limits.block_size);
    match request.kv_bytes {
        Some(bytes) => drop(writeln!(out, "kv_cache_memory_bytes = {bytes}")),
        // What the engine would not take by itself.
        None if !on_cards => {
            let bytes = (plan.pool_pages() as u64).saturating_mul(plan.page_bytes());
            let _ = writeln!(out, "kv_cache_memory_bytes = {bytes}");
        }
        None => {}
    }
    if on_cards {
        let _ = writeln!(out, "gpu_memory_utilization = {}", Value::Float(utilization(plan)));
    }
    let _ = writeln!(
        out,
        "[scheduler]\nmax_num_seqs = {}\nmax_num_batched_tokens = {}",
        limits.max_num_seqs, limits.max_num_batched_tokens
    );
    Ok(out)
}

/// What was asked for, or all but the reserves, rounded down.
fn utilization(plan: &Plan) -> f64 {
    let of_rank = |rank: &consort_parallel::plan::RankPlan| {
        Some(rank.usable_bytes? as f64 / rank.memory_bytes?.max(1) as f64)
    };
    let all = plan.ranks.iter().filter_map(of_rank).fold(1.0, f64::min);
    plan.request.utilization.unwrap_or((all * UTILIZATION_STEPS).floor() / UTILIZATION_STEPS)
}
