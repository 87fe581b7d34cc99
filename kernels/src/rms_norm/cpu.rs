//! One row per task.
#![allow(unsafe_code)]

use crate::{
    device::CpuDevice,
    element::through,
    linear::{Kernels, RowsMut, SharedRows},
    simd::{Lanes, LanesElement, dispatch},
    sys::SharedMut,
};

pub(super) fn rms_norm<T: Kernels>(
    cpu: &CpuDevice,
    residual: &mut [f32],
    delta: Option<&[f32]>,
    weight: &[f32],
    eps: f32,
    out: RowsMut<'_, T>,
) {
    let (width, rows) = (weight.len(), out.rows());
    let (residual, out, isa) = (SharedMut::new(residual), &out.shared(), cpu.isa());
    cpu.team().for_each(rows, |row| {
        let range = row * width..(row + 1) * width;
        let delta = delta.map(|delta| &delta[range.clone()]);
        // SAFETY: each row is visited by one member only.
        let x = unsafe { residual.range_mut(range) };
        let factors = (weight, eps);
        dispatch!(isa, one_row::<T>(x: &mut [f32], delta: Option<&[f32]>, factors: (&[f32], f32),
            out: &SharedRows<'_, T>, row: usize) [T: LanesElement]);
    });
}

#[inline(always)]
unsafe fn one_row<V: Lanes, T: LanesElement>(
    x: &mut [f32],
    delta: Option<&[f32]>,
    (weight, eps): (&[f32], f32),
    out: &SharedRows<'_, T>,
    row: usize,
) {
    // SAFETY: whole chunks of 16; the caller's instruction set is V's.
    let sum = unsafe {
        let mut squares = V::zero();
        let whole = x.len() / 16 * 16;
        for at in (0..whole).step_by(16) {
            let chunk = x.as_mut_ptr().add(at);
            let mut x = V::load(chunk);
            if let Some(delta) = delta {
                x = x.add(V::load(delta.as_ptr().add(at)));
                x.store(chunk);
            }
            squares = x.fma(x, squares);
        }
        if let Some(delta) = delta {
            x[whole..].iter_mut().zip(&delta[whole..]).for_each(|(x, delta)| *x += delta);
        }
        let mut last = [0.0; 16];
        last[..x.len() - whole].copy_from_slice(&x[whole..]);
        let x = V::load(last.as_ptr());
        x.fma(x, squares).sum()
    };
    let scale = 1.0 / (sum / x.len() as f32 + eps).sqrt();
    for at in (0..x.len()).step_by(16) {
        let len = 16.min(x.len() - at);
        // SAFETY: `weight` is as long as `x`; the caller's row belongs to this member alone.
        unsafe {
            let out = out.part(row, at, len);
            if len == 16 {
                let normal = T::through_lanes(V::load(x.as_ptr().add(at)).mul(V::splat(scale)));
                T::store_lanes(normal.mul(V::load(weight.as_ptr().add(at))), out.as_mut_ptr());
                continue;
            }
            for ((x, weight), out) in x[at..].iter().zip(&weight[at..]).zip(out) {
                *out = T::round(through::<T>(x * scale) * weight);
            }
        }
    }
}
