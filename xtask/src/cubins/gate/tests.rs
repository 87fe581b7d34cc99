use std::borrow::Cow;

use consort_kernels::cuda::cubins::Origin;

use super::*;
use crate::cubins::tests::compiler;

const MIXED: &[u8] = include_bytes!("../../../../kernels/src/cuda/image/mixed_12_9_sm_80.cubin");
const TEXT: &str =
    "#include \"prelude.cuh\"\nKERNEL(mixed, 96, 2, (char c)) {}\nKERNEL(without_parameters, 32, 1, ()) {}\n";
const SOURCE: Source = Source { name: "op/kernel.cu", text: TEXT, headers: &[] };

/// A cubin with the log that a compiler writes of it.
fn cubin() -> Cubin {
    let mut log = String::from("ptxas info    : 0 bytes gmem\n");
    for kernel in image::kernels(MIXED).unwrap() {
        log += &format!(
            "ptxas info    : Compiling entry function '{name}' for 'sm_80'\n\
             ptxas info    : Function properties for {name}\n\
             ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
             ptxas info    : Used {registers} registers, used 0 barriers, 372 bytes cmem[0]\n",
            name = kernel.name,
            registers = kernel.registers
        );
    }
    Cubin { bytes: Cow::Borrowed(MIXED), log, origin: Origin::Compiler }
}

fn judged(source: &Source, change: impl Fn(String) -> String) -> Verdict {
    let cubin = cubin();
    judge(source, Arch::CHECKED[0], &Cubin { log: change(cubin.log.clone()), ..cubin }).unwrap()
}

#[track_caller]
fn assert_problem(verdict: &Verdict, words: &[&str]) {
    assert_eq!(verdict.problems.len(), 1, "{:?}", verdict.problems);
    for words in words {
        assert!(verdict.problems[0].contains(words), "{words}: {:?}", verdict.problems);
    }
}

#[test]
fn kernels_without_fault_pass_with_what_they_take() {
    let verdict = judged(&SOURCE, |log| log);
    assert_eq!(verdict.problems, Vec::<String>::new());
    let taken: Vec<_> =
        verdict.kernels.iter().map(|kernel| (kernel.name.as_str(), kernel.block.threads)).collect();
    assert_eq!(taken, [("mixed", 96), ("without_parameters", 32)]);
    assert!(verdict.kernels.iter().all(|kernel| kernel.block.registers > 0 && kernel.occupancy.blocks > 0));
}

#[test]
fn a_spill_a_warning_and_a_disagreement_are_each_a_problem() {
    let spill = |log: String| log.replacen("0 bytes spill loads", "8 bytes spill loads", 1);
    assert_problem(
        &judged(&SOURCE, spill),
        &["mixed in op/kernel.cu for sm_80: it spills", "8 bytes loaded"],
    );
    let warning = |log: String| {
        format!(
            "op/kernel.cu(2): warning #177-D: variable \"x\" was declared\n\n\
         Remark: The warnings can be suppressed with \"-diag-suppress <warning-number>\"\n{log}"
        )
    };
    assert_problem(&judged(&SOURCE, warning), &["op/kernel.cu for sm_80", "warning #177-D"]);
    let registers = image::kernels(MIXED).unwrap()[0].registers;
    let other = |log: String| log.replacen(&format!("Used {registers} "), "Used 77 ", 1);
    assert_problem(&judged(&SOURCE, other), &["mixed in op/kernel.cu", "77 registers", "the cubin"]);
}

#[test]
fn a_log_that_lacks_a_kernel_is_not_taken_for_a_good_one() {
    let cubin = Cubin { log: String::new(), ..cubin() };
    let error = judge(&SOURCE, Arch::CHECKED[0], &cubin).expect_err("no log").to_string();
    assert!(error.contains("op/kernel.cu for sm_80") && error.contains("says nothing of mixed"), "{error}");
}

#[test]
fn launch_bounds_of_the_text_are_held_against_the_cubin_and_the_multiprocessor() {
    let text = "KERNEL(mixed, 128, 2, (char c)) {}\n";
    assert_problem(
        &judged(&Source { text, ..SOURCE }, |log| log),
        &["128 threads in the text, 96 in the cubin"],
    );
    let text = "KERNEL(mixed, 96, 4, (char c)) {}\n// dynamic shared memory: mixed 65536 bytes\n";
    let source = Source { text, ..SOURCE };
    let Verdict { mut kernels, problems } = judged(&source, |log| log);
    assert!(
        problems.is_empty(),
        "a device with less shared memory than stages are laid out for: {problems:?}"
    );
    kernels.retain(|kernel| kernel.name == "mixed");
    kernels[0].arch = Arch::CHECKED[1];
    let problems = broken_promises(&source, &kernels);
    assert_problem(&Verdict { kernels, problems }, &["promises 4 blocks", "2 fit (by shared memory)"]);
}

#[test]
fn shared_memory_of_no_kernel_or_beyond_the_device_is_a_problem() {
    let text = "// dynamic shared memory: gone_* 4096 bytes\n";
    assert_problem(
        &judged(&Source { text, ..SOURCE }, |log| log),
        &["gone_* in op/kernel.cu", "no such kernel"],
    );
    let text = "// dynamic shared memory: mixed 170000 bytes\n";
    assert_problem(&judged(&Source { text, ..SOURCE }, |log| log), &["170000 bytes", "at most 166912"]);
}

const FAULTY: &str = r#"#include "prelude.cuh"
KERNEL(spills, 1024, 2, (const float* in, float* out)) {
    float v[64];
    #pragma unroll
    for (int i = 0; i < 64; i++) v[i] = in[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; i++) out[i * 1024 + threadIdx.x] = v[i] * v[63 - i];
}
struct Peers { const float* buffers[8]; };
KERNEL(indexes_a_parameter, 64, 1, (Peers peers, float* out, int rank)) {
    out[threadIdx.x] = peers.buffers[rank][threadIdx.x];
}
KERNEL(indexes_it_well, 64, 1, (const __grid_constant__ Peers peers, float* out, int rank)) {
    out[threadIdx.x] = peers.buffers[rank][threadIdx.x];
}
extern "C" __global__ void without_bounds(float* out) { out[threadIdx.x] = 1; }
"#;

#[test]
fn the_real_compiler_s_spills_and_local_memory_make_the_gate_fail() {
    let Some(cubins) = compiler() else { return };
    for arch in Arch::CHECKED {
        let source = Source { name: "op/kernel.cu", text: FAULTY, headers: &[] };
        let mut problems = judge(&source, arch, &cubins.compiled(&source, arch).unwrap()).unwrap().problems;
        problems.sort();
        let place = format!("in op/kernel.cu for {arch}: ");
        assert_eq!(problems.len(), 3, "{problems:#?}");
        for (problem, beginning) in problems.iter().zip([
            format!("indexes_a_parameter {place}it keeps 64 bytes in local memory"),
            format!("spills {place}it spills registers: "),
            format!("without_bounds {place}it has no launch bounds"),
        ]) {
            assert!(problem.starts_with(&beginning), "{problem}");
        }
    }
}
