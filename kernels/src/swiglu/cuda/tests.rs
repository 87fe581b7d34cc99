use consort_emulator::Memory;
use half::bf16;

use super::swiglu;
use crate::{
    cuda::row_stride,
    swiglu::swiglu_reference,
    testing::{
        Numbers,
        emulated::{Emulated, device_slice, device_slice_mut},
    },
};

#[test]
fn emulator_every_width_and_extreme_gate_matches_the_reference() {
    // Rounding to BF16 (half of 2^-7 at most), an approximate exponential (2 ulp, and its argument's rounding enlarged
    // by up to 20) and division (2 ulp): 24 ulp of f32, doubled.
    let relative = 1.0 / 256.0 + 48.0 * f32::EPSILON;
    for (rows, width) in [(1, 1), (2, 16), (3, 101), (1, 1536), (0, 8)] {
        let mut values: Vec<f32> = Numbers(4).vec(2 * rows * width).iter().map(|x| x * 20.0).collect();
        values.iter_mut().take(1).for_each(|gate| *gate = -200.0);
        let gate_up = Memory::from_slice(&values);
        for device in Emulated::every_way() {
            let mut out = Memory::<bf16>::poisoned(rows * row_stride(width));
            swiglu(&device, device_slice(&gate_up), width, device_slice_mut(&mut out)).unwrap();
            let out = out.to_vec();
            for row in 0..rows {
                let (gate, up) = values[2 * row * width..][..2 * width].split_at(width);
                let out = &out[row * row_stride(width)..][..row_stride(width)];
                assert!(out[width..].iter().all(|x| x.to_bits() == 0), "padding is zero");
                for (at, expected) in swiglu_reference(gate, up).into_iter().enumerate() {
                    let got = f32::from(out[at]);
                    assert!(
                        (got - expected).abs() <= relative * expected.abs() + 1e-30,
                        "{rows} x {width}: {got}, expected {expected}, {:?}",
                        device.settings
                    );
                }
            }
        }
    }
}
