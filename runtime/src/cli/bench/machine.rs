//! What the machine does at most, so that speeds can be told as shares of it.

use std::time::Duration;

use consort_kernels::{
    KernelError,
    ceilings::{peak_flops, read_speed},
    device::Device,
    element::bf16,
};
use serde::Serialize;

use crate::Engine;

/// For each of the two measurements.
const TIME: Duration = Duration::from_millis(500);

/// The processors of all ranks together.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Machine {
    /// Reading as many bytes as the model has of weights, once after the other.
    pub(super) read_bytes_per_s: f64,
    /// Products of registers, as kernels of the model's type multiply.
    pub(super) flops: f64,
    /// Tokens a second of one request, if a step did nothing but read the weights once.
    pub(super) decode_tokens_per_s: f64,
}

/// Measures with as many threads as the ranks have; nothing where they are on other devices. The engine shall be idle.
pub(super) fn measure(engine: &Engine) -> Result<Option<Machine>, KernelError> {
    let compute = engine.compute();
    if !compute.on_cpus {
        return Ok(None);
    }
    let ranks = engine.status().ensemble.ranks;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (ranks.len() * compute.threads_per_rank).clamp(1, cores);
    let weight_bytes: u64 = ranks.iter().map(|rank| rank.weight_bytes).sum();
    let device = Device::cpu_with(threads, compute.isa)?;
    let read_bytes_per_s = read_speed(&device, weight_bytes as usize, TIME)?;
    let flops = match compute.dtype {
        "bfloat16" => peak_flops::<bf16>(&device, TIME)?,
        _ => peak_flops::<f32>(&device, TIME)?,
    };
    let decode_tokens_per_s = read_bytes_per_s / (weight_bytes as f64).max(1.0);
    Ok(Some(Machine { read_bytes_per_s, flops, decode_tokens_per_s }))
}
