//! Stretched rotary frequencies as both formats give them: defaults, derived values and bounds.

use crate::config::{RopeConfig, RopeScaling};

/// `beta_fast` and `beta_slow` of YaRN where a checkpoint does not give them.
pub(super) const DEFAULT_BETAS: (f32, f32) = (32.0, 1.0);

/// A value of the configuration, for which either format has its own key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Theta,
    Factor,
    OriginalContext,
    BetaFast,
    BetaSlow,
    AttentionFactor,
}

/// YaRN's factor of cosines and sines where the checkpoint does not give it: what the paper recommends, or a quotient
/// of such numbers with weights (`mscale`, `mscale_all_dim`). A weight of 0 means that there is none.
pub(super) fn attention_factor(factor: f32, weights: [f32; 2]) -> f32 {
    let recommended = |weight: f32| match f64::from(factor) {
        factor if factor > 1.0 => 0.1 * f64::from(weight) * libm::log(factor) + 1.0,
        _ => 1.0,
    };
    let [over, under] = weights;
    let value =
        if over != 0.0 && under != 0.0 { recommended(over) / recommended(under) } else { recommended(1.0) };
    value as f32
}

/// The first value of linear or YaRN scaling that nothing can be computed with, and what it must be.
pub(super) fn problem(rope: &RopeConfig) -> Option<(Value, String)> {
    let stretch = |factor: f32| {
        let good = factor.is_finite() && factor >= 1.0;
        (!good).then(|| (Value::Factor, format!("is {factor}; it must be at least 1")))
    };
    match &rope.scaling {
        RopeScaling::Linear { factor } => stretch(*factor),
        RopeScaling::Yarn { yarn, attention_factor } => {
            let positive = |value: f32, name| {
                let good = value.is_finite() && value > 0.0;
                (!good).then(|| (name, format!("is {value}; it must be positive")))
            };
            let theta = rope.theta > 1.0;
            let betas = (yarn.beta_fast, yarn.beta_slow);
            stretch(yarn.factor)
                .or_else(|| {
                    (yarn.original_context == 0)
                        .then(|| (Value::OriginalContext, "is 0; it must be positive".to_owned()))
                })
                .or_else(|| positive(yarn.beta_fast, Value::BetaFast))
                .or_else(|| positive(yarn.beta_slow, Value::BetaSlow))
                .or_else(|| {
                    // Equal ones are in use: the ramp has no width then.
                    let text = || format!("is {}; it must be at least beta_slow, {}", betas.0, betas.1);
                    (betas.0 < betas.1).then(|| (Value::BetaFast, text()))
                })
                .or_else(|| positive(*attention_factor, Value::AttentionFactor))
                .or_else(|| {
                    let text = || format!("is {}; yarn scaling needs one above 1", rope.theta);
                    (!theta).then(|| (Value::Theta, text()))
                })
        }
        RopeScaling::None | RopeScaling::Llama3 { .. } | RopeScaling::Factors(_) => None,
    }
}

#[cfg(test)]
mod tests;
