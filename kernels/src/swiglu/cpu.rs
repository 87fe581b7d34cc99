//! One row per task, sixteen columns at a time.
#![allow(unsafe_code)]

use crate::{
    device::CpuDevice,
    linear::Kernels,
    simd::{Lanes, LanesElement, dispatch, exp2},
    sys::SharedMut,
};

pub(super) fn swiglu<T: Kernels>(cpu: &CpuDevice, gate_up: &[f32], width: usize, out: &mut [T]) {
    let rows = out.len().checked_div(width).unwrap_or(0);
    let (out, isa) = (SharedMut::new(out), cpu.isa());
    cpu.team().for_each(rows, |row| {
        let (gate, up) = gate_up[2 * row * width..][..2 * width].split_at(width);
        // SAFETY: each row is visited by one member only.
        let out = unsafe { out.range_mut(row * width..(row + 1) * width) };
        dispatch!(isa, one_row::<T>(gate: &[f32], up: &[f32], out: &mut [T]) [T: LanesElement]);
    });
}

#[inline(always)]
unsafe fn one_row<V: Lanes, T: LanesElement>(gate: &[f32], up: &[f32], out: &mut [T]) {
    let whole = gate.len() / 16 * 16;
    // SAFETY: whole chunks of 16, then arrays of 16; the caller's instruction set is V's.
    unsafe {
        for at in (0..whole).step_by(16) {
            activate::<V, T>(gate.as_ptr().add(at), up.as_ptr().add(at), out.as_mut_ptr().add(at));
        }
        let rest = gate.len() - whole;
        let (mut g, mut u, mut o) = ([0.0; 16], [0.0; 16], [T::default(); 16]);
        g[..rest].copy_from_slice(&gate[whole..]);
        u[..rest].copy_from_slice(&up[whole..]);
        activate::<V, T>(g.as_ptr(), u.as_ptr(), o.as_mut_ptr());
        out[whole..].copy_from_slice(&o[..rest]);
    }
}

#[inline(always)]
unsafe fn activate<V: Lanes, T: LanesElement>(gate: *const f32, up: *const f32, out: *mut T) {
    unsafe {
        let gate = V::load(gate);
        let power = exp2(gate.mul(V::splat(-std::f32::consts::LOG2_E)));
        T::store_lanes(gate.div(V::splat(1.0).add(power)).mul(V::load(up)), out);
    }
}
