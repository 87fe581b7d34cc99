//! Scores and weighted values on AMX tiles, for BF16: the query vectors of a task are the rows of a tile.
//!
//! A page's keys and values lie as tiles read them, except that the values of 32 keys may lie in two pages: then they
//! are copied together, as they are where some row does not see all keys of a chunk. Values that nobody sees are zeros
//! in the copy. Those that only some rows see meet weights of zero in the others, which must not matter: a chunk
//! with such values that are not finite is left to the lanes, which skip what a row does not see.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{
    CHUNK,
    cpu::{QUERIES_MAX, State},
};
use crate::{
    Element,
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
/// Bytes from row to row of sums.
const SUMS_BYTES: usize = 4 * LINE_BYTES;
/// Tiles of 16 dimensions in the widest head.
const DIM_TILES_MAX: usize = HEAD_DIM_MAX / 16;

/// One task's tiles and what they read and write.
#[repr(align(64))]
pub(super) struct OnTiles {
    weights: [[bf16; CHUNK]; QUERIES_MAX],
    /// Of four tiles of dimensions.
    sums: [[f32; 64]; QUERIES_MAX],
    queries: [[bf16; HEAD_DIM_MAX]; QUERIES_MAX],
    /// `[dims / 16][16 pairs of keys][16 dims x 2 keys]`.
    values: [[[bf16; 32]; 16]; DIM_TILES_MAX],
    _tiles: Tiles,
}

impl OnTiles {
    /// Tiles for `count` query vectors.
    ///
    /// # Safety
    /// As [`Tiles::configure`].
    #[inline(always)]
    pub(super) unsafe fn new(count: usize) -> OnTiles {
        let rows = count as u8;
        OnTiles {
            weights: [[bf16::ZERO; CHUNK]; QUERIES_MAX],
            sums: [[0.0; 64]; QUERIES_MAX],
            queries: [[bf16::ZERO; HEAD_DIM_MAX]; QUERIES_MAX],
            values: [[[bf16::ZERO; 32]; 16]; DIM_TILES_MAX],
            // SAFETY: the caller's.
            _tiles: unsafe { Tiles::configure([rows, rows, rows, rows, rows, rows, 16, 16]) },
        }
    }

    /// Takes a query vector, rounded already.
    pub(super) fn set_query(&mut self, query: usize, values: &[f32]) {
        self.queries[query].iter_mut().zip(values).for_each(|(to, from)| *to = bf16::round(*from));
    }

    /// Unscaled scores of all query vectors with the keys at `keys`, two tiles of 16 of which either may be null.
    #[inline(always)]
    pub(super) unsafe fn scores<V: Lanes>(
        &self,
        state: &mut State<V>,
        keys: [*const u8; 2],
        head_dim: usize,
    ) {
        // SAFETY: keys are tiles of whole pages; queries and scores have a row for every row of the tiles.
        unsafe {
            amx::zero::<0>();
            amx::zero::<1>();
            for block in 0..head_dim / BLOCK {
                let queries = self.queries.as_ptr().cast::<u8>().add(block * LINE_BYTES);
                amx::load::<4>(queries, HEAD_DIM_MAX * size_of::<bf16>());
                if !keys[0].is_null() {
                    amx::load::<6>(keys[0].add(block * TILE_BYTES), LINE_BYTES);
                    amx::multiply::<0, 4, 6>();
                }
                if !keys[1].is_null() {
                    amx::load::<7>(keys[1].add(block * TILE_BYTES), LINE_BYTES);
                    amx::multiply::<1, 4, 7>();
                }
            }
            let scores = state.scores.as_mut_ptr().cast::<u8>();
            amx::store::<0>(scores, 2 * LINE_BYTES);
            amx::store::<1>(scores.add(LINE_BYTES), 2 * LINE_BYTES);
        }
    }

    /// Merges the weighted values of one chunk into the outputs of the query vectors `active`. `from(dims)` are the
    /// values of 16 dimensions: two times 8 pairs of keys, null where nobody sees one, and right behind each other if
    /// `adjacent`. False: left to the lanes.
    #[inline(always)]
    pub(super) unsafe fn values<V: Lanes>(
        &mut self,
        state: &mut State<V>,
        active: Range<usize>,
        from: impl Fn(usize) -> [*const u8; 2],
        adjacent: bool,
        dim_tiles: usize,
    ) -> bool {
        let (mut all, mut any) = (state.seen[active.start].clone(), state.seen[active.start].clone());
        for seen in &state.seen[active.clone()] {
            all = all.start.max(seen.start)..all.end.min(seen.end);
            any = any.start.min(seen.start)..any.end.max(seen.end);
        }
        let in_place = adjacent && all == (0..CHUNK);
        // SAFETY: `from` points to the values of every key in `any`; scratch has room for every tile.
        unsafe {
            if !in_place {
                for dims in 0..dim_tiles {
                    self.copy_values(dims, from(dims), any.clone());
                }
                let copied = self.values[..dim_tiles].as_flattened().as_flattened();
                // Most chunks are seen whole by all; then a product that is not finite is the result.
                if all != any && !all_finite(copied) {
                    return false;
                }
            }
            for query in active.clone() {
                let weights = state.scores[query].as_ptr();
                V::load(weights).store_bf16(self.weights[query].as_mut_ptr());
                V::load(weights.add(16)).store_bf16(self.weights[query].as_mut_ptr().add(16));
            }
            amx::load::<4>(self.weights.as_ptr().cast(), LINE_BYTES);
            for first in (0..dim_tiles).step_by(4) {
                let tiles = 4.min(dim_tiles - first);
                let values = |tile: usize| {
                    let dims = first + tile;
                    if in_place { from(dims)[0] } else { self.values[dims].as_ptr().cast() }
                };
                // Sums of four tiles are on their way at once: a product takes longer than it occupies the unit.
                let sums = self.sums.as_mut_ptr().cast::<u8>();
                sum_tile::<0, 6>(values(0));
                if tiles > 1 {
                    sum_tile::<1, 7>(values(1));
                }
                if tiles > 2 {
                    sum_tile::<2, 6>(values(2));
                }
                if tiles > 3 {
                    sum_tile::<3, 7>(values(3));
                }
                amx::store::<0>(sums, SUMS_BYTES);
                amx::store::<1>(sums.add(LINE_BYTES), SUMS_BYTES);
                amx::store::<2>(sums.add(2 * LINE_BYTES), SUMS_BYTES);
                amx::store::<3>(sums.add(3 * LINE_BYTES), SUMS_BYTES);
                for query in active.clone() {
                    let (old, new) = state.merge[query];
                    let (old, new) = (V::splat(old), V::splat(new));
                    for tile in 0..tiles {
                        let out = state.out[query].as_mut_ptr().add((first + tile) * 16);
                        let chunk = V::load(self.sums[query].as_ptr().add(tile * 16)).mul(new);
                        V::load(out).fma(old, chunk).store(out);
                    }
                }
            }
        }
        true
    }

    /// The values of 16 dimensions of the keys in `seen`, and zeros for the others.
    #[inline(always)]
    unsafe fn copy_values(&mut self, dims: usize, from: [*const u8; 2], seen: Range<usize>) {
        let to = &mut self.values[dims];
        for (pair, to) in to.iter_mut().enumerate() {
            let keys = 2 * pair..2 * pair + 2;
            if seen.end <= keys.start || keys.end <= seen.start {
                *to = [bf16::ZERO; 32];
                continue;
            }
            // SAFETY: the caller's: some key of this pair is seen, so its values are there.
            *to = unsafe { from[pair / 8].cast::<[bf16; 32]>().add(pair % 8).read_unaligned() };
            for (half, key) in keys.enumerate() {
                if !seen.contains(&key) {
                    to.iter_mut().skip(half).step_by(2).for_each(|value| *value = bf16::ZERO);
                }
            }
        }
    }
}

/// Tile `C` becomes the weights in tile 4 times the values at `from`, which come through tile `B`.
#[inline(always)]
unsafe fn sum_tile<const C: u8, const B: u8>(from: *const u8) {
    // SAFETY: the caller's: 16 lines at `from`.
    unsafe {
        amx::zero::<C>();
        amx::load::<B>(from, LINE_BYTES);
        amx::multiply::<C, 4, B>();
    }
}

/// Without a branch per value, so that it takes many at a time.
fn all_finite(values: &[bf16]) -> bool {
    let largest = values.iter().fold(0, |largest, value| (value.to_bits() & 0x7fff).max(largest));
    largest < bf16::INFINITY.to_bits()
}
