use half::bf16;

use super::*;
use crate::{
    element::through,
    swiglu::swiglu_reference,
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
            let wide: Vec<f32> = numbers.vec(rows * inputs).into_iter().map(through::<T>).collect();
            let x = Rows::<T>::of(&device, &wide, inputs).unwrap();
            let w: Vec<f32> = numbers.vec(outputs * inputs).into_iter().map(through::<T>).collect();
            let weight = weight::<T>(&device, &w, outputs, inputs);
            let mut y = vec![f32::NAN; rows * outputs];
            linear(&device, x.view(rows), &weight, ViewMut::from(&mut y[..])).unwrap();
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
        let wide: Vec<f32> =
            scaled(&mut numbers, rows * inputs, scale).into_iter().map(through::<bf16>).collect();
        let w = scaled(&mut numbers, outputs * inputs, scale);
        let rounded: Vec<f32> = w.iter().map(|w| through::<bf16>(*w)).collect();
        let expected = linear_reference(&wide, &rounded, inputs, outputs);
        assert!(expected.iter().all(|y| *y == 0.0 || y.is_normal()));
        for device in devices() {
            let weight = weight::<bf16>(&device, &w, outputs, inputs);
            let x = Rows::<bf16>::of(&device, &wide, inputs).unwrap();
            let mut y = vec![f32::NAN; rows * outputs];
            linear(&device, x.view(rows), &weight, ViewMut::from(&mut y[..])).unwrap();
            assert_same_bits(&y, &expected, &format!("{device:?}, numbers around 2^{scale}"));
        }
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row_and_column() {
    let (rows, inputs, outputs) = (18, 65, 33);
    for device in devices() {
        let mut x = Numbers(5).vec(rows * inputs);
        (x[3 * inputs + 64], x[7 * inputs]) = (f32::NAN, f32::INFINITY);
        let x = Rows::<bf16>::of(&device, &x, inputs).unwrap();
        let mut w = Numbers(6).vec(outputs * inputs);
        w[20 * inputs + 5] = f32::NAN;
        let weight = weight::<bf16>(&device, &w, outputs, inputs);
        let mut y = vec![f32::NAN; rows * outputs];
        linear(&device, x.view(rows), &weight, ViewMut::from(&mut y[..])).unwrap();
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
    let nothing = Rows::<bf16>::zeros(device, 2, 0, "test").unwrap();
    linear(device, nothing.view(2), &weight, ViewMut::from(&mut y[..])).unwrap();
    assert_eq!(y, [0.0; 6]);
    let mut y = [1.0; 6];
    linear_add(device, nothing.view(2), &weight, ViewMut::from(&mut y[..])).unwrap();
    assert_eq!(y, [1.0; 6]);
    let weight = Weight::<bf16>::zeros(device, 0, 3, "test").unwrap();
    let x = Rows::<bf16>::of(device, &[1.0; 6], 3).unwrap();
    linear(device, x.view(2), &weight, ViewMut::from(&mut [][..])).unwrap();
    let gates = Weight::<bf16>::paired(device, 0, 3, "test").unwrap();
    let mut out = Rows::<bf16>::zeros(device, 2, 0, "test").unwrap();
    linear_swiglu(device, x.view(2), &gates, out.view_mut(2)).unwrap();
}

#[test]
fn wrong_shapes_are_refused_with_numbers() {
    let device = &devices()[0];
    let weight = Weight::<f32>::zeros(device, 8, 4, "test").unwrap();
    let x = |inputs: usize| Rows::<f32>::of(device, &vec![0.0; inputs], inputs).unwrap();
    let mut y = [0.0; 8];
    let error = linear(device, x(5).view(1), &weight, ViewMut::from(&mut y[..])).unwrap_err();
    assert_eq!(error.to_string(), "linear: columns of x holds 5 elements, 4 expected");
    assert!(linear(device, x(4).view(1), &weight, ViewMut::from(&mut [0.0; 7][..])).is_err());
    assert!(linear_add(device, x(4).view(1), &weight, ViewMut::from(&mut [0.0; 7][..])).is_err());
    assert!(Weight::<f32>::zeros(device, usize::MAX / 2, 64, "test").is_err());
    assert!(Weight::<f32>::paired(device, usize::MAX / 2, 64, "test").is_err());
    let error = linear_swiglu(device, x(4).view(1), &weight, x(4).view_mut(1)).unwrap_err();
    assert!(error.to_string().contains("a matrix that is not paired has no gates"), "{error}");
    let gates = Weight::<f32>::paired(device, 8, 4, "test").unwrap();
    assert!(linear_swiglu(device, x(4).view(1), &gates, x(7).view_mut(1)).is_err());
}

fn sums_are_added_to_what_is_there<T: Kernels>() {
    for device in devices() {
        for (rows, inputs, outputs) in SHAPES {
            let mut numbers = Numbers(13);
            let x = Rows::<T>::of(&device, &numbers.vec(rows * inputs), inputs).unwrap();
            let weight = weight::<T>(&device, &numbers.vec(outputs * inputs), outputs, inputs);
            let mut added = numbers.vec(rows * outputs);
            let mut y = vec![f32::NAN; rows * outputs];
            linear(&device, x.view(rows), &weight, ViewMut::from(&mut y[..])).unwrap();
            let expected: Vec<f32> = y.iter().zip(&added).map(|(y, there)| there + y).collect();
            linear_add(&device, x.view(rows), &weight, ViewMut::from(&mut added[..])).unwrap();
            assert_same_bits(&added, &expected, &format!("{device:?} {rows}x{inputs}x{outputs}"));
        }
    }
}

#[test]
fn what_is_added_is_the_sum_and_not_its_parts() {
    sums_are_added_to_what_is_there::<f32>();
    sums_are_added_to_what_is_there::<bf16>();
}

/// Two matrices as one.
fn paired<T: Kernels>(device: &Device, gate: &[f32], up: &[f32], inputs: usize) -> Weight<T> {
    let width = gate.len() / inputs;
    let mut weight = Weight::paired(device, width, inputs, "test").unwrap();
    let both = [gate, up].concat();
    let read = |rows: Range<usize>, values: &mut [f32]| -> Result<(), KernelError> {
        values.copy_from_slice(&both[rows.start * inputs..rows.end * inputs]);
        Ok(())
    };
    weight.fill(device, read).unwrap();
    weight
}

fn gates_match_the_reference<T: Kernels>(relative: f32) {
    // In BF16, values below 2^-50 are zero.
    let smallest = if T::DTYPE == crate::DType::BF16 { 1e-15 } else { 1e-30 };
    for (rows, inputs, width) in
        [(1, 1, 1), (2, 40, 16), (3, 33, 100), (1, 64, 1536), (37, 96, 47), (70, 32, 40)]
    {
        let mut first: Option<Vec<f32>> = None;
        for device in devices() {
            let mut numbers = Numbers(4);
            let x = Rows::<T>::of(&device, &numbers.vec(rows * inputs), inputs).unwrap();
            let [gate, up] =
                [(); 2].map(|()| numbers.vec(width * inputs).iter().map(|x| x * 20.0).collect::<Vec<f32>>());
            let sums = |w: &[f32]| {
                let mut y = vec![f32::NAN; rows * width];
                let weight = weight::<T>(&device, w, width, inputs);
                linear(&device, x.view(rows), &weight, ViewMut::from(&mut y[..])).unwrap();
                y
            };
            let expected = swiglu_reference(&sums(&gate), &sums(&up));
            let mut out = Rows::<T>::of(&device, &vec![f32::NAN; rows * width], width).unwrap();
            let pair = paired::<T>(&device, &gate, &up, inputs);
            linear_swiglu(&device, x.view(rows), &pair, out.view_mut(rows)).unwrap();
            let out = out.view(rows).to_vec();
            for (a, b) in out.iter().zip(&expected) {
                assert!(
                    (a - b).abs() <= relative * b.abs() + smallest,
                    "{device:?} {rows}x{inputs}x{width}: {a} {b}"
                );
            }
            assert_same_bits(first.get_or_insert(out.clone()), &out, "the same bits everywhere");
        }
    }
}

#[test]
fn gates_of_every_width_match_the_reference_and_are_the_same_bits_everywhere() {
    // e^-x carries the rounding of x·log2(e): relative |x| ulp, here below 100; in BF16 the output's own 2^-8 besides.
    gates_match_the_reference::<f32>(120.0 * f32::EPSILON);
    gates_match_the_reference::<bf16>(1.0 / 256.0 + 120.0 * f32::EPSILON);
}

#[test]
fn gates_may_be_extreme() {
    for device in devices() {
        let x = Rows::<f32>::of(&device, &[1.0], 1).unwrap();
        // The exponential ends at 2^127, so that the gate of -1e30 lets 6e-9 through.
        let gate = [-200.0, 200.0, -88.0, 0.0, -1e30, 1e30];
        let pair = paired::<f32>(&device, &gate, &[1.0; 6], 1);
        let mut out = Rows::<f32>::zeros(&device, 1, 6, "out").unwrap();
        linear_swiglu(&device, x.view(1), &pair, out.view_mut(1)).unwrap();
        for (got, expected) in out.view(1).to_vec().iter().zip(swiglu_reference(&gate, &[1.0; 6])) {
            assert!((got - expected).abs() <= 1e-5 * expected.abs() + 1e-8, "{got} {expected}");
        }
    }
}

#[test]
fn rows_keep_their_places_whatever_their_number() {
    let device = &devices()[0];
    for (rows, inputs) in [(1, 1), (5, 32), (31, 33), (32, 64), (33, 70), (97, 96)] {
        let values: Vec<f32> = Numbers(2).vec(rows * inputs);
        let all = Rows::<f32>::of(device, &values, inputs).unwrap();
        assert_eq!(all.view(rows).to_vec(), values);
        let mut some = Rows::<f32>::zeros(device, rows, inputs, "test").unwrap();
        for range in [0..1, 0..rows, rows / 2..rows, rows - 1..rows] {
            some.copy_rows(all.view(rows), range.clone());
            let expected = &values[range.start * inputs..range.end * inputs];
            assert_eq!(some.view(range.len()).to_vec(), expected);
        }
    }
}
