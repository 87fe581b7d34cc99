//! Groups of 32 outputs are divided over the team; each streams its packed weights once per panel of rows.
//!
//! Up to four rows share a load of weights: 4 rows x 2 tiles x (even, odd) chains are 16 independent accumulators,
//! enough to hide the latency of FMA. `x` is widened, 512 inputs at a time, into a buffer that stays in L1.
//!
//! The first rows of a group bring its weights from memory and prefetch two blocks ahead; later rows find them in the
//! cache. Tried on two cores of a Xeon with AVX-512 (`model_speed`, SmolLM2-135M, 2 threads): prefetching for a single
//! row only, 42 ms for a step of 8 rows; for the first rows of any step, 24 ms. Taking 128 to 512 KiB of `x` at a time
//! over all groups changed nothing (512 rows 990-1,150 ms against 1,003).
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use super::{BLOCK, GROUP, Kernels, RowsView, TILE, Weight, finish::Finish, tiles::groups_on_tiles};
use crate::{
    DType,
    device::CpuDevice,
    simd::{Isa, Lanes, LanesElement, dispatch},
    sys::SharedMut,
};

/// Inputs widened at a time.
const WIDE: usize = 512;
/// Most rows computed together; panels are whole numbers of them.
const ROWS_MAX: usize = 4;
/// How far ahead of its use a line of weights is asked for: two blocks of a group.
const PREFETCH_BYTES: usize = 4096;

#[derive(Clone, Copy)]
struct Problem<'a, T> {
    x: RowsView<'a, T>,
    packed: &'a [T],
    /// Most rows to compute together on this instruction set.
    rows_together: usize,
}

/// All rows of `x` by all outputs.
pub(super) fn linear<T: Kernels, F: Finish>(
    cpu: &CpuDevice,
    x: RowsView<'_, T>,
    weight: &Weight<T>,
    finish: &F,
) {
    let isa = cpu.isa();
    let groups = weight.groups();
    if isa == Isa::Amx && T::DTYPE == DType::BF16 {
        cpu.team().run(&|me| {
            let part = me.part(groups);
            dispatch!(isa, groups_on_tiles::<T, F>(x: RowsView<'_, T>, weight: &Weight<T>,
                part: std::ops::Range<usize>, finish: &F) [T: Kernels, F: Finish]);
        });
        return;
    }
    // AVX2 has 16 registers of half the width: more rows would spill.
    let rows_together = if isa == Isa::Avx2 { 1 } else { ROWS_MAX };
    let problem = Problem { x, packed: weight.packed(), rows_together };
    cpu.team().run(&|me| {
        for group in me.part(groups) {
            let problem = &problem;
            dispatch!(isa, group_of_outputs::<T, F>(problem: &Problem<'_, T>, group: usize, finish: &F)
                [T: LanesElement, F: Finish]);
        }
    });
}

/// Hands each group of `stride` packed elements to one member.
pub(super) fn for_each_group<T: Send>(
    cpu: &CpuDevice,
    packed: &mut [T],
    stride: usize,
    job: impl Fn(usize, &mut [T]) + Sync,
) {
    let groups = packed.len() / stride;
    let packed = SharedMut::new(packed);
    cpu.team().for_each(groups, |group| {
        // SAFETY: each group is visited by one member only.
        job(group, unsafe { packed.range_mut(group * stride..(group + 1) * stride) });
    });
}

#[inline(always)]
unsafe fn group_of_outputs<V: Lanes, T: LanesElement, F: Finish>(
    problem: &Problem<'_, T>,
    group: usize,
    finish: &F,
) {
    let (mut row, all) = (0, problem.x.rows());
    while row < all {
        let rows = problem.rows_together.min(all - row);
        // SAFETY: the caller's instruction set is V's; rows row..row + rows exist.
        unsafe {
            match rows {
                1 => tile::<V, T, F, 1>(problem, group, row, finish),
                2 => tile::<V, T, F, 2>(problem, group, row, finish),
                3 => tile::<V, T, F, 3>(problem, group, row, finish),
                _ => tile::<V, T, F, ROWS_MAX>(problem, group, row, finish),
            }
        }
        row += rows;
    }
}

/// `R` rows by 32 outputs.
#[inline(always)]
unsafe fn tile<V: Lanes, T: LanesElement, F: Finish, const R: usize>(
    problem: &Problem<'_, T>,
    group: usize,
    row: usize,
    finish: &F,
) {
    let blocks = problem.x.inputs().div_ceil(BLOCK);
    let weights = &problem.packed[group * blocks * 2 * TILE..][..blocks * 2 * TILE];
    // Zeroing it would cost a tenth of the work on a few rows.
    let mut wide = [[MaybeUninit::<f32>::uninit(); WIDE]; R];
    // SAFETY: pointers into `weights` (blocks * 2 tiles) and `wide` stay in bounds by the loop limits.
    unsafe {
        let mut sums = [[V::zero(); 2]; R];
        for first in (0..blocks).step_by(WIDE / BLOCK) {
            let count = (WIDE / BLOCK).min(blocks - first);
            for (r, wide) in wide.iter_mut().enumerate() {
                for (block, wide) in wide.chunks_exact_mut(BLOCK).take(count).enumerate() {
                    let x = problem.x.block(row + r, first + block);
                    for (wide, x) in wide.iter_mut().zip(x) {
                        wide.write(x.widen());
                    }
                }
            }
            for block in 0..count {
                let weights = weights.as_ptr().add((first + block) * 2 * TILE);
                block_of_inputs::<V, T, R>(&wide, block * BLOCK, weights, row == 0, &mut sums);
            }
        }
        let mut lanes = [[0.0f32; GROUP]; R];
        for (lanes, sums) in lanes.iter_mut().zip(&sums) {
            sums[0].store(lanes.as_mut_ptr());
            sums[1].store(lanes.as_mut_ptr().add(16));
        }
        finish.take::<V>(row..row + R, group, &lanes);
    }
}

#[inline(always)]
unsafe fn block_of_inputs<V: Lanes, T: LanesElement, const R: usize>(
    wide: &[[MaybeUninit<f32>; WIDE]; R],
    first: usize,
    weights: *const T,
    cold: bool,
    sums: &mut [[V; 2]; R],
) {
    // SAFETY: as in `tile`, which wrote whole blocks; prefetches may point anywhere.
    unsafe {
        let mut even = [[V::zero(); 2]; R];
        let mut odd = [[V::zero(); 2]; R];
        for pair in 0..BLOCK / 2 {
            for (tile, offset) in [(0, pair * 32), (1, TILE + pair * 32)] {
                let weights = weights.add(offset);
                if cold {
                    V::prefetch(weights.cast::<u8>().wrapping_add(PREFETCH_BYTES));
                }
                let (w_even, w_odd) = T::load_pairs::<V>(weights);
                for r in 0..R {
                    let x = wide[r].as_ptr().cast::<f32>().add(first + 2 * pair);
                    even[r][tile] = V::splat(*x).fma(w_even, even[r][tile]);
                    odd[r][tile] = V::splat(*x.add(1)).fma(w_odd, odd[r][tile]);
                }
            }
        }
        for r in 0..R {
            for tile in 0..2 {
                sums[r][tile] = sums[r][tile].add(even[r][tile].add(odd[r][tile]));
            }
        }
    }
}
