//! The `consort` command: a thin shell over [`crate::Engine`] and [`crate::server`].
//!
//! Answers go to standard output, everything else to standard error. Exit codes: 0 done, 1 failed, 2 called wrongly; of
//! `consort plan` 1 means that the model does not fit, and 2 everything else that goes wrong.

mod args;
mod bench;
mod client;
mod convert;
mod demo;
mod doctor;
#[cfg(test)]
mod goldens;
mod plan;
mod progress;
mod report;
mod run;
mod serve;
#[cfg(test)]
mod tests;

use std::{io::IsTerminal, process::ExitCode};

use clap::Parser;
use tracing_subscriber::EnvFilter;

use self::args::{Cli, Command};
use crate::error::RequestError;

const FAILED: u8 = 1;
const USAGE: u8 = 2;

/// Parses the command line, runs it, and tells what went wrong, once.
pub fn main() -> ExitCode {
    if let Some(code) = crate::shard_main() {
        return code;
    }
    // Wrong usage ends here, with code 2.
    let cli = Cli::parse();
    let exit_code: fn(&anyhow::Error) -> u8 = match &cli.command {
        Command::Plan(_) => plan::exit_code,
        _ => exit_code,
    };
    if matches!(cli.command, Command::Shard) {
        eprintln!("consort shard is a part of `consort serve --isolation process`, which starts it itself");
        return ExitCode::from(USAGE);
    }
    match start(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if report::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", report::chain(&error));
            ExitCode::from(exit_code(&error))
        }
    }
}

fn exit_code(error: &anyhow::Error) -> u8 {
    let request = error.downcast_ref::<RequestError>();
    if request.is_some_and(RequestError::is_about_the_request) { USAGE } else { FAILED }
}

fn start(cli: Cli) -> anyhow::Result<()> {
    let filter = match &cli.log {
        Some(filter) => EnvFilter::try_new(filter)?,
        None => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn")),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let runtime = tokio::runtime::Runtime::new()?;
    let outcome = runtime.block_on(async {
        match cli.command {
            Command::Serve(args) => serve::serve(args).await,
            Command::Run(args) => run::run(args).await,
            Command::Bench(args) => bench::bench(args).await,
            Command::Convert(args) => convert::convert(args).await,
            Command::Plan(args) => plan::plan(args).await,
            Command::Demo(args) => demo::demo(args).await,
            Command::Doctor(args) => doctor::doctor(args).await,
            Command::Shard => Ok(()), // Told before.
        }
    });
    // A blocking thread that is still loading must not hold up the end.
    runtime.shutdown_background();
    outcome
}
