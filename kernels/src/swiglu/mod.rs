//! Gated activation: `out = silu(gate) · up`, rounded to `T`.
//!
//! `silu(x) = x / (1 + e^-x)`, with the kernels' own exponential. On the CPU it is done where gates and ups are summed,
//! see [`crate::linear::linear_swiglu`]. On CUDA there are other activations besides, see [`cuda::Activation`].

mod cpu;
pub mod cuda;
mod reference;

pub(crate) use cpu::silu_times;
pub use reference::{
    clamped_swiglu as clamped_swiglu_reference, geglu as geglu_reference, swiglu as swiglu_reference,
};
