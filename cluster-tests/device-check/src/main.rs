//! `consort-device-check`: on a machine with a GPU, whether kernels and models compute what they do elsewhere, and how
//! fast, beside PyTorch on the same card in the same run.
//!
//! `cargo xtask device-check` builds it, stripped, into a folder with all it needs, to be taken to that machine, where
//! `device-check.sh` starts it. [`supervise`] runs each part as a process of its own, so that a part that hangs, is
//! killed or loses its context takes nothing from another; the table is printed last.
#![allow(clippy::print_stdout)] // a command line tool talks on standard output
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

mod figures;
mod folder;
mod parts;
mod peer;
mod report;
mod session;
mod supervise;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

use self::{folder::Folder, session::Size};

#[derive(Parser)]
#[command(about = "Checks Consort on a GPU: right or not, and how fast beside PyTorch")]
struct Cli {
    /// Folder of recordings, models and the peer's program [default: where this program is].
    #[arg(long, value_name = "DIR", global = true)]
    folder: Option<PathBuf>,
    /// Sizes: those of the models that people run, or small ones that show whether the check itself works.
    #[arg(long, value_enum, default_value_t = Size::Full, global = true)]
    size: Size,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run all parts, or some, and print the table.
    Run(supervise::Args),
    /// Name the parts.
    List,
    /// Run one part in this process. `run` starts this.
    #[command(hide = true)]
    Part(parts::Args),
    /// Be one of the ranks of the part `processes`, which starts this.
    #[command(hide = true)]
    Rank(parts::RankArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = Folder::find(cli.folder).and_then(|folder| match cli.command {
        Command::Run(args) => supervise::run(&folder, cli.size, &args),
        Command::List => {
            print!("{}", parts::list());
            Ok(true)
        }
        Command::Part(args) => parts::run(folder, cli.size, &args).map(|()| true),
        Command::Rank(args) => args.run(cli.size).map(|()| true),
    });
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
