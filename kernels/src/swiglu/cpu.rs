//! One row per task, sixteen columns at a time.
#![allow(unsafe_code)]

use crate::{
    Element,
    device::CpuDevice,
    linear::Kernels,
    simd::{Lanes, dispatch, exp2},
    sys::SharedMut,
};

pub(super) fn swiglu<T: Kernels>(cpu: &CpuDevice, gate_up: &[f32], width: usize, out: &mut [T]) {
    let rows = out.len().checked_div(width).unwrap_or(0);
    let (out, isa) = (SharedMut::new(out), cpu.isa());
    cpu.team().for_each(rows, |row| {
        let (gate, up) = gate_up[2 * row * width..][..2 * width].split_at(width);
        // SAFETY: each row is visited by one member only.
        let out = unsafe { out.range_mut(row * width..(row + 1) * width) };
        dispatch!(isa, one_row::<T>(gate: &[f32], up: &[f32], out: &mut [T]) [T: Element]);
    });
}

#[inline(always)]
unsafe fn one_row<V: Lanes, T: Element>(gate: &[f32], up: &[f32], out: &mut [T]) {
    for ((gate, up), out) in gate.chunks(16).zip(up.chunks(16)).zip(out.chunks_mut(16)) {
        let (mut g, mut u) = ([0.0; 16], [0.0; 16]);
        g[..gate.len()].copy_from_slice(gate);
        u[..up.len()].copy_from_slice(up);
        // SAFETY: arrays of 16; the caller's instruction set is V's.
        let powers = unsafe { exp2(V::load(g.as_ptr()).mul(V::splat(-std::f32::consts::LOG2_E))).to_array() };
        for (lane, out) in out.iter_mut().enumerate() {
            *out = T::round(g[lane] / (1.0 + powers[lane]) * u[lane]);
        }
    }
}
