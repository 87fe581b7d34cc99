use consort_emulator::Memory;
use half::bf16;

use super::{Norm, kernel_for, rms_norm, rms_norm_of_rows};
use crate::{
    cuda::row_stride,
    element::through,
    rms_norm::rms_norm_reference,
    testing::{
        Numbers, assert_same_bits,
        emulated::{Emulated, device_slice, device_slice_mut},
    },
};

const EPS: f32 = 1e-5;

/// Rows of numbers, a delta, weights of which some are negative.
struct Given {
    width: usize,
    residual: Vec<f32>,
    delta: Option<Vec<f32>>,
    weight: Vec<f32>,
}

impl Given {
    fn new(rows: usize, width: usize, with_delta: bool) -> Given {
        let mut numbers = Numbers(11 + width as u64);
        let residual = numbers.vec(rows * width);
        let delta = with_delta.then(|| numbers.vec(rows * width));
        Given { width, residual, delta, weight: numbers.vec(width).iter().map(|x| x * 3.0).collect() }
    }

    /// Row `row` after the sum.
    fn sums(&self, row: usize) -> Vec<f32> {
        let range = row * self.width..(row + 1) * self.width;
        let mut sums = self.residual[range.clone()].to_vec();
        let delta = self.delta.as_ref().map(|delta| &delta[range]);
        rms_norm_reference::<f32>(&mut sums, delta, &self.weight, EPS);
        sums
    }

    /// Holds a row of `out` against the contract in f64. The sum of squares is rounded once per term that a thread or
    /// a tree adds (16384 / 1024 + 10 in a row at most, each half of 2^-23), halved by the root; the root
    /// itself, its argument and the product add 4 ulp: below 2^-18. So the normal before its first rounding lies
    /// within that of the true one, and what comes after is exact: `got` lies between what the two ends become.
    fn assert_row(&self, row: usize, got: &[bf16], context: &str) {
        let sums = self.sums(row);
        let mean = sums.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / sums.len() as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        for (column, (x, weight)) in sums.iter().zip(&self.weight).enumerate() {
            let end = |error: f64| {
                let normal = through::<bf16>((f64::from(*x) * scale * (1.0 + error)) as f32);
                through::<bf16>(normal * weight)
            };
            let (a, b, got) = (end(-1.0 / 262_144.0), end(1.0 / 262_144.0), f32::from(got[column]));
            assert!(a.min(b) <= got && got <= a.max(b), "{context}, column {column}: {got}, not {a} .. {b}");
        }
        assert!(got[self.width..].iter().all(|x| x.to_bits() == 0), "{context}: padding is zero");
    }

    fn run(&self, device: &Emulated) -> (Vec<f32>, Vec<bf16>) {
        let mut residual = Memory::from_slice(&self.residual);
        let delta = self.delta.as_ref().map(|delta| Memory::from_slice(delta));
        let weight = Memory::from_slice(&self.weight);
        let norm = Norm { weight: device_slice(&weight), eps: EPS };
        let rows = self.residual.len() / self.width;
        let mut out = Memory::poisoned(rows * row_stride(self.width));
        let (x, y) = (device_slice_mut(&mut residual), device_slice_mut(&mut out));
        rms_norm(device, x, delta.as_ref().map(device_slice), norm, y).unwrap();
        (residual.to_vec(), out.to_vec())
    }
}

fn assert_every_row(rows: usize, width: usize, ways: usize) {
    for with_delta in [false, true] {
        let given = Given::new(rows, width, with_delta);
        for device in Emulated::every_way().take(ways) {
            let context = format!("{rows} x {width}, delta {with_delta}, {:?}", device.settings);
            let (residual, out) = given.run(&device);
            for row in 0..rows {
                assert_same_bits(&residual[row * width..][..width], &given.sums(row), &context);
                given.assert_row(row, &out[row * row_stride(width)..][..row_stride(width)], &context);
            }
        }
    }
}

#[test]
fn emulator_rows_of_every_kernel_match_the_contract() {
    for (rows, width) in [(1, 1), (0, 16), (3, 16), (2, 101), (4, 576), (2, 2052), (1, 5120)] {
        assert_every_row(rows, width, 12);
    }
}

#[test]
fn emulator_the_widest_rows_of_each_kernel_match_the_contract() {
    for width in [2048, 4096, 16384, 16388, 20480, 4098, 9001] {
        assert_every_row(1, width, 4);
    }
}

