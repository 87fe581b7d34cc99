//! Scores and weighted values on AMX tiles, for BF16: the query vectors of a task are the rows of a tile.
//!
//! A page's keys and values lie as tiles read them: 16 keys by 32 dimensions, and 16 dimensions by 16 keys. Only values
//! of which some row sees a part are copied, with zeros for what nobody sees. Those that only some rows see meet
//! weights of zero in the others, which must not matter: a chunk with such values that are not finite is left to the
//! lanes, which skip what a row does not see.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{
    BLOCK_KEYS, cpu, lanes,
    state::{HALF, SCORES, SUMS, State, TILE_QUERY, WEIGHTS},
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
/// Bytes from row to row of queries, scores, weights and sums.
const QUERY_BYTES: usize = TILE_QUERY * size_of::<bf16>();
const SCORES_BYTES: usize = SCORES * size_of::<f32>();
const WEIGHTS_BYTES: usize = WEIGHTS * size_of::<bf16>();
const SUMS_BYTES: usize = SUMS * size_of::<f32>();
/// Pairs of keys in a block.
const PAIRS: usize = BLOCK_KEYS / 2;
/// Tiles of 16 dimensions in the widest head.
const DIM_TILES_MAX: usize = HEAD_DIM_MAX / 16;

/// Values of a block: `[dims / 16][pairs of keys][16 dims x 2 keys]`.
pub(super) type Values = [[[bf16; 32]; PAIRS]; DIM_TILES_MAX];
pub(super) const NO_VALUES: Values = [[[bf16::ZERO; 32]; PAIRS]; DIM_TILES_MAX];

/// Takes a query vector.
#[inline(always)]
pub(super) unsafe fn set_query<V: Lanes>(to: &mut [bf16; TILE_QUERY], from: &[f32]) {
    debug_assert!(from.len().is_multiple_of(16));
    for at in (0..from.len()).step_by(16) {
        // SAFETY: heads on tiles have whole vectors; V's instruction set is the caller's.
        unsafe { V::load(from.as_ptr().add(at)).store_bf16(to.as_mut_ptr().add(at)) }
    }
}

/// Unscaled scores of all query vectors of the halves that see a key of the chunk; `counts` are those of the halves.
#[inline(always)]
pub(super) unsafe fn scores<V: Lanes>(
    state: &mut State,
    counts: [usize; 2],
    pages: *const bf16,
    head_dim: usize,
    fetch: bool,
) {
    let halves = [0, 1].map(|half| !state.active[half].is_empty());
    let [first, second] = counts.map(|count| count.max(1) as u8);
    // SAFETY: no other tiles live on this thread. Blocks lie within the pages, whose keys are tiles; queries and scores
    // have a row for every row of the tiles.
    unsafe {
        // 0 and 1 are sums of the halves, 2 and 3 the first one's queries, 4 and 5 the second one's, 6 and 7 keys.
        let rows = [first, second, first, first, second, second, 16, 16];
        let _tiles = Tiles::configure(rows);
        let queries = |half: usize| state.tile_queries[half * HALF].as_ptr().cast::<u8>();
        let is_narrow = head_dim <= 2 * BLOCK;
        if is_narrow {
            amx::load::<2>(queries(0), QUERY_BYTES);
            amx::load::<4>(queries(1), QUERY_BYTES);
            if head_dim > BLOCK {
                amx::load::<3>(queries(0).add(LINE_BYTES), QUERY_BYTES);
                amx::load::<5>(queries(1).add(LINE_BYTES), QUERY_BYTES);
            }
        }
        for block in state.blocks.seen.clone() {
            if fetch {
                cpu::prefetch::<V, bf16>(pages, &state.blocks, block, head_dim);
            }
            let keys = pages.add(state.blocks.keys[block]).cast::<u8>();
            amx::zero::<0>();
            amx::zero::<1>();
            if is_narrow {
                amx::load::<6>(keys, LINE_BYTES);
                amx::multiply::<0, 2, 6>();
                if halves[1] {
                    amx::multiply::<1, 4, 6>();
                }
                if head_dim > BLOCK {
                    amx::load::<7>(keys.add(TILE_BYTES), LINE_BYTES);
                    amx::multiply::<0, 3, 7>();
                    if halves[1] {
                        amx::multiply::<1, 5, 7>();
                    }
                }
            } else {
                for dims in 0..head_dim / BLOCK {
                    amx::load::<6>(keys.add(dims * TILE_BYTES), LINE_BYTES);
                    amx::load::<2>(queries(0).add(dims * LINE_BYTES), QUERY_BYTES);
                    amx::multiply::<0, 2, 6>();
                    if halves[1] {
                        amx::load::<4>(queries(1).add(dims * LINE_BYTES), QUERY_BYTES);
                        amx::multiply::<1, 4, 6>();
                    }
                }
            }
            let scores = state.scores.as_mut_ptr().cast::<u8>().add(block * LINE_BYTES);
            if halves[0] {
                amx::store::<0>(scores, SCORES_BYTES);
            }
            if halves[1] {
                amx::store::<1>(scores.add(HALF * SCORES_BYTES), SCORES_BYTES);
            }
        }
    }
}

