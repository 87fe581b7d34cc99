//! `cargo xtask device-check`: a folder to be taken to a machine with a GPU, where its `device-check.sh` says whether
//! kernels and models are right there, and how fast beside PyTorch.
//!
//! In it are one stripped program with cubins built in, what every kernel did on the emulator, small models, and the
//! program that does the same in PyTorch. Nothing on that machine is compiled, fetched or installed.

mod cut;
mod recordings;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use consort_kernels::cuda::{cubins::manifest::Manifest, image};

use crate::{cubins, model, process, workspace::Workspace};

/// What machines are given to take in at once.
const FOLDER_BYTES_MAX: u64 = 30 << 20;
/// Of a folder with a real model in it.
const MODEL_FOLDER_BYTES_MAX: u64 = 56 << 20;
/// Of all recordings: the rest is the program.
const RECORDED_BYTES_MAX: u64 = 18 << 20;

const PROGRAM: &str = "consort-device-check";
const SOURCE: &str = "cluster-tests/device-check";
const FIXTURES: &str = "parallel/fixtures";
const MODELS: [&str; 4] = ["tiny_llama", "tiny_llama_odd", "tiny_mistral", "tiny_wide"];
/// Files of a fixture that make a checkpoint.
const CHECKPOINT_ENDINGS: [&str; 3] = ["config.json", ".safetensors", ".safetensors.index.json"];
/// Layers of the real model that are taken along.
const LAYERS: u32 = 8;

/// Kernels that no single launch is recorded of: grids that wait for each other.
const OF_SEVERAL: &str = "all_";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The folder that is made; what it held is replaced.
    #[arg(long, value_name = "DIR", default_value = "target/device-check/folder")]
    out: PathBuf,
    /// A folder for the part `tokens` alone, with eight layers of SmolLM2 in it (some 50 MB) instead of recordings.
    #[arg(long)]
    smollm2: bool,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let work = workspace.root().join("target/device-check");
    let cubins = work.join("cubins");
    cubins::make(workspace, &cubins)?;
    let program = build(workspace, &work, &cubins)?;
    let out = workspace.root().join(&args.out);
    if out.exists() {
        let ours = out.join(PROGRAM).exists() || fs::read_dir(&out)?.next().is_none();
        if !ours {
            bail!("{} holds something else; name another folder with --out", out.display());
        }
        fs::remove_dir_all(&out).with_context(|| format!("cannot remove {}", out.display()))?;
    }
    fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    copy(&program, &out.join(PROGRAM))?;
    let source = workspace.root().join(SOURCE);
    copy(&source.join("device-check.sh"), &out.join("device-check.sh"))?;
    make_executable(&out.join("device-check.sh"))?;
    copy_files(&source.join("peer"), &out.join("peer"), |name| name.ends_with(".py"))?;
    if args.smollm2 {
        let gguf = fs::read(model::ensure(workspace)?).context("cannot read the model")?;
        let cut = cut::layers(&gguf, LAYERS)?;
        let folder = out.join("models");
        fs::create_dir_all(&folder)?;
        fs::write(folder.join(format!("smollm2-{LAYERS}-layers.gguf")), cut)
            .context("cannot write the model")?;
    } else {
        let fixtures = workspace.root().join(FIXTURES);
        for model in MODELS {
            let wanted = |name: &str| CHECKPOINT_ENDINGS.iter().any(|ending| name.ends_with(ending));
            copy_files(&fixtures.join(model), &out.join("models").join(model), wanted)?;
        }
        let kernels = kernels(&cubins)?;
        let single: Vec<&str> =
            kernels.iter().map(String::as_str).filter(|kernel| !kernel.starts_with(OF_SEVERAL)).collect();
        let recorded = recordings::ensure(workspace, &work)?;
        recordings::choose(&recorded, &out.join("recordings"), &single, RECORDED_BYTES_MAX)?;
    }
    let limit = if args.smollm2 { MODEL_FOLDER_BYTES_MAX } else { FOLDER_BYTES_MAX };
    let bytes = report(&out)?;
    if bytes > limit {
        bail!("{} holds {bytes} bytes, more than {limit}", out.display());
    }
    let only = if args.smollm2 { " --only machine,tokens" } else { "" };
    eprintln!("On a machine with a GPU: {}/device-check.sh{only}", args.out.display());
    Ok(())
}

/// The program, stripped, with cubins in it.
fn build(workspace: &Workspace, work: &Path, cubins: &Path) -> Result<PathBuf> {
    let mut described = workspace.command("git");
    described.args(["describe", "--always", "--dirty", "--abbrev=12"]);
    let commit = process::output(&mut described)
        .map_or_else(|_| "no git".to_owned(), |said| String::from_utf8_lossy(&said).trim().to_owned());
    let target = work.join("build");
    let mut cargo = workspace.cargo();
    cargo.args(["build", "--release", "--package", PROGRAM, "--config", "profile.release.strip=true"]);
    cargo.arg("--target-dir").arg(&target);
    cargo.env("CONSORT_CUBINS_DIR", cubins).env("CONSORT_COMMIT", commit);
    process::run(&mut cargo)?;
    Ok(target.join("release").join(PROGRAM))
}

/// Names of all kernels, from the cubins.
fn kernels(cubins: &Path) -> Result<Vec<String>> {
    let manifest = Manifest::read(cubins)?;
    let mut names = Vec::new();
    for entry in &manifest.entries {
        let bytes =
            fs::read(cubins.join(&entry.file)).with_context(|| format!("cannot read {}", entry.file))?;
        names.extend(image::kernels(&bytes)?.into_iter().map(|kernel| kernel.name));
    }
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// The files of a folder whose names are wanted.
fn copy_files(from: &Path, to: &Path, wanted: impl Fn(&str) -> bool) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    let mut copied = 0;
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let entry = entry?;
        if wanted(&entry.file_name().to_string_lossy()) {
            copy(&entry.path(), &to.join(entry.file_name()))?;
            copied += 1;
        }
    }
    if copied == 0 {
        bail!("{} holds no file that is wanted", from.display());
    }
    Ok(())
}

fn make_executable(file: &Path) -> Result<()> {
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", file.display()))
}

/// Tells what the folder holds, and returns its bytes.
fn report(folder: &Path) -> Result<u64> {
    let mut total = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let bytes = bytes_of(&entry.path())?;
        total += bytes;
        eprintln!("{:>12} bytes  {}", bytes, entry.file_name().to_string_lossy());
    }
    eprintln!("{total:>12} bytes in {}", folder.display());
    Ok(total)
}

fn bytes_of(path: &Path) -> Result<u64> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_dir() {
        return Ok(metadata.len());
    }
    fs::read_dir(path)?.map(|entry| bytes_of(&entry?.path())).sum()
}

/// A command that tells nothing but its errors: what tests print while they are recorded is of no interest.
fn silently(command: &mut Command) -> &mut Command {
    command.stdout(std::process::Stdio::null())
}
