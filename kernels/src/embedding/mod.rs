//! Rows of a table by token id.
//!
//! `out[i] = table[tokens[i] - first]` where that row exists on this rank, zeros elsewhere, so that a sum over ranks
//! yields the whole embedding. `out` is `[tokens, width]`, f32. The table is a packed [`Weight`], because a tied
//! head multiplies by the same bytes.

mod reference;
#[cfg(test)]
mod tests;

pub use reference::embedding as embedding_reference;

use crate::{
    Element, KernelError,
    buffer::{Plain, ViewMut},
    device::Device,
    linear::Weight,
    sys::SharedMut,
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
    match device {
        Device::Cpu(cpu) => {
            let out = SharedMut::new(out.host_mut());
            cpu.team().for_each(tokens.len(), |row| copy_row(tokens[row], table, first, row, &out));
        }
    }
    Ok(())
}

#[allow(unsafe_code)]
fn copy_row<T: Element + Plain>(
    token: u32,
    table: &Weight<T>,
    first: usize,
    row: usize,
    out: &SharedMut<'_, f32>,
) {
    // SAFETY: each row is visited by one member only.
    let out = unsafe { out.range_mut(row * table.inputs()..(row + 1) * table.inputs()) };
    match (token as usize).checked_sub(first) {
        Some(local) if local < table.outputs() => table.read_row(local, out),
        _ => out.fill(0.0),
    }
}
