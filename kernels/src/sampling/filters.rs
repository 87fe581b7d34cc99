//! min-p, top-k and top-p: dropped tokens become minus infinity.

use super::{
    SamplingParams,
    weight::{WHOLE, mass_to_keep, weight},
};

const DROPPED: f32 = f32::NEG_INFINITY;

/// Applies the filters to logits already divided by the temperature. At least one token stays.
pub(super) fn keep_candidates(logits: &mut [f32], params: &SamplingParams) {
    let largest = logits.iter().copied().fold(DROPPED, f32::max);
    if largest == DROPPED {
        return;
    }
    if params.min_p > 0.0 {
        let least = largest + libm::logf(params.min_p);
        drop_below(logits, least.min(largest));
    }
    if let Some(k) = params.top_k {
        keep_top_k(logits, k.max(1) as usize);
    }
    if params.top_p < 1.0 {
        keep_top_p(logits, params.top_p, largest);
    }
}

fn drop_below(logits: &mut [f32], least: f32) {
    for logit in logits {
        if *logit < least {
            *logit = DROPPED;
        }
    }
}

/// Keeps the `k` best and whatever equals the last of them.
fn keep_top_k(logits: &mut [f32], k: usize) {
    let mut values: Vec<f32> = logits.iter().copied().filter(|logit| *logit > DROPPED).collect();
    if k < values.len() {
        let (_, kth, _) = values.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        let kth = *kth;
        drop_below(logits, kth);
    }
}

/// Drops the least likely survivors as long as their weights sum to at most `1 - p` of all; the best one stays. Of
/// equal logits the higher ids go first.
///
/// Tokens no heavier than the budget divided by the survivors are all dropped by that rule, so only the others are
/// sorted.
fn keep_top_p(logits: &mut [f32], p: f32, largest: f32) {
    let mut total = 0u64;
    let mut survivors = 0u64;
    for &logit in logits.iter().filter(|logit| **logit > DROPPED) {
        total += weight(logit, largest);
        survivors += 1;
    }
    let budget = total - mass_to_keep(total, p);
    let negligible = surely_lighter_below(largest, budget / survivors);
    let mut spent = 0u64;
    let mut rest: Vec<(f32, u32)> = Vec::new();
    for (token, logit) in logits.iter_mut().enumerate().filter(|(_, logit)| **logit > DROPPED) {
        if f64::from(*logit) < negligible {
            spent += weight(*logit, largest);
            *logit = DROPPED;
        } else {
            rest.push((*logit, token as u32));
        }
    }
    // Ascending; among equals (both zeros are equal) the higher id is less likely to stay.
    rest.sort_unstable_by(|a, b| (a.0 + 0.0).total_cmp(&(b.0 + 0.0)).then(b.1.cmp(&a.1)));
    rest.pop();
    for (logit, token) in rest {
        spent += weight(logit, largest);
        if spent > budget {
            break;
        }
        logits[token as usize] = DROPPED;
    }
}

/// A logit below which every weight is at most `bound`, by more than the exponential can err.
fn surely_lighter_below(largest: f32, bound: u64) -> f64 {
    const MARGIN: f64 = 1e-3;
    f64::from(largest) + libm::log(bound as f64 / WHOLE as f64) - MARGIN
}
