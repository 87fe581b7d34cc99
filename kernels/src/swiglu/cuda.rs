//! Launches of `kernel.cu`.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;

use half::bf16;

use crate::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, GRID_Y_MAX, Launch, Launcher, kernel_size, row_stride},
};

const THREADS: u32 = 256;
const COLUMNS_PER_THREAD: u32 = 4;

/// What becomes of a gate and an up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `silu(gate) · up`; gates first: Llama, Qwen, Mistral.
    Silu,
    /// `gelu(gate) · up`, approximated by a hyperbolic tangent; gates first: Gemma.
    Gelu,
    /// `(up + 1) · gate · σ(1.702 gate)` within limits of 7; gates and ups take turns: gpt-oss.
    Clamped,
}

/// Activates; shapes as in the [module](super), but rows of `out` are [`row_stride`] apart.
pub fn swiglu(
    launcher: &dyn Launcher,
    activation: Activation,
    gate_up: DeviceSlice<'_, f32>,
    width: usize,
    mut out: DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    let stride = row_stride(width);
    let rows = out.len().checked_div(stride).unwrap_or(0);
    KernelError::check_len("swiglu", "out", out.len(), rows * stride)?;
    KernelError::check_len("swiglu", "gate_up", gate_up.len(), 2 * rows * width)?;
    // Twice the width is a row of gates and ups.
    kernel_size("swiglu", "columns of gates and ups", 2 * width)?;
    if rows == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel: match activation {
            Activation::Silu => "swiglu_silu",
            Activation::Gelu => "swiglu_gelu",
            Activation::Clamped => "swiglu_clamped",
        },
        grid: [(stride as u32).div_ceil(THREADS * COLUMNS_PER_THREAD), rows.min(GRID_Y_MAX) as u32, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: Args::new()
            .slice(gate_up)
            .u32(width as u32)
            .u32(kernel_size("swiglu", "rows", rows)?)
            .slice_mut(&mut out)
            .u32(stride as u32),
    };
    // SAFETY: lengths are checked above; the arguments are the kernel's parameters.
    unsafe { launcher.launch(&launch) }
}
