//! Sixteen lanes in two AVX2 registers.

use std::arch::x86_64::*;

use super::{Lanes, SMALLEST_BITS};
use crate::element::bf16;

#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

// SAFETY (all methods): the trait's callers guarantee AVX2, FMA and valid pointers.
impl Lanes for Avx2 {
    #[inline(always)]
    unsafe fn zero() -> Self {
        unsafe { Avx2(_mm256_setzero_ps(), _mm256_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Avx2(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Avx2(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn load_pairs_bf16(from: *const bf16) -> (Self, Self) {
        unsafe {
            let low = _mm256_loadu_si256(from.cast());
            let high = _mm256_loadu_si256(from.add(16).cast());
            let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            (
                Avx2(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                ),
                Avx2(
                    _mm256_castsi256_ps(_mm256_and_si256(low, mask)),
                    _mm256_castsi256_ps(_mm256_and_si256(high, mask)),
                ),
            )
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        unsafe { Avx2(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        unsafe { Avx2(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        unsafe { Avx2(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe { Avx2(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)) }
    }
    #[inline(always)]
    unsafe fn fma(self, factor: Self, addend: Self) -> Self {
        unsafe {
            Avx2(_mm256_fmadd_ps(self.0, factor.0, addend.0), _mm256_fmadd_ps(self.1, factor.1, addend.1))
        }
    }
    #[inline(always)]
    unsafe fn add_to_exponent(self, whole: Self) -> Self {
        #[inline(always)]
        unsafe fn half(x: __m256, whole: __m256) -> __m256 {
            unsafe {
                let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(whole));
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent))
            }
        }
        unsafe { Avx2(half(self.0, whole.0), half(self.1, whole.1)) }
    }
    #[inline(always)]
    unsafe fn prefetch(line: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
    }
    #[inline(always)]
    unsafe fn is_below_infinity(self) -> bool {
        unsafe {
            let infinity = _mm256_set1_ps(f32::INFINITY);
            let low = _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, infinity);
            let high = _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, infinity);
            _mm256_movemask_ps(_mm256_and_ps(low, high)) == 0xff
        }
    }
    #[inline(always)]
    unsafe fn through_bf16(self) -> Self {
        #[inline(always)]
        unsafe fn half(x: __m256) -> __m256 {
            unsafe {
                let bits = _mm256_castps_si256(x);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
                let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
                let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
                let rounded = _mm256_blendv_epi8(up, quiet, is_nan);
                let rounded = _mm256_and_si256(rounded, _mm256_set1_epi32(0xffff_0000_u32 as i32));
                let magnitude = _mm256_and_si256(rounded, _mm256_set1_epi32(0x7fff_ffff));
                let vanishes = _mm256_cmpgt_epi32(_mm256_set1_epi32(SMALLEST_BITS), magnitude);
                _mm256_castsi256_ps(_mm256_andnot_si256(vanishes, rounded))
            }
        }
        unsafe { Avx2(half(self.0), half(self.1)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16) {
        unsafe {
            let Avx2(low, high) = self.through_bf16();
            let low = _mm256_srli_epi32::<16>(_mm256_castps_si256(low));
            let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(high));
            // Packing works within halves of the register: 0, 2, 1, 3 brings their quarters into order.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(to.cast(), packed);
        }
    }
}
