use super::*;

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
        // 1.2 ulp of a 24-bit significand.
        assert!(
            error < 1.2 * f64::from(f32::EPSILON),
            "2^{x} = {y}, exact {exact}, relative error {error:e}"
        );
    }
}

#[test]
fn exp2_and_sums_have_the_same_bits_on_every_instruction_set() {
    let input = inputs();
    let expected = exp2_on(Isa::Portable, &input);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
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
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let mut out = [[0.0; 16]; 2];
        let (from, to) = (&pairs, &mut out);
        dispatch!(isa, split::<>(from: &[bf16; 32], to: &mut [[f32; 16]; 2]) []);
        let [first, second] = out;
        assert_eq!(first, std::array::from_fn(|lane| (2 * lane) as f32 - 7.0), "{isa}");
        assert_eq!(second, std::array::from_fn(|lane| (2 * lane + 1) as f32 - 7.0), "{isa}");
    }
}
