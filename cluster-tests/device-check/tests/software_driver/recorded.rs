//! Launches recorded on the emulator here and now, and what the check says of them.
#![allow(unsafe_code)]

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use consort_emulator::{Grid, Memory, Settings, recording};
use consort_kernels::{
    KernelError,
    cuda::{DeviceSlice, DeviceSliceMut, Launch, Launcher, row_stride},
    embedding::cuda::embedding,
    rms_norm::cuda::{Norm, rms_norm},
    swiglu::cuda::{Activation, swiglu},
};
use half::bf16;
use safetensors::SafeTensors;

use crate::{cases, check, outcome, row, rows};

/// Runs each launch at once.
struct Emulated;

impl Launcher for Emulated {
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), KernelError> {
        let grid = Grid {
            kernel: launch.kernel,
            grid: launch.grid,
            threads: [launch.threads, 1, 1],
            shared_bytes: launch.shared_bytes as usize,
            arguments: launch.args.pointers(),
            argument_bytes: launch.args.sizes().map(|bytes| bytes as u32).collect(),
            rank: 0,
        };
        // SAFETY: the caller's promise.
        unsafe { consort_emulator::launch(grid, Settings::PLAIN) }.unwrap();
        Ok(())
    }

    fn multiprocessors(&self) -> u32 {
        4
    }
}

fn view<T>(memory: &Memory<T>) -> DeviceSlice<'_, T>
where
    T: Copy,
{
    // SAFETY: there, initialised, and borrowed as long as the view.
    unsafe { DeviceSlice::new(memory.address(), memory.len()) }
}

fn view_mut<T: Copy>(memory: &mut Memory<T>) -> DeviceSliceMut<'_, T> {
    // SAFETY: as above, exclusively.
    unsafe { DeviceSliceMut::new(memory.address(), memory.len()) }
}

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|at| (at as f32 * 0.7).sin()).collect()
}

/// Two launches each of three operations. Asked for once, since a process records to one folder.
fn record(folder: &Path) {
    assert!(recording::record_to(folder), "memory was made before");
    for rows in [2, 3] {
        const WIDTH: usize = 40;
        let table: Vec<bf16> = numbers(8 * row_stride(WIDTH)).into_iter().map(bf16::from_f32).collect();
        let (table, tokens) = (Memory::from_slice(&table), Memory::from_slice(&[7u32, 0, 3][..rows]));
        let mut residual = Memory::poisoned(rows * WIDTH);
        let drawn = Memory::from_slice(&[]);
        embedding(&Emulated, view(&tokens), view(&drawn), view(&table), WIDTH, 0, view_mut(&mut residual))
            .unwrap();
        let norm = Memory::from_slice(&numbers(WIDTH));
        let mut normal = Memory::poisoned(rows * row_stride(WIDTH));
        let norm = Norm { weight: view(&norm), eps: 1e-5 };
        rms_norm(&Emulated, view_mut(&mut residual), None, norm, view_mut(&mut normal)).unwrap();
        let gate_up = Memory::from_slice(&numbers(rows * 2 * WIDTH));
        let mut out = Memory::poisoned(rows * row_stride(WIDTH));
        swiglu(&Emulated, Activation::Silu, view(&gate_up), WIDTH, view_mut(&mut out)).unwrap();
    }
}

/// Changes one bit of what a launch wrote: the highest of the exponent of its first number.
fn falsify(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let after = tensors.names().into_iter().find(|name| name.ends_with(".after")).unwrap().to_owned();
    let data = tensors.tensor(&after).unwrap().data().as_ptr() as usize;
    let at = data - bytes.as_ptr() as usize + 1;
    bytes[at] ^= 0x40;
    fs::write(file, bytes).unwrap();
}

