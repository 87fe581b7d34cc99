//! What is refused, and with which status.

use consort_software_driver::in_child;
use cudarc::{
    cublaslt::sys::cublasLtMatmulDescAttributes_t as Attribute,
    driver::{CudaContext, CudaSlice},
};

use crate::{
    harness::{
        Algorithm, At, Compute, Config, Epilogue, LayoutAttribute, Lt, Preference, Problem, Status, Type,
        address, configure, initialised, set_layout,
    },
    matrix::{Matrix, Read, whole},
};

const INVALID: Result<(), Status> = Err(Status::CUBLAS_STATUS_INVALID_VALUE);
const UNSUPPORTED: Result<(), Status> = Err(Status::CUBLAS_STATUS_NOT_SUPPORTED);
const READS: (Read, Read) = (Read::Transposed, Read::AsItIs);
const M: usize = 32;
const N: usize = 4;
const K: usize = 64;

/// A problem that is in order, its memory, and a call that would work.
struct Good {
    lt: Lt,
    a: Matrix,
    b: Matrix,
    d: Matrix,
    memory: [CudaSlice<u8>; 3],
}

impl Good {
    fn new() -> Good {
        let lt = Lt::new();
        let a = Matrix::new(Type::CUDA_R_16BF, (K, M), K, 1, whole(1));
        let b = Matrix::new(Type::CUDA_R_16BF, (K, N), K, 1, whole(2));
        let d = Matrix::new(Type::CUDA_R_32F, (M, N), M, 1, |_, _, _| 0.0);
        let memory = [&a, &b, &d].map(|matrix| lt.upload(matrix));
        Good { lt, a, b, d, memory }
    }

    fn problem(&self) -> Problem {
        Problem::new((&self.a, READS.0), (&self.b, READS.1), &self.d)
    }

    fn at<'a>(&self, algorithm: Option<&'a Algorithm>) -> At<'a> {
        let [a, b, d] = [0, 1, 2].map(|index: usize| address(&self.memory[index]));
        let workspace = (address(&self.lt.workspace), self.lt.workspace.len());
        At { alpha: 1.0, a, b, beta: 0.0, c: 0, d, algorithm, workspace }
    }

    fn first(&self, problem: &Problem) -> Algorithm {
        self.lt.proposals(problem, 1).expect("a problem in order")[0].algo
    }

    /// What a proposal, and a call with the algorithm of the good problem, say to `change`.
    fn changed(&self, change: impl Fn(&Problem)) -> [Result<(), Status>; 2] {
        let problem = self.problem();
        let algorithm = self.first(&problem);
        change(&problem);
        [self.lt.proposals(&problem, 1).map(drop), self.lt.multiply_at(&problem, self.at(Some(&algorithm)))]
    }
}

#[test]
fn software_driver_descriptors_that_contradict_each_other_are_invalid() {
    in_child("refusals::software_driver_descriptors_that_contradict_each_other_are_invalid", &[], || {
        use LayoutAttribute as L;
        let good = Good::new();
        assert_eq!(good.changed(|_| ()), [Ok(()), Ok(())]);
        assert_eq!(
            good.changed(|p| set_layout(p.a, L::CUBLASLT_MATRIX_LAYOUT_LD, &(K as i64 - 1))),
            [INVALID; 2]
        );
        assert_eq!(good.changed(|p| set_layout(p.b, L::CUBLASLT_MATRIX_LAYOUT_LD, &-64i64)), [INVALID; 2]);
        assert_eq!(good.changed(|p| set_layout(p.b, L::CUBLASLT_MATRIX_LAYOUT_ROWS, &63u64)), [INVALID; 2]);
        assert_eq!(good.changed(|p| set_layout(p.b, L::CUBLASLT_MATRIX_LAYOUT_COLS, &0u64)), [INVALID; 2]);
        assert_eq!(good.changed(|p| set_layout(p.d, L::CUBLASLT_MATRIX_LAYOUT_ROWS, &31u64)), [INVALID; 2]);
        assert_eq!(
            good.changed(|p| set_layout(p.a, L::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &2i32)),
            [INVALID; 2]
        );
        assert_eq!(
            good.changed(|p| set_layout(p.a, L::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &0i32)),
            [INVALID; 2]
        );
        // Beyond any memory, and beyond 64 bits.
        for leading in [1i64 << 45, i64::MAX] {
            assert_eq!(
                good.changed(|p| set_layout(p.a, L::CUBLASLT_MATRIX_LAYOUT_LD, &leading)),
                [INVALID; 2]
            );
        }
        // Batches of D one over the other.
        let overlapping = |p: &Problem| {
            for layout in [p.a, p.b, p.d] {
                set_layout(layout, L::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &2i32);
            }
            set_layout(p.d, L::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &((M * N) as i64 - 1));
        };
        assert_eq!(good.changed(overlapping), [INVALID; 2]);
        assert_eq!(good.changed(|p| p.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &7i32)), [INVALID; 2]);
    });
}

