//! Sixteen lanes in one AVX-512 register.

use std::arch::x86_64::*;

use super::Lanes;
use crate::element::bf16;

#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

// SAFETY (all methods): the trait's callers guarantee AVX-512F/BW and valid pointers.
impl Lanes for Avx512 {
    #[inline(always)]
    unsafe fn zero() -> Self {
        unsafe { Avx512(_mm512_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Avx512(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Avx512(_mm512_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn load_pairs_bf16(from: *const bf16) -> (Self, Self) {
        unsafe {
            let pairs = _mm512_loadu_si512(from.cast());
            let first = _mm512_slli_epi32::<16>(pairs);
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (Avx512(_mm512_castsi512_ps(first)), Avx512(_mm512_castsi512_ps(second)))
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { Avx512(_mm512_add_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        unsafe { Avx512(_mm512_sub_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        unsafe { Avx512(_mm512_mul_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe { Avx512(_mm512_max_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn fma(self, factor: Self, addend: Self) -> Self {
        unsafe { Avx512(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe { Avx512(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT }>(self.0)) }
    }
    #[inline(always)]
    unsafe fn pow2(self) -> Self {
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_cvttps_epi32(self.0), _mm512_set1_epi32(127));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent)))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(line: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
    }
}
