//! The product on AMX tiles, for BF16.
//!
//! A panel of up to 32 rows meets the two tiles of a group of 32 outputs. A few rows are bound by the weights, which are
//! one stream from memory. With many, the first panel of a group finds the group's weights in the second cache, because
//! the panels of the group before have asked for them there, a few lines with each block.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{BLOCK, GROUP, Kernels, RowsView, TILE, Weight, finish::Finish, rows::PANEL};
use crate::simd::{
    Lanes,
    amx::{self, Tiles},
};

/// Rows of one tile.
const ROWS: usize = 16;
/// Bytes of a tile, of one of its rows, and of a row of sums.
const TILE_BYTES: usize = 2 * TILE;
const LINE_BYTES: usize = 64;
const SUMS_BYTES: usize = GROUP * size_of::<f32>();
/// Lines of a block of a group's weights.
const BLOCK_LINES: usize = 2 * TILE_BYTES / LINE_BYTES;
/// How far ahead of its use a line of weights is brought into the first cache, and into the second. On two cores with
/// AMX (`model_speed`, SmolLM2-135M, 2 threads) a decode takes 10 ms with both and about twice that without.
const PREFETCH_NEAR_BYTES: usize = 2 << 10;
const PREFETCH_FAR_BYTES: usize = 8 << 10;
/// How far ahead of its use a line of rows is brought into the first cache.
const PREFETCH_ROWS_BYTES: usize = 4 << 10;

/// Sums of a panel.
#[repr(align(64))]
struct Sums([[f32; GROUP]; PANEL]);

/// What to ask for while a panel is multiplied.
#[derive(Clone, Copy)]
enum Ahead {
    /// The weights themselves, and those behind them.
    Stream,
    /// Rows that follow, weights that are in the second cache, and so many lines for each block from an address on.
    Panels { cold: bool, later: *const u8, lines: usize },
}

/// The groups `part` of a product of BF16, on a device that has [`crate::device::Isa::Amx`].
#[inline(always)]
pub(super) unsafe fn groups_on_tiles<V: Lanes, T: Kernels, F: Finish>(
    x: RowsView<'_, T>,
    weight: &Weight<T>,
    part: Range<usize>,
    finish: &F,
) {
    let rows = x.rows();
    let whole = rows / PANEL * PANEL;
    let panels = rows.div_ceil(PANEL);
    let mut product = Product { x, weight, finish, sums: Sums([[0.0; GROUP]; PANEL]) };
    // SAFETY: a device has this instruction set only where the system permits it; this thread has no other tiles, and no
    // two of these at a time; rows and groups exist.
    unsafe {
        if panels <= 1 {
            let _tiles = configure(rows);
            for group in part {
                product.panel::<V>(group, 0, Ahead::Stream);
            }
            return;
        }
        let lines = BLOCK_LINES.div_ceil(panels);
        let _tiles = (whole == rows).then(|| configure(PANEL));
        for group in part {
            let tiles = (whole < rows).then(|| configure(PANEL));
            for at in 0..whole / PANEL {
                let ahead = product.ahead(group, at, lines);
                product.panel::<V>(group, at * PANEL, ahead);
            }
            drop(tiles);
            if whole < rows {
                let _tiles = configure(rows - whole);
                let ahead = product.ahead(group, whole / PANEL, lines);
                product.panel::<V>(group, whole, ahead);
            }
        }
    }
}

struct Product<'a, T, F> {
    x: RowsView<'a, T>,
    weight: &'a Weight<T>,
    finish: &'a F,
    sums: Sums,
}

impl<T: Kernels, F: Finish> Product<'_, T, F> {
    fn blocks(&self) -> usize {
        self.x.inputs().div_ceil(BLOCK)
    }

    fn weights(&self, group: usize) -> *const u8 {
        self.weight.packed()[group * self.blocks() * 2 * TILE..].as_ptr().cast()
    }

    /// What to ask for with the panel `at`, one of as many as `lines` for each block were reckoned with.
    fn ahead(&self, group: usize, at: usize, lines: usize) -> Ahead {
        let (next, blocks) =
            (self.weights(group).wrapping_add(self.blocks() * 2 * TILE_BYTES), self.blocks());
        Ahead::Panels { cold: at == 0, later: next.wrapping_add(at * lines * blocks * LINE_BYTES), lines }
    }

    /// The panel that begins with row `first`.
    #[inline(always)]
    unsafe fn panel<V: Lanes>(&mut self, group: usize, first: usize, ahead: Ahead) {
        let (x, height) = self.x.panel(first);
        let operands = (x.as_ptr().cast::<u8>(), self.weights(group), self.blocks());
        // SAFETY: the caller's.
        unsafe {
            match height > ROWS {
                true => two_tiles(operands, height, ahead, &mut self.sums),
                false => one_tile(operands, height, ahead, &mut self.sums),
            }
            self.finish.take::<V>(first..first + height, group, &self.sums.0[..height]);
        }
    }
}

