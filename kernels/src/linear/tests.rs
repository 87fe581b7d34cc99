use half::bf16;

use super::*;
use crate::{
    element::through,
    testing::{Numbers, assert_same_bits, devices, weight},
};

/// Ragged and round shapes: (rows, inputs, outputs).
const SHAPES: [(usize, usize, usize); 15] = [
    (1, 32, 32),
    (1, 1, 1),
    (2, 33, 31),
    (3, 64, 48),
    (5, 576, 40),
    (8, 100, 65),
    (1, 1536, 96),
    (17, 520, 33),
    (4, 1025, 32),
    (16, 64, 64),
    (32, 96, 32),
    (33, 64, 70),
    (47, 40, 33),
    (50, 64, 70),
    (100, 33, 96),
];

fn against_reference<T: Element + Plain + Kernels>() {
    for device in devices() {
        for (rows, inputs, outputs) in SHAPES {
            let mut numbers = Numbers(7);
            let x: Vec<T> = numbers.vec(rows * inputs).into_iter().map(T::round).collect();
            let w: Vec<f32> = numbers.vec(outputs * inputs).into_iter().map(through::<T>).collect();
            let weight = weight::<T>(&device, &w, outputs, inputs);
            let mut y = vec![f32::NAN; rows * outputs];
            linear(&device, View::from(&x[..]), &weight, ViewMut::from(&mut y[..])).unwrap();
            let wide: Vec<f32> = x.iter().map(|x| x.widen()).collect();
            let expected = linear_reference(&wide, &w, inputs, outputs);
            assert_same_bits(&y, &expected, &format!("{device:?} {rows}x{inputs}x{outputs} {}", T::DTYPE));
        }
    }
}

#[test]
fn f32_equals_the_reference_bit_for_bit_on_every_instruction_set_and_team() {
    against_reference::<f32>();
}

#[test]
fn bf16_equals_the_reference_bit_for_bit_on_every_instruction_set_and_team() {
    against_reference::<bf16>();
}

/// Numbers around `2^scale`, zeros of both signs among them.
fn scaled(numbers: &mut Numbers, len: usize, scale: i32) -> Vec<f32> {
    let number = |numbers: &mut Numbers| match numbers.below(8) {
        0 => 0.0,
        1 => -0.0,
        _ => numbers.f32() * 2.0f32.powi(scale + numbers.below(16) as i32 - 8),
    };
    (0..len).map(|_| number(numbers)).collect()
}

#[test]
fn tiny_and_huge_numbers_are_the_same_bits_on_every_instruction_set() {
    let (rows, inputs, outputs) = (35, 96, 40);
    let mut numbers = Numbers(11);
    // Products of the tiniest would be subnormal; 2^-50 itself is among the others.
    for scale in [-70, -64, -60, -56, -50, -45, -20, 0, 40] {
        let x = scaled(&mut numbers, rows * inputs, scale).into_iter().map(bf16::round).collect::<Vec<_>>();
        let w = scaled(&mut numbers, outputs * inputs, scale);
        let wide: Vec<f32> = x.iter().map(|x| x.widen()).collect();
        let rounded: Vec<f32> = w.iter().map(|w| through::<bf16>(*w)).collect();
        let expected = linear_reference(&wide, &rounded, inputs, outputs);
        assert!(expected.iter().all(|y| *y == 0.0 || y.is_normal()));
        for device in devices() {
            let weight = weight::<bf16>(&device, &w, outputs, inputs);
            let mut y = vec![f32::NAN; rows * outputs];
            linear(&device, View::from(&x[..]), &weight, ViewMut::from(&mut y[..])).unwrap();
            assert_same_bits(&y, &expected, &format!("{device:?}, numbers around 2^{scale}"));
        }
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row_and_column() {
    let (rows, inputs, outputs) = (18, 65, 33);
    for device in devices() {
        let mut x: Vec<bf16> = Numbers(5).vec(rows * inputs).into_iter().map(bf16::round).collect();
        (x[3 * inputs + 64], x[7 * inputs]) = (bf16::NAN, bf16::INFINITY);
        let mut w = Numbers(6).vec(outputs * inputs);
        w[20 * inputs + 5] = f32::NAN;
        let weight = weight::<bf16>(&device, &w, outputs, inputs);
        let mut y = vec![f32::NAN; rows * outputs];
        linear(&device, View::from(&x[..]), &weight, ViewMut::from(&mut y[..])).unwrap();
        for (row, y) in y.chunks(outputs).enumerate() {
            for (output, y) in y.iter().enumerate() {
                let poisoned = row == 3 || row == 7 || output == 20;
                assert_eq!(y.is_finite(), !poisoned, "{device:?} row {row} output {output}");
            }
        }
    }
}

#[test]
fn the_order_of_summation_stays_close_to_the_exact_sum() {
    let mut numbers = Numbers(3);
    let (x, w) = (numbers.vec(1536), numbers.vec(1536));
    let exact: f64 = x.iter().zip(&w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
    let got = linear_reference(&x, &w, 1536, 1)[0];
    // 48 blocks of chains of 16: about 64 roundings of partial sums below 40.
    assert!((f64::from(got) - exact).abs() < 64.0 * 40.0 * f64::from(f32::EPSILON));
}

#[test]
fn rows_are_read_back_as_written() {
    for device in devices() {
        let rows: Vec<f32> = Numbers(1).vec(70 * 45).into_iter().map(through::<bf16>).collect();
        let weight = weight::<bf16>(&device, &rows, 70, 45);
        let mut row = vec![0.0; 45];
        for at in [0, 9, 10, 31, 32, 69] {
            weight.read_row(at, &mut row);
            assert_eq!(row, &rows[at * 45..][..45]);
        }
    }
}

#[test]
fn the_first_error_of_a_reader_ends_the_filling() {
    for device in devices() {
        let mut weight = Weight::<f32>::zeros(&device, 200, 8, "test").unwrap();
        let read =
            |rows: Range<usize>, _: &mut [f32]| if rows.start >= 64 { Err(rows.start) } else { Ok(()) };
        assert!(weight.fill(&device, read).unwrap_err() >= 64);
    }
}

#[test]
fn a_rank_without_inputs_adds_zero_and_one_without_outputs_nothing() {
    let device = &devices()[0];
    let mut y = [f32::NAN; 6];
    let weight = Weight::<bf16>::zeros(device, 3, 0, "test").unwrap();
    linear(device, View::from(&[][..]), &weight, ViewMut::from(&mut y[..])).unwrap();
    assert_eq!(y, [0.0; 6]);
    let weight = Weight::<bf16>::zeros(device, 0, 3, "test").unwrap();
    linear(device, View::from(&[bf16::ONE; 6][..]), &weight, ViewMut::from(&mut [][..])).unwrap();
}

#[test]
fn wrong_shapes_are_refused_with_numbers() {
    let device = &devices()[0];
    let weight = Weight::<f32>::zeros(device, 8, 4, "test").unwrap();
    let mut y = [0.0; 8];
    let error = linear(device, View::from(&[0.0; 5][..]), &weight, ViewMut::from(&mut y[..])).unwrap_err();
    assert_eq!(error.to_string(), "linear: x holds 5 elements, 4 expected");
    assert!(linear(device, View::from(&[0.0; 4][..]), &weight, ViewMut::from(&mut [0.0; 7][..])).is_err());
    assert!(Weight::<f32>::zeros(device, usize::MAX / 2, 64, "test").is_err());
}
