//! The keys, or the values, of one head are one member's: whatever the slots, nobody else writes there.
#![allow(unsafe_code)]

use super::PageShape;
use crate::{Element, device::CpuDevice, rope::Heads, sys::SharedMut};

/// Fewer numbers than this are written by the caller: waking the others takes as long.
const ALONE_MAX: usize = 4096;

pub(super) fn kv_append<T: Element>(
    cpu: &CpuDevice,
    x: &[f32],
    [keys, values]: [Heads; 2],
    slots: &[u32],
    shape: PageShape,
    pages: &mut [T],
) {
    let pages = SharedMut::new(pages);
    let write = |part: usize| {
        let (head, is_value) = (part / 2, part % 2 == 1);
        let heads = if is_value { values } else { keys };
        for (row, &slot) in slots.iter().enumerate() {
            let (page, offset) = (slot as usize / shape.block_size, slot as usize % shape.block_size);
            let first = shape.page_start(page) + part * shape.half_elements();
            // SAFETY: each part of every page is visited by one member only.
            let half = unsafe { pages.range_mut(first..first + shape.half_elements()) };
            let x = &x[row * heads.stride + heads.first + head * heads.dim..][..heads.dim];
            match is_value {
                true => put_value(half, x, offset, shape),
                false => put_key(half, x, offset, shape),
            }
        }
    };
    let parts = 2 * shape.kv_heads;
    match slots.len() * parts * shape.head_dim < ALONE_MAX {
        true => (0..parts).for_each(write),
        false => cpu.team().for_each(parts, write),
    }
}

/// A token's key: two dimensions in each line of the pairs of 16 tokens.
fn put_key<T: Element>(keys: &mut [T], key: &[f32], offset: usize, shape: PageShape) {
    let lines = &mut keys[shape.key_at::<T>(offset, 0) - T::pair_offset(offset % 16, 0)..];
    let (even, odd) = (T::pair_offset(offset % 16, 0), T::pair_offset(offset % 16, 1));
    for (line, key) in lines.chunks_exact_mut(32).zip(key.chunks_exact(2)) {
        line[even] = T::round(key[0]);
        line[odd] = T::round(key[1]);
    }
}

/// A token's value: every other element of a line for each 16 dimensions.
fn put_value<T: Element>(values: &mut [T], value: &[f32], offset: usize, shape: PageShape) {
    for (dims, value) in value.chunks(16).enumerate() {
        let line = shape.value_at::<T>(offset, dims * 16) - T::pair_offset(0, offset % 2);
        let line = &mut values[line..line + 32];
        for (dim, x) in value.iter().enumerate() {
            line[T::pair_offset(dim, offset % 2)] = T::round(*x);
        }
    }
}
