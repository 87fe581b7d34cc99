//! Groups of 32 outputs are divided over the team; each streams its packed weights once per block of rows.
//!
//! Up to four rows share a load of weights: 4 rows x 2 tiles x (even, odd) chains are 16 independent accumulators,
//! enough to hide the latency of FMA. `x` is widened per panel of 512 inputs into a buffer that stays in L1.
//!
//! The first rows of a group bring its weights from memory and prefetch two blocks ahead; later rows find them in the
//! cache. Tried on two cores of a Xeon with AVX-512 (`model_speed`, SmolLM2-135M, 2 threads): prefetching for a single
//! row only, 42 ms for a step of 8 rows; for the first rows of any step, 24 ms. Taking 128 to 512 KiB of `x` at a time
//! over all groups changed nothing (512 rows 990-1,150 ms against 1,003).
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use super::{BLOCK, GROUP, Kernels, TILE, Weight, tiles};
use crate::{
    DType, KernelError,
    device::CpuDevice,
    simd::{Isa, Lanes, LanesElement, dispatch},
    sys::SharedMut,
};

/// Inputs widened at a time.
const PANEL: usize = 512;
/// Most rows computed together.
const ROWS_MAX: usize = 4;
/// How far ahead of its use a line of weights is asked for: two blocks of a group.
const PREFETCH_BYTES: usize = 4096;

#[derive(Clone, Copy)]
struct Problem<'a, T> {
    x: &'a [T],
    packed: &'a [T],
    inputs: usize,
    outputs: usize,
    rows: usize,
    /// Most rows to compute together on this instruction set.
    rows_together: usize,
}

pub(super) fn linear<T>(
    cpu: &CpuDevice,
    x: &[T],
    weight: &Weight<T>,
    y: &mut [f32],
) -> Result<(), KernelError>
where
    T: LanesElement + crate::buffer::Plain,
{
    if let (Isa::Amx, Some(x), Some(packed)) = (cpu.isa(), T::as_bf16(x), T::as_bf16(weight.packed())) {
        let problem = tiles::Problem { x, packed, inputs: weight.inputs, outputs: weight.outputs };
        return tiles::linear(cpu, &problem, y);
    }
    let problem = Problem {
        x,
        packed: weight.packed(),
        inputs: weight.inputs,
        outputs: weight.outputs,
        rows: x.len() / weight.inputs,
        // AVX2 has 16 registers of half the width: more rows would spill.
        rows_together: if cpu.isa() == Isa::Avx2 { 1 } else { ROWS_MAX },
    };
    let y = SharedMut::new(y);
    let isa = cpu.isa();
    cpu.team().run(&|me| {
        for group in me.part(weight.outputs.div_ceil(GROUP)) {
            let (problem, y) = (&problem, &y);
            dispatch!(isa, group_of_outputs::<T>(problem: &Problem<'_, T>, group: usize, y: &SharedMut<'_, f32>)
                [T: LanesElement]);
        }
    });
    Ok(())
}

pub(super) fn reserve<T: Kernels>(cpu: &CpuDevice, rows: usize, inputs: usize) -> Result<u64, KernelError> {
    if cpu.isa() != Isa::Amx || T::DTYPE != DType::BF16 {
        return Ok(0);
    }
    let elements = tiles::packed_elements(rows, inputs);
    cpu.with_scratch(elements, tiles::SCRATCH, |_: &mut [T]| {})?;
    Ok(elements.saturating_mul(size_of::<T>()) as u64)
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
unsafe fn group_of_outputs<V: Lanes, T: LanesElement>(
    problem: &Problem<'_, T>,
    group: usize,
    y: &SharedMut<'_, f32>,
) {
    let mut row = 0;
    while row < problem.rows {
        let rows = problem.rows_together.min(problem.rows - row);
        // SAFETY: the caller's instruction set is V's; rows row..row + rows exist.
        unsafe {
            match rows {
                1 => tile::<V, T, 1>(problem, group, row, y),
                2 => tile::<V, T, 2>(problem, group, row, y),
                3 => tile::<V, T, 3>(problem, group, row, y),
                _ => tile::<V, T, ROWS_MAX>(problem, group, row, y),
            }
        }
        row += rows;
    }
}

/// `R` rows by 32 outputs.
#[inline(always)]
unsafe fn tile<V: Lanes, T: LanesElement, const R: usize>(
    problem: &Problem<'_, T>,
    group: usize,
    row: usize,
    y: &SharedMut<'_, f32>,
) {
    let blocks = problem.inputs.div_ceil(BLOCK);
    let weights = &problem.packed[group * blocks * 2 * TILE..][..blocks * 2 * TILE];
    // Zeroing it would cost a tenth of the work on a few rows.
    let mut panel = [[MaybeUninit::<f32>::uninit(); PANEL]; R];
    // SAFETY: pointers into `weights` (blocks * 2 tiles) and `panel` stay in bounds by the loop limits.
    unsafe {
        let mut sums = [[V::zero(); 2]; R];
        for first in (0..problem.inputs).step_by(PANEL) {
            let width = PANEL.min(problem.inputs - first);
            for (r, panel) in panel.iter_mut().enumerate() {
                let x = &problem.x[(row + r) * problem.inputs + first..][..width];
                for (wide, x) in panel.iter_mut().zip(x) {
                    wide.write(x.widen());
                }
                panel[width..width.next_multiple_of(BLOCK)].fill(MaybeUninit::new(0.0));
            }
            for block in 0..width.div_ceil(BLOCK) {
                let weights = weights.as_ptr().add((first / BLOCK + block) * 2 * TILE);
                block_of_inputs::<V, T, R>(&panel, block * BLOCK, weights, row == 0, &mut sums);
            }
        }
        let outputs = GROUP.min(problem.outputs - group * GROUP);
        for (r, sums) in sums.iter().enumerate() {
            let to = (row + r) * problem.outputs + group * GROUP;
            let mut lanes = [0.0f32; GROUP];
            sums[0].store(lanes.as_mut_ptr());
            sums[1].store(lanes.as_mut_ptr().add(16));
            // Columns of this group belong to this member alone.
            y.range_mut(to..to + outputs).copy_from_slice(&lanes[..outputs]);
        }
    }
}

#[inline(always)]
unsafe fn block_of_inputs<V: Lanes, T: LanesElement, const R: usize>(
    panel: &[[MaybeUninit<f32>; PANEL]; R],
    first: usize,
    weights: *const T,
    cold: bool,
    sums: &mut [[V; 2]; R],
) {
    // SAFETY: as in `tile`, which wrote whole blocks of the panel; prefetches may point anywhere.
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
                    let x = panel[r].as_ptr().cast::<f32>().add(first + 2 * pair);
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
