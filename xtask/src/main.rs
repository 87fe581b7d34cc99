//! Chores of the workspace, as `cargo xtask CHORE`.
//!
//! Each chore is one module. Programs are started with the workspace root as working directory, and the first failure
//! ends a chore with the command that failed; only [`tidy`] goes on, to report everything at once. Nothing here is
//! part of the product, and no other crate depends on it.

#![allow(clippy::print_stdout)] // a command line tool talks on standard output

mod abi;
mod bench;
mod cubins;
mod demo;
mod device_check;
mod emulate;
mod fixtures;
mod model;
mod process;
mod simulate;
mod test;
mod tidy;
mod venv;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Chores of the Consort workspace", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Fetch SmolLM2-135M-Instruct (98 MB, checked by SHA-256) into target/models, unless it is there.
    Model(model::Args),
    /// Fetch the model, build in release mode, and let three CPU shards answer a question.
    Demo(demo::Args),
    /// Fetch the model and run every test of the workspace. Extra arguments go to `cargo test`.
    Test(test::Args),
    /// Compile every CUDA kernel with NVRTC, fetched from PyPI; fail on spills, print registers and occupancy.
    Cubins(cubins::Args),
    /// Hold the software driver's declarations against CUDA's headers, fetched from PyPI.
    Abi(abi::Args),
    /// Check format, lints, docs, crate arrows, file sizes and where `unsafe` stands.
    Tidy(tidy::Args),
    /// Run the CUDA texts' tests on the host, perhaps under a sanitizer.
    Emulate(emulate::Args),
    /// Make a folder that checks kernels and models on a machine with a GPU, and how fast they are beside PyTorch.
    DeviceCheck(device_check::Args),
    /// Measure how fast a model answers on this machine, if wanted beside llama.cpp, vLLM and OpenVINO.
    Bench(bench::Args),
    /// Simulate the scheduler, seed after seed, until time is over or an invariant breaks.
    Simulate(simulate::Args),
    /// Generate the reference logits anew, with torch and transformers (several GB; never in CI).
    Fixtures(fixtures::Args),
}

fn main() -> ExitCode {
    match run(Cli::parse().chore) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not by returning it: a backtrace of xtask says nothing about the chore that failed.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(chore: Chore) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    match chore {
        Chore::Model(args) => model::run(&workspace, &args),
        Chore::Demo(args) => demo::run(&workspace, &args),
        Chore::Test(args) => test::run(&workspace, &args),
        Chore::Cubins(args) => cubins::run(&workspace, &args),
        Chore::Abi(args) => abi::run(&workspace, &args),
        Chore::Tidy(args) => tidy::run(&workspace, &args),
        Chore::Emulate(args) => emulate::run(&workspace, &args),
        Chore::DeviceCheck(args) => device_check::run(&workspace, &args),
        Chore::Bench(args) => bench::run(&workspace, &args),
        Chore::Simulate(args) => simulate::run(&workspace, &args),
        Chore::Fixtures(args) => fixtures::run(&workspace, &args),
    }
}
