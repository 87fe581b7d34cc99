//! The product on AMX tiles, for BF16.
//!
//! A panel of up to 32 rows meets the two tiles of a group of 32 outputs. A few rows are bound by the weights, which
//! are one stream from memory. With many, the first panel of a group finds the group's weights in the second cache,
//! because the panels of the group before have asked for them there, a few lines with each block. What becomes of a
//! panel's sums happens while the next panel is multiplied, a few rows with each block: beside tiles, lanes have half
//! of their throughput, which is enough for it.
//!
//! Tried with 512 rows of 576 by 3,072, 576 and 960 outputs on two cores (`cargo bench -p consort-kernels --bench
//! ops`): asking for the rows of panels ahead of their use costs 5 to 13 %, since they come from the second cache in
//! time.
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
const PREFETCH_FAR_BYTES: usize = 16 << 10;
/// Sums of a panel.
#[repr(align(64))]
struct Sums([[f32; GROUP]; PANEL]);

/// What to ask for while a panel is multiplied.
#[derive(Clone, Copy)]
enum Ahead {
    /// The weights themselves, and those behind them.
    Stream,
    /// So many lines for each block, from an address on.
    Lines { later: *const u8, lines: usize },
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
    let mut product =
        Product { x, weight, finish, sums: [const { Sums([[0.0; GROUP]; PANEL]) }; 2], waiting: None };
    // SAFETY: a device has this instruction set only where the system permits it; this thread has no other tiles, and
    // no two of these at a time; rows and groups exist.
    unsafe {
        if panels <= 1 {
            let _tiles = configure(rows);
            for group in part {
                product.panel::<V>(group, 0, Ahead::Stream);
            }
            product.end::<V>();
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
        product.end::<V>();
    }
}

struct Product<'a, T, F> {
    x: RowsView<'a, T>,
    weight: &'a Weight<T>,
    finish: &'a F,
    /// Of the panel that is multiplied, and of the one before.
    sums: [Sums; 2],
    waiting: Option<Waiting>,
}

/// Sums of which nothing has become yet.
#[derive(Clone, Copy)]
struct Waiting {
    /// Which of the two they are.
    of: usize,
    first: usize,
    rows: usize,
    group: usize,
}

/// What becomes of waiting sums, some rows at a time.
struct Later<'a, F> {
    finish: &'a F,
    sums: &'a [[f32; GROUP]],
    first: usize,
    group: usize,
    done: usize,
    step: usize,
}

