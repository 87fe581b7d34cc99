//! The card, its driver and its libraries: what all other figures are to be read with.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use consort_kernels::cuda::{
    device::{CudaError, libraries, nccl},
    settings::Settings,
};

use crate::{
    figures::{Figure, Row},
    report::Machine,
    session::{Line, Session},
};

pub(crate) fn run(session: &mut Session) -> Result<()> {
    let facts = session.device.facts().clone();
    let (major, minor) = facts.capability;
    let gib = facts.memory_bytes as f64 / f64::from(1 << 30);
    let card = format!(
        "{} ({gib:.1} GiB, compute capability {major}.{minor}, {} multiprocessors)",
        facts.name, facts.multiprocessors
    );
    let settings = Settings::of_process();
    let [driver, products] = libraries(&settings);
    let collectives = nccl(&settings);
    let told = |library: &Result<consort_kernels::cuda::device::LibraryFacts, String>| match library {
        Ok(facts) => format!("{facts:?}"),
        Err(reason) => format!("none: {reason}"),
    };
    let machine = Machine {
        time: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs(),
        commit: commit(),
        card,
        driver: told(&driver),
        libraries: vec![told(&products), told(&collectives)],
        peer: String::new(),
    };
    session.line(&Line::Machine(machine))?;
    let started = std::time::Instant::now();
    session.device.load_all()?;
    let loading = Figure::cost(started.elapsed().as_secs_f64(), "s");
    session.row(Row::new("load all kernels", loading))?;
    match session.device.matrix_library() {
        Ok(_) => Ok(()),
        Err(reason) => {
            Err(CudaError::Misuse { device: facts.name, reason: format!("no cuBLASLt: {reason}") }.into())
        }
    }
}

/// The commit that `cargo xtask device-check` built.
fn commit() -> String {
    option_env!("CONSORT_COMMIT").unwrap_or("unknown: not built by `cargo xtask device-check`").to_owned()
}
