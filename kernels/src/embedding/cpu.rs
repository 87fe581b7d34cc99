//! One row per task.
#![allow(unsafe_code)]

use crate::{Element, buffer::Plain, device::CpuDevice, linear::Weight, sys::SharedMut};

pub(super) fn embedding<T: Element + Plain>(
    cpu: &CpuDevice,
    tokens: &[u32],
    table: &Weight<T>,
    first: usize,
    out: &mut [f32],
) {
    let (width, out) = (table.inputs(), SharedMut::new(out));
    cpu.team().for_each(tokens.len(), |row| {
        // SAFETY: each row is visited by one member only.
        let out = unsafe { out.range_mut(row * width..(row + 1) * width) };
        match (tokens[row] as usize).checked_sub(first) {
            Some(local) if local < table.outputs() => table.read_row(local, out),
            _ => out.fill(0.0),
        }
    });
}
