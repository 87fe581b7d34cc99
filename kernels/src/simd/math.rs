//! Functions of lanes that are the same bits on every instruction set.

use super::Lanes;

/// Two to the power of each lane. Lanes below -126 (also minus infinity) give 2^-126, above 127 they are clamped.
///
/// The fraction in -0.5..=0.5 goes through the polynomial of degree 5 that is nearest to 2^f, relative to it, of those
/// that are 1 at 0; the result is within 1.5 times 2^-23 of the exact one (tested), and of whole numbers exact.
#[inline(always)]
pub(crate) unsafe fn exp2<V: Lanes>(x: V) -> V {
    unsafe { exp2_in_range(V::splat(-127.0).max(x.mul(V::splat(-1.0))).mul(V::splat(-1.0))) }
}

/// [`exp2`] of lanes of which none is above 127.
#[inline(always)]
pub(crate) unsafe fn exp2_in_range<V: Lanes>(x: V) -> V {
    #[expect(clippy::approx_constant, reason = "the last one is near the logarithm of 2, and not it")]
    const COEFFICIENTS: [f32; 5] =
        [1.326_472_7e-3, 9.671_513e-3, 5.550_733_6e-2, 2.402_224_2e-1, 6.931_47e-1];
    unsafe { exp2_by(COEFFICIENTS, x.max(V::splat(-126.0))) }
}

/// [`exp2`] of lanes of which none is above 127, for results that are rounded to BF16: within 3e-6 of the exact one,
/// and never below 2^-50 (see [`crate::element::BF16_SMALLEST`]).
#[inline(always)]
pub(crate) unsafe fn exp2_for_bf16<V: Lanes>(x: V) -> V {
    const COEFFICIENTS: [f32; 4] = [9.582_853e-3, 5.590_642_6e-2, 2.402_41e-1, 6.931_242e-1];
    unsafe { exp2_by(COEFFICIENTS, x.max(V::splat(-50.0))) }
}

/// Lanes are in -126..=127.
#[inline(always)]
unsafe fn exp2_by<V: Lanes, const DEGREE: usize>(coefficients: [f32; DEGREE], x: V) -> V {
    // Where numbers of this size are one apart: adding it rounds to a whole number, and leaves that in the last bits.
    const ROUNDS: f32 = 1.5 * (1 << 23) as f32;
    unsafe {
        let shifted = x.add(V::splat(ROUNDS));
        let fraction = x.sub(shifted.sub(V::splat(ROUNDS)));
        let mut sum = V::splat(coefficients[0]);
        for &coefficient in &coefficients[1..] {
            sum = sum.fma(fraction, V::splat(coefficient));
        }
        // A whole part of -126 comes with a fraction from 0 on, so that no exponent leaves its range.
        sum.fma(fraction, V::splat(1.0)).add_to_exponent(shifted)
    }
}
