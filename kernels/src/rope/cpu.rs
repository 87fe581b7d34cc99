//! One row per task.
#![allow(unsafe_code)]

use super::{Heads, Pairs};
use crate::{device::CpuDevice, sys::SharedMut};

pub(super) fn rope_angles(
    cpu: &CpuDevice,
    positions: &[u32],
    frequencies: &[f32],
    attention_factor: f32,
    cos: &mut [f32],
    sin: &mut [f32],
) {
    let (half, cos, sin) = (frequencies.len(), SharedMut::new(cos), SharedMut::new(sin));
    cpu.team().for_each(positions.len(), |row| {
        let range = row * half..(row + 1) * half;
        // SAFETY: each row is visited by one member only.
        let (cos, sin) = unsafe { (cos.range_mut(range.clone()), sin.range_mut(range)) };
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(frequencies) {
            let (s, c) = libm::sincos(f64::from(positions[row] as f32 * frequency));
            (*cos, *sin) = (c as f32 * attention_factor, s as f32 * attention_factor);
        }
    });
}

pub(super) fn rope(cpu: &CpuDevice, x: &mut [f32], heads: Heads, pairs: Pairs, cos: &[f32], sin: &[f32]) {
    let rows = x.len().checked_div(heads.stride).unwrap_or(0);
    let half = cos.len().checked_div(rows).unwrap_or(0);
    let x = SharedMut::new(x);
    cpu.team().for_each(rows, |row| {
        let first = row * heads.stride + heads.first;
        // SAFETY: each row is visited by one member only.
        let x = unsafe { x.range_mut(first..first + heads.count * heads.dim) };
        let (cos, sin) = (&cos[row * half..][..half], &sin[row * half..][..half]);
        for head in x.chunks_exact_mut(heads.dim) {
            turn(head, pairs, cos, sin);
        }
    });
}

fn turn(head: &mut [f32], pairs: Pairs, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for i in 0..half {
        let (at_a, at_b) = match pairs {
            Pairs::HalfSplit => (i, i + half),
            Pairs::Interleaved => (2 * i, 2 * i + 1),
        };
        let (a, b) = (head[at_a], head[at_b]);
        head[at_a] = a * cos[i] - b * sin[i];
        head[at_b] = b * cos[i] + a * sin[i];
    }
}
