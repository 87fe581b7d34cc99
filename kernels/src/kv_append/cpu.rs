//! Plain scatter on the caller's thread: a step appends a few kilobytes per layer.

use super::PageShape;
use crate::{Element, rope::Heads};

pub(super) fn kv_append<T: Element>(
    x: &[f32],
    keys: Heads,
    values: Heads,
    slots: &[u32],
    shape: PageShape,
    pages: &mut [T],
) {
    let half = shape.half_elements();
    for (row, &slot) in slots.iter().enumerate() {
        let (page, offset) = (slot as usize / shape.block_size, slot as usize % shape.block_size);
        let page = &mut pages[page * shape.page_elements()..][..shape.page_elements()];
        for (head, page) in page.chunks_exact_mut(2 * half).enumerate() {
            let (k, v) = page.split_at_mut(half);
            let key = &x[row * keys.stride + keys.first + head * keys.dim..][..keys.dim];
            let value = &x[row * values.stride + values.first + head * values.dim..][..values.dim];
            for dim in 0..shape.head_dim {
                k[shape.key_at::<T>(offset, dim)] = T::round(key[dim]);
                v[shape.value_at::<T>(offset, dim)] = T::round(value[dim]);
            }
        }
    }
}