#[test]
fn software_driver_what_is_not_done_is_not_guessed() {
    in_child("refusals::software_driver_what_is_not_done_is_not_guessed", &[], || {
        use LayoutAttribute as L;
        let good = Good::new();
        assert_eq!(
            good.changed(|p| set_layout(p.a, L::CUBLASLT_MATRIX_LAYOUT_ORDER, &1i32)),
            [UNSUPPORTED; 2]
        );
        assert_eq!(
            good.changed(|p| set_layout(p.a, L::CUBLASLT_MATRIX_LAYOUT_BATCH_MODE, &1u32)),
            [UNSUPPORTED; 2]
        );
        // 64-bit, 8-bit and mixed types; FP16 results of BF16.
        for (layout, kind) in [(0, 1u32), (0, 28), (0, 2), (2, 2)] {
            let change =
                |p: &Problem| set_layout([p.a, p.b, p.d][layout], L::CUBLASLT_MATRIX_LAYOUT_TYPE, &kind);
            assert_eq!(good.changed(change), [UNSUPPORTED; 2], "{layout} {kind}");
        }
        assert_eq!(good.changed(|p| p.compute_in(Compute::CUBLAS_COMPUTE_16F)), [UNSUPPORTED; 2]);
        assert_eq!(good.changed(|p| p.compute_in(Compute::CUBLAS_COMPUTE_32F_FAST_TF32)), [UNSUPPORTED; 2]);
        for (attribute, value) in [
            (Attribute::CUBLASLT_MATMUL_DESC_POINTER_MODE, 1i32),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSC, 1),
            (Attribute::CUBLASLT_MATMUL_DESC_FILL_MODE, 0),
        ] {
            assert_eq!(good.changed(|p| p.set(attribute, &value)), [UNSUPPORTED; 2], "{attribute:?}");
        }
        for epilogue in [Epilogue::CUBLASLT_EPILOGUE_GELU_AUX, Epilogue::CUBLASLT_EPILOGUE_BGRADA] {
            assert_eq!(good.changed(|p| p.finish_with(epilogue, None)), [UNSUPPORTED; 2]);
        }
        assert_eq!(
            good.changed(|p| p.prefer(Preference::CUBLASLT_MATMUL_PREF_SEARCH_MODE, &1u32))[0],
            UNSUPPORTED
        );
    });
}

#[test]
fn software_driver_operands_must_lie_as_the_algorithm_wants_them() {
    in_child("refusals::software_driver_operands_must_lie_as_the_algorithm_wants_them", &[], || {
        let good = Good::new();
        let problem = good.problem();
        let algorithm = good.first(&problem);
        let at = good.at(Some(&algorithm));
        for (name, wrong) in [
            ("A by 2 bytes", At { a: at.a + 2, ..at }),
            ("B by 8 bytes", At { b: at.b + 8, ..at }),
            ("D by 4 bytes", At { d: at.d + 4, ..at }),
            ("A null", At { a: 0, ..at }),
            ("D null", At { d: 0, ..at }),
            ("C null, but wanted", At { beta: 1.0, ..at }),
        ] {
            assert_eq!(good.lt.multiply_at(&problem, wrong), INVALID, "{name}");
        }
        // The algorithm for any address still wants whole elements. One row less, so that it stays within A.
        let simple = initialised(&good.lt, 0).unwrap();
        let narrow = Matrix::new(Type::CUDA_R_16BF, (K, M - 1), K, 1, whole(1));
        let d = Matrix::new(Type::CUDA_R_32F, (M - 1, N), M, 1, |_, _, _| 0.0);
        let problem = Problem::new((&narrow, READS.0), (&good.b, READS.1), &d);
        let at = good.at(Some(&simple));
        assert_eq!(good.lt.multiply_at(&problem, At { a: at.a + 2, ..at }), Ok(()));
        assert_eq!(good.lt.multiply_at(&problem, At { a: at.a + 1, ..at }), INVALID);
        // Columns that are not aligned fit no algorithm that wants alignment, and it is not proposed.
        let odd = Matrix::new(Type::CUDA_R_16BF, (K, M), K + 1, 1, whole(1));
        let problem = Problem::new((&odd, READS.0), (&good.b, READS.1), &good.d);
        assert_eq!(good.lt.check(&problem, &algorithm).map(drop), UNSUPPORTED);
        assert_eq!(good.lt.check(&problem, &good.first(&problem)), Ok(0));
    });
}

#[test]
fn software_driver_a_bias_must_be_there_and_aligned() {
    in_child("refusals::software_driver_a_bias_must_be_there_and_aligned", &[], || {
        let good = Good::new();
        let problem = good.problem();
        let bias = good.lt.upload(&Matrix::new(Type::CUDA_R_32F, (M + 1, 1), M + 1, 1, |_, _, _| 1.0));
        problem.finish_with(Epilogue::CUBLASLT_EPILOGUE_BIAS, None);
        let algorithm = good.first(&problem);
        assert_eq!(good.lt.multiply_at(&problem, good.at(Some(&algorithm))), INVALID);
        for (offset, wanted) in [(0, Ok(())), (4, INVALID)] {
            problem.finish_with(Epilogue::CUBLASLT_EPILOGUE_BIAS, Some(address(&bias) + offset));
            assert_eq!(good.lt.multiply_at(&problem, good.at(Some(&algorithm))), wanted);
        }
        // Of another type than the result.
        problem.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &(Type::CUDA_R_16BF as i32));
        assert_eq!(good.lt.multiply_at(&problem, good.at(Some(&algorithm))), UNSUPPORTED);
    });
}

