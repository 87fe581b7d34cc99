//! `consort doctor`, on a machine without CUDA and over the software driver.

use std::{
    path::{Path, PathBuf},
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
fn doctor(libraries: &Path, cache: &Path) -> Command {
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
fn software_driver_has_three_cards_that_doctor_describes() {
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
    assert_eq!(code, Some(0), "{out}{errors}");
    for line in [
        "cuda:2 Consort software device 2, compute capability 9.0",
        "cuda:1 atomics - atomics",
        "NVLink not told: no usable NVML",
        "--device cuda:2 (Consort software device 2) can be used",
    ] {
        let is_printed = out.lines().any(|printed| printed.split_whitespace().eq(line.split(' ')));
        assert!(is_printed, "{line}\n{out}");
    }
    let (code, (out, errors)) = over(&["--device", "cuda:3"]);
    assert_eq!(code, Some(1), "{out}{errors}");
    assert!(out.contains("  ! cuda:3 is not there -> there are cuda:0, cuda:1, cuda:2"), "{out}");

    let (code, (out, errors)) = over(&["--json"]);
    assert_eq!(code, Some(0), "{out}{errors}");
    let seen: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&seen["driver"]["status"], &seen["driver"]["cuda_version"]),
        (&"found".into(), &"13.0".into())
    );
    let ordinals: Vec<_> = seen["cards"].as_array().unwrap().iter().map(|card| &card["ordinal"]).collect();
    assert_eq!(ordinals, [0, 1, 2]);
    assert_eq!(seen["cards"][1]["memory_bytes"], 1_000_000_000);
    assert!(seen["cards"][1]["free_bytes"].as_u64().unwrap() > 900_000_000);
    let links = seen["links"].as_array().unwrap();
    assert!(links.len() == 6 && links.iter().all(|link| link["peer_access"] == true), "{links:?}");
    assert_eq!(seen["libraries"]["cublaslt"]["status"], "found");
    assert_eq!(seen["libraries"]["nvrtc"]["status"], "found");
    assert_eq!(seen["libraries"]["nccl"]["status"], "found");
    assert_eq!(seen["can_serve"], serde_json::json!(["cpu", "cuda:0", "cuda:1", "cuda:2"]));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn software_driver_cards_without_kernels_and_broken_drivers_are_gaps_and_no_panics() {
    let folder = empty_folder("software-driver-odd");
    let over = |name: &str, value: &str| {
        let mut command = doctor(consort_software_driver::folder(), &folder);
        let output = command.args(["--device", "cuda"]).env(name, value).output().unwrap();
        let (out, errors) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{out}{errors}");
        assert!(!errors.contains("panicked"), "{errors}");
        out
    };
    // Newer than what the compiler there knows.
    let new = over("CONSORT_SOFTWARE_DRIVER_CAPABILITY", "129");
    assert!(
        new.contains("  ! cuda:0: this build has no kernels for sm_129, and NVRTC 12.9 compiles for"),
        "{new}"
    );
    let none = over("CONSORT_SOFTWARE_DRIVER_DEVICES", "0");
    assert!(none.contains("  ! the driver has no card for this process"), "{none}");
    let broken = over("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuDeviceTotalMem_v2:1=999");
    assert!(broken.contains("  ! the driver does not work: ") && broken.contains("(999)"), "{broken}");
    let taken = over("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuDevicePrimaryCtxRetain:1=101");
    assert!(taken.contains("  ! cuda:0 cannot be opened -> "), "{taken}");
    std::fs::remove_dir_all(folder).unwrap();
}
