//! Residual addition and RMS normalisation in one pass.
//!
//! Per row: `residual += delta` (where there is one), then
//! `out = round(round(residual / sqrt(mean(residual²) + eps)) · weight)`, statistics in f32; both roundings are to `T`,
//! the order in which Llama and Qwen models are trained.
//!
//! | argument | shape |
//! |---|---|
//! | `residual` | `[rows, width]`, f32, updated |
//! | `delta` | `[rows, width]`, f32, or none |
//! | `weight` | `[width]`, f32 |
//! | `out` | `[rows, width]`, `T`, in panels (see [`crate::linear::Rows`]) |
//!
//! The sum of squares runs in 16 lanes, folded 8, 4, 2, 1 apart at the end.

mod cpu;
pub mod cuda;
mod reference;
#[cfg(test)]
mod tests;

pub use reference::rms_norm as rms_norm_reference;

use crate::{
    KernelError,
    buffer::{View, ViewMut},
    device::Device,
    linear::{Kernels, RowsMut},
};

/// Adds and normalises; see the module.
pub fn rms_norm<T: Kernels>(
    device: &Device,
    residual: ViewMut<'_, f32>,
    delta: Option<View<'_, f32>>,
    weight: View<'_, f32>,
    eps: f32,
    out: RowsMut<'_, T>,
) -> Result<(), KernelError> {
    let width = weight.len();
    let rows = residual.len().checked_div(width).unwrap_or(0);
    KernelError::check_len("rms_norm", "residual", residual.len(), rows * width)?;
    KernelError::check_len("rms_norm", "rows of out", out.rows(), rows)?;
    KernelError::check_len("rms_norm", "columns of out", out.inputs(), width)?;
    if let Some(delta) = &delta {
        KernelError::check_len("rms_norm", "delta", delta.len(), rows * width)?;
    }
    let cpu = device.require_cpu("rms_norm")?;
    cpu::rms_norm(cpu, residual.host_mut(), delta.map(View::host), weight.host(), eps, out);
    Ok(())
}
