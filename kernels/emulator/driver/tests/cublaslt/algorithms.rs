//! Which algorithms are proposed, and what callers may rely on when they keep one.

use consort_software_driver::in_child;

use crate::{
    harness::{
        Algorithm, Config, Lt, Preference, Problem, Status, Type, configure, configured, ids, initialised,
    },
    matrix::{Matrix, Read, fractions},
};

const OUTPUTS: usize = 64;

/// A linear operation on `rows` rows of `k` numbers, the first ones of the same 200 each time.
struct Linear {
    weight: Matrix,
    rows: Matrix,
    result: Matrix,
    problem: Problem,
}

impl Linear {
    fn new(rows: usize, k: usize) -> Linear {
        let weight = Matrix::new(Type::CUDA_R_16BF, (k, OUTPUTS), k, 1, fractions(1));
        let rows = Matrix::new(Type::CUDA_R_16BF, (k, rows), k, 1, fractions(2));
        let result = Matrix::new(Type::CUDA_R_32F, (OUTPUTS, rows.columns), OUTPUTS, 1, |_, _, _| 0.0);
        let problem = Problem::new((&weight, Read::Transposed), (&rows, Read::AsItIs), &result);
        Linear { weight, rows, result, problem }
    }

    fn run(&self, lt: &Lt, algorithm: &Algorithm) -> Vec<u32> {
        let mut on_result = lt.upload(&self.result);
        let (weight, rows) = (lt.upload(&self.weight), lt.upload(&self.rows));
        lt.multiply(&self.problem, (&weight, &rows, &mut on_result), Some(algorithm)).unwrap();
        lt.download(&self.result, &on_result).bits()
    }
}

#[test]
fn software_driver_proposals_differ_in_their_last_bits_and_change_with_the_number_of_rows() {
    in_child(
        "algorithms::software_driver_proposals_differ_in_their_last_bits_and_change_with_the_number_of_rows",
        &[],
        || {
            let lt = Lt::new();
            for k in [64, 256] {
                let mut firsts: Vec<Vec<u32>> = Vec::new();
                for rows in [1, 8, 9, 32, 33, 64] {
                    let linear = Linear::new(rows, k);
                    let proposals = lt.proposals(&linear.problem, 4).unwrap();
                    assert_eq!(proposals.len(), 4);
                    let mut results: Vec<Vec<u32>> =
                        proposals.iter().map(|proposal| linear.run(&lt, &proposal.algo)).collect();
                    // The first row of what a caller gets who always takes the first proposal.
                    firsts.push(results[0][..OUTPUTS].to_vec());
                    assert!(results[0] != results[1], "{rows} rows, k = {k}");
                    // With one chunk in each part, the parts' sums are added as the chunks' would be.
                    results.sort();
                    results.dedup();
                    assert!(results.len() >= 3, "{rows} rows, k = {k}");
                }
                let changes: Vec<bool> = firsts.windows(2).map(|pair| pair[0] != pair[1]).collect();
                assert_eq!(changes, [false, true, false, true, false], "k = {k}");
            }
        },
    );
}

#[test]
fn software_driver_an_algorithm_that_is_kept_gives_a_row_the_same_bits_in_every_batch() {
    in_child(
        "algorithms::software_driver_an_algorithm_that_is_kept_gives_a_row_the_same_bits_in_every_batch",
        &[],
        || {
            let lt = Lt::new();
            let all = Linear::new(200, 256);
            for proposal in lt.proposals(&Linear::new(8, 256).problem, 8).unwrap() {
                let wanted = all.run(&lt, &proposal.algo);
                for rows in [1, 2, 7, 32, 65] {
                    let found = Linear::new(rows, 256).run(&lt, &proposal.algo);
                    assert!(found == wanted[..rows * OUTPUTS], "{rows} rows");
                }
            }
        },
    );
}

#[test]
fn software_driver_preferences_leave_out_what_they_exclude() {
    in_child("algorithms::software_driver_preferences_leave_out_what_they_exclude", &[], || {
        let lt = Lt::new();
        let linear = Linear::new(8, 256);
        let splits = |proposals: &[crate::harness::Proposal]| -> Vec<i32> {
            proposals.iter().map(|p| configured(&p.algo, Config::CUBLASLT_ALGO_CONFIG_SPLITK_NUM)).collect()
        };
        let all = lt.proposals(&linear.problem, 16).unwrap();
        assert_eq!(splits(&all), [8, 1, 4, 2, 1, 1, 1]);
        // A part's sums take 4 bytes each.
        let bytes: Vec<usize> = all.iter().map(|proposal| proposal.workspaceSize).collect();
        assert_eq!(bytes, [8, 0, 4, 2, 0, 0, 0].map(|parts| parts * 8 * OUTPUTS * 4));
        linear.problem.prefer(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(bytes[2] as u64));
        assert_eq!(splits(&lt.proposals(&linear.problem, 16).unwrap()), [4, 1, 2, 1, 1, 1]);
        linear.problem.prefer(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &1u32);
        assert_eq!(splits(&lt.proposals(&linear.problem, 16).unwrap()), [1, 1, 1, 1]);
        // Only the algorithm that takes any address.
        linear.problem.prefer(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &2u32);
        let unaligned = lt.proposals(&linear.problem, 16).unwrap();
        let id = |algorithm: &Algorithm| configured(algorithm, Config::CUBLASLT_ALGO_CONFIG_ID);
        assert_eq!(unaligned.iter().map(|p| id(&p.algo)).collect::<Vec<_>>(), [0, 0]);
        linear.problem.prefer(Preference::CUBLASLT_MATMUL_PREF_IMPL_MASK, &0x2u64);
        assert_eq!(lt.proposals(&linear.problem, 16).unwrap_err(), Status::CUBLAS_STATUS_NOT_SUPPORTED);
    });
}

#[test]
fn software_driver_algorithms_can_be_made_and_set_up_by_hand() {
    in_child("algorithms::software_driver_algorithms_can_be_made_and_set_up_by_hand", &[], || {
        let lt = Lt::new();
        let linear = Linear::new(16, 256);
        assert_eq!(ids(&lt), [1, 0]);
        assert_eq!(initialised(&lt, 5), Err(Status::CUBLAS_STATUS_INVALID_VALUE));
        let mut algorithm = initialised(&lt, 1).unwrap();
        assert_eq!(lt.check(&linear.problem, &algorithm), Ok(0));
        let first = lt.proposals(&linear.problem, 1).unwrap()[0];
        assert!(linear.run(&lt, &algorithm) != linear.run(&lt, &first.algo));
        for attribute in [
            Config::CUBLASLT_ALGO_CONFIG_TILE_ID,
            Config::CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
            Config::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
            Config::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION,
            Config::CUBLASLT_ALGO_CONFIG_STAGES_ID,
        ] {
            configure(&mut algorithm, attribute, &configured(&first.algo, attribute)).unwrap();
        }
        assert_eq!(algorithm, first.algo);
        assert_eq!(lt.check(&linear.problem, &algorithm), Ok(first.workspaceSize));
        let fixed = configure(&mut algorithm, Config::CUBLASLT_ALGO_CONFIG_ID, &0i32);
        assert_eq!(fixed, Err(Status::CUBLAS_STATUS_INVALID_VALUE));
    });
}
