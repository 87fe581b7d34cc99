use super::*;

const NVRTC_12: &str = include_str!("nvrtc_12_9_sm_80.txt");
const NVRTC_13: &str = include_str!("nvrtc_13_5_sm_90a.txt");

fn of(log: &str, function: &str) -> Usage {
    parse(log).unwrap().into_iter().find(|usage| usage.function == function).unwrap()
}

fn kernel(function: &str, registers: u32, stack: [u32; 3], shared_bytes: u32, constant_bytes: u32) -> Usage {
    let [stack_frame_bytes, spill_store_bytes, spill_load_bytes] = stack;
    Usage {
        function: function.to_owned(),
        is_kernel: true,
        registers,
        stack_frame_bytes,
        spill_store_bytes,
        spill_load_bytes,
        shared_bytes,
        constant_bytes,
    }
}

#[test]
fn a_log_of_nvrtc_12_tells_registers_spills_and_memory() {
    assert_eq!(of(NVRTC_12, "linear_gemv_add"), kernel("linear_gemv_add", 14, [0, 0, 0], 0, 376));
    assert_eq!(of(NVRTC_12, "spiller"), kernel("spiller", 32, [64, 56, 56], 0, 372));
    assert_eq!(of(NVRTC_12, "all_reduce_peers"), kernel("all_reduce_peers", 24, [128, 0, 0], 512, 496));
}

#[test]
fn a_log_of_nvrtc_13_tells_registers_spills_and_memory() {
    assert_eq!(of(NVRTC_13, "linear_gemm_mma"), kernel("linear_gemm_mma", 18, [0, 0, 0], 0, 0));
    assert_eq!(of(NVRTC_13, "spiller"), kernel("spiller", 32, [48, 52, 52], 0, 0));
    assert_eq!(of(NVRTC_13, "all_reduce_peers"), kernel("all_reduce_peers", 38, [128, 0, 0], 512, 0));
}

#[test]
fn functions_that_were_not_inlined_are_told_from_kernels() {
    for log in [NVRTC_12, NVRTC_13] {
        let usage = parse(log).unwrap();
        assert_eq!(usage.iter().filter(|usage| usage.is_kernel).count(), 6);
        let other: Vec<&str> =
            usage.iter().filter(|usage| !usage.is_kernel).map(|usage| usage.function.as_str()).collect();
        assert_eq!(other, ["_Z6helperPKfi"]);
    }
}

#[test]
fn the_layout_of_the_offline_assembler_is_read_too() {
    let log = "ptxas info    : Compiling entry function 'k' for 'sm_90'\n\
               ptxas info    : Function properties for k\n\
               ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\r\n\
               ptxas info    : Used 40 registers, 48 bytes smem, 400 bytes cmem[0], 8 bytes cmem[2]\r\n";
    assert_eq!(parse(log), Ok(vec![kernel("k", 40, [8, 4, 4], 48, 408)]));
}

#[test]
fn warnings_and_empty_logs_say_nothing_of_functions() {
    assert_eq!(parse(""), Ok(Vec::new()));
    assert_eq!(
        parse("kernel.cu(3): warning #177-D: variable \"x\" was declared but never referenced\n"),
        Ok(Vec::new())
    );
    assert_eq!(parse("ptxas info    : 0 bytes gmem\nptxas warning : something\n"), Ok(Vec::new()));
}

#[test]
fn every_log_cut_at_any_line_is_refused_or_tells_whole_kernels() {
    for log in [NVRTC_12, NVRTC_13] {
        let whole = parse(log).unwrap();
        let lines: Vec<&str> = log.lines().collect();
        for end in 0..lines.len() {
            match parse(&lines[..end].join("\n")) {
                Ok(usage) => assert!(whole.starts_with(&usage), "{end} lines"),
                Err(error) => assert!(matches!(error, UsageError::Incomplete { .. }), "{end} lines: {error}"),
            }
        }
    }
}

#[test]
fn numbers_that_are_no_numbers_are_refused_with_their_line() {
    let damaged = NVRTC_12.replace("56 bytes spill stores", "many bytes spill stores");
    let error = parse(&damaged).expect_err("`many` is no number").to_string();
    assert!(error.contains("line 21") && error.contains("many bytes spill stores"), "{error}");
    let huge = NVRTC_12.replace("Used 32 registers", "Used 99999999999 registers");
    assert!(matches!(parse(&huge), Err(UsageError::Line { .. })));
    let orphan = "ptxas info    : Used 32 registers, used 1 barriers\n";
    assert!(matches!(parse(orphan), Err(UsageError::Line { line: 1, .. })));
}
