//! What a task remembers: query vectors, their running softmax, and what a chunk needs.

use std::{array, ops::Range, ptr};

use super::{
    BLOCK_KEYS, CHUNK,
    tiles::{NO_VALUES, Values},
};
use crate::{element::bf16, kv_append::HEAD_DIM_MAX};

/// Query vectors of one half of a task: rows of a tile.
pub(super) const HALF: usize = 16;
/// Query vectors of a task: the second half begins at [`HALF`], however many the first has.
pub(super) const QUERIES_MAX: usize = 2 * HALF;
/// Blocks of keys in a chunk.
pub(super) const BLOCKS: usize = CHUNK / BLOCK_KEYS;
/// Lengths of rows that are read or written as lines of tiles: one line more than is used, since lines that are a power
/// of two apart compete for the same places of the first cache.
pub(super) const SCORES: usize = CHUNK + 16;
pub(super) const WEIGHTS: usize = CHUNK + 32;
pub(super) const SUMS: usize = HEAD_DIM_MAX + 16;
pub(super) const TILE_QUERY: usize = HEAD_DIM_MAX + 32;

/// Running softmax of up to [`QUERIES_MAX`] query vectors, and what a chunk needs. Each thread keeps one: what a task
/// does not write, it does not read.
#[repr(C, align(64))]
pub(super) struct State {
    /// Scores of a chunk; then, for lanes, the weights.
    pub(super) scores: [[f32; SCORES]; QUERIES_MAX],
    /// The weights, for tiles.
    pub(super) weights: [[bf16; WEIGHTS]; QUERIES_MAX],
    pub(super) queries: [[f32; HEAD_DIM_MAX]; QUERIES_MAX],
    /// The same, for tiles.
    pub(super) tile_queries: [[bf16; TILE_QUERY]; QUERIES_MAX],
    pub(super) out: [[f32; HEAD_DIM_MAX]; QUERIES_MAX],
    /// A chunk's weighted values, from tiles.
    pub(super) sums: [[f32; SUMS]; QUERIES_MAX],
    /// Values of a block that some row does not see whole.
    pub(super) values: [Values; BLOCKS],
    /// Where tiles read the values of each block, and the elements from 16 dimensions to the next.
    pub(super) tile_values: [(*const bf16, usize); BLOCKS],
    /// Sums of weights, by lane.
    pub(super) total: [[f32; 16]; QUERIES_MAX],
    pub(super) largest: [f32; QUERIES_MAX],
    /// Largest score of the chunk, scaled.
    pub(super) base: [f32; QUERIES_MAX],
    /// Factors of the old state and of the chunk in the merge.
    pub(super) merge: [[f32; QUERIES_MAX]; 2],
    /// Keys of the chunk that each sees.
    pub(super) seen: [Range<usize>; QUERIES_MAX],
    /// Query vectors of each half that see a key of the chunk.
    pub(super) active: [Range<usize>; 2],
    pub(super) blocks: Blocks,
}

/// Where a chunk's keys and values are, in elements of the pages: 16 keys of one head, all dimensions, and 16
/// dimensions of the values of 16 keys.
pub(super) struct Blocks {
    pub(super) keys: [usize; BLOCKS],
    /// Of the first dimensions.
    pub(super) values: [usize; BLOCKS],
    /// Elements from 16 dimensions of values to the next.
    pub(super) value_stride: usize,
    /// The blocks of which some query vector sees a key; of others nothing is known.
    pub(super) seen: Range<usize>,
}

impl State {
    pub(super) fn new() -> Box<State> {
        Box::new(State {
            scores: [[0.0; SCORES]; QUERIES_MAX],
            weights: [[bf16::ZERO; WEIGHTS]; QUERIES_MAX],
            queries: [[0.0; HEAD_DIM_MAX]; QUERIES_MAX],
            tile_queries: [[bf16::ZERO; TILE_QUERY]; QUERIES_MAX],
            out: [[0.0; HEAD_DIM_MAX]; QUERIES_MAX],
            sums: [[0.0; SUMS]; QUERIES_MAX],
            values: [NO_VALUES; BLOCKS],
            tile_values: [(ptr::null(), 0); BLOCKS],
            total: [[0.0; 16]; QUERIES_MAX],
            largest: [0.0; QUERIES_MAX],
            base: [0.0; QUERIES_MAX],
            merge: [[0.0; QUERIES_MAX]; 2],
            seen: array::from_fn(|_| 0..0),
            active: [0..0, HALF..HALF],
            blocks: Blocks { keys: [0; BLOCKS], values: [0; BLOCKS], value_stride: 0, seen: 0..0 },
        })
    }

    /// The query vectors that see a key of the chunk.
    pub(super) fn active(&self) -> impl Iterator<Item = usize> + use<> {
        let [first, second] = self.active.clone();
        first.chain(second)
    }
}
