//! Rotary position embedding, in place.
//!
//! Each pair `(a, b)` of a head turns by the angle `position · frequency[i]`: `a' = a cos - b sin`,
//! `b' = b cos + a sin`. Pairs are `(i, i + r/2)` ([`Pairs::HalfSplit`], Hugging Face) or `(2i, 2i + 1)`
//! ([`Pairs::Interleaved`]); dimensions from `r` on pass unchanged.
//!
//! Frequencies may be stretched for contexts longer than the original training's: [`scale_linear`], [`scale_llama3`],
//! [`scale_yarn`]. YaRN also multiplies cosines and sines by an attention factor, so that scores grow by its square.
//!
//! Angles are f32 products as in `transformers`; their cosines come from one software implementation, so that they
//! are the same bits on every machine. They are computed once per step ([`rope_angles`]) and used by every layer.

mod cpu;
pub mod cuda;
mod reference;
#[cfg(test)]
mod tests;

pub use reference::rope as rope_reference;

use crate::{
    KernelError,
    buffer::{View, ViewMut},
    device::Device,
};

/// Which dimensions of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// `(i, i + r/2)`.
    HalfSplit,
    /// `(2i, 2i + 1)`.
    Interleaved,
}

/// Heads laid side by side in the columns of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Columns of a row.
    pub stride: usize,
    /// First column of the first head.
    pub first: usize,
    /// Heads.
    pub count: usize,
    /// Columns of one head.
    pub dim: usize,
}

impl Heads {
    /// Checks that the heads lie within a row and that `len` elements are whole rows; returns the rows.
    pub(crate) fn rows(&self, operation: &'static str, len: usize) -> Result<usize, KernelError> {
        KernelError::check_len(operation, "columns of a row", self.stride.max(self.end()), self.stride)?;
        let rows = len.checked_div(self.stride).unwrap_or(0);
        KernelError::check_len(operation, "rows", len, rows * self.stride)?;
        Ok(rows)
    }

    fn end(&self) -> usize {
        self.first + self.count * self.dim
    }
}

/// Plain frequencies `theta^(-2i/r)`, `i < r/2`.
pub fn frequencies(theta: f32, rotary_dim: usize) -> Vec<f32> {
    (0..rotary_dim / 2)
        .map(|i| (1.0 / libm::pow(f64::from(theta), 2.0 * i as f64 / rotary_dim as f64)) as f32)
        .collect()
}

/// Linear stretching, in place: as if positions were divided by `factor`.
pub fn scale_linear(frequencies: &mut [f32], factor: f32) {
    frequencies.iter_mut().for_each(|frequency| *frequency /= factor);
}

/// Which frequencies [`scale_yarn`] keeps and which it divides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Divisor of the low frequencies.
    pub factor: f32,
    /// Tokens of the original training's context.
    pub original_context: usize,
    /// Pairs that turn more often than this within the original context are kept.
    pub beta_fast: f32,
    /// Pairs that turn less often than this within the original context are divided.
    pub beta_slow: f32,
    /// Whether the ends of the ramp between are rounded outwards to whole pairs.
    pub truncate: bool,
}

/// YaRN's stretching, in place, of the plain frequencies of `theta`: high ones stay, low ones are divided by `factor`,
/// those of a ramp of pairs between are blended.
pub fn scale_yarn(frequencies: &mut [f32], theta: f32, yarn: &Yarn) {
    let rotary_dim = 2.0 * frequencies.len() as f64;
    // The pair that turns `rotations` times within the original context.
    let pair = |rotations: f32| {
        let wavelength = yarn.original_context as f64 / (f64::from(rotations) * 2.0 * std::f64::consts::PI);
        rotary_dim * libm::log(wavelength) / (2.0 * libm::log(f64::from(theta)))
    };
    let (mut low, mut high) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(rotary_dim - 1.0));
    if low == high {
        high += 0.001;
    }
    for (at, frequency) in frequencies.iter_mut().enumerate() {
        let ramp = ((at as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
        *frequency = *frequency * (1.0 - ramp) + *frequency / yarn.factor * ramp;
    }
}

/// Llama 3.1's stretching, in place: with `λ = 2π/f`, `f` stays where `λ < context/high`, becomes `f/factor` where
/// `λ > context/low`, and is interpolated between.
pub fn scale_llama3(frequencies: &mut [f32], factor: f32, low: f32, high: f32, original_context: usize) {
    let context = original_context as f32;
    for f in frequencies {
        let wavelength = 2.0 * std::f32::consts::PI / *f;
        if wavelength > context / low {
            *f /= factor;
        } else if wavelength >= context / high {
            let t = (context / wavelength - low) / (high - low);
            *f = (1.0 - t) * *f / factor + t * *f;
        }
    }
}

/// Cosines and sines `[rows, frequencies]` for each row's position, times `attention_factor`.
pub fn rope_angles(
    device: &Device,
    positions: &[u32],
    frequencies: &[f32],
    attention_factor: f32,
    cos: ViewMut<'_, f32>,
    sin: ViewMut<'_, f32>,
) -> Result<(), KernelError> {
    let len = positions.len() * frequencies.len();
    KernelError::check_len("rope_angles", "cos", cos.len(), len)?;
    KernelError::check_len("rope_angles", "sin", sin.len(), len)?;
    let cpu = device.require_cpu("rope_angles")?;
    cpu::rope_angles(cpu, positions, frequencies, attention_factor, cos.host_mut(), sin.host_mut());
    Ok(())
}

/// Turns `heads` of every row of `x` by the angles of that row.
pub fn rope(
    device: &Device,
    x: ViewMut<'_, f32>,
    heads: Heads,
    pairs: Pairs,
    cos: View<'_, f32>,
    sin: View<'_, f32>,
) -> Result<(), KernelError> {
    let rows = heads.rows("rope", x.len())?;
    let half = cos.len().checked_div(rows).unwrap_or(0);
    KernelError::check_len("rope", "cos", cos.len(), rows * half)?;
    KernelError::check_len("rope", "sin", sin.len(), rows * half)?;
    KernelError::check_index("rope", "rotated dimension", half * 2, heads.dim + 1)?;
    cpu::rope(device.require_cpu("rope")?, x.host_mut(), heads, pairs, cos.host(), sin.host());
    Ok(())
}
