//! The product on AMX tiles, for BF16.
//!
//! A tile of 16 rows of `x` meets the two tiles of a group of 32 outputs; two of them share each load of weights.
//! A few rows are loaded as they lie: 32 inputs of a row are one line of a tile, and inputs beyond the last whole block
//! go through a zeroed copy, because the tile would reach into the next row. Many rows are packed first,
//! `[rows / 32][in / 32][2 tiles][16 rows][32]`, so that the tiles of a block come as one stream.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{BLOCK, GROUP, TILE};
use crate::{
    KernelError,
    device::CpuDevice,
    element::bf16,
    simd::amx::{self, Tiles},
    sys::SharedMut,
};

/// Rows of one tile.
const ROWS: usize = 16;
/// Bytes of a tile of weights, and of one of its rows.
const TILE_BYTES: usize = 2 * TILE;
const LINE_BYTES: usize = 64;
/// How far ahead of its use a line of weights is brought into the first cache, and into the second. On two cores with
/// AMX (`model_speed`, SmolLM2-135M, 2 threads) a decode takes 10 ms with both and about twice that without.
const PREFETCH_NEAR_BYTES: usize = 2 << 10;
const PREFETCH_FAR_BYTES: usize = 8 << 10;

/// How far ahead of its use a line of packed rows is brought into the first cache.
const PREFETCH_ROWS_BYTES: usize = 4 << 10;
/// Name of the packed rows' memory.
pub(super) const SCRATCH: &str = "rows packed for tiles";
/// Rows that are not packed: a step of so few is bound by the weights, and packing would cost a barrier. With more,
/// packing pays: 512 rows took 290 ms loaded as they lie and 205 ms packed (`model_speed`, SmolLM2-135M, 2 threads).
const ROWS_IN_PLACE_MAX: usize = 32;

pub(super) struct Problem<'a> {
    pub(super) x: &'a [bf16],
    /// As in [`super::Weight`].
    pub(super) packed: &'a [bf16],
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

/// Lines of zeros around the inputs beyond the last whole block of up to 32 rows.
#[repr(align(64))]
struct Tail([[bf16; BLOCK]; 2 * ROWS]);

/// Sums of up to 32 rows on their way to a ragged group.
#[repr(align(64))]
struct Sums([[f32; GROUP]; 2 * ROWS]);

/// All rows of `y`, on a device that has [`crate::device::Isa::Amx`].
pub(super) fn linear(cpu: &CpuDevice, problem: &Problem<'_>, y: &mut [f32]) -> Result<(), KernelError> {
    let rows = problem.x.len() / problem.inputs;
    let y = SharedMut::new(y);
    let multiply = |packed: Option<&[PackedBlock]>| {
        cpu.team().run(&|me| {
            for group in me.part(problem.outputs.div_ceil(GROUP)) {
                // SAFETY: a device has this instruction set only where the system permits it; this thread has no
                // other tiles; groups belong to one member.
                unsafe { group_of_outputs(problem, packed, group, rows, &y) }
            }
        });
    };
    if rows <= ROWS_IN_PLACE_MAX {
        multiply(None);
        return Ok(());
    }
    let blocks = problem.inputs.div_ceil(BLOCK);
    cpu.with_scratch(packed_elements(rows, problem.inputs), SCRATCH, |packed: &mut [bf16]| {
        let packed = packed.as_chunks_mut::<BLOCK>().0.as_chunks_mut::<{ 2 * ROWS }>().0;
        let shared = SharedMut::new(packed);
        cpu.team().for_each(rows.div_ceil(2 * ROWS), |pair| {
            // SAFETY: each pair of tiles is visited by one member only.
            let packed = unsafe { shared.range_mut(pair * blocks..(pair + 1) * blocks) };
            pack(problem, pair * 2 * ROWS..rows.min((pair + 1) * 2 * ROWS), packed);
        });
        multiply(Some(packed));
    })
}

