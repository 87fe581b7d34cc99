//! `consort doctor`: what this machine has for serving models, and what to do about each gap.
//!
//! [`gpus`] and [`host`] look and [`facts`] is what they see; [`wanted`] holds it against the devices that somebody
//! asks for, and [`report`] turns it into lines and advice. Nothing is changed by looking, and nothing is needed: on a
//! machine without CUDA this takes milliseconds.

mod facts;
mod gpus;
mod host;
mod report;
#[cfg(test)]
mod tests;
mod variables;
mod wanted;

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use consort_kernels::cuda::settings::Settings;

pub(super) use self::wanted::WantedDevice;
use self::{
    facts::Facts,
    gpus::CudaFacts,
    report::Report,
    wanted::{Asked, Verdict},
};
use super::args::DoctorArgs;
use crate::topology::{Environment, Overrides, Topology, TopologyError};

/// A driver that takes longer hangs. Eight cards that nobody keeps awake take some ten seconds.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Where to look.
struct Surroundings {
    settings: Settings,
    environment: Environment,
    /// What `/proc` and `/sys` are in.
    root: PathBuf,
}

/// What was seen, and what comes of it.
struct Examination {
    facts: Facts,
    verdict: Option<Verdict>,
    topology_error: Option<TopologyError>,
}

/// A machine that has not what somebody asks for.
#[derive(Debug, thiserror::Error)]
#[error("{} cannot be used on this machine; the report says why", .devices.join(", "))]
struct NotMet {
    devices: Vec<String>,
}

pub(super) async fn doctor(args: DoctorArgs) -> anyhow::Result<()> {
    let surroundings = Surroundings {
        settings: Settings::of_process(),
        environment: Environment::of_process(),
        root: PathBuf::from("/"),
    };
    let examination = Examination::new(&args, &surroundings).await;
    let text = if args.json { examination.json()? } else { examination.text() };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    examination.outcome()
}

impl Examination {
    async fn new(args: &DoctorArgs, surroundings: &Surroundings) -> Examination {
        let facts = look(surroundings).await;
        let (asked, topology_error) = match asked(args, &surroundings.environment) {
            Ok(asked) => (asked, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let verdict = (!asked.is_empty()).then(|| wanted::judge(&asked, &facts));
        Examination { facts, verdict, topology_error }
    }

    fn report(&self) -> Report<'_> {
        report::report(&self.facts, self.verdict.as_ref())
    }

    fn text(&self) -> String {
        self.report().text()
    }

    fn json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(&self.report())? + "\n")
    }

    /// What the exit code is made of.
    fn outcome(self) -> anyhow::Result<()> {
        if let Some(error) = self.topology_error {
            return Err(error.into());
        }
        let devices = self.verdict.map(|verdict| verdict.unusable()).unwrap_or_default();
        if devices.is_empty() { Ok(()) } else { Err(NotMet { devices }.into()) }
    }
}

/// The devices that the command line and the topology name.
fn asked(args: &DoctorArgs, environment: &Environment) -> Result<Vec<Asked>, TopologyError> {
    let mut asked: Vec<Asked> = args.device.iter().map(|device| Asked::flag(*device)).collect();
    if let Some(path) = &args.topology {
        let topology = topology(path, environment)?;
        let several = topology.data_parallel_size() > 1;
        for (replica, devices) in topology.replica_devices().enumerate() {
            let ranks = devices.iter().enumerate();
            asked.extend(ranks.map(|(rank, device)| match several {
                true => Asked::rank_of(replica, rank, *device),
                false => Asked::rank(rank, *device),
            }));
        }
    }
    Ok(asked)
}

fn topology(path: &Path, environment: &Environment) -> Result<Topology, TopologyError> {
    // The server's address and key have nothing to do with devices.
    let overrides = Overrides { without_server: true, isolates_gpus: true, ..Overrides::default() };
    Topology::load_with(path, &overrides, environment)
}

async fn look(surroundings: &Surroundings) -> Facts {
    let settings = surroundings.settings.clone();
    let cuda = within(ANSWER_MAX, move || CudaFacts::look(&settings)).await;
    let cuda = cuda.unwrap_or_else(CudaFacts::unanswered);
    let environment = &surroundings.environment;
    Facts {
        version: env!("CARGO_PKG_VERSION"),
        driver: cuda.driver,
        kernel_module_version: host::kernel_module_version(&surroundings.root),
        cards_on_bus: host::cards_on_bus(&surroundings.root),
        cards: cuda.cards,
        links: cuda.links,
        nvlink_problem: cuda.nvlink_problem,
        libraries: cuda.libraries,
        embedded_cubins: cuda.embedded_cubins,
        cubin_cache: cuda.cubin_cache,
        host: host::look(&surroundings.root, environment),
        environment: variables::set(environment),
    }
}

/// What `work` returns; else how it did not. It is left behind if it takes longer than `limit`.
async fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    match tokio::time::timeout(limit, tokio::task::spawn_blocking(work)).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(format!("asking it was cut short: {error}")),
        Err(_) => Err(format!("it did not answer within {} s", limit.as_secs())),
    }
}
