use half::bf16;

use super::*;
use crate::linear::Rows;
use crate::testing::{Numbers, assert_same_bits, devices};

fn run<T: Kernels>(tolerance: f32) {
    for (rows, width) in [(1, 1), (3, 16), (5, 576), (2, 100)] {
        let mut numbers = Numbers(11);
        let (x, delta, weight) = (numbers.vec(rows * width), numbers.vec(rows * width), numbers.vec(width));
        let mut first: Option<Vec<f32>> = None;
        for device in devices() {
            for delta in [None, Some(&delta[..])] {
                let mut residual = x.clone();
                let mut out = Rows::<T>::zeros(&device, rows, width, "out").unwrap();
                let view = ViewMut::from(&mut residual[..]);
                let weights = View::from(&weight[..]);
                rms_norm(&device, view, delta.map(View::from), weights, 1e-5, out.view_mut(rows)).unwrap();
                let out = out.view(rows).to_vec();
                for row in 0..rows {
                    let range = row * width..(row + 1) * width;
                    let mut expected_residual = x[range.clone()].to_vec();
                    let delta = delta.map(|delta| &delta[range.clone()]);
                    let expected = rms_norm_reference::<T>(&mut expected_residual, delta, &weight, 1e-5);
                    assert_same_bits(&residual[range.clone()], &expected_residual, "residual");
                    for (a, b) in out[range].iter().zip(&expected) {
                        assert!((a - b).abs() <= tolerance * b.abs().max(1e-3), "{a} {b}");
                    }
                }
                if delta.is_some() {
                    assert_same_bits(first.get_or_insert(out.clone()), &out, "the same bits everywhere");
                }
            }
        }
    }
}

#[test]
fn rows_match_the_reference_and_are_the_same_bits_on_every_instruction_set() {
    // The sum of squares runs in another order than the reference's: a few ulp of f32, at most one of BF16 twice.
    run::<f32>(1e-5);
    run::<bf16>(2.0 / 128.0);
}
