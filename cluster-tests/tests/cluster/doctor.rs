//! `consort doctor`, on a machine without CUDA and over the software driver.

use std::{
    path::PathBuf,
    process::{Command, Output},
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::harness::{consort, root};

/// A folder of its own for one test, without libraries in it.
fn empty_folder(test: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("consort-doctor-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// The command with nothing of ours in its environment but where CUDA's libraries are.
fn doctor(libraries: &std::path::Path, cache: &std::path::Path) -> Command {
    let mut command = consort();
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CONSORT_") {
            command.env_remove(name);
        }
    }
    command.arg("doctor").env("CONSORT_CUDA_LIB_PATH", libraries).env("CONSORT_CACHE_DIR", cache);
    command
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn doctor_on_a_machine_without_cuda_says_that_cpus_serve_within_a_second() {
    let folder = empty_folder("none");
    let started = Instant::now();
    let output = doctor(&folder, &folder).output().unwrap();
    let took = started.elapsed();
    let (out, errors) = texts(&output);
    assert_eq!(output.status.code(), Some(0), "{out}{errors}");
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(out.contains("  ! no CUDA driver") && out.contains("libcuda.so.1: not there"), "{out}");
    assert!(out.contains("\nA model can be served on\n  cpu "), "{out}");
    assert_eq!(errors, "");

    let output = doctor(&folder, &folder).args(["--device", "cuda"]).output().unwrap();
    let (out, errors) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{out}{errors}");
    assert!(out.contains("  ! no card can be used without the driver -> "), "{out}");
    assert_eq!(errors, "error: cuda cannot be used on this machine; the report says why\n");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_model_on_a_card_that_is_not_there_is_refused_with_the_doctor_as_the_next_step() {
    let folder = empty_folder("refused");
    let tiny = root().join("parallel/fixtures/tiny_llama");
    let output = consort()
        .args(["run", tiny.to_str().unwrap(), "hi", "--devices", "cuda:0"])
        .env("CONSORT_CUDA_LIB_PATH", &folder)
        .output()
        .unwrap();
    let (_, errors) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("`consort doctor`") && errors.contains("no CUDA driver"), "{errors}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn doctor_describes_three_cards_of_the_software_driver() {
    let folder = empty_folder("software-driver");
    let libraries = consort_software_driver::folder();
    let over = |arguments: &[&str]| {
        let report = folder.join("report.json");
        let output = doctor(libraries, &folder)
            .args(arguments)
            .env("CONSORT_SOFTWARE_DRIVER_DEVICES", "3")
            .env("CONSORT_SOFTWARE_DRIVER_MEMORY", "1000000000")
            .env("CONSORT_SOFTWARE_DRIVER_REPORT", &report)
            .output()
            .unwrap();
        let report = consort_software_driver::Report::read(&report).unwrap();
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:#?}");
        (output.status.code(), texts(&output))
    };
    let (code, (out, errors)) = over(&["--device", "cuda:0,cuda:2"]);
    println!("{out}{errors}");
    assert_eq!(code, Some(0), "{out}{errors}");
    let (code, (out, errors)) = over(&["--json"]);
    println!("{out}{errors}");
    assert_eq!(code, Some(0), "{out}{errors}");
    let _seen: Value = serde_json::from_str(&out).unwrap();
    std::fs::remove_dir_all(folder).unwrap();
}
