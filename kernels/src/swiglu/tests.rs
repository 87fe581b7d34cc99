use half::bf16;

use super::*;
use crate::testing::{Numbers, assert_same_bits, devices};

fn against_reference<T: Kernels>(relative: f32) {
    // In BF16, values below 2^-50 are zero.
    let smallest = if T::DTYPE == crate::DType::BF16 { 1e-15 } else { 1e-30 };
    for (rows, width) in [(1, 1), (2, 16), (3, 100), (1, 1536)] {
        let mut gate_up: Vec<f32> = Numbers(4).vec(2 * rows * width).iter().map(|x| x * 20.0).collect();
        gate_up[0] = -200.0;
        let mut first: Option<Vec<f32>> = None;
        for device in devices() {
            let mut rounded = vec![T::default(); rows * width];
            swiglu(&device, View::from(&gate_up[..]), width, ViewMut::from(&mut rounded[..])).unwrap();
            let out: Vec<f32> = rounded.iter().map(|x| x.widen()).collect();
            for row in 0..rows {
                let (gate, up) = gate_up[2 * row * width..][..2 * width].split_at(width);
                let expected = swiglu_reference(gate, up);
                for (a, b) in out[row * width..].iter().zip(&expected) {
                    assert!((a - b).abs() <= relative * b.abs() + smallest, "{a} {b}");
                }
            }
            assert_same_bits(first.get_or_insert(out.clone()), &out, "the same bits everywhere");
        }
    }
}

#[test]
fn every_width_and_extreme_gate_matches_the_reference() {
    // e^-x carries the rounding of x·log2(e): relative |x| ulp, here below 20; in BF16 the output's own 2^-8 besides.
    against_reference::<f32>(24.0 * f32::EPSILON);
    against_reference::<bf16>(1.0 / 256.0 + 24.0 * f32::EPSILON);
}

#[test]
fn lengths_that_do_not_agree_are_refused() {
    let device = &devices()[0];
    let mut out = [0.0f32; 4];
    assert!(swiglu(device, View::from(&[0.0; 7][..]), 4, ViewMut::from(&mut out[..])).is_err());
}
