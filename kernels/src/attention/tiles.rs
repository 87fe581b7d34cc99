//! Scores and weighted values on AMX tiles, for BF16: the query vectors of a task are the rows of a tile.
//!
//! A page's keys and values lie as tiles read them: 16 keys by 32 dimensions, and 16 dimensions by 16 keys. Only values
//! of which some row sees a part are copied, with zeros for what nobody sees. Those that only some rows see meet
//! weights of zero in the others, which must not matter: a chunk with such values that are not finite is left to the
//! lanes, which skip what a row does not see.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{
    BLOCK_KEYS, CHUNK,
    cpu::{Blocks, QUERIES_MAX, SCORES, State, TILE_QUERY, WEIGHTS},
    lanes,
};
use crate::{
    element::bf16,
    kv_append::HEAD_DIM_MAX,
    linear::BLOCK,
    simd::{
        Lanes,
        amx::{self, Tiles},
    },
};

/// Bytes of a line of a tile, and of 16 lines.
const LINE_BYTES: usize = 64;
const TILE_BYTES: usize = 16 * LINE_BYTES;
/// Bytes from row to row of scores, weights and sums.
const SCORES_BYTES: usize = SCORES * size_of::<f32>();
const WEIGHTS_BYTES: usize = WEIGHTS * size_of::<bf16>();
const SUMS_BYTES: usize = 4 * LINE_BYTES;
/// Pairs of keys in a block.
const PAIRS: usize = BLOCK_KEYS / 2;
/// Tiles of 16 dimensions in the widest head.
const DIM_TILES_MAX: usize = HEAD_DIM_MAX / 16;

/// Values of a block: `[dims / 16][pairs of keys][16 dims x 2 keys]`.
pub(super) type Values = [[[bf16; 32]; PAIRS]; DIM_TILES_MAX];
pub(super) const NO_VALUES: Values = [[[bf16::ZERO; 32]; PAIRS]; DIM_TILES_MAX];

/// Tiles 0 to 3 for sums of `count` query vectors, 4 for queries, 5 for keys, 6 for weights and 7 for values.
///
/// # Safety
/// As [`Tiles::configure`].
#[inline(always)]
pub(super) unsafe fn configure(count: usize) -> Tiles {
    let rows = count as u8;
    // SAFETY: the caller's.
    unsafe {
        Tiles::configure_widths(
            [rows, rows, rows, rows, rows, 16, rows, PAIRS as u8],
            [64, 64, 64, 64, 64, 64, 32, 64],
        )
    }
}

/// Takes a query vector.
#[inline(always)]
pub(super) unsafe fn set_query<V: Lanes>(to: &mut [bf16; TILE_QUERY], from: &[f32]) {
    debug_assert!(from.len().is_multiple_of(16));
    for at in (0..from.len()).step_by(16) {
        // SAFETY: heads on tiles have whole vectors; V's instruction set is the caller's.
        unsafe { V::load(from.as_ptr().add(at)).store_bf16(to.as_mut_ptr().add(at)) }
    }
}

/// Unscaled scores of all query vectors with the 16 keys at `keys`.
#[inline(always)]
pub(super) unsafe fn scores(state: &mut State, keys: *const u8, head_dim: usize, block: usize) {
    // SAFETY: keys are tiles of whole pages; queries and scores have a row for every row of the tiles.
    unsafe {
        amx::zero::<0>();
        for dims in 0..head_dim / BLOCK {
            let queries = state.tile_queries.as_ptr().cast::<u8>().add(dims * LINE_BYTES);
            amx::load::<4>(queries, TILE_QUERY * size_of::<bf16>());
            amx::load::<5>(keys.add(dims * TILE_BYTES), LINE_BYTES);
            amx::multiply::<0, 4, 5>();
        }
        let scores = state.scores.as_mut_ptr().cast::<u8>().add(block * LINE_BYTES);
        amx::store::<0>(scores, SCORES_BYTES);
    }
}

