//! `cargo xtask simulate`: the scheduler's simulation, seed after seed, until time is over or something fails.
//!
//! A failure is shrunk, printed with the commands that replay it, and ends the chore.

use std::time::Duration;

use anyhow::Result;

use crate::{process, workspace::Workspace};

/// The test that runs on; it reads the environment.
const TEST: &str = "scheduler::simulation::runs::the_long_run_finds_nothing";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The first seed; each one that follows is greater by one.
    #[arg(long)]
    seed: Option<u64>,
    /// How long: 90s, 10m, 2h. For ever without it.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    time: Option<Duration>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let mut command = workspace.cargo();
    command.args(["test", "--package", "consort-actors", "--lib"]);
    command.args(["--", "--ignored", "--exact", TEST, "--nocapture"]);
    if let Some(seed) = args.seed {
        command.env("CONSORT_SIMULATION_SEED", seed.to_string());
    }
    if let Some(time) = args.time {
        command.env("CONSORT_SIMULATION_SECONDS", time.as_secs().to_string());
    }
    process::run(&mut command)
}

/// A whole number with its unit.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no time: 90s, 10m or 2h is");
    let units = [("s", 1), ("m", 60), ("h", 3600)];
    let (number, seconds) = units
        .into_iter()
        .find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, seconds)))
        .ok_or_else(wrong)?;
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_whole_number_with_its_unit() {
        for (text, seconds) in [("90s", 90), ("10m", 600), ("2h", 7200)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)));
        }
        for wrong in ["", "10", "m", "1.5h", "-3s", "99999999999999999999h"] {
            assert!(duration(wrong).is_err(), "{wrong:?}");
        }
    }
}
