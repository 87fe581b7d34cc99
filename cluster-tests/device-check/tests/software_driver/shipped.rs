//! What is taken to a GPU machine beside the program: the script that starts it, and the peer's programs.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use crate::{outcome, row};

fn source(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

#[test]
fn software_driver_the_script_runs_the_check_where_it_lies_and_passes_its_verdict_on() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("device-check.sh");
    fs::copy(source("device-check.sh"), &script).unwrap();
    symlink(env!("CARGO_BIN_EXE_consort-device-check"), folder.path().join("consort-device-check")).unwrap();
    let run = |only: &str| {
        let output = Command::new("bash")
            .arg(&script)
            .args(["--size", "small", "--folder"])
            .arg(folder.path())
            .args(["--only", only, "--out"])
            .arg(folder.path().join("out"))
            .env("CONSORT_CUDA_LIB_PATH", consort_software_driver::folder())
            .env("CONSORT_CACHE_DIR", folder.path().join("cache"))
            // No interpreter but this one, which has no PyTorch.
            .env("CONSORT_DEVICE_CHECK_PYTHON", "/nowhere")
            .output()
            .unwrap();
        let report = fs::read(folder.path().join("out/report.json")).unwrap();
        (output, serde_json::from_slice::<serde_json::Value>(&report).unwrap())
    };
    let (output, report) = run("machine");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(outcome(&report, "machine"), "done");
    assert!(row(&report, "machine", "load all kernels")["ours"]["value"].is_number());
    assert!(said.contains("| machine | load all kernels") && said.trim_end().ends_with("done"), "{said}");
    assert!(folder.path().join("out/report.md").exists() && folder.path().join("out/parts.log").exists());
    // Without recordings this part fails, and so does the script.
    let (output, report) = run("kernels");
    assert_eq!((output.status.code(), outcome(&report, "kernels")), (Some(1), "failed"));
}

#[test]
fn the_peer_s_programs_are_python() {
    let mut programs = 0;
    for entry in fs::read_dir(source("peer")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "py") {
            let compile = "import ast, sys; ast.parse(open(sys.argv[1]).read(), sys.argv[1])";
            let output = Command::new("python3").args(["-c", compile]).arg(&path).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            programs += 1;
        }
    }
    assert!(programs >= 7, "{programs} programs");
}
