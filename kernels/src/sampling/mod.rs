//! From one row of logits to one token.
//!
//! Order, as in vLLM: what the request changes ([`Adjustments`]), temperature, min-p, top-k, top-p, draw. Greedy
//! (temperature below 1e-5) takes the largest logit after the changes, ties to the lowest id.
//!
//! **Draws** are Gumbel-max over a counter-based generator: the token that maximises `logit / temperature + g` wins,
//! where `g` depends on (seed, position, token) alone. So a draw depends neither on the order in which candidates are
//! looked at, nor on the batch, the step or the number of ranks; a replayed sequence draws the same tokens.
//!
//! **The same on every device.** What decides about a token is computed by single rounded operations and sums of
//! integers: top-p counts probabilities in units of 2^-40 of the likeliest token's, rounded down. So CUDA ([`cuda`])
//! draws the CPU's tokens from the CPU's logits, however it cuts the work.

mod adjust;
pub mod cuda;
mod filters;
mod random;
#[cfg(test)]
mod tests;
mod weight;

pub use adjust::{Adjustments, TokenHistory};
use filters::keep_candidates;
use random::gumbel_argmax;

/// Below this temperature the choice is greedy.
pub const GREEDY_BELOW: f32 = 1e-5;

/// How a sequence's tokens are drawn. Validated by whoever builds it.
#[derive(Clone, Debug, PartialEq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct SamplingParams {
    /// Divisor of the logits; below 1e-5 the choice is greedy.
    pub temperature: f32,
    /// Keep only the k best tokens, and those equal to the last of them; `None` keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set of best tokens whose probability reaches this; 1.0 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this times the best one's probability; 0.0 keeps all.
    pub min_p: f32,
    /// Key of the counter-based generator; with the position it fixes every draw.
    pub seed: u64,
    /// Changes of the logits before any of the above.
    pub adjustments: Adjustments,
}

impl Default for SamplingParams {
    fn default() -> Self {
        let adjustments = Adjustments::default();
        Self { temperature: 1.0, top_k: None, top_p: 1.0, min_p: 0.0, seed: 0, adjustments }
    }
}

/// The token at `position` (its index in the sequence), from logits that [`Adjustments::apply`] has changed. `logits`
/// is used as scratch: its contents are lost.
///
/// NaN counts as minus infinity, also where the temperature makes it. `None` when no logit is left that could be
/// chosen: the model broke down on this sequence, and any token would be a lie.
pub fn sample(logits: &mut [f32], params: &SamplingParams, position: u64) -> Option<u32> {
    if params.temperature < GREEDY_BELOW {
        return (largest(logits) > f32::NEG_INFINITY).then(|| argmax(logits));
    }
    let inverse = 1.0 / params.temperature;
    logits.iter_mut().for_each(|logit| *logit = number(*logit * inverse));
    if logits.iter().all(|logit| *logit == f32::NEG_INFINITY) {
        return None;
    }
    keep_candidates(logits, params);
    Some(gumbel_argmax(logits, params.seed, position))
}

/// NaN as minus infinity.
fn number(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit }
}

/// Index of the largest value, the lowest among equals; 0 where no value is above minus infinity.
pub fn argmax(values: &[f32]) -> u32 {
    let largest = largest(values);
    values.iter().position(|value| *value == largest).unwrap_or(0) as u32
}

/// The largest value, minus infinity if there is none. Not one after the other, so that it takes many at a time.
fn largest(values: &[f32]) -> f32 {
    const LANES: usize = 32;
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane = larger(*value, *lane));
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |most, value| larger(*value, most))
}

/// Log-probability of `token` under the softmax of `logits`, and of the `top` best tokens, best first, ties to the
/// lower id. Computed in f64, so that it does not depend on the order of summation in any visible digit. NaN counts as
/// minus infinity, which has no probability.
pub fn log_probabilities(logits: &[f32], token: u32, top: usize) -> (f32, Vec<(u32, f32)>) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let below = |logit: f32| if logit == largest { 0.0 } else { f64::from(logit) - f64::from(largest) };
    let exp = |&logit: &f32| if logit.is_nan() { 0.0 } else { libm::exp(below(logit)) };
    let total = libm::log(logits.iter().map(exp).sum());
    let of = |token: u32| match logits.get(token as usize) {
        Some(&logit) if logit > f32::NEG_INFINITY => (below(logit) - total) as f32,
        _ => f32::NEG_INFINITY,
    };
    let best = best_tokens(logits, top);
    (of(token), best.into_iter().map(|token| (token, of(token))).collect())
}

/// The `count` best tokens, best first, ties to the lower id.
fn best_tokens(logits: &[f32], count: usize) -> Vec<u32> {
    // Both zeros are equal.
    let of = |token: &u32| number(logits[*token as usize]) + 0.0;
    let better = |a: &u32, b: &u32| of(b).total_cmp(&of(a)).then(a.cmp(b));
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    if count == 0 {
        return Vec::new();
    }
    if count < ids.len() {
        ids.select_nth_unstable_by(count - 1, better);
        ids.truncate(count);
    }
    ids.sort_unstable_by(better);
    ids
}
