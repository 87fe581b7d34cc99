//! A product among other work: graphs, streams, and what the driver's clock sees of it.

use consort_software_driver::{in_child, in_child_reported};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use crate::{
    harness::{At, Lt, Problem, Type, address, address_mut},
    matrix::{Matrix, Read, product, whole},
};

const M: usize = 64;
const N: usize = 8;
const K: usize = 96;

fn operand(columns: usize, seed: usize) -> Matrix {
    Matrix::new(Type::CUDA_R_16BF, (K, columns), K, 1, whole(seed))
}

fn result(leading: usize) -> Matrix {
    Matrix::new(Type::CUDA_R_32F, (M, N), leading, 1, |_, _, _| 0.0)
}

fn problem(a: &Matrix, b: &Matrix, d: &Matrix) -> Problem {
    Problem::new((a, Read::Transposed), (b, Read::AsItIs), d)
}

fn wanted(a: &Matrix, b: &Matrix, d: &Matrix) -> Matrix {
    product((a, Read::Transposed), (b, Read::AsItIs), d, |_, _, _, sum| sum)
}

#[test]
fn software_driver_a_captured_product_reads_new_operands_at_each_replay() {
    in_child("streams::software_driver_a_captured_product_reads_new_operands_at_each_replay", &[], || {
        let lt = Lt::new();
        let (a, d) = (operand(M, 1), result(M));
        let (on_a, mut on_b, mut on_d) = (lt.upload(&a), lt.upload(&operand(N, 2)), lt.upload(&d));
        lt.stream.synchronize().unwrap();
        lt.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        {
            // The descriptors are gone before the first replay.
            let problem = problem(&a, &operand(N, 2), &d);
            let proposal = lt.proposals(&problem, 1).unwrap()[0];
            assert!(proposal.workspaceSize > 0, "the workspace is part of what is captured");
            lt.multiply(&problem, (&on_a, &on_b, &mut on_d), Some(&proposal.algo)).unwrap();
        }
        let graph = lt.stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph");
        assert_eq!(lt.download(&d, &on_d), d, "capturing computes nothing");
        for seed in [2, 3, 4] {
            let b = operand(N, seed);
            lt.stream.memcpy_htod(&b.bytes(), &mut on_b).unwrap();
            graph.launch().unwrap();
            assert!(lt.download(&d, &on_d).bits() == wanted(&a, &b, &d).bits(), "replay with operand {seed}");
        }
    });
}

/// Runs `body` in a process that counts violations; what it found, if this is not that process.
fn violations(test: &str, body: impl FnOnce()) -> Option<Vec<String>> {
    in_child_reported(test, &[("CONSORT_SOFTWARE_DRIVER_STRICT", "0")], body).map(|report| report.messages)
}

/// Writes an operand in one stream and multiplies in another, which waits for it or does not.
fn multiply_beside_a_write(waits: bool) {
    let lt = Lt::new();
    let (a, b, d) = (operand(M, 1), operand(N, 2), result(M));
    let (on_a, mut on_b, mut on_d) = (lt.upload(&a), lt.upload(&b), lt.upload(&d));
    lt.stream.synchronize().unwrap();
    let other = lt.context.new_stream().unwrap();
    other.memset_zeros(&mut on_b).unwrap();
    if waits {
        lt.stream.join(&other).unwrap();
    }
    let problem = problem(&a, &b, &d);
    lt.multiply(&problem, (&on_a, &on_b, &mut on_d), None).unwrap();
    lt.context.synchronize().unwrap();
}

#[test]
fn software_driver_a_product_that_waits_for_its_operand_is_in_order() {
    let test = "streams::software_driver_a_product_that_waits_for_its_operand_is_in_order";
    if let Some(found) = violations(test, || multiply_beside_a_write(true)) {
        assert!(found.is_empty(), "{found:?}");
    }
}

#[test]
fn software_driver_a_product_that_does_not_wait_for_its_operand_is_seen() {
    let test = "streams::software_driver_a_product_that_does_not_wait_for_its_operand_is_seen";
    if let Some(found) = violations(test, || multiply_beside_a_write(false)) {
        assert!(found.iter().any(|message| message.contains("cublasLtMatmul")), "{found:?}");
    }
}

#[test]
fn software_driver_two_streams_may_fill_the_columns_of_one_matrix_side_by_side() {
    let test = "streams::software_driver_two_streams_may_fill_the_columns_of_one_matrix_side_by_side";
    let found = violations(test, || {
        let mut lt = Lt::new();
        // The upper and the lower half of each column, by one product each.
        let (a, b, d) = (operand(M, 1), operand(N, 2), result(2 * M));
        let (on_a, on_b, mut on_d) = (lt.upload(&a), lt.upload(&b), lt.upload(&d));
        lt.stream.synchronize().unwrap();
        let problem = problem(&a, &b, &d);
        let half = (M * 4) as u64;
        let at = At {
            alpha: 1.0,
            a: address(&on_a),
            b: address(&on_b),
            beta: 0.0,
            c: 0,
            d: address_mut(&mut on_d),
            algorithm: None,
            workspace: (0, 0),
        };
        lt.multiply_at(&problem, at).unwrap();
        let first = std::mem::replace(&mut lt.stream, lt.context.new_stream().unwrap());
        lt.multiply_at(&problem, At { d: at.d + half, ..at }).unwrap();
        lt.context.synchronize().unwrap();
        drop(first);
    });
    if let Some(found) = found {
        assert!(found.is_empty(), "{found:?}");
    }
}
