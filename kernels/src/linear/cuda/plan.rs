//! Which kernel multiplies a shape, in how many blocks, and how its sums are split. Plain arithmetic.

use super::{Invariance, WorkspaceLen};
use crate::cuda::row_stride;

/// What a kernel of `gemv.cu` or `gemm.cu` does in a block; the numbers are those of its text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tile {
    pub(super) kernel: &'static str,
    pub(super) outputs: usize,
    pub(super) rows: usize,
    /// Inputs that a block takes at once; a split is a whole number of them.
    pub(super) step: usize,
    pub(super) warps_max: usize,
    /// Shared memory of a block, or of each of its warps.
    pub(super) shared_bytes: SharedBytes,
    /// Blocks that keep a multiprocessor busy.
    blocks: usize,
    /// Splits at most: their sums are added one after another.
    splits_max: usize,
    /// Steps in a split at least, so that its work outweighs its part of the adding.
    steps_min: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum SharedBytes {
    OfBlock(usize),
    OfWarp(usize),
}

/// Up to eight rows. Four steps keep four warps busy.
pub(super) const GEMV: Tile = Tile {
    kernel: "linear_gemv",
    outputs: 16,
    rows: 8,
    step: 128,
    warps_max: 8,
    shared_bytes: SharedBytes::OfWarp(512),
    blocks: 2,
    splits_max: 16,
    steps_min: 4,
};

/// Any number of rows, by ascending height of the tile.
pub(super) const GEMM: [Tile; 5] = [
    gemm("linear_gemm_8", 64, 8, 4, 6),
    gemm("linear_gemm_16", 64, 16, 4, 6),
    gemm("linear_gemm_32", 64, 32, 4, 6),
    gemm("linear_gemm_64", 128, 64, 4, 4),
    gemm("linear_gemm_128", 128, 128, 8, 3),
];

const fn gemm(kernel: &'static str, outputs: usize, rows: usize, warps: usize, stages: usize) -> Tile {
    const STEP: usize = 64;
    // Tiles of many rows are bound by arithmetic, and their sums are many: two blocks or long sums do not pay.
    let (blocks, splits_max) = if rows > 32 { (1, 4) } else { (2, 8) };
    let shared_bytes = SharedBytes::OfBlock(stages * (outputs + rows) * STEP * 2);
    Tile {
        kernel,
        outputs,
        rows,
        step: STEP,
        warps_max: warps,
        shared_bytes,
        blocks,
        splits_max,
        steps_min: 4,
    }
}

/// Multiprocessors for which batch-invariant splits are chosen, on whatever device: those of an H100 or H200.
const INVARIANT_MULTIPROCESSORS: usize = 132;

/// How a shape is multiplied.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) tile: &'static Tile,
    /// Tiles of outputs and rows.
    pub(super) tiles: usize,
    pub(super) splits: usize,
    pub(super) steps_per_split: usize,
    /// Whether blocks take a split each and meet in the workspace; else one launch after another adds a split to `y`.
    pub(super) at_once: bool,
}

impl Plan {
    /// For at least one output and one row.
    pub(super) fn new(
        multiprocessors: usize,
        outputs: usize,
        inputs: usize,
        rows: usize,
        invariance: Invariance,
    ) -> Plan {
        let tile = if invariance == Invariance::None && rows <= GEMV.rows { &GEMV } else { gemm_tile(rows) };
        let tiles = outputs.div_ceil(tile.outputs) * rows.div_ceil(tile.rows);
        let steps = row_stride(inputs).div_ceil(tile.step);
        let busy = tile.blocks * multiprocessors;
        let splits = match invariance {
            Invariance::None => split(tile, tiles, steps, busy),
            Invariance::Batch => {
                let smallest = &GEMM[0];
                let busy = smallest.blocks * INVARIANT_MULTIPROCESSORS;
                split(smallest, outputs.div_ceil(smallest.outputs), steps, busy)
            }
        };
        let steps_per_split = steps.div_ceil(splits);
        // Rounding up may leave the last splits without steps.
        let splits = steps.div_ceil(steps_per_split.max(1)).max(1);
        let at_once = splits > 1 && (invariance == Invariance::None || tiles * splits <= 2 * busy);
        Plan { tile, tiles, splits, steps_per_split, at_once }
    }

    /// Warps of a block: the GEMV's share the steps of a split.
    pub(super) fn warps(&self) -> usize {
        match self.tile.shared_bytes {
            SharedBytes::OfWarp(_) => self.steps_per_split.clamp(1, self.tile.warps_max),
            SharedBytes::OfBlock(_) => self.tile.warps_max,
        }
    }

    pub(super) fn shared_bytes(&self) -> usize {
        match self.tile.shared_bytes {
            SharedBytes::OfWarp(bytes) => bytes * self.warps(),
            SharedBytes::OfBlock(bytes) => bytes,
        }
    }

    pub(super) fn workspace_len(&self) -> WorkspaceLen {
        if !self.at_once {
            return WorkspaceLen::default();
        }
        let sums = self.tile.outputs * self.tile.rows;
        WorkspaceLen { partials: self.tiles * self.splits * sums, arrivals: self.tiles }
    }
}

/// The smallest tile that holds all rows, or the largest.
fn gemm_tile(rows: usize) -> &'static Tile {
    GEMM.iter().find(|tile| rows <= tile.rows).unwrap_or(&GEMM[GEMM.len() - 1])
}

/// Splits so that `busy` blocks have work, as far as the sum is long enough. The GEMV's blocks are small and many, so
/// a few more than `busy` even out; of a GEMM's, a few more would be a second round of which most of the card sees
/// nothing.
fn split(tile: &Tile, tiles: usize, steps: usize, busy: usize) -> usize {
    let wanted = if *tile == GEMV { busy.div_ceil(tiles) } else { busy / tiles };
    wanted.min(steps / tile.steps_min).clamp(1, tile.splits_max)
}

/// The most that any number of rows up to `rows_max` needs.
pub(super) fn workspace_len(
    multiprocessors: usize,
    outputs: usize,
    inputs: usize,
    rows_max: usize,
    invariance: Invariance,
) -> WorkspaceLen {
    if outputs == 0 || rows_max == 0 {
        return WorkspaceLen::default();
    }
    // Rows matter by tile and number of tiles only. More tiles than blocks that are split at all need nothing.
    let highest = &GEMM[GEMM.len() - 1];
    let tiles_max = rows_max.div_ceil(highest.rows).min(2 * highest.blocks * multiprocessors);
    let lower = GEMM.iter().map(|tile| tile.rows.min(rows_max));
    let higher = (1..=tiles_max).map(|tiles| rows_max.min(tiles * highest.rows));
    lower
        .chain(higher)
        .map(|rows| Plan::new(multiprocessors, outputs, inputs, rows, invariance).workspace_len())
        .fold(WorkspaceLen::default(), WorkspaceLen::max)
}

#[cfg(test)]
mod tests;
