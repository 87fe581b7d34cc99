use super::*;
use crate::testing::{Numbers, assert_same_bits, devices};

#[test]
fn every_width_and_extreme_gate_matches_the_reference() {
    for (rows, width) in [(1, 1), (2, 16), (3, 100), (1, 1536)] {
        let mut gate_up: Vec<f32> = Numbers(4).vec(2 * rows * width).iter().map(|x| x * 20.0).collect();
        gate_up[0] = -200.0;
        let mut first: Option<Vec<f32>> = None;
        for device in devices() {
            let mut out = vec![0.0f32; rows * width];
            swiglu(&device, View::from(&gate_up[..]), width, ViewMut::from(&mut out[..])).unwrap();
            for row in 0..rows {
                let (gate, up) = gate_up[2 * row * width..][..2 * width].split_at(width);
                let expected = swiglu_reference(gate, up);
                for (a, b) in out[row * width..].iter().zip(&expected) {
                    // e^-x carries the rounding of x·log2(e): relative |x| ulp, here below 20.
                    assert!((a - b).abs() <= 24.0 * f32::EPSILON * b.abs() + 1e-30, "{a} {b}");
                }
            }
            assert_same_bits(first.get_or_insert(out.clone()), &out, "the same bits everywhere");
        }
    }
}

#[test]
fn lengths_that_do_not_agree_are_refused() {
    let device = &devices()[0];
    let mut out = [0.0f32; 4];
    assert!(swiglu(device, View::from(&[0.0; 7][..]), 4, ViewMut::from(&mut out[..])).is_err());
}