/// Elements of scratch memory for so many rows.
pub(super) fn packed_elements(rows: usize, inputs: usize) -> usize {
    let pairs = if rows <= ROWS_IN_PLACE_MAX { 0 } else { rows.div_ceil(2 * ROWS) };
    pairs.saturating_mul(2 * ROWS * inputs.next_multiple_of(BLOCK))
}

/// One block of inputs of up to 32 rows.
type PackedBlock = [[bf16; BLOCK]; 2 * ROWS];

fn pack(problem: &Problem<'_>, rows: Range<usize>, packed: &mut [PackedBlock]) {
    for (line, row) in rows.enumerate() {
        let x = &problem.x[row * problem.inputs..][..problem.inputs];
        for (block, x) in packed.iter_mut().zip(x.chunks(BLOCK)) {
            block[line][..x.len()].copy_from_slice(x);
            block[line][x.len()..].fill(bf16::ZERO);
        }
    }
}

unsafe fn group_of_outputs(
    problem: &Problem<'_>,
    packed: Option<&[PackedBlock]>,
    group: usize,
    rows: usize,
    y: &SharedMut<'_, f32>,
) {
    let whole = rows / (2 * ROWS) * (2 * ROWS);
    // SAFETY: as the caller's.
    unsafe {
        if whole > 0 {
            let _tiles = Tiles::configure([16; 8]);
            for first in (0..whole).step_by(2 * ROWS) {
                two_tiles(problem, packed, group, first..first + 2 * ROWS, y);
            }
        }
        let rest = rows - whole;
        if rest > ROWS {
            let last = (rest - ROWS) as u8;
            let _tiles = Tiles::configure([16, 16, last, last, 16, last, 16, 16]);
            two_tiles(problem, packed, group, whole..rows, y);
        } else if rest > 0 {
            let few = rest as u8;
            let _tiles = Tiles::configure([few, few, few, few, few, few, 16, 16]);
            one_tile(problem, packed, group, whole..rows, y);
        }
    }
}

/// Tiles 0 and 1 become the sums of up to 16 rows.
unsafe fn one_tile(
    problem: &Problem<'_>,
    packed: Option<&[PackedBlock]>,
    group: usize,
    rows: Range<usize>,
    y: &SharedMut<'_, f32>,
) {
    // SAFETY: rows and group exist, so all addresses but those of prefetches lie in `x` and the packed weights.
    unsafe {
        amx::zero::<0>();
        amx::zero::<1>();
        problem.each_block(packed, group, &rows, |x, stride, weights| {
            amx::load::<4>(x, stride);
            amx::load::<6>(weights, LINE_BYTES);
            amx::multiply::<0, 4, 6>();
            amx::load::<7>(weights.add(TILE_BYTES), LINE_BYTES);
            amx::multiply::<1, 4, 7>();
        });
        problem.write(group, rows, y, |to, stride| {
            amx::store::<0>(to, stride);
            amx::store::<1>(to.add(LINE_BYTES), stride);
        });
    }
}

/// Tiles 0 to 3 become the sums of 17 to 32 rows.
unsafe fn two_tiles(
    problem: &Problem<'_>,
    packed: Option<&[PackedBlock]>,
    group: usize,
    rows: Range<usize>,
    y: &SharedMut<'_, f32>,
) {
    // SAFETY: as in `one_tile`.
    unsafe {
        amx::zero::<0>();
        amx::zero::<1>();
        amx::zero::<2>();
        amx::zero::<3>();
        problem.each_block(packed, group, &rows, |x, stride, weights| {
            amx::load::<4>(x, stride);
            amx::load::<6>(weights, LINE_BYTES);
            amx::multiply::<0, 4, 6>();
            amx::load::<7>(weights.add(TILE_BYTES), LINE_BYTES);
            amx::multiply::<1, 4, 7>();
            amx::load::<5>(x.wrapping_add(ROWS * stride), stride);
            amx::multiply::<2, 5, 6>();
            amx::multiply::<3, 5, 7>();
        });
        problem.write(group, rows, y, |to, stride| {
            amx::store::<0>(to, stride);
            amx::store::<1>(to.add(LINE_BYTES), stride);
            amx::store::<2>(to.add(ROWS * stride), stride);
            amx::store::<3>(to.add(ROWS * stride + LINE_BYTES), stride);
        });
    }
}

