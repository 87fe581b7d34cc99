//! Every kernel against what it read and wrote on the emulator.
//!
//! A kernel that ends its context takes the process's with it: its row is written, and the rest is done by this program
//! started anew.

mod compare;
mod recording;
mod replay;

use std::{collections::BTreeMap, os::unix::process::CommandExt, path::PathBuf, process::Command};

use anyhow::{Context, Result};
use consort_kernels::{
    KernelError,
    cuda::{arch::Arch, cubins::Cubins, device::CudaError, image, settings::Settings, sources::SOURCES},
};

use self::{
    compare::{Difference, Tolerance},
    recording::Recording,
    replay::replay,
};
use crate::{
    figures::{Figure, Goal, Row},
    session::Session,
};

/// Kernels that wait for each other are no single launches; the part `all_reduce` runs them.
const OF_SEVERAL: &str = "all_";

/// Set for a process that goes on with the kernel after this one.
const AFTER: &str = "CONSORT_DEVICE_CHECK_AFTER";

pub(crate) fn run(session: &mut Session) -> Result<()> {
    let mut by_kernel: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for file in recording::files(&session.folder.recordings())? {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let kernel = name.rsplit_once('-').map_or(name.as_str(), |(kernel, _)| kernel).to_owned();
        by_kernel.entry(kernel).or_default().push(file);
    }
    for name in kernels_of(session)? {
        if !name.starts_with(OF_SEVERAL) {
            by_kernel.entry(name).or_default();
        }
    }
    let done = std::env::var(AFTER).ok();
    for (kernel, files) in by_kernel {
        if done.as_ref().is_some_and(|done| kernel <= *done) {
            continue;
        }
        let (row, lost) = check(session, &kernel, &files);
        session.row(row)?;
        if lost {
            let mut again = Command::new(std::env::current_exe()?);
            again.args(std::env::args_os().skip(1)).env(AFTER, kernel);
            return Err(again.exec()).context("cannot go on in a new process");
        }
    }
    Ok(())
}

/// The row of a kernel, and whether the device is lost now.
fn check(session: &Session, kernel: &str, files: &[PathBuf]) -> (Row, bool) {
    let goal = Goal::required(1.0, "tolerance");
    let tolerance = tolerance_of(kernel);
    let (mut found, mut equal) = (Difference::default(), 0);
    for file in files {
        let replayed = Recording::read(file).and_then(|recording| replay(session, &recording, tolerance));
        match replayed {
            Ok(difference) => {
                equal += usize::from(difference.differ == 0);
                found = found.and(difference);
            }
            Err(error) => {
                return (Row::without(kernel, format!("{error:#}")).goal(goal), is_lost(&error));
            }
        }
    }
    let Difference { worst, differ, elements, changed } = found;
    if changed == 0 {
        return (
            Row::without(kernel, "no launch of it that changes anything was recorded").goal(goal),
            false,
        );
    }
    let note =
        format!("{} launches, {equal} of equal bits; {differ} of {elements} elements differ", files.len());
    (Row::new(kernel, Figure::cost(f64::from(worst), "of tolerance")).goal(goal).note(note), false)
}

/// Whether the device is of no use to this process any more: its context has ended, or a kernel goes on for ever.
fn is_lost(error: &anyhow::Error) -> bool {
    let error = match error.downcast_ref::<KernelError>() {
        Some(KernelError::Cuda(error)) => Some(&**error),
        _ => error.downcast_ref::<CudaError>(),
    };
    error.is_some_and(|error| error.is_lost() || matches!(error, CudaError::Timeout { .. }))
}

/// Attention rounds weights of keys to BF16, so that a last bit of an approximate exponential may become 2^-9 of one.
/// Candidates are listed as they are found, by whichever thread comes first.
fn tolerance_of(kernel: &str) -> Tolerance {
    Tolerance {
        float: if kernel.starts_with("attention") { 4e-3 } else { 1e-4 },
        any_order: kernel == "sampling_candidates",
    }
}

/// The kernels that this device's cubins hold; none where they are no cubins, as over a software driver.
fn kernels_of(session: &Session) -> Result<Vec<String>> {
    let (major, minor) = session.device.facts().capability;
    let (cubins, arch) = (Cubins::new(Settings::of_process()), Arch::of_device(major, minor)?);
    let mut names = Vec::new();
    for source in SOURCES {
        let cubin = cubins.cubin(source, arch)?;
        if cubin.bytes.starts_with(b"\x7fELF") {
            names.extend(image::kernels(&cubin.bytes)?.into_iter().map(|kernel| kernel.name));
        }
    }
    Ok(names)
}
