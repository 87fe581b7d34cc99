//! `cargo xtask abi`: the software driver's view of CUDA's C interfaces against the real headers.
//!
//! The headers come in Python wheels, as the compiler of CUDA kernels does. Each file of `kernels/emulator/driver/abi`
//! includes one of them beside our own declarations and asserts name by name that values, sizes, offsets and signatures
//! are the same, so compiling it is the check. Needs a C++ compiler, and neither a GPU nor a toolkit.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::{cubins::REQUIREMENTS, process, venv, workspace::Workspace};

const CHECKS: &str = "kernels/emulator/driver/abi";

/// A header of CUDA's and where its wheel puts it; those without a place come with no wheel small enough to fetch.
struct Header {
    name: &'static str,
    check: &'static str,
    wheel_folder: Option<&'static str>,
    /// Folder beside the check that stands in for headers that come with toolkits only.
    stand_in: Option<&'static str>,
    /// File beside the check that keeps what the header says, for tests on machines without it. The check prints it.
    facts: Option<&'static str>,
}

const HEADERS: &[Header] = &[
    Header::of_wheel("cuda.h", "driver.cpp", "nvidia/cu13/include"),
    Header::of_wheel("nvrtc.h", "nvrtc.cpp", "nvidia/cuda_nvrtc/include"),
    Header { name: "cublasLt.h", check: "cublaslt.cpp", wheel_folder: None, stand_in: None, facts: None },
    Header {
        name: "nccl.h",
        check: "nccl.cpp",
        wheel_folder: None,
        stand_in: Some("nccl_stand_in"),
        facts: Some("nccl_facts.txt"),
    },
];

impl Header {
    const fn of_wheel(name: &'static str, check: &'static str, folder: &'static str) -> Header {
        Header { name, check, wheel_folder: Some(folder), stand_in: None, facts: None }
    }
}

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Take headers from this folder, too: that of a toolkit also has cublasLt.h, and that of the wheel
    /// nvidia-nccl-cu12 has nccl.h; these wheels are too large to fetch.
    #[arg(long, value_name = "DIR")]
    include: Vec<PathBuf>,
    /// Write down anew what headers say whose facts are kept for tests, instead of comparing with them.
    #[arg(long)]
    facts: bool,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let venv = venv::ensure(workspace, "venv-cubins", REQUIREMENTS)?;
    let out = workspace.root().join("target/abi");
    fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let mut problems = Vec::new();
    for header in HEADERS {
        let mut folders = args.include.clone();
        if let Some(folder) = header.wheel_folder {
            folders.push(venv.package_file(folder)?);
        }
        if !folders.iter().any(|folder| folder.join(header.name).exists()) {
            println!(
                "{}: not compared, no folder given holds it (see --include); unit tests hold our view against {}",
                header.name,
                if header.facts.is_some() { "the facts kept of it" } else { "cudarc's bindings" }
            );
            continue;
        }
        if let Some(stand_in) = header.stand_in {
            folders.push(workspace.root().join(CHECKS).join(stand_in));
        }
        let compared = compare(workspace, header.check, &folders, &out)
            .and_then(|summary| kept(workspace, header, &out, args.facts).map(|()| summary));
        match compared {
            Ok(summary) => print!("{summary}"),
            Err(error) => problems.push(format!("{}: {error:#}", header.name)),
        }
    }
    if !problems.is_empty() {
        bail!("our declarations are not the header's:\n{}", problems.join("\n"));
    }
    Ok(())
}

/// Compiles a check and returns what it compared, or the compiler's errors.
fn compare(workspace: &Workspace, check: &str, folders: &[PathBuf], out: &Path) -> Result<String> {
    let program = out.join(check).with_extension("");
    let compiler = env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut compile = workspace.command(compiler);
    compile.args(["-std=c++20", "-Wall", "-o"]).arg(&program);
    // As system headers: their warnings are nobody's business.
    for folder in folders {
        compile.arg("-isystem").arg(folder);
    }
    compile.arg(workspace.root().join(CHECKS).join(check));
    let output = compile.output().map_err(|error| process::cannot_start(&compile, error))?;
    if !output.status.success() {
        bail!("{}", errors(&String::from_utf8_lossy(&output.stderr)));
    }
    let summary = process::output(&mut workspace.command(&program))?;
    String::from_utf8(summary).context("the check printed no text")
}

/// Holds what is kept of a header against it, or keeps it anew.
fn kept(workspace: &Workspace, header: &Header, out: &Path, anew: bool) -> Result<()> {
    let Some(name) = header.facts else { return Ok(()) };
    let mut program = workspace.command(out.join(header.check).with_extension(""));
    let facts =
        String::from_utf8(process::output(program.arg("facts"))?).context("the check printed no text")?;
    let file = workspace.root().join(CHECKS).join(name);
    if anew {
        return fs::write(&file, facts).with_context(|| format!("cannot write {}", file.display()));
    }
    let known = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let differences = differences(&known, &facts);
    if differences.is_empty() {
        return Ok(());
    }
    bail!("{}, which `cargo xtask abi --facts` writes, says something else:\n{differences}", file.display())
}

/// Lines of only one of two texts, whatever their order.
fn differences(kept: &str, header: &str) -> String {
    let only = |of: &str, other: &str, mark: &str| -> Vec<String> {
        let other: Vec<&str> = other.lines().collect();
        of.lines().filter(|line| !other.contains(line)).map(|line| format!("{mark} {line}")).collect()
    };
    [only(kept, header, "-"), only(header, kept, "+")].concat().join("\n")
}

/// The lines that say what is wrong, of all that the compiler has to say.
fn errors(output: &str) -> String {
    let errors: Vec<&str> = output.lines().filter(|line| line.contains("error:")).collect();
    if errors.is_empty() { output.trim_end().to_owned() } else { errors.join("\n") }
}

#[cfg(test)]
mod tests;