/// Merges the weighted values of one chunk into the outputs of its query vectors. False: left to the lanes.
#[inline(always)]
pub(super) unsafe fn values<V: Lanes>(
    state: &mut State,
    counts: [usize; 2],
    pages: *const bf16,
    dim_tiles: usize,
) -> bool {
    // SAFETY: the caller's.
    if !unsafe { prepare_values(state, pages, dim_tiles) } {
        return false;
    }
    let has_second = !state.active[1].is_empty();
    let [first, second] = counts.map(|count| count.max(1) as u8);
    let pairs = PAIRS as u8;
    // SAFETY: no other tiles live on this thread. Prepared values are there; weights and sums have a row for every row
    // of the tiles; V's instruction set is the caller's.
    unsafe {
        // 0 and 1 are sums of the first half, 2 and 3 of the second; 4 and 5 their weights, 6 and 7 values.
        let rows = [first, first, second, second, first, second, pairs, pairs];
        let _tiles = Tiles::configure_widths(rows, [64, 64, 64, 64, 32, 32, 64, 64]);
        let weights = state.weights.as_ptr().cast::<u8>();
        let sums = state.sums.as_mut_ptr().cast::<u8>();
        for dims in (0..dim_tiles).step_by(2) {
            let has_two = dims + 1 < dim_tiles;
            amx::zero::<0>();
            amx::zero::<1>();
            amx::zero::<2>();
            amx::zero::<3>();
            for block in state.blocks.seen.clone() {
                let (values, stride) = state.tile_values[block];
                let weights = weights.add(block * BLOCK_KEYS * size_of::<bf16>());
                amx::load::<4>(weights, WEIGHTS_BYTES);
                amx::load::<6>(values.add(dims * stride).cast(), LINE_BYTES);
                amx::multiply::<0, 4, 6>();
                if has_second {
                    amx::load::<5>(weights.add(HALF * WEIGHTS_BYTES), WEIGHTS_BYTES);
                    amx::multiply::<2, 5, 6>();
                }
                if has_two {
                    amx::load::<7>(values.add((dims + 1) * stride).cast(), LINE_BYTES);
                    amx::multiply::<1, 4, 7>();
                    if has_second {
                        amx::multiply::<3, 5, 7>();
                    }
                }
            }
            let sums = sums.add(dims * LINE_BYTES);
            amx::store::<0>(sums, SUMS_BYTES);
            if has_two {
                amx::store::<1>(sums.add(LINE_BYTES), SUMS_BYTES);
            }
            if has_second {
                amx::store::<2>(sums.add(HALF * SUMS_BYTES), SUMS_BYTES);
                if has_two {
                    amx::store::<3>(sums.add(HALF * SUMS_BYTES + LINE_BYTES), SUMS_BYTES);
                }
            }
        }
        for query in state.active() {
            lanes::merge_sums::<V>(state, query, dim_tiles);
        }
    }
    true
}

/// Where the values of the chunk's blocks are: in the pages, or copied. False: they cannot be had on tiles.
#[inline(always)]
unsafe fn prepare_values(state: &mut State, pages: *const bf16, dim_tiles: usize) -> bool {
    let mut active = state.active().map(|query| &state.seen[query]);
    let Some(first) = active.next() else { return true };
    let (mut all, mut any) = (first.clone(), first.clone());
    for seen in active {
        all = all.start.max(seen.start)..all.end.min(seen.end);
        any = any.start.min(seen.start)..any.end.max(seen.end);
    }
    let stride = state.blocks.value_stride;
    for block in state.blocks.seen.clone() {
        let keys = block * BLOCK_KEYS..(block + 1) * BLOCK_KEYS;
        // SAFETY: blocks lie within the pages, and of those in `seen` some key is seen.
        let from = unsafe { pages.add(state.blocks.values[block]) };
        state.tile_values[block] = (from, stride);
        if all.start <= keys.start && keys.end <= all.end {
            continue;
        }
        for dims in 0..dim_tiles {
            // SAFETY: as above.
            unsafe { copy_values(&mut state.values[block][dims], from.add(dims * stride), keys.start, &any) }
        }
        let copied = state.values[block][..dim_tiles].as_flattened().as_flattened();
        // Where all see the same, a product that is not finite is the result.
        if all != any && !all_finite(copied) {
            return false;
        }
        state.tile_values[block] = (copied.as_ptr(), PAIRS * 32);
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

/// Without a branch per value, so that it takes many at a time.
fn all_finite(values: &[bf16]) -> bool {
    let largest = values.iter().fold(0, |largest, value| (value.to_bits() & 0x7fff).max(largest));
    largest < bf16::INFINITY.to_bits()
}

const _: () = assert!(HALF == 16);
