//! `cargo xtask test`: the model, then every test of the workspace, then one line that adds up all binaries' results.

use std::{
    ffi::OsString,
    io::{BufRead, BufReader, IsTerminal, Write},
    process::Stdio,
};

use anyhow::{Context, Result};

use crate::{model, process, workspace::Workspace};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Passed on to `cargo test`: filters, `--package NAME`, `-- --nocapture`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    rest: Vec<OsString>,
}

/// Results of several test binaries, added up.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    ignored: u64,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    model::ensure(workspace)?;
    let mut command = workspace.cargo();
    command.arg("test");
    // As typed: clap would swallow a leading `--`, which means something to cargo.
    let rest = if args.rest.is_empty() { Vec::new() } else { std::env::args_os().skip(2).collect() };
    if !chooses_packages(&rest) {
        command.arg("--workspace");
    }
    // One failing binary must not hide the results of the others.
    command.arg("--no-fail-fast");
    if std::io::stdout().is_terminal() {
        command.arg("--color=always");
    }
    command.args(&rest).stdout(Stdio::piped());
    process::announce(&command);

    let mut child = command.spawn().map_err(|error| process::cannot_start(&command, error))?;
    let output = child.stdout.take().context("cargo test has no standard output")?;
    let mut tally = Tally::default();
    let mut forward = std::io::stdout().lock();
    for line in BufReader::new(output).split(b'\n') {
        let line = line.context("cannot read the output of cargo test")?;
        tally.add_line(&String::from_utf8_lossy(&line));
        forward.write_all(&line)?;
        forward.write_all(b"\n")?;
    }
    let status = child.wait().context("cannot wait for cargo test")?;
    writeln!(forward, "\n{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.ignored)?;
    drop(forward);
    process::check(&command, status)
}

/// Whether the arguments before `--` already say which packages to test.
fn chooses_packages(args: &[OsString]) -> bool {
    args.iter().take_while(|arg| *arg != "--").any(|arg| {
        let arg = arg.to_string_lossy();
        arg == "--workspace" || arg == "--all" || arg.starts_with("-p") || arg.starts_with("--package")
    })
}

impl Tally {
    /// Adds a summary line of the test runner; any other line changes nothing.
    fn add_line(&mut self, line: &str) {
        let line = without_colour(line);
        let Some(summary) = line.strip_prefix("test result: ") else { return };
        let Some((_, counts)) = summary.split_once(". ") else { return };
        for part in counts.split("; ") {
            let Some((count, what)) = part.split_once(' ') else { continue };
            let Ok(count) = count.parse::<u64>() else { continue };
            match what {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.ignored += count,
                _ => {}
            }
        }
    }
}

/// The line without ANSI escape sequences (ESC to the first letter; the runner writes only these and `ESC ( B`).
fn without_colour(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            chars.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(c);
        }
    }
    plain
}

#[cfg(test)]
mod tests;
