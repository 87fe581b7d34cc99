//! Sixteen lanes in one AVX-512 register.

use std::arch::{asm, x86_64::*};

use super::{Lanes, SMALLEST_BITS};
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
    unsafe fn div(self, other: Self) -> Self {
        unsafe { Avx512(_mm512_div_ps(self.0, other.0)) }
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
    unsafe fn add_to_exponent(self, whole: Self) -> Self {
        unsafe {
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(whole.0));
            Avx512(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(self.0), exponent)))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(line: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
    }
    #[inline(always)]
    unsafe fn is_below_infinity(self) -> bool {
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, _mm512_set1_ps(f32::INFINITY)) == u16::MAX }
    }
    #[inline(always)]
    unsafe fn through_bf16(self) -> Self {
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let rounded = _mm512_mask_or_epi32(up, is_nan, bits, _mm512_set1_epi32(0x0040_0000));
            let rounded = _mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            let magnitude = _mm512_and_si512(rounded, _mm512_set1_epi32(0x7fff_ffff));
            let stays = _mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(SMALLEST_BITS));
            Avx512(_mm512_castsi512_ps(_mm512_maskz_mov_epi32(stays, rounded)))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16) {
        unsafe {
            let high = _mm512_srli_epi32::<16>(_mm512_castps_si512(self.through_bf16().0));
            _mm512_mask_cvtepi32_storeu_epi16(to.cast(), u16::MAX, high);
        }
    }
    #[inline(always)]
    unsafe fn store_weights_of_tiles(self, to: *mut bf16) {
        unsafe { _mm256_storeu_si256(to.cast(), round_weights(self.0)) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let x = _mm512_add_ps(self.0, half(self.0));
            let x = _mm512_add_ps(x, quarter(x));
            let x = _mm512_add_ps(x, two(x));
            _mm512_cvtss_f32(_mm512_add_ps(x, one(x)))
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe {
            let x = _mm512_max_ps(self.0, half(self.0));
            let x = _mm512_max_ps(x, quarter(x));
            let x = _mm512_max_ps(x, two(x));
            _mm512_cvtss_f32(_mm512_max_ps(x, one(x)))
        }
    }
}

// Lanes 8, 4, 2 and 1 further on, where the lower ones are. Not by closures: see `dispatch!`.

#[inline(always)]
unsafe fn half(x: __m512) -> __m512 {
    unsafe { _mm512_shuffle_f32x4::<0b00_00_11_10>(x, x) }
}

#[inline(always)]
unsafe fn quarter(x: __m512) -> __m512 {
    unsafe { _mm512_shuffle_f32x4::<0b00_00_00_01>(x, x) }
}

#[inline(always)]
unsafe fn two(x: __m512) -> __m512 {
    unsafe { _mm512_permute_ps::<0b00_00_11_10>(x) }
}

#[inline(always)]
unsafe fn one(x: __m512) -> __m512 {
    unsafe { _mm512_permute_ps::<0b00_00_00_01>(x) }
}

/// Zeros and numbers from 2^-50 on, rounded as elements are, on machines with AVX512-BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn round_weights(weights: __m512) -> __m256i {
    let rounded: __m256i;
    // Nearest, ties to even. As assembly, since the intrinsic asks for a feature that callers are compiled without.
    // SAFETY: the caller's.
    unsafe {
        asm!("vcvtneps2bf16 {rounded}, {weights}", rounded = lateout(ymm_reg) rounded,
            weights = in(zmm_reg) weights, options(pure, nomem, nostack, preserves_flags));
    }
    rounded
}
