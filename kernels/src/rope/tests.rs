use super::*;
use crate::testing::{Numbers, assert_same_bits, devices};

#[test]
fn heads_match_the_reference_in_both_pairings_with_and_without_unturned_dimensions() {
    let positions = [0u32, 1, 77, 8191];
    for (dim, rotary) in [(64, 64), (16, 16), (128, 64)] {
        for pairs in [Pairs::HalfSplit, Pairs::Interleaved] {
            let frequencies = frequencies(1e5, rotary);
            let heads = Heads { stride: 5 * dim + 3, first: dim + 1, count: 3, dim };
            let x = Numbers(2).vec(positions.len() * heads.stride);
            let mut first: Option<Vec<f32>> = None;
            for device in devices() {
                let (mut cos, mut sin) =
                    (vec![0.0; positions.len() * rotary / 2], vec![0.0; positions.len() * rotary / 2]);
                let (c, s) = (ViewMut::from(&mut cos[..]), ViewMut::from(&mut sin[..]));
                rope_angles(&device, &positions, &frequencies, c, s).unwrap();
                let mut got = x.clone();
                let (c, s) = (View::from(&cos[..]), View::from(&sin[..]));
                rope(&device, ViewMut::from(&mut got[..]), heads, pairs, c, s).unwrap();
                let mut expected = x.clone();
                for (row, &position) in positions.iter().enumerate() {
                    for head in 0..3 {
                        let at = row * heads.stride + heads.first + head * dim;
                        rope_reference(&mut expected[at..at + dim], position, &frequencies, pairs);
                    }
                }
                for (a, b) in got.iter().zip(&expected) {
                    // cos and sin are rounded to f32 before two products of numbers below 1: 4 half ulp.
                    assert!((a - b).abs() < 4.0 * f32::EPSILON, "{a} {b}");
                }
                assert_same_bits(first.get_or_insert(got.clone()), &got, "the same bits everywhere");
            }
        }
    }
}

#[test]
fn llama3_scaling_keeps_high_divides_low_and_blends_between() {
    // The numbers of transformers 5's _compute_llama3_parameters for Llama 3.2 1B (theta 5e5, factor 32).
    let plain = frequencies(5e5, 64);
    let mut scaled = plain.clone();
    scale_llama3(&mut scaled, 32.0, 1.0, 4.0, 8192);
    assert_eq!(scaled[0], plain[0]);
    assert_eq!(scaled[31], plain[31] / 32.0);
    let blended: Vec<usize> =
        (0..32).filter(|&i| scaled[i] != plain[i] && scaled[i] != plain[i] / 32.0).collect();
    assert_eq!(blended, [15, 16, 17]);
    assert!(blended.iter().all(|&i| scaled[i] < plain[i] && scaled[i] > plain[i] / 32.0));
}

#[test]
fn heads_outside_a_row_are_refused() {
    let device = &devices()[0];
    let heads = Heads { stride: 32, first: 16, count: 2, dim: 16 };
    let mut x = [0.0; 32];
    let none = [0.0; 8];
    let (cos, sin) = (View::from(&none[..]), View::from(&none[..]));
    assert!(rope(device, ViewMut::from(&mut x[..]), heads, Pairs::HalfSplit, cos, sin).is_err());
}
