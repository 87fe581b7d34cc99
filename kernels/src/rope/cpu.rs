//! One row per task.
#![allow(unsafe_code)]

use super::{Heads, Pairs};
use crate::{
    device::CpuDevice,
    simd::{Lanes, dispatch},
    sys::SharedMut,
};

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
    let (x, isa) = (SharedMut::new(x), cpu.isa());
    cpu.team().for_each(rows, |row| {
        let first = row * heads.stride + heads.first;
        // SAFETY: each row is visited by one member only.
        let x = unsafe { x.range_mut(first..first + heads.count * heads.dim) };
        let (cos, sin) = (&cos[row * half..][..half], &sin[row * half..][..half]);
        for head in x.chunks_exact_mut(heads.dim) {
            match pairs {
                Pairs::HalfSplit => {
                    dispatch!(isa, turn_halves::<>(head: &mut [f32], cos: &[f32], sin: &[f32]) []);
                }
                Pairs::Interleaved => {
                    for (pair, (cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos.iter().zip(sin))
                    {
                        *pair = turned(pair[0], pair[1], *cos, *sin).into();
                    }
                }
            }
        }
    });
}

/// The first half of the turned dimensions against the second one.
#[inline(always)]
unsafe fn turn_halves<V: Lanes>(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head[..2 * cos.len()].split_at_mut(cos.len());
    let whole = cos.len() / 16 * 16;
    for at in (0..whole).step_by(16) {
        // SAFETY: whole vectors of slices that are equally long; V's instruction set is the caller's.
        unsafe {
            let (a, b) = (low.as_mut_ptr().add(at), high.as_mut_ptr().add(at));
            let (x, y) = (V::load(a), V::load(b));
            let (cos, sin) = (V::load(cos.as_ptr().add(at)), V::load(sin.as_ptr().add(at)));
            x.mul(cos).sub(y.mul(sin)).store(a);
            y.mul(cos).add(x.mul(sin)).store(b);
        }
    }
    for at in whole..cos.len() {
        (low[at], high[at]) = turned(low[at], high[at], cos[at], sin[at]);
    }
}

fn turned(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (a * cos - b * sin, b * cos + a * sin)
}
