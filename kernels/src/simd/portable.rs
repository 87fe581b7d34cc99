//! Sixteen lanes in plain Rust.

use super::Lanes;
use crate::element::{Element, bf16, through};

#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; 16]);

#[inline(always)]
fn map2(a: Portable, b: Portable, f: impl Fn(f32, f32) -> f32) -> Portable {
    Portable(std::array::from_fn(|lane| f(a.0[lane], b.0[lane])))
}

// SAFETY (all methods): nothing beyond the validity of pointers that the trait demands.
impl Lanes for Portable {
    #[inline(always)]
    unsafe fn zero() -> Self {
        Portable([0.0; 16])
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Portable([x; 16])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Portable(unsafe { from.cast::<[f32; 16]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { to.cast::<[f32; 16]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_pairs_bf16(from: *const bf16) -> (Self, Self) {
        let pairs = unsafe { from.cast::<[bf16; 32]>().read_unaligned() };
        (
            Portable(std::array::from_fn(|lane| pairs[2 * lane].widen())),
            Portable(std::array::from_fn(|lane| pairs[2 * lane + 1].widen())),
        )
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        map2(self, other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        map2(self, other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        map2(self, other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        map2(self, other, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        map2(self, other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn fma(self, factor: Self, addend: Self) -> Self {
        Portable(std::array::from_fn(|lane| self.0[lane].mul_add(factor.0[lane], addend.0[lane])))
    }
    #[inline(always)]
    unsafe fn add_to_exponent(self, whole: Self) -> Self {
        map2(self, whole, |x, whole| f32::from_bits(x.to_bits().wrapping_add(whole.to_bits() << 23)))
    }
    #[inline(always)]
    unsafe fn is_below_infinity(self) -> bool {
        self.0.iter().all(|x| *x < f32::INFINITY)
    }
    #[inline(always)]
    unsafe fn through_bf16(self) -> Self {
        Portable(self.0.map(through::<bf16>))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16) {
        unsafe { to.cast::<[bf16; 16]>().write_unaligned(self.0.map(bf16::round)) }
    }
}
