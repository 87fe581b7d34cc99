use super::*;
use crate::Element;

/// Inputs that reach every branch: signs, halves, ends of the range, subnormal results.
fn inputs() -> Vec<f32> {
    let mut inputs: Vec<f32> = (-1300..1300).map(|i| i as f32 * 0.1).collect();
    inputs.extend([f32::NEG_INFINITY, -1e30, -126.0, -125.5, -0.0, 0.0, 0.5, -0.5, 1.5, 127.0, 126.49]);
    inputs.resize(inputs.len().next_multiple_of(16), 0.0);
    inputs
}

#[inline(always)]
unsafe fn exp2_all<V: Lanes>(input: &[f32], output: &mut [f32]) {
    for (from, to) in input.chunks_exact(16).zip(output.chunks_exact_mut(16)) {
        unsafe { exp2(V::load(from.as_ptr())).store(to.as_mut_ptr()) }
    }
}

fn exp2_on(isa: Isa, input: &[f32]) -> Vec<f32> {
    let mut output = vec![0.0; input.len()];
    let out = output.as_mut_slice();
    dispatch!(isa, exp2_all::<>(input: &[f32], out: &mut [f32]) []);
    output
}

#[test]
fn exp2_is_within_a_few_ulp_of_the_exact_value() {
    let input = inputs();
    for (x, y) in input.iter().zip(exp2_on(Isa::Portable, &input)) {
        let exact = f64::from(x.clamp(-126.0, 127.0)).exp2();
        let error = ((f64::from(y) - exact) / exact).abs();
        assert!(
            error < 1.5 * f64::from(f32::EPSILON),
            "2^{x} = {y}, exact {exact}, relative error {error:e}"
        );
    }
}

#[test]
fn exp2_for_bf16_is_near_and_never_too_small_for_it() {
    #[inline(always)]
    unsafe fn all<V: Lanes>(input: &[f32], output: &mut [f32]) {
        for (from, to) in input.chunks_exact(16).zip(output.chunks_exact_mut(16)) {
            unsafe { bf16::exp2_lanes(V::load(from.as_ptr())).store(to.as_mut_ptr()) }
        }
    }
    let input: Vec<f32> = inputs().into_iter().map(|x| x.min(127.0)).collect();
    let mut first = Vec::new();
    for isa in Isa::available() {
        let mut output = vec![0.0; input.len()];
        let (from, out) = (&input[..], output.as_mut_slice());
        dispatch!(isa, all::<>(from: &[f32], out: &mut [f32]) []);
        for (x, y) in input.iter().zip(&output) {
            let exact = f64::from(x.max(-50.0)).exp2();
            assert!(
                ((f64::from(*y) - exact) / exact).abs() < 3e-6 && *y >= BF16_SMALLEST.widen(),
                "2^{x} = {y}"
            );
        }
        first = if first.is_empty() { output.clone() } else { first };
        assert!(output.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa}");
    }
}

#[test]
fn exp2_of_whole_numbers_is_exact() {
    let whole: Vec<f32> = (-128..128).map(|x| x as f32).collect();
    for (x, y) in whole.iter().zip(exp2_on(Isa::Portable, &whole)) {
        assert_eq!(y, x.clamp(-126.0, 127.0).exp2(), "2^{x}");
    }
}

#[test]
fn exp2_and_sums_have_the_same_bits_on_every_instruction_set() {
    let input = inputs();
    let expected = exp2_on(Isa::Portable, &input);
    for isa in Isa::available() {
        let got = exp2_on(isa, &input);
        assert!(got.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa}");
    }
}

#[test]
fn bf16_pairs_come_apart_in_order() {
    #[inline(always)]
    unsafe fn split<V: Lanes>(pairs: &[bf16; 32], out: &mut [[f32; 16]; 2]) {
        unsafe {
            let (first, second) = V::load_pairs_bf16(pairs.as_ptr());
            *out = [first.to_array(), second.to_array()];
        }
    }
    let pairs: [bf16; 32] = std::array::from_fn(|i| bf16::from_f32(i as f32 - 7.0));
    for isa in Isa::available() {
        let mut out = [[0.0; 16]; 2];
        let (from, to) = (&pairs, &mut out);
        dispatch!(isa, split::<>(from: &[bf16; 32], to: &mut [[f32; 16]; 2]) []);
        let [first, second] = out;
        assert_eq!(first, std::array::from_fn(|lane| (2 * lane) as f32 - 7.0), "{isa}");
        assert_eq!(second, std::array::from_fn(|lane| (2 * lane + 1) as f32 - 7.0), "{isa}");
    }
}

#[test]
fn lanes_round_to_bf16_as_elements_do() {
    #[inline(always)]
    unsafe fn both<V: Lanes>(input: &[f32], stored: &mut [bf16], through: &mut [f32]) {
        for at in (0..input.len()).step_by(16) {
            unsafe {
                let lanes = V::load(input.as_ptr().add(at));
                lanes.store_bf16(stored.as_mut_ptr().add(at));
                lanes.through_bf16().store(through.as_mut_ptr().add(at));
            }
        }
    }
    // Every sign and exponent, with significands around the ties.
    let tails = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1_7fff, 0x1_8000, 0x1_8001, 0x7f_ffff];
    let mut input: Vec<f32> =
        (0..512).flat_map(|head| tails.map(|tail| f32::from_bits(head << 23 | tail))).collect();
    input.resize(input.len().next_multiple_of(16), 0.0);
    for isa in Isa::available() {
        let mut stored = vec![bf16::ONE; input.len()];
        let mut through = vec![1.0; input.len()];
        let (from, to, wide) = (&input[..], &mut stored[..], &mut through[..]);
        dispatch!(isa, both::<>(from: &[f32], to: &mut [bf16], wide: &mut [f32]) []);
        for ((x, stored), through) in input.iter().zip(stored).zip(through) {
            let expected = bf16::round(*x);
            assert_eq!(stored.to_bits(), expected.to_bits(), "{isa} {x:e}");
            assert_eq!(through.to_bits(), expected.widen().to_bits(), "{isa} {x:e}");
        }
    }
}

#[test]
fn weights_round_as_elements_do_where_tiles_are() {
    #[inline(always)]
    unsafe fn stored<V: Lanes>(input: &[f32], to: &mut [bf16]) {
        for at in (0..input.len()).step_by(16) {
            unsafe { V::load(input.as_ptr().add(at)).store_weights_of_tiles(to.as_mut_ptr().add(at)) }
        }
    }
    if !Isa::Amx.is_available() {
        return;
    }
    // Zero and every exponent from -50 on, with significands around the ties.
    let tails =
        [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1_7fff, 0x1_8000, 0x1_8001, 0x7f_7fff, 0x7f_8000, 0x7f_ffff];
    let mut input: Vec<f32> =
        (77..255).flat_map(|head| tails.map(|tail| f32::from_bits(head << 23 | tail))).collect();
    input.push(0.0);
    input.resize(input.len().next_multiple_of(16), 0.0);
    let mut to = vec![bf16::ONE; input.len()];
    let (from, out) = (&input[..], &mut to[..]);
    dispatch!(Isa::Amx, stored::<>(from: &[f32], out: &mut [bf16]) []);
    for (x, stored) in input.iter().zip(to) {
        assert_eq!(stored, bf16::round(*x), "{x:e}");
    }
}