#[test]
fn software_driver_kernels_do_what_was_recorded_and_what_they_do_not_fails_the_check() {
    let folder = tempfile::tempdir().unwrap();
    let recordings = folder.path().join("recordings");
    record(&recordings);
    let only = ["--only", "kernels"];
    let (output, report) = check(folder.path(), folder.path(), &[], &only);
    assert!(output.status.success(), "{report:#}");
    assert_eq!(cases(&report, "kernels"), ["embedding_bf16", "rms_norm_1", "swiglu_silu"]);
    for row in rows(&report, "kernels") {
        assert_eq!(row["ours"]["value"], 0.0, "the same machine underneath: {row}");
        assert!(row["note"].as_str().unwrap().starts_with("2 launches, 2 of equal bits; 0 of "), "{row}");
    }

    // The device is lost in the second kernel; the third is checked all the same.
    let faults = [("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuLaunchKernel:3=700")];
    let (output, report) = check(folder.path(), folder.path(), &faults, &only);
    assert!(!output.status.success());
    assert_eq!(outcome(&report, "kernels"), "done");
    assert_eq!(row(&report, "kernels", "embedding_bf16")["ours"]["value"], 0.0);
    assert_eq!(row(&report, "kernels", "swiglu_silu")["ours"]["value"], 0.0);
    let lost = row(&report, "kernels", "rms_norm_1");
    assert!(lost["ours"].is_null() && lost["note"].as_str().unwrap().contains("700"), "{lost}");

    sanitizer_findings_fail_the_check_and_its_absence_does_not(folder.path());

    let mut files: Vec<_> = fs::read_dir(&recordings).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let swiglu = files.iter().rfind(|file| file.to_string_lossy().contains("swiglu")).unwrap();
    falsify(swiglu);
    let (output, report) = check(folder.path(), folder.path(), &[], &only);
    assert!(!output.status.success(), "one wrong number fails the check");
    assert_eq!(row(&report, "kernels", "rms_norm_1")["ours"]["value"], 0.0);
    let wrong = row(&report, "kernels", "swiglu_silu");
    assert!(wrong["note"].as_str().unwrap().starts_with("2 launches, 1 of equal bits; 1 of "), "{wrong}");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.lines().any(|line| line.contains("swiglu_silu") && line.contains("| NO")), "{table}");

    fs::write(swiglu, b"nothing of the kind").unwrap();
    let (output, report) = check(folder.path(), folder.path(), &[], &only);
    assert!(!output.status.success());
    let unread = row(&report, "kernels", "swiglu_silu")["note"].as_str().unwrap();
    assert!(unread.contains("is no recording"), "{unread}");
}

/// A program that runs what it is told to, and writes what the real one writes; nothing is found but by racecheck.
const SANITIZER: &str = "#!/bin/sh
tool=$2 log=$4
shift 4
[ $tool = racecheck ] && n=2 || n=0
[ $tool = initcheck ] || \"$@\" --size small || exit
echo \"========= ERROR SUMMARY: $n errors\" >$log
";

fn sanitizer_findings_fail_the_check_and_its_absence_does_not(folder: &Path) {
    let only = ["--only", "sanitizer"];
    let (output, report) = check(folder, folder, &[("PATH", "/nowhere")], &only);
    assert!(output.status.success(), "{report:#}");
    assert!(row(&report, "sanitizer", "compute-sanitizer")["note"].as_str().unwrap().contains("toolkit"));

    let program = folder.join("compute-sanitizer");
    fs::write(&program, SANITIZER).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let path = folder.to_string_lossy().into_owned();
    let (output, report) = check(folder, folder, &[("PATH", &path)], &only);
    assert!(!output.status.success());
    let found = |tool: &str| row(&report, "sanitizer", tool);
    assert_eq!(
        (&found("memcheck")["ours"]["value"], &found("racecheck")["ours"]["value"]),
        (&0.0.into(), &2.0.into())
    );
    assert_eq!(found("memcheck")["note"], "0 errors; 3 kernels");
    // A tool that ran nothing has found nothing, and shows nothing.
    assert!(found("initcheck")["ours"].is_null(), "{report:#}");
    assert!(found("initcheck")["note"].as_str().unwrap().contains("saw no kernel"), "{report:#}");
}
