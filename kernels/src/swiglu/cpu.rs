//! The activation on lanes: [`crate::linear::linear_swiglu`] applies it to sums while they are at hand.
#![allow(unsafe_code)]

use crate::simd::{Lanes, exp2};

/// `silu(gate) · up`.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
pub(crate) unsafe fn silu_times<V: Lanes>(gate: V, up: V) -> V {
    unsafe {
        let power = exp2(gate.mul(V::splat(-std::f32::consts::LOG2_E)));
        gate.div(V::splat(1.0).add(power)).mul(up)
    }
}
