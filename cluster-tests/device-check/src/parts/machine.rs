//! The card, its driver and its libraries: what all other figures are to be read with.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use consort_kernels::cuda::{
    device::{CudaDevice, LibraryFacts, libraries, nccl},
    settings::Settings,
};

use crate::{
    figures::{Figure, Row},
    report::Machine,
    session::{Line, Session},
};

/// What every part's figures are to be read with.
pub(crate) fn facts(device: &CudaDevice) -> Machine {
    let facts = device.facts();
    let (major, minor) = facts.capability;
    let gib = facts.memory_bytes as f64 / f64::from(1 << 30);
    let card = format!(
        "{} ({gib:.1} GiB, compute capability {major}.{minor}, {} multiprocessors)",
        facts.name, facts.multiprocessors
    );
    let [driver, products] = libraries(&Settings::of_process());
    Machine {
        time: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs(),
        commit: commit(),
        card,
        driver: told(driver),
        libraries: vec![told(products)],
        peer: String::new(),
    }
}

pub(crate) fn run(session: &mut Session) -> Result<()> {
    let mut machine = facts(&session.device);
    machine.libraries.push(told(nccl(&Settings::of_process())));
    session.line(&Line::Machine(machine))?;
    let started = Instant::now();
    session.device.load_all()?;
    session.row(Row::new("load all kernels", Figure::cost(started.elapsed().as_secs_f64(), "s")))?;
    if let Err(reason) = session.device.matrix_library() {
        bail!("no cuBLASLt: {reason}");
    }
    Ok(())
}

fn told(library: Result<LibraryFacts, String>) -> String {
    match library {
        Ok(LibraryFacts { name, file, version }) => format!("{name} {version} at {}", file.display()),
        Err(reason) => reason.replace('\n', " "),
    }
}

/// The commit that `cargo xtask device-check` built.
fn commit() -> String {
    option_env!("CONSORT_COMMIT").unwrap_or("unknown: not built by `cargo xtask device-check`").to_owned()
}
