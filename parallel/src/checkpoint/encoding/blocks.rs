//! Blocks of 32 elements under one half-precision scale.
//!
//! Four-bit parts are stored in halves: the low nibbles of 16 bytes are elements 0..16, the high ones 16..32. A
//! fifth bit stands in a little-endian word of 32, bit `i` for element `i`. Around a middle the value is
//! `scale * (q - middle)` with the difference taken in integers; above a minimum it is `scale * q + minimum`.

use super::half_at;

/// Elements of a block.
pub(super) const ELEMENTS: usize = 32;
const HALF: usize = ELEMENTS / 2;

/// Scale, nibbles.
pub(super) const Q4_0_BYTES: usize = 2 + HALF;
/// Scale, minimum, nibbles.
pub(super) const Q4_1_BYTES: usize = 2 + 2 + HALF;
/// Scale, fifth bits, nibbles.
pub(super) const Q5_0_BYTES: usize = 2 + 4 + HALF;
/// Scale, minimum, fifth bits, nibbles.
pub(super) const Q5_1_BYTES: usize = 2 + 2 + 4 + HALF;
/// Scale, bytes.
pub(super) const Q8_0_BYTES: usize = 2 + ELEMENTS;

pub(super) fn q4_0(block: &[u8; Q4_0_BYTES], out: &mut [f32; ELEMENTS]) {
    let scale = half_at(block, 0);
    nibbles(&block[2..], 0, out, |q| scale * f32::from(q as i8 - 8));
}

pub(super) fn q4_1(block: &[u8; Q4_1_BYTES], out: &mut [f32; ELEMENTS]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    nibbles(&block[4..], 0, out, |q| scale * f32::from(q) + minimum);
}

pub(super) fn q5_0(block: &[u8; Q5_0_BYTES], out: &mut [f32; ELEMENTS]) {
    let scale = half_at(block, 0);
    nibbles(&block[6..], word_at(block, 2), out, |q| scale * f32::from(q as i8 - 16));
}

pub(super) fn q5_1(block: &[u8; Q5_1_BYTES], out: &mut [f32; ELEMENTS]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    nibbles(&block[8..], word_at(block, 4), out, |q| scale * f32::from(q) + minimum);
}

pub(super) fn q8_0(block: &[u8; Q8_0_BYTES], out: &mut [f32; ELEMENTS]) {
    let scale = half_at(block, 0);
    for (value, byte) in out.iter_mut().zip(&block[2..]) {
        *value = scale * f32::from(*byte as i8);
    }
}

/// Puts together nibbles and `fifth` bits and converts each number, of five bits at most.
fn nibbles(bytes: &[u8], fifth: u32, out: &mut [f32; ELEMENTS], value: impl Fn(u8) -> f32) {
    let bit = |element: usize| ((fifth >> element) as u8 & 1) << 4;
    let (low, high) = out.split_at_mut(HALF);
    for (i, ((low, high), byte)) in low.iter_mut().zip(high).zip(bytes).enumerate() {
        *low = value(byte & 0x0f | bit(i));
        *high = value(byte >> 4 | bit(i + HALF));
    }
}

fn word_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}