impl<F: Finish> Later<'_, F> {
    #[inline(always)]
    unsafe fn some<V: Lanes>(&mut self) {
        let rows = self.done..self.sums.len().min(self.done + self.step);
        if rows.is_empty() {
            return;
        }
        self.done = rows.end;
        let (first, sums) = (self.first, &self.sums[rows.clone()]);
        // SAFETY: the caller's.
        unsafe { self.finish.take::<V>(first + rows.start..first + rows.end, self.group, sums) }
    }
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
        Ahead::Lines { later: next.wrapping_add(at * lines * blocks * LINE_BYTES), lines }
    }

    /// The panel that begins with row `first`.
    #[inline(always)]
    unsafe fn panel<V: Lanes>(&mut self, group: usize, first: usize, ahead: Ahead) {
        let (x, height) = self.x.panel(first);
        let operands = (x.as_ptr().cast::<u8>(), self.weights(group), self.blocks());
        let blocks = self.blocks();
        let of = self.waiting.map_or(0, |waiting| 1 - waiting.of);
        let [one, other] = &mut self.sums;
        let (sums, before) = if of == 0 { (one, other) } else { (other, one) };
        let waiting = self.waiting.replace(Waiting { of, first, rows: height, group });
        let waiting = waiting.unwrap_or(Waiting { of: 1 - of, first: 0, rows: 0, group: 0 });
        let mut later = Later {
            finish: self.finish,
            sums: &before.0[..waiting.rows],
            first: waiting.first,
            group: waiting.group,
            done: 0,
            step: waiting.rows.div_ceil(blocks),
        };
        // SAFETY: the caller's.
        unsafe {
            match height > ROWS {
                true => two_tiles::<V, F>(operands, height, ahead, sums, &mut later),
                false => one_tile::<V, F>(operands, height, ahead, sums, &mut later),
            }
        }
    }

    /// What is left to do.
    #[inline(always)]
    unsafe fn end<V: Lanes>(&mut self) {
        if let Some(Waiting { of, first, rows, group }) = self.waiting.take() {
            // SAFETY: the caller's.
            unsafe { self.finish.take::<V>(first..first + rows, group, &self.sums[of].0[..rows]) }
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
unsafe fn one_tile<V: Lanes, F: Finish>(
    (x, weights, blocks): Operands,
    height: usize,
    ahead: Ahead,
    sums: &mut Sums,
    later: &mut Later<'_, F>,
) {
    // SAFETY: the caller's: blocks of so many rows, and of two tiles, are there.
    unsafe {
        amx::zero::<0>();
        amx::zero::<1>();
        for block in 0..blocks {
            let (x, weights) = (x.add(block * height * LINE_BYTES), weights.add(block * 2 * TILE_BYTES));
            amx::load::<4>(x, LINE_BYTES);
            ahead.ask(block, weights);
            amx::load::<6>(weights, LINE_BYTES);
            amx::multiply::<0, 4, 6>();
            amx::load::<7>(weights.add(TILE_BYTES), LINE_BYTES);
            amx::multiply::<1, 4, 7>();
            later.some::<V>();
        }
        let sums = sums.0.as_mut_ptr().cast::<u8>();
        amx::store::<0>(sums, SUMS_BYTES);
        amx::store::<1>(sums.add(LINE_BYTES), SUMS_BYTES);
    }
}

/// 17 to 32 rows.
#[inline(always)]
unsafe fn two_tiles<V: Lanes, F: Finish>(
    (x, weights, blocks): Operands,
    height: usize,
    ahead: Ahead,
    sums: &mut Sums,
    later: &mut Later<'_, F>,
) {
    // SAFETY: as in `one_tile`.
    unsafe {
        amx::zero::<0>();
        amx::zero::<1>();
        amx::zero::<2>();
        amx::zero::<3>();
        for block in 0..blocks {
            let (x, weights) = (x.add(block * height * LINE_BYTES), weights.add(block * 2 * TILE_BYTES));
            ahead.ask(block, weights);
            amx::load::<4>(x, LINE_BYTES);
            amx::load::<6>(weights, LINE_BYTES);
            amx::multiply::<0, 4, 6>();
            amx::load::<7>(weights.add(TILE_BYTES), LINE_BYTES);
            amx::multiply::<1, 4, 7>();
            amx::load::<5>(x.add(ROWS * LINE_BYTES), LINE_BYTES);
            amx::multiply::<2, 5, 6>();
            amx::multiply::<3, 5, 7>();
            later.some::<V>();
        }
        let sums = sums.0.as_mut_ptr().cast::<u8>();
        amx::store::<0>(sums, SUMS_BYTES);
        amx::store::<1>(sums.add(LINE_BYTES), SUMS_BYTES);
        amx::store::<2>(sums.add(ROWS * SUMS_BYTES), SUMS_BYTES);
        amx::store::<3>(sums.add(ROWS * SUMS_BYTES + LINE_BYTES), SUMS_BYTES);
    }
}

impl Ahead {
    /// With the given block, whose weights are at `weights`.
    #[inline(always)]
    fn ask(self, block: usize, weights: *const u8) {
        match self {
            Ahead::Stream => {
                for line in 0..BLOCK_LINES {
                    amx::prefetch_far(weights.wrapping_add(PREFETCH_FAR_BYTES + line * LINE_BYTES));
                    amx::prefetch_near(weights.wrapping_add(PREFETCH_NEAR_BYTES + line * LINE_BYTES));
                }
            }
            Ahead::Lines { later, lines } => {
                for line in 0..lines {
                    amx::prefetch_far(later.wrapping_add((block * lines + line) * LINE_BYTES));
                }
            }
        }
    }
}
