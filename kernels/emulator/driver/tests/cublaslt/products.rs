//! What is computed: types, transposes, gaps between columns, batches, factors, epilogues.

use consort_software_driver::in_child;
use cudarc::cublaslt::{CudaBlasLT, MatmulConfig};
use half::{bf16, f16};

use crate::{
    harness::{
        At, Compute, Epilogue, LayoutAttribute, Lt, Problem, Status, Type, address, address_mut, own_matmul,
        set_layout,
    },
    matrix::{Matrix, Read, fractions, product, whole},
};

const BF16: Type = Type::CUDA_R_16BF;
const F16: Type = Type::CUDA_R_16F;
const F32: Type = Type::CUDA_R_32F;
const READS: [Read; 2] = [Read::AsItIs, Read::Transposed];

/// What an epilogue does last.
type Activation<'a> = &'a dyn Fn(f64) -> f64;

/// Operands of a product of `m` by `n`, with `gap` elements between the columns of each.
fn operands(
    (m, n, k): (usize, usize, usize),
    (read_a, read_b): (Read, Read),
    gap: usize,
    (input, output): (Type, Type),
) -> (Matrix, Matrix, Matrix) {
    let of = |kind, shape: (usize, usize), value: &dyn Fn(usize, usize, usize) -> f32| {
        Matrix::new(kind, shape, shape.0 + gap, 1, value)
    };
    let a = of(input, read_a.shape(m, k), &whole(1));
    let b = of(input, read_b.shape(k, n), &whole(2));
    (a, b, of(output, (m, n), &|_, _, _| -1.0))
}

/// The product of whole numbers by every algorithm that is proposed, bit for bit.
fn assert_exact(lt: &Lt, shape: (usize, usize, usize), reads: (Read, Read), gap: usize, kinds: (Type, Type)) {
    let (a, b, d) = operands(shape, reads, gap, kinds);
    let wanted = product((&a, reads.0), (&b, reads.1), &d, |_, _, _, sum| sum);
    let problem = Problem::new((&a, reads.0), (&b, reads.1), &d);
    let (on_a, on_b, mut on_d) = (lt.upload(&a), lt.upload(&b), lt.upload(&d));
    let proposals = lt.proposals(&problem, 8).unwrap();
    assert!(proposals.len() >= 2, "{shape:?}: {} proposals", proposals.len());
    for proposal in proposals {
        lt.stream.memcpy_htod(&d.bytes(), &mut on_d).unwrap();
        lt.multiply(&problem, (&on_a, &on_b, &mut on_d), Some(&proposal.algo)).unwrap();
        let found = lt.download(&d, &on_d);
        assert!(found.bits() == wanted.bits(), "{shape:?} {reads:?} {gap} {kinds:?}");
    }
}

#[test]
fn software_driver_bf16_products_of_all_shapes_and_transposes_are_exact() {
    in_child("products::software_driver_bf16_products_of_all_shapes_and_transposes_are_exact", &[], || {
        let lt = Lt::new();
        for shape in
            [(1, 1, 1), (16, 4, 32), (17, 3, 5), (1, 130, 40), (130, 1, 77), (67, 65, 96), (24, 5, 200)]
        {
            for reads in READS.into_iter().flat_map(|a| READS.map(|b| (a, b))) {
                for gap in [0, 3, 8] {
                    assert_exact(&lt, shape, reads, gap, (BF16, F32));
                }
            }
        }
    });
}

#[test]
fn software_driver_all_combinations_of_types_are_exact() {
    in_child("products::software_driver_all_combinations_of_types_are_exact", &[], || {
        let lt = Lt::new();
        // Sums up to 16 * 8 are whole numbers of BF16, too.
        for kinds in [(BF16, F32), (BF16, BF16), (F16, F32), (F16, F16), (F32, F32)] {
            assert_exact(&lt, (40, 24, 8), (Read::Transposed, Read::AsItIs), 8, kinds);
        }
    });
}

