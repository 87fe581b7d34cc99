//! Devices, buffers and the numerical operations of Consort.
//!
//! One folder per operation: `mod.rs` states the contract and dispatches, `reference.rs` is the truth in plain f32
//! loops, `cpu.rs` the CPU kernel, `tests.rs` holds them together.
//!
//! | module | what it is |
//! |---|---|
//! | [`device`], [`buffer`], [`workspace`] | where memory lives and who owns it |
//! | [`cuda`] | launches, views of device memory, the texts and their cubins |
//! | [`team`] | the threads of one CPU device |
//! | [`element`] | the storage types, f32 and BF16, and the rounding between them |
//! | [`embedding`], [`rms_norm`], [`linear`], [`rope`], [`kv_append`], [`attention`], [`swiglu`] | layer operations |
//! | [`all_reduce`] | sums and exchanges among devices that read each other's memory |
//! | [`sampling`] | from a row of logits to one token |
//! | [`sys`] | the few system calls |
//! | [`progress`] | that this process gets on |
//!
//! Absent on purpose: autograd, a general tensor type, operator graphs, anything that knows of models, or of ranks
//! beyond peers in memory.

pub mod all_reduce;
pub mod attention;
pub mod buffer;
pub mod ceilings;
pub mod cuda;
pub mod device;
pub mod element;
pub mod embedding;
mod error;
pub mod kv_append;
pub mod kv_copy;
pub mod linear;
pub mod progress;
pub mod qkv;
pub mod rms_norm;
pub mod rope;
pub mod sampling;
mod simd;
pub mod swiglu;
pub mod sys;
pub mod team;
#[cfg(test)]
mod testing;
pub mod workspace;

pub use element::{DType, Element};
pub use error::KernelError;
