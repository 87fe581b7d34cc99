//! `cargo xtask demo`: the model, a release build, and three CPU shards that answer a question.

use anyhow::Result;

use crate::{model, process, workspace::Workspace};

const TOPOLOGY: &str = "examples/topologies/three-cpu-shards.toml";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave the server up after the answer.
    #[arg(long)]
    serve: bool,
    /// Passed on to `consort demo`.
    #[arg(last = true, value_name = "ARGS")]
    rest: Vec<String>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    model::ensure(workspace)?;
    process::run(workspace.cargo().args(["build", "--release", "--package", "consort"]))?;
    let binary = workspace.target_directory()?.join("release").join("consort");
    let mut demo = workspace.command(binary);
    demo.args(["demo", TOPOLOGY]);
    if args.serve {
        demo.arg("--serve");
    }
    process::run(demo.args(&args.rest))
}
