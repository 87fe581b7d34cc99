//! Functions of lanes that are the same bits on every instruction set.

use super::Lanes;

/// Two to the power of each lane. Lanes below -126 (also minus infinity) give 2^-126, above 127 they are clamped.
///
/// The fraction in -0.5..=0.5 goes through the Taylor polynomial of degree 7 of e^(f ln 2), whose first dropped
/// term is below 6e-9; the result is within 1.2 ulp (tested).
#[inline(always)]
pub(crate) unsafe fn exp2<V: Lanes>(x: V) -> V {
    unsafe { exp2_in_range(V::splat(-127.0).max(x.mul(V::splat(-1.0))).mul(V::splat(-1.0))) }
}

/// [`exp2`] of lanes of which none is above 127.
#[inline(always)]
pub(crate) unsafe fn exp2_in_range<V: Lanes>(x: V) -> V {
    const COEFFICIENTS: [f32; 7] = [
        1.525_273_4e-5,
        1.540_353_e-4,
        1.333_355_8e-3,
        9.618_129_e-3,
        5.550_411e-2,
        2.402_265e-1,
        6.931_472e-1,
    ];
    unsafe {
        let x = x.max(V::splat(-126.0));
        let whole = x.round();
        let fraction = x.sub(whole);
        let mut sum = V::splat(COEFFICIENTS[0]);
        for &coefficient in &COEFFICIENTS[1..] {
            sum = sum.fma(fraction, V::splat(coefficient));
        }
        sum = sum.fma(fraction, V::splat(1.0));
        sum.mul(whole.pow2())
    }
}
