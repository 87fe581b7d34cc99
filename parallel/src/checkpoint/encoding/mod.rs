//! How the elements of a tensor are stored, and how they become `f32`.
//!
//! Every value is computed in single precision in the one order of operations that the module of its family
//! states, without fused multiply-add, so that it is the same on every machine. Scales are not judged: one that is
//! subnormal, negative, infinite or not a number gives what IEEE arithmetic makes of it, and never a panic.

mod blocks;
mod superblocks;
#[cfg(test)]
mod tests;

use std::{fmt, ops::Range};

use half::{f16, slice::HalfFloatSliceExt};

/// Storage of a tensor's elements. Rows are stored one after the other; a quantised row is a whole number of
/// blocks of 32 or 256 elements along the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Encoding {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    Bf16,
    /// Blocks of 32: half-precision scale, then 32 four-bit integers around 8.
    Q4_0,
    /// Blocks of 32: half-precision scale and minimum, then 32 four-bit integers.
    Q4_1,
    /// Blocks of 32: half-precision scale, then 32 five-bit integers around 16.
    Q5_0,
    /// Blocks of 32: half-precision scale and minimum, then 32 five-bit integers.
    Q5_1,
    /// Blocks of 32: half-precision scale, then 32 signed bytes.
    Q8_0,
    /// Blocks of 256: scales and minima of eight parts, then 256 four-bit integers.
    Q4K,
    /// Blocks of 256: scales and minima of eight parts, then 256 five-bit integers.
    Q5K,
    /// Blocks of 256: six-bit integers around 32, then scales of sixteen parts.
    Q6K,
}

impl Encoding {
    /// The readable types, for messages.
    pub(super) const SUPPORTED: &'static str =
        "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K";

    /// The name that files and their tools use.
    pub const fn name(self) -> &'static str {
        match self {
            Encoding::F32 => "F32",
            Encoding::F16 => "F16",
            Encoding::Bf16 => "BF16",
            Encoding::Q4_0 => "Q4_0",
            Encoding::Q4_1 => "Q4_1",
            Encoding::Q5_0 => "Q5_0",
            Encoding::Q5_1 => "Q5_1",
            Encoding::Q8_0 => "Q8_0",
            Encoding::Q4K => "Q4_K",
            Encoding::Q5K => "Q5_K",
            Encoding::Q6K => "Q6_K",
        }
    }

    /// Elements and bytes of the smallest unit that can be decoded alone. Slices that start and end at
    /// multiples of it are the cheapest to read.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Encoding::F32 => (1, 4),
            Encoding::F16 | Encoding::Bf16 => (1, 2),
            Encoding::Q4_0 => (blocks::ELEMENTS, blocks::Q4_0_BYTES),
            Encoding::Q4_1 => (blocks::ELEMENTS, blocks::Q4_1_BYTES),
            Encoding::Q5_0 => (blocks::ELEMENTS, blocks::Q5_0_BYTES),
            Encoding::Q5_1 => (blocks::ELEMENTS, blocks::Q5_1_BYTES),
            Encoding::Q8_0 => (blocks::ELEMENTS, blocks::Q8_0_BYTES),
            Encoding::Q4K => (superblocks::ELEMENTS, superblocks::Q4K_BYTES),
            Encoding::Q5K => (superblocks::ELEMENTS, superblocks::Q5K_BYTES),
            Encoding::Q6K => (superblocks::ELEMENTS, superblocks::Q6K_BYTES),
        }
    }

    /// Bytes of a row of `cols` elements, or nothing if no such row can be stored.
    pub(super) fn row_bytes(self, cols: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        cols.is_multiple_of(elements).then(|| (cols / elements).checked_mul(bytes)).flatten()
    }

    /// Converts the elements `cols` of one stored row. `row` is the whole row, of which only the blocks that
    /// hold `cols` are touched; `out` has `cols.len()` places.
    pub(super) fn decode(self, row: &[u8], cols: Range<usize>, out: &mut [f32]) {
        debug_assert_eq!(cols.len(), out.len());
        match self {
            Encoding::F32 => {
                for (value, bytes) in out.iter_mut().zip(row[cols.start * 4..cols.end * 4].chunks_exact(4)) {
                    *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
            Encoding::Bf16 => {
                for (value, bytes) in out.iter_mut().zip(row[cols.start * 2..cols.end * 2].chunks_exact(2)) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
                }
            }
            Encoding::F16 => decode_f16(&row[cols.start * 2..cols.end * 2], out),
            Encoding::Q4_0 => decode_blocks(row, cols, out, blocks::q4_0),
            Encoding::Q4_1 => decode_blocks(row, cols, out, blocks::q4_1),
            Encoding::Q5_0 => decode_blocks(row, cols, out, blocks::q5_0),
            Encoding::Q5_1 => decode_blocks(row, cols, out, blocks::q5_1),
            Encoding::Q8_0 => decode_blocks(row, cols, out, blocks::q8_0),
            Encoding::Q4K => decode_blocks(row, cols, out, superblocks::q4k),
            Encoding::Q5K => decode_blocks(row, cols, out, superblocks::q5k),
            Encoding::Q6K => decode_blocks(row, cols, out, superblocks::q6k),
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Half precision by way of a small array, because stored bytes need not be aligned and the vector instruction
/// takes values.
fn decode_f16(bytes: &[u8], out: &mut [f32]) {
    const LANES: usize = 64;
    let mut halves = [f16::ZERO; LANES];
    for (values, stored) in out.chunks_mut(LANES).zip(bytes.chunks(LANES * 2)) {
        for (half, pair) in halves.iter_mut().zip(stored.chunks_exact(2)) {
            *half = f16::from_le_bytes([pair[0], pair[1]]);
        }
        halves[..values.len()].convert_to_f32_slice(values);
    }
}

/// Walks the blocks of `BYTES` bytes that hold `cols`; a block that is wanted in part goes through a scratch.
fn decode_blocks<const BYTES: usize, const ELEMENTS: usize>(
    row: &[u8],
    cols: Range<usize>,
    mut out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    let (blocks, _) = row.as_chunks::<BYTES>();
    let mut at = cols.start;
    while at < cols.end {
        let block = &blocks[at / ELEMENTS];
        let skipped = at % ELEMENTS;
        let count = (ELEMENTS - skipped).min(cols.end - at);
        let (values, rest) = out.split_at_mut(count);
        match <&mut [f32; ELEMENTS]>::try_from(&mut *values) {
            Ok(whole) => decode(block, whole),
            Err(_) => {
                let mut scratch = [0.0; ELEMENTS];
                decode(block, &mut scratch);
                values.copy_from_slice(&scratch[skipped..skipped + count]);
            }
        }
        out = rest;
        at += count;
    }
}

/// A half-precision number of a block's head.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
