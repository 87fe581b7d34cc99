use super::*;
use crate::testing::{Numbers, assert_same_bits, devices};

#[test]
fn heads_match_the_reference_in_both_pairings_with_and_without_unturned_dimensions() {
    let positions = [0u32, 1, 77, 8191];
    for (dim, rotary, factor) in [(64, 64, 1.0), (16, 16, 1.375), (128, 64, 0.8)] {
        for pairs in [Pairs::HalfSplit, Pairs::Interleaved] {
            let frequencies = frequencies(1e5, rotary);
            let heads = Heads { stride: 5 * dim + 3, first: dim + 1, count: 3, dim };
            let x = Numbers(2).vec(positions.len() * heads.stride);
            let mut first: Option<Vec<f32>> = None;
            for device in devices() {
                let (mut cos, mut sin) =
                    (vec![0.0; positions.len() * rotary / 2], vec![0.0; positions.len() * rotary / 2]);
                let (c, s) = (ViewMut::from(&mut cos[..]), ViewMut::from(&mut sin[..]));
                rope_angles(&device, &positions, &frequencies, factor, c, s).unwrap();
                let mut got = x.clone();
                let (c, s) = (View::from(&cos[..]), View::from(&sin[..]));
                rope(&device, ViewMut::from(&mut got[..]), heads, pairs, c, s).unwrap();
                let mut expected = x.clone();
                for (row, &position) in positions.iter().enumerate() {
                    for head in 0..3 {
                        let at = row * heads.stride + heads.first + head * dim;
                        let turned = &mut expected[at..at + dim];
                        rope_reference(turned, position, &frequencies, factor, pairs);
                    }
                }
                for (a, b) in got.iter().zip(&expected) {
                    // cos and sin are rounded to f32, and again when multiplied, before two products of numbers below
                    // 1.4: 8 half ulp.
                    assert!((a - b).abs() < 8.0 * f32::EPSILON, "{a} {b}");
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

/// Compares with what transformers 5's ROPE_INIT_FUNCTIONS["yarn"] returned.
#[track_caller]
fn assert_yarn(theta: f32, yarn: Yarn, expected: &[f32]) {
    let mut got = frequencies(theta, 2 * expected.len());
    scale_yarn(&mut got, theta, &yarn);
    for (at, (a, b)) in got.iter().zip(expected).enumerate() {
        // Both sides round in f32: a power, two divisions, two products, a sum.
        assert!((a - b).abs() <= 8.0 * f32::EPSILON * b, "pair {at}: {a} {b}");
    }
}

#[test]
fn yarn_keeps_divides_and_blends_as_transformers_does() {
    let yarn = Yarn { factor: 4.0, original_context: 32, beta_fast: 32.0, beta_slow: 1.0, truncate: true };
    assert_yarn(
        1e4,
        yarn,
        &[1.0, 0.197_642_36, 0.025, 0.007_905_695, 0.0025, 0.000_790_569_47, 0.000_25, 7.905_695e-5],
    );
    // One pair is both the last that is kept and the first that is divided.
    let yarn = Yarn { factor: 32.0, original_context: 4096, beta_fast: 1.0, ..yarn };
    let mut scaled = frequencies(5e4, 64);
    scale_yarn(&mut scaled, 5e4, &yarn);
    assert!((scaled[19] - 1.621_76e-3).abs() < 1e-9, "{}", scaled[19]);
    assert!((scaled[20] - 3.614_046_7e-5).abs() < 1e-11, "{}", scaled[20]);
    // Without truncation the ramp runs from pair 8.09 to pair 17.40.
    let yarn = Yarn { beta_fast: 32.0, truncate: false, ..yarn };
    let mut scaled = frequencies(1.5e5, 64);
    let plain = scaled.clone();
    scale_yarn(&mut scaled, 1.5e5, &yarn);
    assert_eq!(scaled[8], plain[8]);
    for (pair, expected) in [(9, 0.031_705_696), (13, 0.003_860_359), (17, 0.000_129_318_7)] {
        assert!((scaled[pair] / expected - 1.0).abs() < 1e-6, "pair {pair}: {}", scaled[pair]);
    }
    assert_eq!(scaled[18], plain[18] / 32.0);
}

#[test]
fn an_original_context_shorter_than_one_turn_leaves_the_frequencies_alone() {
    // transformers divides none of them either.
    let yarn = Yarn { factor: 4.0, original_context: 1, beta_fast: 32.0, beta_slow: 1.0, truncate: true };
    let mut scaled = frequencies(1e4, 16);
    scale_yarn(&mut scaled, 1e4, &yarn);
    assert_eq!(scaled, frequencies(1e4, 16));
}

#[test]
fn linear_scaling_divides_every_frequency() {
    let mut scaled = frequencies(1e4, 64);
    scale_linear(&mut scaled, 2.5);
    assert!(scaled.iter().zip(frequencies(1e4, 64)).all(|(scaled, plain)| *scaled == plain / 2.5));
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
