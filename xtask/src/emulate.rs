//! `cargo xtask emulate`: the kernels' emulated tests, plain or under a sanitizer.
//!
//! The C++ that is made of the kernels' CUDA texts is compiled with the sanitizer and its library is preloaded, so that
//! it also watches the memory that Rust allocates. Everything goes into a target folder of its own.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{process, workspace::Workspace};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Under AddressSanitizer: any access out of bounds or after free.
    #[arg(long, conflicts_with = "tsan")]
    asan: bool,
    /// Under ThreadSanitizer: any two accesses that no barrier or flag orders.
    #[arg(long)]
    tsan: bool,
    /// Only emulated tests whose names hold this, say an operation's.
    #[arg(default_value = "")]
    filter: String,
    /// The package whose tests run.
    #[arg(long, short, default_value = "consort-kernels")]
    package: String,
}

/// What a sanitizer is called where.
struct Sanitizer {
    name: &'static str,
    library: &'static str,
    options: (&'static str, &'static str),
}

const ADDRESS: Sanitizer = Sanitizer {
    name: "address",
    library: "asan",
    // The emulator's fibers and the test runner never end cleanly enough for the leak checker.
    options: ("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0"),
};

const THREAD: Sanitizer = Sanitizer {
    name: "thread",
    library: "tsan",
    options: ("TSAN_OPTIONS", "halt_on_error=1:report_thread_leaks=0"),
};

/// How Rust's threads synchronise is not watched, so whatever happens within Rust's functions (their names are mangled
/// so) is no finding. The threads of a kernel have none on their stacks.
const NOT_WATCHED: &str = "race:_RN\nrace:_ZN7consort\nrace:_ZN14consort\nrace:_ZN15consort\nrace:_ZN16consort\n\
                           race:_ZN3std\nrace:_ZN4core\nrace:_ZN5alloc\n";

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let sanitizer = match (args.asan, args.tsan) {
        (true, _) => Some(&ADDRESS),
        (_, true) => Some(&THREAD),
        _ => None,
    };
    let listed =
        String::from_utf8(process::output(tests(workspace, args, sanitizer)?.args(["--list", "emulator"]))?)?;
    let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
    let names: Vec<&str> = names.filter(|name| name.contains(&args.filter)).collect();
    if names.is_empty() {
        bail!("no emulated test of {} holds {:?} in its name", args.package, args.filter);
    }
    let mut command = tests(workspace, args, sanitizer)?;
    command.arg("--exact").args(names);
    if args.tsan {
        command.arg("--test-threads=1");
    }
    process::run(&mut command)
}

/// `cargo test` with the sanitizer, up to the arguments of the test program.
fn tests(workspace: &Workspace, args: &Args, sanitizer: Option<&Sanitizer>) -> Result<Command> {
    let mut command = workspace.cargo();
    command.args(["test", "--package", &args.package]);
    if let Some(sanitizer) = sanitizer {
        let host = host(workspace)?;
        let folder = workspace.target_directory()?.join(format!("emulate-{}", sanitizer.library));
        let library = library(workspace, sanitizer)?;
        // With a target given, build scripts and macros keep their plain flags.
        command.args(["--target", &host, "--target-dir"]).arg(&folder);
        command.env("CONSORT_SANITIZE", sanitizer.name);
        command.env("RUSTFLAGS", format!("-Clink-arg=-l{}", sanitizer.library));
        let mut runner = OsString::from("setarch -R env ");
        runner.push(format!("{}={}", sanitizer.options.0, sanitizer.options.1));
        if args.tsan {
            runner.push(":suppressions=");
            runner.push(suppressions(&folder)?);
        }
        runner.push(" LD_PRELOAD=");
        runner.push(library);
        let host = host.to_uppercase().replace('-', "_");
        command.env(format!("CARGO_TARGET_{host}_RUNNER"), runner);
    }
    command.args(["--lib", "--"]);
    Ok(command)
}

/// A file for the race detector that says what is no finding.
fn suppressions(folder: &Path) -> Result<PathBuf> {
    let path = folder.join("not-watched.txt");
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&path, NOT_WATCHED))
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// The triple of this machine, as rustc names it.
fn host(workspace: &Workspace) -> Result<String> {
    let output = process::output(workspace.command("rustc").arg("-vV"))?;
    let text = String::from_utf8_lossy(&output);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("rustc -vV names no host")
}

/// Where the C++ compiler keeps the sanitizer's library.
fn library(workspace: &Workspace, sanitizer: &Sanitizer) -> Result<PathBuf> {
    let name = format!("lib{}.so", sanitizer.library);
    let output = process::output(workspace.command("c++").arg(format!("-print-file-name={name}")))?;
    let path = PathBuf::from(String::from_utf8_lossy(&output).trim());
    if !path.is_absolute() {
        bail!("the C++ compiler has no {name} (Debian: apt-get install g++)");
    }
    path.canonicalize().with_context(|| format!("no sanitizer library at {}", path.display()))
}
