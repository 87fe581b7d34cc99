//! The truth: one row and head in f64, no pages, no chunks.

use std::num::NonZeroUsize;

/// Softmax attention of one query over `keys` and `values`, each `[tokens, dim]`; the last is the query's own, and with
/// a window only so many of the last count. A `sink` is the logit of one more key, whose value is zero.
pub fn attention(
    query: &[f32],
    keys: &[f32],
    values: &[f32],
    scale: f32,
    window: Option<NonZeroUsize>,
    sink: Option<f32>,
) -> Vec<f32> {
    let dim = query.len();
    let hidden = window.map_or(0, |window| (keys.len() / dim).saturating_sub(window.get()));
    let (keys, values) = (&keys[hidden * dim..], &values[hidden * dim..]);
    let dot =
        |key: &[f32]| -> f64 { query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum() };
    let scores: Vec<f64> = keys.chunks_exact(dim).map(|key| dot(key) * f64::from(scale)).collect();
    let sink = sink.map_or(f64::NEG_INFINITY, f64::from);
    let largest = scores.iter().copied().fold(sink, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
    let total = weights.iter().sum::<f64>() + (sink - largest).exp();
    let mut out = vec![0.0f64; dim];
    for (weight, value) in weights.iter().zip(values.chunks_exact(dim)) {
        out.iter_mut().zip(value).for_each(|(out, v)| *out += weight / total * f64::from(*v));
    }
    out.into_iter().map(|x| x as f32).collect()
}