#[test]
fn software_driver_numbers_of_16_bits_are_read_and_rounded_as_half_s() {
    in_child("products::software_driver_numbers_of_16_bits_are_read_and_rounded_as_half_s", &[], || {
        let lt = Lt::new();
        for kind in [F16, BF16] {
            let number = |bits: usize| match kind {
                F16 => f16::from_bits(bits as u16).to_f32(),
                _ => bf16::from_bits(bits as u16).to_f32(),
            };
            let rounded = |value: f32| match kind {
                F16 => f16::from_f32(value).to_f32(),
                _ => bf16::from_f32(value).to_f32(),
            };
            // Every number there is, times one.
            let a = Matrix::new(kind, (1 << 16, 1), 1 << 16, 1, |_, row, _| number(row));
            let one = Matrix::new(kind, (1, 1), 8, 1, |_, _, _| 1.0);
            let d = Matrix::new(kind, (1 << 16, 1), 1 << 16, 1, |_, _, _| 0.0);
            let problem = Problem::new((&a, Read::AsItIs), (&one, Read::AsItIs), &d);
            let (on_a, on_one, mut on_d) = (lt.upload(&a), lt.upload(&one), lt.upload(&d));
            for alpha in [1.0f32, 1.001, 0.37, 1.0 / 3.0, 1e-5, 2048.5] {
                let (a, b, d_at) = (address(&on_a), address(&on_one), address_mut(&mut on_d));
                let at = At { alpha, a, b, beta: 0.0, c: 0, d: d_at, algorithm: None, workspace: (0, 0) };
                lt.multiply_at(&problem, at).unwrap();
                let found = lt.download(&d, &on_d);
                for bits in 0..1 << 16 {
                    let (wanted, found) = (rounded(number(bits) * alpha), found.at(0, bits, 0));
                    let same = wanted == found || wanted.is_nan() && found.is_nan();
                    assert!(same, "{kind:?} {bits:#06x} times {alpha}: {found} instead of {wanted}");
                }
            }
        }
    });
}

#[test]
fn software_driver_tf32_leaves_out_the_last_13_bits_and_f32_does_not() {
    in_child("products::software_driver_tf32_leaves_out_the_last_13_bits_and_f32_does_not", &[], || {
        let lt = Lt::new();
        let value = 1.0 + 2f32.powi(-10) + 2f32.powi(-12);
        let a = Matrix::new(F32, (4, 4), 4, 1, |_, row, column| if row == column { value } else { 0.0 });
        let b = Matrix::new(F32, (4, 4), 4, 1, |_, row, column| if row == column { 1.0 } else { 0.0 });
        for (compute, wanted) in [
            (Compute::CUBLAS_COMPUTE_32F, value),
            (Compute::CUBLAS_COMPUTE_32F_PEDANTIC, value),
            (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, 1.0 + 2f32.powi(-10)),
        ] {
            let problem = Problem::new((&a, Read::AsItIs), (&b, Read::AsItIs), &a);
            problem.compute_in(compute);
            let (on_a, on_b, mut on_d) = (lt.upload(&a), lt.upload(&b), lt.upload(&a));
            lt.multiply(&problem, (&on_a, &on_b, &mut on_d), None).unwrap();
            assert_eq!(lt.download(&a, &on_d).at(0, 2, 2), wanted, "{compute:?}");
        }
    });
}