/// Merges the weighted values of one chunk into the outputs of the query vectors `active`. False: left to the lanes.
#[inline(always)]
pub(super) unsafe fn values<V: Lanes>(
    state: &mut State,
    active: Range<usize>,
    blocks: &Blocks<bf16>,
    dim_tiles: usize,
) -> bool {
    let (mut all, mut any) = (state.seen[active.start].clone(), state.seen[active.start].clone());
    for seen in &state.seen[active.clone()] {
        all = all.start.max(seen.start)..all.end.min(seen.end);
        any = any.start.min(seen.start)..any.end.max(seen.end);
    }
    let mut from = blocks.values;
    let mut stride = [blocks.value_stride; CHUNK / BLOCK_KEYS];
    // SAFETY: blocks point to the values of every key in `any`; sums have a row for every row of the tiles.
    unsafe {
        for block in blocks.seen.clone() {
            let keys = block * BLOCK_KEYS..(block + 1) * BLOCK_KEYS;
            if all.start <= keys.start && keys.end <= all.end {
                continue;
            }
            for dims in 0..dim_tiles {
                let from = from[block].add(dims * blocks.value_stride);
                copy_values(&mut state.values[block][dims], from, keys.start, &any);
            }
            let copied = state.values[block][..dim_tiles].as_flattened().as_flattened();
            // Where all see the same, a product that is not finite is the result.
            if all != any && !all_finite(copied) {
                return false;
            }
            (from[block], stride[block]) = (copied.as_ptr(), PAIRS * 32);
        }
        for first in (0..dim_tiles).step_by(4) {
            let tiles = 4.min(dim_tiles - first);
            amx::zero::<0>();
            amx::zero::<1>();
            amx::zero::<2>();
            amx::zero::<3>();
            for block in blocks.seen.clone() {
                let weights = state.weights.as_ptr().cast::<u8>().add(block * BLOCK_KEYS * size_of::<bf16>());
                amx::load::<6>(weights, WEIGHTS_BYTES);
                let values = |tile: usize| from[block].add((first + tile) * stride[block]).cast::<u8>();
                add_tile::<0>(values(0));
                if tiles > 1 {
                    add_tile::<1>(values(1));
                }
                if tiles > 2 {
                    add_tile::<2>(values(2));
                }
                if tiles > 3 {
                    add_tile::<3>(values(3));
                }
            }
            let sums = state.sums.as_mut_ptr().cast::<u8>();
            amx::store::<0>(sums, SUMS_BYTES);
            amx::store::<1>(sums.add(LINE_BYTES), SUMS_BYTES);
            amx::store::<2>(sums.add(2 * LINE_BYTES), SUMS_BYTES);
            amx::store::<3>(sums.add(3 * LINE_BYTES), SUMS_BYTES);
            for query in active.clone() {
                for tile in 0..tiles {
                    let chunk = V::load(state.sums[query].as_ptr().add(tile * 16));
                    lanes::merge::<V>(state, query, first + tile, chunk);
                }
            }
        }
    }
    true
}

/// The values of 16 dimensions of the keys in `seen` of the 16 from `first_key` on, and zeros for the others.
#[inline(always)]
unsafe fn copy_values(
    to: &mut [[bf16; 32]; PAIRS],
    from: *const bf16,
    first_key: usize,
    seen: &Range<usize>,
) {
    for (pair, to) in to.iter_mut().enumerate() {
        let keys = first_key + 2 * pair..first_key + 2 * pair + 2;
        if seen.end <= keys.start || keys.end <= seen.start {
            *to = [bf16::ZERO; 32];
            continue;
        }
        // SAFETY: the caller's: some key of this block is seen, so its values are there.
        *to = unsafe { from.cast::<[bf16; 32]>().add(pair).read_unaligned() };
        for (half, key) in keys.enumerate() {
            if !seen.contains(&key) {
                to.iter_mut().skip(half).step_by(2).for_each(|value| *value = bf16::ZERO);
            }
        }
    }
}

/// Adds the weights in tile 6 times the values at `from` to tile `C`.
#[inline(always)]
unsafe fn add_tile<const C: u8>(from: *const u8) {
    // SAFETY: the caller's: lines of a block at `from`.
    unsafe {
        amx::load::<7>(from, LINE_BYTES);
        amx::multiply::<C, 6, 7>();
    }
}

/// Without a branch per value, so that it takes many at a time.
fn all_finite(values: &[bf16]) -> bool {
    let largest = values.iter().fold(0, |largest, value| (value.to_bits() & 0x7fff).max(largest));
    largest < bf16::INFINITY.to_bits()
}

const _: () = assert!(QUERIES_MAX <= 16);
