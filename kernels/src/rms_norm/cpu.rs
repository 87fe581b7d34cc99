//! One row per task.
#![allow(unsafe_code)]

use crate::{
    device::CpuDevice,
    element::through,
    linear::Kernels,
    simd::{Lanes, LanesElement, dispatch},
    sys::SharedMut,
};

pub(super) fn rms_norm<T: Kernels>(
    cpu: &CpuDevice,
    residual: &mut [f32],
    delta: Option<&[f32]>,
    weight: &[f32],
    eps: f32,
    out: &mut [T],
) {
    let width = weight.len();
    let rows = residual.len().checked_div(width).unwrap_or(0);
    let (residual, out, isa) = (SharedMut::new(residual), SharedMut::new(out), cpu.isa());
    cpu.team().for_each(rows, |row| {
        let range = row * width..(row + 1) * width;
        let delta = delta.map(|delta| &delta[range.clone()]);
        // SAFETY: each row is visited by one member only.
        let (x, out) = unsafe { (residual.range_mut(range.clone()), out.range_mut(range)) };
        dispatch!(isa, one_row::<T>(x: &mut [f32], delta: Option<&[f32]>, weight: &[f32], eps: f32, out: &mut [T])
            [T: LanesElement]);
    });
}

#[inline(always)]
unsafe fn one_row<V: Lanes, T: LanesElement>(
    x: &mut [f32],
    delta: Option<&[f32]>,
    weight: &[f32],
    eps: f32,
    out: &mut [T],
) {
    if let Some(delta) = delta {
        x.iter_mut().zip(delta).for_each(|(x, delta)| *x += delta);
    }
    // SAFETY: whole chunks of 16; the caller's instruction set is V's.
    let sum = unsafe {
        let mut squares = V::zero();
        let (chunks, rest) = x.as_chunks::<16>();
        for chunk in chunks {
            let x = V::load(chunk.as_ptr());
            squares = x.fma(x, squares);
        }
        let mut last = [0.0; 16];
        last[..rest.len()].copy_from_slice(rest);
        let x = V::load(last.as_ptr());
        x.fma(x, squares).sum()
    };
    let scale = 1.0 / (sum / x.len() as f32 + eps).sqrt();
    let whole = x.len() / 16 * 16;
    // SAFETY: `weight` and `out` are as long as `x`.
    unsafe {
        for at in (0..whole).step_by(16) {
            let normal = T::through_lanes(V::load(x.as_ptr().add(at)).mul(V::splat(scale)));
            T::store_lanes(normal.mul(V::load(weight.as_ptr().add(at))), out.as_mut_ptr().add(at));
        }
    }
    for ((x, weight), out) in x[whole..].iter().zip(&weight[whole..]).zip(&mut out[whole..]) {
        *out = T::round(through::<T>(x * scale) * weight);
    }
}