#[test]
fn software_driver_factors_c_bias_and_activations_are_applied_in_order() {
    in_child("products::software_driver_factors_c_bias_and_activations_are_applied_in_order", &[], || {
        let lt = Lt::new();
        let (m, n) = (48, 12);
        let (a, b, _) = operands((m, n, 32), (Read::Transposed, Read::AsItIs), 0, (BF16, F32));
        let c = Matrix::new(F32, (m, n), m + 4, 1, whole(3));
        let bias = Matrix::new(F32, (m, 1), m, 1, |_, row, _| row as f32 / 4.0 - 5.0);
        let on_bias = lt.upload(&bias);
        let relu = |x: f64| x.max(0.0);
        let gelu = |x: f64| 0.5 * x * (1.0 + (0.7978845608 * (x + 0.044715 * x * x * x)).tanh());
        let cases: [(Epilogue, bool, Activation<'_>); 6] = [
            (Epilogue::CUBLASLT_EPILOGUE_DEFAULT, false, &|x| x),
            (Epilogue::CUBLASLT_EPILOGUE_RELU, false, &relu),
            (Epilogue::CUBLASLT_EPILOGUE_GELU, false, &gelu),
            (Epilogue::CUBLASLT_EPILOGUE_BIAS, true, &|x| x),
            (Epilogue::CUBLASLT_EPILOGUE_RELU_BIAS, true, &relu),
            (Epilogue::CUBLASLT_EPILOGUE_GELU_BIAS, true, &gelu),
        ];
        for (epilogue, biased, activation) in cases {
            let problem = Problem::new((&a, Read::Transposed), (&b, Read::AsItIs), &c);
            problem.finish_with(epilogue, biased.then_some(address(&on_bias)));
            let (on_a, on_b, mut on_d) = (lt.upload(&a), lt.upload(&b), lt.upload(&c));
            let d = address_mut(&mut on_d);
            let workspace = (address(&lt.workspace), lt.workspace.len());
            let (a_at, b_at) = (address(&on_a), address(&on_b));
            // In place: the same memory is C and D.
            for proposal in lt.proposals(&problem, 2).unwrap() {
                lt.stream.memcpy_htod(&c.bytes(), &mut on_d).unwrap();
                let algorithm = Some(&proposal.algo);
                let at = At { alpha: 0.5, a: a_at, b: b_at, beta: 2.0, c: d, d, algorithm, workspace };
                lt.multiply_at(&problem, at).unwrap();
                let wanted =
                    product((&a, Read::Transposed), (&b, Read::AsItIs), &c, |_, row, column, sum| {
                        let bias = if biased { f64::from(bias.at(0, row, 0)) } else { 0.0 };
                        activation(0.5 * sum + 2.0 * f64::from(c.at(0, row, column)) + bias)
                    });
                let found = lt.download(&c, &on_d);
                for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                    let (found, wanted) = (found.at(0, row, column), wanted.at(0, row, column));
                    // One rounding each of factor, polynomial and tanh.
                    assert!(
                        (found - wanted).abs() <= wanted.abs() * 1e-6 + 2e-6,
                        "{epilogue:?}: {found} {wanted}"
                    );
                }
            }
        }
    });
}

#[test]
fn software_driver_batches_have_their_strides_and_one_weight_may_serve_all() {
    in_child(
        "products::software_driver_batches_have_their_strides_and_one_weight_may_serve_all",
        &[],
        || {
            let lt = Lt::new();
            let (m, n, k, batches) = (32, 8, 64, 5);
            let a = Matrix::new(BF16, (k, m), k, batches, whole(1));
            let b = Matrix::new(BF16, (k, n), k + 8, batches, whole(2));
            let d = Matrix::new(F32, (m, n), m + 4, batches, |_, _, _| -1.0);
            for shared in [false, true] {
                let problem = Problem::new((&a, Read::Transposed), (&b, Read::AsItIs), &d);
                let mut one = a.clone();
                if shared {
                    set_layout(
                        problem.a,
                        LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                        &0i64,
                    );
                    one = Matrix::new(BF16, (k, m), k, 1, whole(1));
                }
                let wanted = product((&one, Read::Transposed), (&b, Read::AsItIs), &d, |_, _, _, sum| sum);
                let (on_a, on_b, mut on_d) = (lt.upload(&a), lt.upload(&b), lt.upload(&d));
                for proposal in lt.proposals(&problem, 3).unwrap() {
                    lt.multiply(&problem, (&on_a, &on_b, &mut on_d), Some(&proposal.algo)).unwrap();
                    assert!(lt.download(&d, &on_d).bits() == wanted.bits(), "shared: {shared}");
                }
            }
        },
    );
}

