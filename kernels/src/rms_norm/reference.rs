//! The truth: one row at a time, plain loops.

use crate::{Element, element::through};

/// Normalises one row after adding `delta` to it; returns the rounded outputs, widened.
pub fn rms_norm<T: Element>(
    residual: &mut [f32],
    delta: Option<&[f32]>,
    weight: &[f32],
    eps: f32,
) -> Vec<f32> {
    if let Some(delta) = delta {
        residual.iter_mut().zip(delta).for_each(|(x, delta)| *x += delta);
    }
    let sum: f32 = residual.iter().map(|x| x * x).sum();
    let scale = 1.0 / (sum / residual.len() as f32 + eps).sqrt();
    residual.iter().zip(weight).map(|(x, weight)| through::<T>(through::<T>(x * scale) * weight)).collect()
}
