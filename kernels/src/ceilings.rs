//! What this machine does at most: the ceilings that benches name their share of.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

pub use crate::linear::peak_flops;
use crate::{KernelError, buffer::Buffer, device::Device};

/// Sums side by side, so that adding never waits.
const SUMS: usize = 64;

/// Bytes a second that all threads of `device` together read of `bytes` of memory, once after the other: the wall of a
/// step whose weights are so many. Median over passes that take `time`, after one that does not count.
///
/// # Errors
/// No memory, and a device that is no CPU.
pub fn read_speed(device: &Device, bytes: usize, time: Duration) -> Result<f64, KernelError> {
    let threads = device.require_cpu("read_speed")?.threads();
    let part = (bytes / size_of::<f32>() / threads).max(1).next_multiple_of(SUMS);
    let mut memory = Buffer::<f32>::zeros(device, part * threads, "memory to read")?;
    // The system gives pages when they are first written; until then all are one page of zeros.
    device.map_rows(memory.as_mut_slice(), part, |_, values| values.fill(1.0));
    let mut passes = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < time || passes.len() < 2 {
        let pass = Instant::now();
        device.map_rows(memory.as_mut_slice(), part, |_, values| {
            let mut sums = [0.0f32; SUMS];
            for chunk in values.as_chunks::<SUMS>().0 {
                sums.iter_mut().zip(chunk).for_each(|(sum, value)| *sum += value);
            }
            black_box(sums);
        });
        passes.push(pass.elapsed().as_secs_f64());
    }
    passes.remove(0);
    passes.sort_by(f64::total_cmp);
    Ok((memory.len() * size_of::<f32>()) as f64 / passes[passes.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::bf16;

    #[test]
    fn a_machine_reads_and_multiplies_at_a_speed() {
        let device = Device::cpu(2).expect("a device");
        let time = Duration::from_millis(5);
        for bytes in [0, 1000, 8 << 20] {
            let speed = read_speed(&device, bytes, time).expect("a speed");
            assert!(speed.is_finite() && speed > 0.0, "{bytes}: {speed}");
        }
        // Less than a core of the oldest machine does in scalar code would be a mistake in counting.
        assert!(peak_flops::<bf16>(&device, time).expect("a speed") > 1e8);
        assert!(peak_flops::<f32>(&device, time).expect("a speed") > 1e8);
    }
}