#[test]
fn software_driver_cudarc_s_own_matmul_works_and_says_no_to_a_wrong_leading_dimension() {
    in_child(
        "products::software_driver_cudarc_s_own_matmul_works_and_says_no_to_a_wrong_leading_dimension",
        &[],
        || {
            let lt = Lt::new();
            let blas = CudaBlasLT::new(lt.stream.clone()).unwrap();
            // y = x W^T + bias, as rows: [n][k] times [m][k].
            let (m, n, k) = (24usize, 5usize, 40usize);
            let x: Vec<f32> = (0..n * k).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
            let w: Vec<f32> = (0..m * k).map(|i| (i % 23) as f32 / 16.0 - 0.5).collect();
            let bias: Vec<f32> = (0..m).map(|i| i as f32 / 4.0).collect();
            let [on_x, on_w, on_bias] = [&x, &w, &bias].map(|values| lt.stream.clone_htod(values).unwrap());
            let mut on_y = lt.stream.alloc_zeros::<f32>(n * m).unwrap();
            let config = MatmulConfig {
                transa: true,
                transb: false,
                transc: false,
                m: m as u64,
                n: n as u64,
                k: k as u64,
                alpha: 1.0,
                lda: k as i64,
                ldb: k as i64,
                beta: 0.0,
                ldc: m as i64,
                stride_a: None,
                stride_b: None,
                stride_c: None,
                stride_bias: None,
                batch_size: None,
            };
            let run = |config, y: &mut _| own_matmul(&blas, config, (&on_w, &on_x, y), &on_bias);
            run(config, &mut on_y).unwrap();
            let found = lt.stream.clone_dtoh(&on_y).unwrap();
            for (row, output) in (0..n).flat_map(|row| (0..m).map(move |output| (row, output))) {
                let terms = (0..k).map(|i| x[row * k + i] * w[output * k + i]);
                // Multiples of 2^-7 below 2^6, and factors that TF32 has, too: exact.
                let wanted = terms.sum::<f32>() + bias[output];
                assert_eq!(found[row * m + output], wanted, "row {row}, output {output}");
            }
            let refused = run(MatmulConfig { lda: 8, ..config }, &mut on_y);
            assert_eq!(refused.unwrap_err().0, Status::CUBLAS_STATUS_INVALID_VALUE);
        },
    );
}

#[test]
fn software_driver_products_of_fractions_are_as_close_as_f32_sums_can_be() {
    in_child("products::software_driver_products_of_fractions_are_as_close_as_f32_sums_can_be", &[], || {
        let lt = Lt::new();
        let (m, n, k) = (576, 128, 576);
        let a = Matrix::new(BF16, (k, m), k, 1, fractions(1));
        let b = Matrix::new(BF16, (k, n), k, 1, fractions(2));
        let d = Matrix::new(F32, (m, n), m, 1, |_, _, _| 0.0);
        let wanted = product((&a, Read::Transposed), (&b, Read::AsItIs), &d, |_, _, _, sum| sum);
        let problem = Problem::new((&a, Read::Transposed), (&b, Read::AsItIs), &d);
        let (on_a, on_b, mut on_d) = (lt.upload(&a), lt.upload(&b), lt.upload(&d));
        for proposal in lt.proposals(&problem, 8).unwrap() {
            lt.multiply(&problem, (&on_a, &on_b, &mut on_d), Some(&proposal.algo)).unwrap();
            let found = lt.download(&d, &on_d);
            for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                let error = (found.at(0, row, column) - wanted.at(0, row, column)).abs();
                // k additions of terms below 1, each rounded to 2^-24 of a sum that is below 64 by far.
                assert!(error < 576.0 * 64.0 * 2f32.powi(-25), "({row}, {column}): {error}");
            }
        }
    });
}
