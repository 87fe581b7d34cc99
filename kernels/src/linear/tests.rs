use half::bf16;

use super::*;
use crate::{
    element::through,
    testing::{Numbers, assert_same_bits, devices, weight},
};

/// Ragged and round shapes: (rows, inputs, outputs).
const SHAPES: [(usize, usize, usize); 9] = [
    (1, 32, 32),
    (1, 1, 1),
    (2, 33, 31),
    (3, 64, 48),
    (5, 576, 40),
    (8, 100, 65),
    (1, 1536, 96),
    (17, 520, 33),
    (4, 1025, 32),
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
