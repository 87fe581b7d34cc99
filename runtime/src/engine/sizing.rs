//! Numbers of an engine that need no model: threads, and sampling defaults within bounds. Pure.

#[cfg(test)]
mod tests;

use consort_parallel::config::GenerationDefaults;

use super::validate::{REPETITION_PENALTY_MAX, REPETITION_PENALTY_MIN};

/// Threads of each rank: the machine's cores, shared out.
pub(super) fn threads_per_rank(requested: Option<usize>, cores: usize, ranks: usize) -> usize {
    requested.unwrap_or(cores / ranks.max(1)).max(1)
}

/// The checkpoint's sampling defaults without those that no request could have: a bad file must not make every
/// request fail.
pub(super) fn sane(defaults: &GenerationDefaults) -> GenerationDefaults {
    let keep = |name: &str, value: Option<f32>, good: fn(f32) -> bool| {
        let value = value?;
        if good(value) {
            return Some(value);
        }
        tracing::warn!(name, value, "generation_config.json has a value out of range; ignored");
        None
    };
    GenerationDefaults {
        repetition_penalty: keep("repetition_penalty", defaults.repetition_penalty, |v| {
            (REPETITION_PENALTY_MIN..=REPETITION_PENALTY_MAX).contains(&v)
        }),
        temperature: keep("temperature", defaults.temperature, |v| (0.0..=2.0).contains(&v)),
        top_p: keep("top_p", defaults.top_p, |v| v > 0.0 && v <= 1.0),
        min_p: keep("min_p", defaults.min_p, |v| (0.0..=1.0).contains(&v)),
        ..defaults.clone()
    }
}