#[test]
fn software_driver_a_workspace_must_be_as_large_as_the_algorithm_says() {
    in_child("refusals::software_driver_a_workspace_must_be_as_large_as_the_algorithm_says", &[], || {
        let good = Good::new();
        let problem = good.problem();
        let proposal = good.lt.proposals(&problem, 1).unwrap()[0];
        let needed = proposal.workspaceSize;
        assert!(needed > 0, "the first proposal for {N} rows splits k");
        let at = good.at(Some(&proposal.algo));
        let with = |workspace| good.lt.multiply_at(&problem, At { workspace, ..at });
        assert_eq!(with((at.workspace.0, needed)), Ok(()));
        assert_eq!(with((at.workspace.0, needed - 1)), INVALID);
        assert_eq!(with((0, needed)), INVALID);
        assert_eq!(with((at.workspace.0 + 8, needed)), INVALID);
        // Who names no algorithm gets one that needs none.
        assert_eq!(good.lt.multiply_at(&problem, At { algorithm: None, workspace: (0, 0), ..at }), Ok(()));
    });
}

#[test]
fn software_driver_an_algorithm_of_another_problem_is_refused() {
    in_child("refusals::software_driver_an_algorithm_of_another_problem_is_refused", &[], || {
        let good = Good::new();
        let problem = good.problem();
        let of_types = |input, output| {
            let like = |matrix: &Matrix, kind| {
                Matrix::new(kind, (matrix.rows, matrix.columns), matrix.leading, 1, whole(1))
            };
            let (a, b, d) = (like(&good.a, input), like(&good.b, input), like(&good.d, output));
            good.first(&Problem::new((&a, READS.0), (&b, READS.1), &d))
        };
        for (input, output) in [(Type::CUDA_R_16F, Type::CUDA_R_32F), (Type::CUDA_R_16BF, Type::CUDA_R_16BF)]
        {
            let other = of_types(input, output);
            assert_eq!(good.lt.check(&problem, &other).map(drop), INVALID, "{input:?} {output:?}");
            assert_eq!(good.lt.multiply_at(&problem, good.at(Some(&other))), INVALID);
        }
        for garbage in [Algorithm { data: [0; 8] }, Algorithm { data: [u64::MAX; 8] }] {
            assert_eq!(good.lt.multiply_at(&problem, good.at(Some(&garbage))), INVALID);
        }
        // More parts than k has chunks, parts without a way to add them, and none at all.
        for (splits, reduction) in [(16i32, 2u32), (2, 0), (2, 1), (1, 2), (0, 0)] {
            let mut algorithm = initialised(&good.lt, 1).unwrap();
            configure(&mut algorithm, Config::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits).unwrap();
            configure(&mut algorithm, Config::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &reduction).unwrap();
            assert_eq!(good.lt.check(&problem, &algorithm).map(drop), UNSUPPORTED, "{splits} {reduction}");
        }
    });
}

#[test]
fn software_driver_a_handle_serves_the_device_that_it_was_made_on() {
    let devices = [("CONSORT_SOFTWARE_DRIVER_DEVICES", "2")];
    in_child("refusals::software_driver_a_handle_serves_the_device_that_it_was_made_on", &devices, || {
        let good = Good::new();
        let problem = good.problem();
        let other = CudaContext::new(1).unwrap();
        other.bind_to_thread().unwrap();
        assert_eq!(good.lt.proposals(&problem, 1).map(drop), INVALID);
        good.lt.context.bind_to_thread().unwrap();
        assert_eq!(good.lt.proposals(&problem, 1).map(drop), Ok(()));
        // No context, no handle.
        let without = std::thread::spawn(|| cudarc::cublaslt::result::create_handle().unwrap_err().0);
        assert_eq!(without.join().unwrap(), Status::CUBLAS_STATUS_NOT_INITIALIZED);
    });
}

#[test]
fn software_driver_calls_fail_when_the_environment_asks_for_it() {
    let faults =
        [("CONSORT_SOFTWARE_DRIVER_FAULTS", "cublasLtMatmul:2=13,cublasLtMatmulAlgoGetHeuristic:2=15")];
    in_child("refusals::software_driver_calls_fail_when_the_environment_asks_for_it", &faults, || {
        let good = Good::new();
        let problem = good.problem();
        let algorithm = good.first(&problem);
        assert_eq!(good.lt.proposals(&problem, 1).map(drop), UNSUPPORTED);
        let call = || good.lt.multiply_at(&problem, good.at(Some(&algorithm)));
        assert_eq!([call(), call(), call()], [Ok(()), Err(Status::CUBLAS_STATUS_EXECUTION_FAILED), Ok(())]);
    });
}