#[test]
fn every_kernel_holds_the_widths_that_it_is_chosen_for() {
    for width in 1..40_000 {
        let (kernel, threads) = kernel_for(width);
        assert!(threads % 32 == 0 && (32..=1024).contains(&threads), "{width}");
        let vectors = match kernel {
            "rms_norm_1" => 1,
            "rms_norm_2" => 2,
            "rms_norm_4" => 4,
            _ => continue,
        };
        assert!(width % 4 == 0 && vectors * threads * 4 >= width, "{width}: {kernel}, {threads} threads");
        assert!(vectors == 4 || threads <= 512, "{width}: {kernel} has at most 512 threads");
    }
    assert_eq!(kernel_for(8192), ("rms_norm_4", 512));
}

#[test]
fn emulator_a_rows_bits_do_not_depend_on_its_company() {
    let many = Given::new(5, 1028, true);
    let (_, together) = many.run(&Emulated::every_way().next().unwrap());
    for row in 0..5 {
        let range = row * 1028..(row + 1) * 1028;
        let one = Given {
            residual: many.residual[range.clone()].to_vec(),
            delta: many.delta.as_ref().map(|delta| delta[range].to_vec()),
            weight: many.weight.clone(),
            width: 1028,
        };
        let (_, alone) = one.run(&Emulated::every_way().last().unwrap());
        assert_eq!(together[row * 1032..][..1032], alone[..], "row {row}");
    }
}

#[test]
fn emulator_chosen_rows_are_normalised_in_place_of_a_gather_and_change_nothing() {
    let rows_of = [4u32, 0, 0, 5, 2, u32::MAX];
    for width in [64, 100, 101, 2112, 4200, 16388] {
        for with_delta in [false, true] {
            let given = Given::new(5, width, with_delta);
            for device in Emulated::every_way().step_by(if width > 4000 { 5 } else { 1 }) {
                let context = format!("{width}, {:?}", device.settings);
                let (residual, weight) =
                    (Memory::from_slice(&given.residual), Memory::from_slice(&given.weight));
                let delta = given.delta.as_ref().map(|delta| Memory::from_slice(delta));
                let rows = Memory::from_slice(&rows_of);
                let mut out = Memory::poisoned(rows_of.len() * row_stride(width));
                let norm = Norm { weight: device_slice(&weight), eps: EPS };
                rms_norm_of_rows(
                    &device,
                    device_slice(&residual),
                    delta.as_ref().map(device_slice),
                    device_slice(&rows),
                    norm,
                    device_slice_mut(&mut out),
                )
                .unwrap();
                let out = out.to_vec();
                for (at, &row) in rows_of.iter().enumerate() {
                    let out = &out[at * row_stride(width)..][..row_stride(width)];
                    match row {
                        ..5 => given.assert_row(row as usize, out, &context),
                        _ => assert!(out.iter().all(|x| x.to_bits() == 0), "{context}: no such row"),
                    }
                }
                assert_same_bits(&residual.to_vec(), &given.residual, "the residual");
            }
        }
    }
}

#[test]
fn lengths_that_do_not_agree_are_refused_before_a_launch() {
    let device = Emulated::every_way().next().unwrap();
    let weight = Memory::from_slice(&[1.0f32; 12]);
    let norm = Norm { weight: device_slice(&weight), eps: EPS };
    let mut residual = Memory::from_slice(&[1.0f32; 24]);
    let mut out = Memory::<bf16>::poisoned(32);
    let short = Memory::from_slice(&[1.0f32; 23]);
    let (x, y) = (device_slice_mut(&mut residual), device_slice_mut(&mut out));
    let refused = rms_norm(&device, x, Some(device_slice(&short)), norm, y);
    assert_eq!(refused.unwrap_err().to_string(), "rms_norm: delta holds 23 elements, 24 expected");
    let (x, y) = (device_slice_mut(&mut residual), device_slice_mut(&mut out));
    assert!(rms_norm(&device, x, None, norm, y).is_ok());
    let mut dense = Memory::<bf16>::poisoned(24);
    let (x, y) = (device_slice_mut(&mut residual), device_slice_mut(&mut dense));
    assert!(rms_norm(&device, x, None, norm, y).is_err(), "rows are a stride apart");
}

#[test]
fn rows_that_do_not_start_on_16_bytes_are_refused_before_a_device_would_fault() {
    let device = Emulated::every_way().next().unwrap();
    let (mut residual, weight) = (Memory::<f32>::poisoned(16), Memory::<f32>::poisoned(9));
    let mut out = Memory::<bf16>::poisoned(16);
    let mut refuse = |from: usize, weight_from: usize| {
        let norm = Norm { weight: device_slice(&weight).range(weight_from..weight_from + 8), eps: 1e-5 };
        let mut residual = device_slice_mut(&mut residual);
        rms_norm(&device, residual.range(from..from + 8), None, norm, device_slice_mut(&mut out).range(0..8))
            .unwrap_err()
            .to_string()
    };
    assert!(refuse(1, 0).contains("residual at 0x") && refuse(0, 1).contains("weight at 0x"));
}
