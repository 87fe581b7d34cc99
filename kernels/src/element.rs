//! The types in which weights, matrix inputs, keys and values are stored.

use std::fmt;

pub use half::bf16;

/// Storage type by name, as users write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, wincode::SchemaRead, wincode::SchemaWrite)]
pub enum DType {
    /// 32-bit floats throughout: the path for comparison with other implementations.
    F32,
    /// BF16 weights and matrix inputs; sums and the residual stream stay in f32.
    BF16,
}

impl DType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::BF16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "float32",
            DType::BF16 => "bfloat16",
        })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

/// A storage type of weights and matrix inputs: [`f32`] or [`bf16`].
///
/// Packed layouts hold pairs along the summed dimension for 16 outputs at a time. BF16 keeps the two halves of a
/// pair side by side (`[16 outputs][2]`, one 32-bit lane each, the form that AMX tiles read); f32 keeps them apart
/// (`[2][16 outputs]`). [`Element::pair_offset`] is the only place that knows.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + PartialEq + fmt::Debug + 'static {
    /// The name.
    const DTYPE: DType;

    /// Nearest value of this type, ties to even. In BF16, values below 2^-50 become zero: see [`BF16_SMALLEST`].
    fn round(x: f32) -> Self;

    /// Exact value.
    fn widen(self) -> f32;

    /// Offset, within the 32 elements of one pair of 16 outputs, of `output` (0..16) and `half` (0 or 1).
    fn pair_offset(output: usize, half: usize) -> usize;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    fn round(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn pair_offset(output: usize, half: usize) -> usize {
        half * 16 + output
    }
}

/// 2^-50: smaller BF16 inputs of a product are taken for zero.
///
/// AMX takes subnormal numbers for zero, other instruction sets do not. A BF16 number of at least 2^-50 is a multiple
/// of 2^-57, so a product of two is a multiple of 2^-114, and so is every rounded sum of such products: no subnormal
/// number (below 2^-126) can arise, and all instruction sets agree in every bit.
pub const BF16_SMALLEST: bf16 = bf16::from_bits((127 - 50) << 7);

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;

    #[inline(always)]
    fn round(x: f32) -> Self {
        let bits = x.to_bits();
        if x.is_nan() {
            return bf16::from_bits((bits >> 16) as u16 | 0x40);
        }
        let rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        bf16::from_bits(if rounded & 0x7fff < BF16_SMALLEST.to_bits() { 0 } else { rounded })
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn pair_offset(output: usize, half: usize) -> usize {
        output * 2 + half
    }
}

/// `x` rounded to `T` and widened again.
#[inline(always)]
pub fn through<T: Element>(x: f32) -> f32 {
    T::round(x).widen()
}
