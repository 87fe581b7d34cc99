//! Divisors of rotary frequencies, as GGUF stores them, back to the parameters of Llama 3.1's scaling.
//!
//! With wavelength `λ`, the divisor is 1 where `λ < context/high`, `factor` where `λ > context/low`, and
//! `1 / ((1 - s)/factor + s)` between, with `s = (context/λ - low) / (high - low)`. Every published model has
//! `low = 1` and `high = 4`, so one pair between the two ends gives the context away.

use std::f64::consts::TAU;

use crate::config::RopeScaling;

const LOW: f64 = 1.0;
const HIGH: f64 = 4.0;

/// Pairs whose context is tried: all of them give the same one unless the divisors are of another kind.
const CANDIDATES_MAX: usize = 4;

/// The scaling that gives these divisors, if there is one; nothing where they are all 1.
pub(super) fn recognise(divisors: &[f32], theta: f32) -> Option<RopeScaling> {
    let factor = divisors.iter().copied().fold(1.0, f32::max);
    if divisors.iter().all(|divisor| *divisor == 1.0) {
        return Some(RopeScaling::None);
    }
    let pairs: Vec<Pair> =
        divisors.iter().enumerate().map(|pair| Pair::of(pair, divisors.len(), theta)).collect();
    let contexts = contexts(&pairs, f64::from(factor));
    let original_context = contexts.into_iter().find(|context| {
        pairs.iter().all(|pair| pair.has(expected(pair.wavelength, f64::from(factor), *context)))
    })?;
    Some(RopeScaling::Llama3 {
        factor,
        low_freq_factor: LOW as f32,
        high_freq_factor: HIGH as f32,
        original_context: original_context as usize,
    })
}

struct Pair {
    wavelength: f64,
    divisor: f64,
}

impl Pair {
    fn of((at, divisor): (usize, &f32), pairs: usize, theta: f32) -> Self {
        let wavelength = TAU * f64::from(theta).powf(at as f64 / pairs as f64);
        Self { wavelength, divisor: f64::from(*divisor) }
    }

    /// Whether the divisor is this one, but for roundings. Converters compute in single precision: the frequency is
    /// off by up to 11 units in the last place (a power whose exponent is rounded), `context/λ <= 4` and a division
    /// by 3 carry that into `s`, and `s` into the divisor with its square. Twice that; another context by one token
    /// in 8,192, or another `low`, is far outside.
    fn has(&self, expected: f64) -> bool {
        let tolerance = 16.0 * f64::from(f32::EPSILON) * expected * expected;
        (self.divisor - expected).abs() <= tolerance
    }
}

fn expected(wavelength: f64, factor: f64, context: f64) -> f64 {
    let kept = ((context / wavelength - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
    1.0 / ((1.0 - kept) / factor + kept)
}

/// Contexts that may have given these pairs.
fn contexts(pairs: &[Pair], factor: f64) -> Vec<f64> {
    let mut between: Vec<f64> = pairs
        .iter()
        .filter(|pair| pair.divisor > 1.0 && pair.divisor < factor)
        .map(|pair| {
            let kept = (1.0 / pair.divisor - 1.0 / factor) / (1.0 - 1.0 / factor);
            ((kept * (HIGH - LOW) + LOW) * pair.wavelength).round()
        })
        .take(CANDIDATES_MAX)
        .collect();
    if between.is_empty() {
        between.extend(context_between_the_ends(pairs, factor));
    }
    between.retain(|context| *context >= 1.0 && *context <= f64::from(u32::MAX));
    between
}

/// A context for few pairs of which none lies between the ends: any that keeps the kept ones and divides the
/// divided ones is right. The power of two nearest to the middle, as contexts usually are.
fn context_between_the_ends(pairs: &[Pair], factor: f64) -> Option<f64> {
    let wavelengths =
        |divisor: f64| pairs.iter().filter(move |pair| pair.divisor == divisor).map(|pair| pair.wavelength);
    let (least, most) =
        (wavelengths(1.0).reduce(f64::max)? * HIGH, wavelengths(factor).reduce(f64::min)? * LOW);
    let middle = (least * most).sqrt();
    let power = middle.log2().round().exp2();
    Some(if least < power && power < most { power } else { middle.round() })
}
