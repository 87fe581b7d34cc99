//! Rows of a table by token id.
//!
//! `out[i] = table[tokens[i] - first]` where that row exists on this rank, zeros elsewhere, so that a sum over ranks
//! yields the whole embedding. `out` is `[tokens, width]`, f32. The table is a packed [`Weight`], because a tied
//! head multiplies by the same bytes; on CUDA ([`cuda`]) it is row-major BF16.

mod cpu;
pub mod cuda;
mod reference;
#[cfg(test)]
mod tests;

pub use reference::embedding as embedding_reference;

use crate::{
    Element, KernelError,
    buffer::{Plain, ViewMut},
    device::Device,
    linear::Weight,
};

/// Gathers rows; see the module. `first` is the id of the table's row 0.
pub fn embedding<T: Element + Plain>(
    device: &Device,
    tokens: &[u32],
    table: &Weight<T>,
    first: usize,
    out: ViewMut<'_, f32>,
) -> Result<(), KernelError> {
    let width = table.inputs();
    KernelError::check_len("embedding", "out", out.len(), tokens.len() * width)?;
    cpu::embedding(device.require_cpu("embedding")?, tokens, table, first, out.host_mut());
    Ok(())
}
