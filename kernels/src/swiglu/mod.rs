//! Gated activation: `out = silu(gate) · up`, rounded to `T`.
//!
//! `gate_up` is `[rows, 2 · width]`, f32, gate columns first; `out` is `[rows, width]`.
//! `silu(x) = x / (1 + e^-x)`, with the kernels' own exponential. On CUDA there are other activations besides, see
//! [`cuda::Activation`].

mod cpu;
pub mod cuda;
mod reference;
#[cfg(test)]
mod tests;

pub use reference::{
    clamped_swiglu as clamped_swiglu_reference, geglu as geglu_reference, swiglu as swiglu_reference,
};

use crate::{
    KernelError,
    buffer::{View, ViewMut},
    device::Device,
    linear::Kernels,
};

/// Activates; see the module.
pub fn swiglu<T: Kernels>(
    device: &Device,
    gate_up: View<'_, f32>,
    width: usize,
    out: ViewMut<'_, T>,
) -> Result<(), KernelError> {
    let rows = out.len().checked_div(width).unwrap_or(0);
    KernelError::check_len("swiglu", "out", out.len(), rows * width)?;
    KernelError::check_len("swiglu", "gate_up", gate_up.len(), 2 * rows * width)?;
    cpu::swiglu(device.require_cpu("swiglu")?, gate_up.host(), width, out.host_mut());
    Ok(())
}
