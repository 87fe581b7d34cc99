//! The check itself, over a software driver: its parts run, what is wrong fails it, and no part takes another with it.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

/// The check with small sizes, and without PyTorch.
fn check(folder: &Path, out: &Path, environment: &[(&str, &str)], args: &[&str]) -> (Output, Value) {
    let output = Command::new(env!("CARGO_BIN_EXE_consort-device-check"))
        .args(["--size", "small", "--folder"])
        .arg(folder)
        .args(["run", "--no-peer", "--out"])
        .arg(out)
        .args(args)
        .env("CONSORT_CUDA_LIB_PATH", consort_software_driver::folder())
        .env("CONSORT_CACHE_DIR", out.join("cache"))
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let report = serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
    (output, report)
}

/// How a part ended.
fn outcome<'a>(report: &'a Value, part: &str) -> &'a str {
    let parts = report["parts"].as_array().unwrap();
    parts.iter().find(|found| found["part"] == part).unwrap()["outcome"].as_str().unwrap()
}

#[test]
fn software_driver_a_part_that_hangs_is_ended_and_the_next_one_runs() {
    let folder = tempfile::tempdir().unwrap();
    let faults = [("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuGraphLaunch:1=hang")];
    let args = ["--only", "ceilings,machine", "--limit", "14"];
    let (output, report) = check(folder.path(), folder.path(), &faults, &args);
    assert!(!output.status.success());
    assert_eq!((outcome(&report, "ceilings"), outcome(&report, "machine")), ("timed_out", "skipped"));
}
