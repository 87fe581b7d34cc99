//! What this machine multiplies at most: products of registers, without memory. Benches name their share of it.
#![allow(unsafe_code)]

use std::{
    hint::black_box,
    sync::Mutex,
    time::{Duration, Instant},
};

use super::{Kernels, lock};
use crate::{
    DType, KernelError,
    device::Device,
    simd::{
        Isa, Lanes,
        amx::{self, Tiles},
        dispatch,
    },
};

/// Products between two looks at the clock.
const ROUNDS: usize = 2000;
/// Sums that are on their way at once.
const CHAINS: usize = 12;

/// Floating-point operations a second of all threads of `device` together, as its kernels for `T` multiply: tiles where
/// there are some for it, else chains of fused multiply-adds. Takes `time`.
pub fn peak_flops<T: Kernels>(device: &Device, time: Duration) -> Result<f64, KernelError> {
    let cpu = device.require_cpu("peak_flops")?;
    let isa = cpu.isa();
    let on_tiles = isa == Isa::Amx && T::DTYPE == DType::BF16;
    let total = Mutex::new(0.0);
    cpu.team().run(&|_| {
        let (begin, mut operations) = (Instant::now(), 0usize);
        while begin.elapsed() < time {
            if on_tiles {
                // SAFETY: a device has this instruction set only where the system permits it.
                unsafe { tiles() }
                // Four products of 16 rows, 32 inputs and 16 outputs.
                operations += ROUNDS * 4 * 2 * 16 * 32 * 16;
            } else {
                dispatch!(isa, chains::<>() []);
                operations += ROUNDS * CHAINS * 2 * 16;
            }
        }
        *lock(&total) += operations as f64 / begin.elapsed().as_secs_f64();
    });
    Ok(total.into_inner().unwrap_or_default())
}

unsafe fn tiles() {
    // SAFETY: the caller's; no other tiles live on this thread.
    unsafe {
        let _tiles = Tiles::configure([16; 8]);
        amx::zero::<4>();
        amx::zero::<5>();
        amx::zero::<6>();
        amx::zero::<7>();
        for _ in 0..ROUNDS {
            amx::multiply::<0, 4, 6>();
            amx::multiply::<1, 4, 7>();
            amx::multiply::<2, 5, 6>();
            amx::multiply::<3, 5, 7>();
        }
    }
}

#[inline(always)]
unsafe fn chains<V: Lanes>() {
    // SAFETY: V's instruction set is the caller's.
    unsafe {
        let (factor, addend) = (V::splat(black_box(1.5)), V::splat(black_box(0.5)));
        let mut sums = [V::zero(); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = factor.fma(addend, *sum);
            }
        }
        for sum in sums {
            black_box(sum.to_array());
        }
    }
}
