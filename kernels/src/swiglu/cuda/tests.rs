use consort_emulator::Memory;
use half::bf16;

use super::{Activation, swiglu};
use crate::{
    cuda::row_stride,
    swiglu::{clamped_swiglu_reference, geglu_reference, swiglu_reference},
    testing::{
        Numbers,
        emulated::{Emulated, device_slice, device_slice_mut},
    },
};

/// A row of gates and ups through the reference.
fn reference(activation: Activation, row: &[f32]) -> Vec<f32> {
    let (gate, up) = row.split_at(row.len() / 2);
    match activation {
        Activation::Silu => swiglu_reference(gate, up),
        Activation::Gelu => geglu_reference(gate, up),
        Activation::Clamped => clamped_swiglu_reference(row),
    }
}

fn run(device: &Emulated, activation: Activation, gate_up: &[f32], width: usize) -> Vec<bf16> {
    let rows = gate_up.len().checked_div(2 * width).unwrap_or(0);
    let memory = Memory::from_slice(gate_up);
    let mut out = Memory::<bf16>::poisoned(rows * row_stride(width));
    swiglu(device, activation, device_slice(&memory), width, device_slice_mut(&mut out)).unwrap();
    out.to_vec()
}

fn assert_rows(activation: Activation, rows: usize, width: usize, ways: usize) {
    // Rounding to BF16 (2^-8), and before it an approximate exponential and division (2 ulp each) and the rounding of
    // the exponential's argument, enlarged by the argument itself: below 100 wherever the result is above 1e-30.
    let relative = 1.0 / 256.0 + 256.0 * f32::EPSILON;
    let mut values: Vec<f32> = Numbers(4).vec(2 * rows * width).iter().map(|x| x * 12.0).collect();
    values.iter_mut().take(1).for_each(|gate| *gate = -200.0);
    for device in Emulated::every_way().take(ways) {
        let out = run(&device, activation, &values, width);
        for (row, out) in values.chunks_exact(2 * width).zip(out.chunks_exact(row_stride(width))) {
            assert!(out[width..].iter().all(|x| x.to_bits() == 0), "padding is zero");
            for (column, expected) in reference(activation, row).into_iter().enumerate() {
                let got = f32::from(out[column]);
                assert!(
                    (got - expected).abs() <= relative * expected.abs() + 1e-30,
                    "{activation:?}, {rows} x {width}, column {column}: {got}, expected {expected}, {:?}",
                    device.settings
                );
            }
        }
    }
}

#[test]
fn emulator_every_width_and_extreme_gate_matches_the_reference_of_each_activation() {
    for activation in [Activation::Silu, Activation::Gelu, Activation::Clamped] {
        for (rows, width) in [(1, 1), (2, 16), (3, 101), (3, 102), (2, 1028), (0, 8)] {
            assert_rows(activation, rows, width, 12);
        }
        assert_rows(activation, 2, 9600, 2);
    }
}

#[test]
fn emulator_infinities_and_nan_pass_as_arithmetic_says() {
    let device = Emulated::every_way().next().unwrap();
    let inf = f32::INFINITY;
    for activation in [Activation::Silu, Activation::Gelu] {
        let out = run(&device, activation, &[inf, f32::NAN, 1.0, -88.0, 2.0, 1.0, f32::NAN, -3.0], 4);
        assert_eq!(f32::from(out[0]), inf, "{activation:?}");
        assert!(f32::from(out[1]).is_nan() && f32::from(out[2]).is_nan());
        assert!(f32::from(out[3]).abs() < 1e-30);
    }
    // Pairs: both clamped from above, the up from below, NaN on either side.
    let pairs = [inf, inf, 7.0, -inf, f32::NAN, 1.0, 1.0, f32::NAN];
    let out: Vec<f32> = run(&device, Activation::Clamped, &pairs, 4).iter().map(|x| f32::from(*x)).collect();
    assert_eq!(out[..2], [56.0, -42.0]);
    assert!(out[2].is_nan() && out[3].is_nan());
}

#[test]
fn the_references_give_the_values_of_their_published_formulas() {
    // x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) as it stands, worked out in double elsewhere.
    let gelu = geglu_reference(&[1.0, -1.0, 3.0, 0.0], &[1.0; 4]);
    for (got, expected) in gelu.iter().zip([0.841_192, -0.158_808, 2.996_363, 0.0]) {
        assert!((got - expected).abs() < 1e-6, "{got}, expected {expected}");
    }
    // (up + 1) · gate · sigmoid(1.702 gate) of (1, 2) and, clamped to (7, -7), of (100, -100).
    let clamped = clamped_swiglu_reference(&[1.0, 2.0, 100.0, -100.0]);
    assert!((clamped[0] - 2.537_387).abs() < 1e-5 && (clamped[1] + 41.999_72).abs() < 1e-4, "{clamped:?}");
}

#[test]
fn lengths_that_do_not_agree_are_refused_before_a_launch() {
    let device = Emulated::every_way().next().unwrap();
    let gate_up = Memory::from_slice(&[0.0f32; 9]);
    let mut out = Memory::<bf16>::poisoned(8);
    let refused =
        swiglu(&device, Activation::Silu, device_slice(&gate_up), 5, device_slice_mut(&mut out)).unwrap_err();
    assert_eq!(refused.to_string(), "swiglu: gate_up holds 9 elements, 10 expected");
}
