//! `cargo xtask fixtures`: reference logits from torch and transformers, in a virtual environment under target/.
//!
//! Needs several GB and minutes; its small outputs are committed, so neither tests nor CI ever run it.

use std::path::PathBuf;

use anyhow::Result;

use crate::{model, process, venv, workspace::Workspace};

const FOLDER: &str = "parallel/fixtures";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A Python that already has torch, transformers, safetensors and gguf; no environment is made then.
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
    /// Also write SmolLM2, converted to BF16, as a Hugging Face folder.
    #[arg(long, value_name = "DIR")]
    save_hf: Option<PathBuf>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let python = match &args.python {
        Some(python) => std::path::absolute(python)?,
        None => venv::ensure(workspace, "venv-fixtures", &format!("{FOLDER}/requirements.txt"))?.python(),
    };
    let model = model::ensure(workspace)?;
    let script = |name: &str| {
        let mut command = workspace.command(&python);
        command.arg(format!("{FOLDER}/{name}")).args(["--out", FOLDER]);
        command
    };
    process::run(workspace.command(&python).arg(format!("{FOLDER}/make_gguf.py")))?;
    process::run(&mut script("make_tiny_llama.py"))?;
    let mut adjustments = workspace.command(&python);
    process::run(adjustments.args(["kernels/fixtures/make_adjustments.py", "--out", "kernels/fixtures"]))?;
    let mut logits = script("make_smollm2_logits.py");
    logits.arg("--gguf").arg(model);
    if let Some(folder) = &args.save_hf {
        logits.arg("--save-hf").arg(std::path::absolute(folder)?);
    }
    process::run(&mut logits)
}
