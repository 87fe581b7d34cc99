//! How the elements of a tensor are stored, and how they become `f32`.

use std::ops::Range;

use half::{f16, slice::HalfFloatSliceExt};

/// Elements in a block of every quantised type that is read.
const BLOCK: usize = 32;

/// Storage of a tensor's elements. Rows are stored one after the other; a quantised row is a whole number of
/// blocks of 32 elements along the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Encoding {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    Bf16,
    /// Blocks of 32: half-precision scale and minimum, then 32 four-bit integers.
    Q4_1,
    /// Blocks of 32: half-precision scale, then 32 signed bytes.
    Q8_0,
}

impl Encoding {
    /// The readable types, for messages.
    pub(super) const SUPPORTED: &'static str = "F32, F16, BF16, Q4_1 and Q8_0";

    /// Elements and bytes of the smallest unit that can be decoded alone. Slices that start and end at
    /// multiples of it are the cheapest to read.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Encoding::F32 => (1, 4),
            Encoding::F16 | Encoding::Bf16 => (1, 2),
            Encoding::Q4_1 => (BLOCK, 2 + 2 + BLOCK / 2),
            Encoding::Q8_0 => (BLOCK, 2 + BLOCK),
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
            Encoding::Q4_1 => decode_blocks(row, cols, out, decode_q4_1),
            Encoding::Q8_0 => decode_blocks(row, cols, out, decode_q8_0),
        }
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
fn decode_blocks<const BYTES: usize>(
    row: &[u8],
    cols: Range<usize>,
    mut out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; BLOCK]),
) {
    let (blocks, _) = row.as_chunks::<BYTES>();
    let mut at = cols.start;
    while at < cols.end {
        let block = &blocks[at / BLOCK];
        let skipped = at % BLOCK;
        let count = (BLOCK - skipped).min(cols.end - at);
        let (values, rest) = out.split_at_mut(count);
        match <&mut [f32; BLOCK]>::try_from(&mut *values) {
            Ok(whole) => decode(block, whole),
            Err(_) => {
                let mut scratch = [0.0; BLOCK];
                decode(block, &mut scratch);
                values.copy_from_slice(&scratch[skipped..skipped + count]);
            }
        }
        out = rest;
        at += count;
    }
}

/// `scale * q + minimum`; the low nibbles are elements 0..16, the high ones 16..32.
fn decode_q4_1(block: &[u8; 20], out: &mut [f32; BLOCK]) {
    let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
    let minimum = f16::from_le_bytes([block[2], block[3]]).to_f32();
    let (low, high) = out.split_at_mut(BLOCK / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(&block[4..]) {
        *low = scale * f32::from(byte & 0x0f) + minimum;
        *high = scale * f32::from(byte >> 4) + minimum;
    }
}

/// `scale * q`.
fn decode_q8_0(block: &[u8; 34], out: &mut [f32; BLOCK]) {
    let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
    for (value, byte) in out.iter_mut().zip(&block[2..]) {
        *value = scale * f32::from(*byte as i8);
    }
}
