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
}

const HEADERS: &[Header] = &[
    Header { name: "cuda.h", check: "driver.cpp", wheel_folder: Some("nvidia/cu13/include") },
    Header { name: "nvrtc.h", check: "nvrtc.cpp", wheel_folder: Some("nvidia/cuda_nvrtc/include") },
    Header { name: "cublasLt.h", check: "cublaslt.cpp", wheel_folder: None },
];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Take headers from this folder, too: that of a toolkit also has cublasLt.h, whose wheel is too large to fetch.
    #[arg(long, value_name = "DIR")]
    include: Vec<PathBuf>,
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
                "{}: not compared, no folder given holds it (see --include); unit tests hold it against cudarc's \
                 bindings",
                header.name
            );
            continue;
        }
        match compare(workspace, header.check, &folders, &out) {
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

/// The lines that say what is wrong, of all that the compiler has to say.
fn errors(output: &str) -> String {
    let errors: Vec<&str> = output.lines().filter(|line| line.contains("error:")).collect();
    if errors.is_empty() { output.trim_end().to_owned() } else { errors.join("\n") }
}

#[cfg(test)]
mod tests;
