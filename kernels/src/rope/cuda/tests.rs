use consort_emulator::{Memory, Settings};

use super::rope_angles;
use crate::{
    buffer::ViewMut,
    device::Device,
    rope::{frequencies, rope_angles as cpu_rope_angles, scale_llama3},
    testing::{
        Numbers,
        emulated::{Emulated, device_slice, device_slice_mut},
    },
};

fn on_cpu(positions: &[u32], frequencies: &[f32], factor: f32) -> (Vec<f32>, Vec<f32>) {
    let len = positions.len() * frequencies.len();
    let (mut cos, mut sin) = (vec![0.0; len], vec![0.0; len]);
    let device = Device::cpu(1).unwrap();
    let (c, s) = (ViewMut::from(&mut cos[..]), ViewMut::from(&mut sin[..]));
    cpu_rope_angles(&device, positions, frequencies, factor, c, s).unwrap();
    (cos, sin)
}

fn on(device: &Emulated, positions: &[u32], frequencies: &[f32], factor: f32) -> (Vec<f32>, Vec<f32>) {
    let len = positions.len() * frequencies.len();
    let (positions, frequencies) = (Memory::from_slice(positions), Memory::from_slice(frequencies));
    let (mut cos, mut sin) = (Memory::poisoned(len), Memory::poisoned(len));
    let (c, s) = (device_slice_mut(&mut cos), device_slice_mut(&mut sin));
    rope_angles(device, device_slice(&positions), device_slice(&frequencies), factor, c, s).unwrap();
    (cos.to_vec(), sin.to_vec())
}

/// Places between floats of the same sign from one number to another.
fn ulps(a: f32, b: f32) -> u32 {
    if a == b { 0 } else { (a.to_bits().wrapping_sub(b.to_bits()) as i32).unsigned_abs() }
}

/// Returns how many numbers differ at all.
fn assert_neighbours(device: &Emulated, positions: &[u32], frequencies: &[f32]) -> usize {
    let (cos, sin) = on(device, positions, frequencies, 1.0);
    let (expected_cos, expected_sin) = on_cpu(positions, frequencies, 1.0);
    let mut differ = 0;
    for (got, expected) in cos.iter().zip(&expected_cos).chain(sin.iter().zip(&expected_sin)) {
        assert!(ulps(*got, *expected) <= 1, "{got}, expected {expected}");
        differ += usize::from(got != expected);
    }
    differ
}

#[test]
fn emulator_angles_are_the_cpus_or_their_neighbours_up_to_a_million_and_beyond() {
    let device = Emulated { settings: Settings::PLAIN, multiprocessors: 4 };
    let mut numbers = Numbers(8);
    let mut positions: Vec<u32> = (0..2000).map(|_| numbers.below(1 << 20) as u32).collect();
    positions.extend([0, 1, 2, 3, (1 << 20) - 1, 1 << 20, (1 << 24) + 1, u32::MAX]);
    let mut scaled = frequencies(5e5, 64);
    scale_llama3(&mut scaled, 32.0, 1.0, 4.0, 8192);
    let mut differ = 0;
    for frequencies in [frequencies(1e4, 128), scaled, frequencies(1.5e5, 6)] {
        differ += assert_neighbours(&device, &positions, &frequencies);
    }
    // Nearly 400,000 numbers, of which one in 2^24 may.
    assert!(differ <= 1, "{differ} differ");
}

#[test]
fn emulator_angles_close_to_multiples_of_a_quarter_turn_keep_their_relative_accuracy() {
    // The float nearest to a multiple of pi/2 leaves a rest as small as 2^-30, in which a rough pi would show.
    let device = Emulated { settings: Settings::PLAIN, multiprocessors: 4 };
    let close: Vec<f32> =
        (1..1500).map(|n| (f64::from(n * n) * std::f64::consts::FRAC_PI_2) as f32).collect();
    assert_eq!(assert_neighbours(&device, &[1], &close), 0);
}

#[test]
fn emulator_factors_multiply_what_was_rounded_in_every_way_of_running() {
    let (positions, frequencies) = ([5u32, 8191, 0], frequencies(1.5e5, 64));
    let expected = on_cpu(&positions, &frequencies, 1.346_574);
    for device in Emulated::every_way() {
        assert_eq!(on(&device, &positions, &frequencies, 1.346_574), expected, "{:?}", device.settings);
        assert_eq!(on(&device, &[], &frequencies, 1.0), (vec![], vec![]));
        assert_eq!(on(&device, &positions, &[], 1.0), (vec![], vec![]));
    }
}
