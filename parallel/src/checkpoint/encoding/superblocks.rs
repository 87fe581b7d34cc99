//! Blocks of 256 elements, the "K" types: one half-precision scale over small integer scales of parts.
//!
//! Four and five bits have eight parts of 32, each with a six-bit scale and a six-bit minimum of its own; the
//! value is `(d * scale) * q - (dmin * minimum)`. Six bits have sixteen parts of 16, each with a signed byte for a
//! scale; the value is `(d * scale) * (q - 32)`, the difference taken in integers.

use super::half_at;

/// Elements of a block.
pub(super) const ELEMENTS: usize = 256;
/// Elements that share a scale and a minimum, of four and five bits.
const PART: usize = 32;
/// Elements that share a scale, of six bits.
const PART_OF_SIX: usize = 16;
/// Eight scales and eight minima of six bits each.
const PACKED_SCALES: usize = 12;

/// Scale of scales, scale of minima, scales and minima, nibbles.
pub(super) const Q4K_BYTES: usize = 2 + 2 + PACKED_SCALES + ELEMENTS / 2;
/// The same with fifth bits before the nibbles.
pub(super) const Q5K_BYTES: usize = Q4K_BYTES + ELEMENTS / 8;
/// Nibbles, upper two bits, scales, scale of scales.
pub(super) const Q6K_BYTES: usize = ELEMENTS / 2 + ELEMENTS / 4 + ELEMENTS / PART_OF_SIX + 2;

pub(super) fn q4k(block: &[u8; Q4K_BYTES], out: &mut [f32; ELEMENTS]) {
    let (head, nibbles) = block.split_at(4 + PACKED_SCALES);
    four_and_fifth(head, &[0; PART], nibbles, out);
}

pub(super) fn q5k(block: &[u8; Q5K_BYTES], out: &mut [f32; ELEMENTS]) {
    let (head, rest) = block.split_at(4 + PACKED_SCALES);
    let (fifth, nibbles) = rest.split_at(PART);
    four_and_fifth(head, fifth, nibbles, out);
}

/// Each 32 bytes of nibbles hold two parts, the low nibbles first; bit `j` of byte `i` of `fifth` belongs to
/// element `i` of part `j`.
fn four_and_fifth(head: &[u8], fifth: &[u8], nibbles: &[u8], out: &mut [f32; ELEMENTS]) {
    let (d, d_min) = (half_at(head, 0), half_at(head, 2));
    for (part, values) in out.chunks_exact_mut(PART).enumerate() {
        let (scale, minimum) = scale_and_minimum(&head[4..], part);
        let (scale, minimum) = (d * f32::from(scale), d_min * f32::from(minimum));
        let shift = part % 2 * 4;
        let stored = &nibbles[part / 2 * PART..][..PART];
        for ((value, byte), fifth) in values.iter_mut().zip(stored).zip(fifth) {
            let q = byte >> shift & 0x0f | (fifth >> part & 1) << 4;
            *value = scale * f32::from(q) - minimum;
        }
    }
}

/// Six bits each of a part's scale and minimum. The first four parts have theirs in bytes 0..4 and 4..8; the
/// others' lower four bits share bytes 8..12, and their upper two fill the tops of the first eight bytes.
fn scale_and_minimum(packed: &[u8], part: usize) -> (u8, u8) {
    if part < 4 {
        return (packed[part] & 0x3f, packed[part + 4] & 0x3f);
    }
    let lower = packed[part + 4];
    (lower & 0x0f | packed[part - 4] >> 6 << 4, lower >> 4 | packed[part] >> 6 << 4)
}

pub(super) fn q6k(block: &[u8; Q6K_BYTES], out: &mut [f32; ELEMENTS]) {
    let (nibbles, rest) = block.split_at(ELEMENTS / 2);
    let (upper, scales) = rest.split_at(ELEMENTS / 4);
    let d = half_at(scales, ELEMENTS / PART_OF_SIX);
    // A half of 128 elements, in quarters of 32: 64 bytes of nibbles, the low ones for quarters 0 and 1, the high
    // ones for 2 and 3; and 32 bytes of which each holds the upper two bits of one element per quarter.
    for (part, values) in out.chunks_exact_mut(PART_OF_SIX).enumerate() {
        let (half, quarter, within) = (part / 8, part % 8 / 2, part % 2 * PART_OF_SIX);
        let nibbles = &nibbles[half * 64 + quarter % 2 * 32 + within..][..PART_OF_SIX];
        let upper = &upper[half * 32 + within..][..PART_OF_SIX];
        let scale = d * f32::from(scales[part] as i8);
        for ((value, nibble), upper) in values.iter_mut().zip(nibbles).zip(upper) {
            let q = nibble >> (quarter / 2 * 4) & 0x0f | (upper >> (quarter * 2) & 0x03) << 4;
            *value = scale * f32::from(q as i8 - 32);
        }
    }
}