/// Asks for the weights of blocks to come.
#[inline(always)]
fn prefetch_weights(weights: *const u8) {
    for line in 0..2 * TILE_BYTES / LINE_BYTES {
        amx::prefetch_far(weights.wrapping_add(PREFETCH_FAR_BYTES + line * LINE_BYTES));
        amx::prefetch_near(weights.wrapping_add(PREFETCH_NEAR_BYTES + line * LINE_BYTES));
    }
}

impl Problem<'_> {
    /// Calls `multiply(rows, stride of rows, weights)` for every block of inputs, with the addresses of its first row
    /// and of the two tiles of weights.
    #[inline(always)]
    fn each_block(
        &self,
        packed: Option<&[PackedBlock]>,
        group: usize,
        rows: &Range<usize>,
        mut multiply: impl FnMut(*const u8, usize, *const u8),
    ) {
        let blocks = self.inputs.div_ceil(BLOCK);
        let weights: *const u8 =
            self.packed[group * blocks * 2 * TILE..][..blocks * 2 * TILE].as_ptr().cast();
        let weights = |block: usize| weights.wrapping_add(block * 2 * TILE_BYTES);
        let cold = rows.start == 0;
        if let Some(packed) = packed {
            for (block, x) in packed[rows.start / (2 * ROWS) * blocks..][..blocks].iter().enumerate() {
                let x: *const u8 = x.as_ptr().cast();
                if cold {
                    prefetch_weights(weights(block));
                } else {
                    for line in 0..2 * ROWS {
                        amx::prefetch_near(x.wrapping_add(PREFETCH_ROWS_BYTES + line * LINE_BYTES));
                    }
                }
                multiply(x, LINE_BYTES, weights(block));
            }
            return;
        }
        let x: *const u8 = self.x[rows.start * self.inputs..].as_ptr().cast();
        for block in 0..self.inputs / BLOCK {
            prefetch_weights(weights(block));
            multiply(x.wrapping_add(block * LINE_BYTES), self.inputs * size_of::<bf16>(), weights(block));
        }
        let width = self.inputs % BLOCK;
        if width > 0 {
            let block = blocks - 1;
            let mut tail = Tail([[bf16::ZERO; BLOCK]; 2 * ROWS]);
            for (line, row) in tail.0.iter_mut().zip(rows.clone()) {
                line[..width].copy_from_slice(&self.x[row * self.inputs + block * BLOCK..][..width]);
            }
            multiply(tail.0.as_ptr().cast(), LINE_BYTES, weights(block));
        }
    }

    /// Calls `store(address, stride)` where the sums of `rows` belong, or where they are taken from.
    #[inline(always)]
    fn write(
        &self,
        group: usize,
        rows: Range<usize>,
        y: &SharedMut<'_, f32>,
        store: impl FnOnce(*mut u8, usize),
    ) {
        let (first, width) = (group * GROUP, GROUP.min(self.outputs - group * GROUP));
        if width == GROUP {
            let to =
                y.pointer(rows.start * self.outputs + first..(rows.end - 1) * self.outputs + first + GROUP);
            return store(to.cast(), self.outputs * size_of::<f32>());
        }
        let mut sums = Sums([[0.0; GROUP]; 2 * ROWS]);
        store(sums.0.as_mut_ptr().cast(), GROUP * size_of::<f32>());
        for (sums, row) in sums.0.iter().zip(rows) {
            let to = row * self.outputs + first;
            // SAFETY: these columns belong to this member alone.
            unsafe { y.range_mut(to..to + width) }.copy_from_slice(&sums[..width]);
        }
    }
}
