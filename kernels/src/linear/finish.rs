//! What becomes of sums while they are at hand: written, added to a residual, or activated.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{GROUP, rows::SharedRows};
use crate::{
    simd::{Lanes, LanesElement},
    swiglu::silu_times,
    sys::SharedMut,
};

/// Takes the sums of one group of 32 outputs.
pub(super) trait Finish: Sync {
    /// `sums` are those of `rows`, 32 at most.
    ///
    /// # Safety
    /// V's instruction set is there, and each row of a group is taken once.
    unsafe fn take<V: Lanes>(&self, rows: Range<usize>, group: usize, sums: &[[f32; GROUP]]);
}

/// `y = sums`.
pub(super) struct Store<'a> {
    pub(super) y: SharedMut<'a, f32>,
    pub(super) outputs: usize,
}

impl Finish for Store<'_> {
    #[inline(always)]
    unsafe fn take<V: Lanes>(&self, rows: Range<usize>, group: usize, sums: &[[f32; GROUP]]) {
        let width = GROUP.min(self.outputs - group * GROUP);
        for (row, sums) in rows.zip(sums) {
            let first = row * self.outputs + group * GROUP;
            // SAFETY: these columns belong to this member alone; a whole group is two vectors.
            unsafe {
                let y = self.y.range_mut(first..first + width);
                if width == GROUP {
                    V::load(sums.as_ptr()).store(y.as_mut_ptr());
                    V::load(sums.as_ptr().add(16)).store(y.as_mut_ptr().add(16));
                } else {
                    y.copy_from_slice(&sums[..width]);
                }
            }
        }
    }
}

/// `y += sums`.
pub(super) struct Add<'a> {
    pub(super) y: SharedMut<'a, f32>,
    pub(super) outputs: usize,
}

impl Finish for Add<'_> {
    #[inline(always)]
    unsafe fn take<V: Lanes>(&self, rows: Range<usize>, group: usize, sums: &[[f32; GROUP]]) {
        let width = GROUP.min(self.outputs - group * GROUP);
        for (row, sums) in rows.zip(sums) {
            let first = row * self.outputs + group * GROUP;
            // SAFETY: as in `Store`.
            unsafe {
                let y = self.y.range_mut(first..first + width);
                if width == GROUP {
                    for at in [0, 16] {
                        let y = y.as_mut_ptr().add(at);
                        V::load(y).add(V::load(sums.as_ptr().add(at))).store(y);
                    }
                } else {
                    y.iter_mut().zip(sums).for_each(|(y, sum)| *y += sum);
                }
            }
        }
    }
}

/// `out = silu(gate) · up`, of a paired matrix.
pub(super) struct Gate<'a, T> {
    pub(super) out: SharedRows<'a, T>,
}

impl<T: LanesElement> Finish for Gate<'_, T> {
    #[inline(always)]
    unsafe fn take<V: Lanes>(&self, rows: Range<usize>, group: usize, sums: &[[f32; GROUP]]) {
        let first = group * GROUP / 2;
        let width = (GROUP / 2).min(self.out.inputs() - first);
        for (row, sums) in rows.zip(sums) {
            // SAFETY: as in `Store`; 16 sums of gates come before 16 of ups.
            unsafe {
                let gated = silu_times(V::load(sums.as_ptr()), V::load(sums.as_ptr().add(16)));
                let out = self.out.part(row, first, width);
                if width == GROUP / 2 {
                    T::store_lanes(gated, out.as_mut_ptr());
                } else {
                    let mut all = [T::default(); GROUP / 2];
                    T::store_lanes(gated, all.as_mut_ptr());
                    out.copy_from_slice(&all[..width]);
                }
            }
        }
    }
}