/// Tiles for panels of `height` rows: 0 to 3 for sums, 4 and 5 for rows, 6 and 7 for weights.
unsafe fn configure(height: usize) -> Tiles {
    let first = height.min(ROWS) as u8;
    let second = if height > ROWS { (height - ROWS) as u8 } else { first };
    // SAFETY: the caller's.
    unsafe { Tiles::configure([first, first, second, second, first, second, 16, 16]) }
}

/// Where the rows and weights of a panel begin, and how many blocks they have.
type Operands = (*const u8, *const u8, usize);

/// Up to 16 rows.
#[inline(always)]
unsafe fn one_tile((x, weights, blocks): Operands, height: usize, ahead: Ahead, sums: &mut Sums) {
    // SAFETY: the caller's: blocks of so many rows, and of two tiles, are there.
    unsafe {
        amx::zero::<0>();
        amx::zero::<1>();
        for block in 0..blocks {
            let (x, weights) = (x.add(block * height * LINE_BYTES), weights.add(block * 2 * TILE_BYTES));
            amx::load::<4>(x, LINE_BYTES);
            ahead.ask(block, x, height, weights);
            amx::load::<6>(weights, LINE_BYTES);
            amx::multiply::<0, 4, 6>();
            amx::load::<7>(weights.add(TILE_BYTES), LINE_BYTES);
            amx::multiply::<1, 4, 7>();
        }
        let sums = sums.0.as_mut_ptr().cast::<u8>();
        amx::store::<0>(sums, SUMS_BYTES);
        amx::store::<1>(sums.add(LINE_BYTES), SUMS_BYTES);
    }
}

/// 17 to 32 rows.
#[inline(always)]
unsafe fn two_tiles((x, weights, blocks): Operands, height: usize, ahead: Ahead, sums: &mut Sums) {
    // SAFETY: as in `one_tile`.
    unsafe {
        amx::zero::<0>();
        amx::zero::<1>();
        amx::zero::<2>();
        amx::zero::<3>();
        for block in 0..blocks {
            let (x, weights) = (x.add(block * height * LINE_BYTES), weights.add(block * 2 * TILE_BYTES));
            ahead.ask(block, x, height, weights);
            amx::load::<4>(x, LINE_BYTES);
            amx::load::<6>(weights, LINE_BYTES);
            amx::multiply::<0, 4, 6>();
            amx::load::<7>(weights.add(TILE_BYTES), LINE_BYTES);
            amx::multiply::<1, 4, 7>();
            amx::load::<5>(x.add(ROWS * LINE_BYTES), LINE_BYTES);
            amx::multiply::<2, 5, 6>();
            amx::multiply::<3, 5, 7>();
        }
        let sums = sums.0.as_mut_ptr().cast::<u8>();
        amx::store::<0>(sums, SUMS_BYTES);
        amx::store::<1>(sums.add(LINE_BYTES), SUMS_BYTES);
        amx::store::<2>(sums.add(ROWS * SUMS_BYTES), SUMS_BYTES);
        amx::store::<3>(sums.add(ROWS * SUMS_BYTES + LINE_BYTES), SUMS_BYTES);
    }
}

impl Ahead {
    /// With the given block, whose rows and weights are at `x` and `weights`.
    #[inline(always)]
    fn ask(self, block: usize, x: *const u8, height: usize, weights: *const u8) {
        match self {
            Ahead::Stream => {
                for line in 0..BLOCK_LINES {
                    amx::prefetch_far(weights.wrapping_add(PREFETCH_FAR_BYTES + line * LINE_BYTES));
                    amx::prefetch_near(weights.wrapping_add(PREFETCH_NEAR_BYTES + line * LINE_BYTES));
                }
            }
            Ahead::Panels { cold, later, lines } => {
                if cold {
                    for line in 0..BLOCK_LINES {
                        amx::prefetch_near(weights.wrapping_add(PREFETCH_NEAR_BYTES + line * LINE_BYTES));
                    }
                }
                for line in 0..height {
                    amx::prefetch_near(x.wrapping_add(PREFETCH_ROWS_BYTES + line * LINE_BYTES));
                }
                for line in 0..lines {
                    amx::prefetch_far(later.wrapping_add((block * lines + line) * LINE_BYTES));
                }
            }
        }
    }
}
