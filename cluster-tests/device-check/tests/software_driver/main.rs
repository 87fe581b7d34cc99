//! The check itself, over a software driver: its parts run, what is wrong fails it, and no part takes another with it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod operations;
mod processes;
mod recorded;
mod shipped;
mod whole_models;

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
    let report = fs::read(out.join("report.json"));
    let report =
        report.unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (output, serde_json::from_slice(&report).unwrap())
}

/// What is said of a part.
fn part<'a>(report: &'a Value, name: &str) -> &'a Value {
    let parts = report["parts"].as_array().unwrap();
    parts.iter().find(|found| found["part"] == name).unwrap()
}

/// How it ended.
fn outcome<'a>(report: &'a Value, name: &str) -> &'a str {
    part(report, name)["outcome"].as_str().unwrap()
}

/// Its rows, in order.
fn rows<'a>(report: &'a Value, name: &str) -> &'a [Value] {
    part(report, name)["rows"].as_array().unwrap()
}

/// Their cases.
fn cases<'a>(report: &'a Value, name: &str) -> Vec<&'a str> {
    rows(report, name).iter().map(|row| row["case"].as_str().unwrap()).collect()
}

/// A part's row.
fn row<'a>(report: &'a Value, name: &str, case: &str) -> &'a Value {
    let rows = rows(report, name);
    rows.iter().find(|row| row["case"] == case).unwrap_or_else(|| panic!("no {case} in {rows:?}"))
}

#[test]
fn software_driver_a_part_that_hangs_is_ended_and_the_next_one_runs() {
    let folder = tempfile::tempdir().unwrap();
    let faults = [("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuGraphLaunch:1=hang")];
    let args = ["--only", "ceilings,machine", "--part-limit", "5"];
    let (output, report) = check(folder.path(), folder.path(), &faults, &args);
    assert!(!output.status.success());
    assert_eq!(outcome(&report, "ceilings"), "timed_out");
    assert_eq!(outcome(&report, "machine"), "done");
    // What it had found before stays.
    assert!(row(&report, "ceilings", "copy")["ours"]["value"].as_f64().unwrap() > 0.0);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("| ceilings | copy") && table.contains("ENDED: after 5 s"), "{table}");
}

#[test]
fn software_driver_what_is_not_there_is_said_and_costs_its_part_only() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = check(folder.path(), folder.path(), &[], &["--only", "kernels,machine"]);
    assert!(!output.status.success());
    assert_eq!(outcome(&report, "machine"), "done");
    let reason = part(&report, "kernels")["reason"].as_str().unwrap();
    assert!(reason.contains("no recordings at") && reason.contains("cargo xtask device-check"), "{reason}");
    assert!(report["machine"]["card"].as_str().unwrap().contains("compute capability 9.0"), "{report}");

    let no_driver = [("CONSORT_CUDA_LIB_PATH", "/nowhere")];
    let (output, report) = check(folder.path(), folder.path(), &no_driver, &["--only", "machine"]);
    assert!(!output.status.success());
    assert!(part(&report, "machine")["reason"].as_str().unwrap().contains("no CUDA driver on this machine"));
}

#[test]
fn a_part_that_is_none_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_consort-device-check"))
        .arg("--folder")
        .arg(folder.path())
        .args(["run", "--only", "speed"])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("no part `speed`; the parts are machine, kernels"), "{said}");
}

#[test]
fn software_driver_faults_have_the_types_that_the_product_gives_them() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = check(folder.path(), folder.path(), &[], &["--only", "faults"]);
    assert!(output.status.success(), "{report:#}");
    let rows = rows(&report, "faults");
    assert_eq!(rows.len(), 8);
    for row in rows {
        assert_eq!(row["ours"]["value"], 1.0, "{row:#}");
    }
    let note = |case: &str| row(&report, "faults", case)["note"].as_str().unwrap().to_owned();
    assert!(
        note("more memory than there is").contains("2147483648 bytes (2.00 GiB) wanted, 1073741824 bytes")
    );
    assert!(note("a read where nothing is").contains("(700)"));
}

#[test]
fn software_driver_parts_for_which_no_time_is_left_are_not_begun() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--only", "machine,ceilings", "--limit", "7"];
    let (output, report) = check(folder.path(), folder.path(), &[], &args);
    assert!(output.status.success(), "nothing is wrong: {report:#}");
    for name in ["machine", "ceilings"] {
        assert_eq!(outcome(&report, name), "skipped");
        assert_eq!(part(&report, name)["reason"], "no time was left");
    }
}
