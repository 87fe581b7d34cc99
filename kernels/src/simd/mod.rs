//! Sixteen f32 lanes on three instruction sets, AMX tiles, and the choice among them.
//!
//! Kernels are written once over [`Lanes`] and compiled per instruction set by [`dispatch!`]. Every method is one
//! IEEE operation per lane with one rounding, so the results are the same bits on every machine.
#![allow(unsafe_code)]

#[cfg_attr(not(target_arch = "x86_64"), path = "no_amx.rs")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod isa;
mod math;
mod portable;
#[cfg(test)]
mod tests;

pub use isa::{Isa, UnknownIsa};
pub(crate) use math::exp2;
use math::{exp2_for_bf16, exp2_in_range};
pub(crate) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use {avx2::Avx2, avx512::Avx512};

use crate::element::{BF16_SMALLEST, bf16};

/// [`BF16_SMALLEST`] as the bits of an f32.
#[cfg(target_arch = "x86_64")]
const SMALLEST_BITS: i32 = (BF16_SMALLEST.to_bits() as i32) << 16;

/// Sixteen f32 lanes.
///
/// # Safety
/// Methods must be called where the instruction set of the implementor is available; pointers must be valid for 16
/// elements (32 for pairs), without alignment.
pub(crate) trait Lanes: Copy {
    unsafe fn zero() -> Self;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// One pair of BF16 per lane: the first halves, the second halves.
    unsafe fn load_pairs_bf16(from: *const bf16) -> (Self, Self);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    unsafe fn max(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once.
    unsafe fn fma(self, factor: Self, addend: Self) -> Self;
    /// Adds to the exponent of each lane the number in the last nine bits of `whole`, modulo 2^9: of normal numbers,
    /// whose exponents stay in range, times two to the power of it.
    unsafe fn add_to_exponent(self, whole: Self) -> Self;
    /// Each lane rounded to BF16 as [`crate::Element::round`] does, and widened again.
    unsafe fn through_bf16(self) -> Self;
    /// Stores 16 lanes rounded likewise.
    unsafe fn store_bf16(self, to: *mut bf16);
    /// The same of lanes that are zero or numbers from 2^-50 on, where tiles are.
    #[inline(always)]
    unsafe fn store_weights_of_tiles(self, to: *mut bf16) {
        unsafe { self.store_bf16(to) }
    }
    /// Whether every lane is finite or minus infinity.
    unsafe fn is_below_infinity(self) -> bool;
    /// Sum of all lanes: halves folded onto each other, 8, 4, 2, 1 apart.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let mut lanes = unsafe { self.to_array() };
        for distance in [8, 4, 2, 1] {
            for lane in 0..distance {
                lanes[lane] += lanes[lane + distance];
            }
        }
        lanes[0]
    }
    /// Largest lane. Lanes must not be NaN.
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let mut lanes = unsafe { self.to_array() };
        for distance in [8, 4, 2, 1] {
            for lane in 0..distance {
                lanes[lane] =
                    if lanes[lane] > lanes[lane + distance] { lanes[lane] } else { lanes[lane + distance] };
            }
        }
        lanes[0]
    }
    #[inline(always)]
    unsafe fn to_array(self) -> [f32; 16] {
        let mut lanes = [0.0; 16];
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }
    /// Asks for a cache line ahead of its use.
    unsafe fn prefetch(_line: *const u8) {}
}

/// Storage types whose pairs can be loaded into lanes.
pub(crate) trait LanesElement: crate::Element {
    /// The 16 first and the 16 second halves of one packed pair.
    ///
    /// # Safety
    /// As [`Lanes`]; `from` is valid for 32 elements.
    unsafe fn load_pairs<V: Lanes>(from: *const Self) -> (V, V);

    /// Lanes rounded to this type and widened again.
    ///
    /// # Safety
    /// As [`Lanes`].
    unsafe fn through_lanes<V: Lanes>(lanes: V) -> V;

    /// Two to the power of lanes of which none is above 127, as near as results of this type can tell.
    ///
    /// # Safety
    /// As [`Lanes`].
    unsafe fn exp2_lanes<V: Lanes>(lanes: V) -> V;

    /// Stores 16 lanes rounded to this type.
    ///
    /// # Safety
    /// As [`Lanes`]; `to` is valid for 16 elements.
    unsafe fn store_lanes<V: Lanes>(lanes: V, to: *mut Self);
}

impl LanesElement for f32 {
    #[inline(always)]
    unsafe fn load_pairs<V: Lanes>(from: *const f32) -> (V, V) {
        unsafe { (V::load(from), V::load(from.add(16))) }
    }

    #[inline(always)]
    unsafe fn through_lanes<V: Lanes>(lanes: V) -> V {
        lanes
    }

    #[inline(always)]
    unsafe fn exp2_lanes<V: Lanes>(lanes: V) -> V {
        unsafe { exp2_in_range(lanes) }
    }

    #[inline(always)]
    unsafe fn store_lanes<V: Lanes>(lanes: V, to: *mut f32) {
        unsafe { lanes.store(to) }
    }
}

impl LanesElement for bf16 {
    #[inline(always)]
    unsafe fn load_pairs<V: Lanes>(from: *const bf16) -> (V, V) {
        unsafe { V::load_pairs_bf16(from) }
    }

    #[inline(always)]
    unsafe fn through_lanes<V: Lanes>(lanes: V) -> V {
        unsafe { lanes.through_bf16() }
    }

    #[inline(always)]
    unsafe fn exp2_lanes<V: Lanes>(lanes: V) -> V {
        unsafe { exp2_for_bf16(lanes) }
    }

    #[inline(always)]
    unsafe fn store_lanes<V: Lanes>(lanes: V, to: *mut bf16) {
        unsafe { lanes.store_bf16(to) }
    }
}

/// Calls `$function::<L, ..>($args)` with the lanes of `$isa`, compiled for that instruction set.
///
/// `$function` must be `#[inline(always)] unsafe fn f<V: Lanes, ..>(..)`, and so must be whatever it calls with lanes.
/// No closure may work with lanes: it is compiled by itself, for the plainest instruction set.
macro_rules! dispatch {
    ($isa:expr, $function:ident ::<$($generic:ty),*> ( $($arg:ident : $type:ty),* $(,)? ) [$($bound:tt)*] ) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        unsafe fn avx512<$($bound)*>($($arg: $type),*) {
            unsafe { $function::<$crate::simd::Avx512, $($generic),*>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn avx2<$($bound)*>($($arg: $type),*) {
            unsafe { $function::<$crate::simd::Avx2, $($generic),*>($($arg),*) }
        }
        // SAFETY: a device carries an instruction set only after `Isa::is_available` said that the machine has it.
        unsafe {
            match $isa {
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Isa::Amx | $crate::simd::Isa::Avx512 => avx512::<$($generic),*>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Isa::Avx2 => avx2::<$($generic),*>($($arg),*),
                _ => $function::<$crate::simd::Portable, $($generic),*>($($arg),*),
            }
        }
    }};
}
pub(crate) use dispatch;
