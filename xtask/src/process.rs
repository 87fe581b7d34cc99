//! Starting programs: what runs is shown, and a failure names the command.

use std::{
    io::ErrorKind,
    process::{Command, ExitStatus, Stdio},
};

use anyhow::{Context, Result, anyhow, bail};

/// Runs to the end with inherited streams; an error unless the program succeeds.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    announce(command);
    let status = command.status().map_err(|error| cannot_start(command, error))?;
    check(command, status)
}

/// Runs to the end and returns standard output; standard error stays visible.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| cannot_start(command, error))?;
    check(command, output.status)?;
    Ok(output.stdout)
}

/// Whether the program starts and succeeds, silently.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Shows a command on standard error, as it could be typed.
pub(crate) fn announce(command: &Command) {
    eprintln!("+ {}", shown(command));
}

/// Turns a failed status into an error that names the command.
pub(crate) fn check(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("`{}` failed with {status}", shown(command));
    }
    Ok(())
}

/// Names the program that could not be started, and what to do where it is missing.
pub(crate) fn cannot_start(command: &Command, error: std::io::Error) -> anyhow::Error {
    let program = command.get_program().to_string_lossy().into_owned();
    let advice = if error.kind() == ErrorKind::NotFound { "; is it installed and on PATH?" } else { "" };
    anyhow!(error).context(format!("cannot start `{program}`{advice}"))
}

/// `python3`, checked to be there and to have `module`.
pub(crate) fn require_python_module(python: &str, module: &str, package: &str) -> Result<()> {
    let mut version = Command::new(python);
    version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    version
        .status()
        .map_err(|error| cannot_start(&version, error))
        .with_context(|| format!("this chore needs {python} (Debian: apt-get install python3)"))?;
    if !succeeds(Command::new(python).args(["-m", module, "--help"])) {
        bail!("{python} has no module `{module}` (Debian: apt-get install {package})");
    }
    Ok(())
}

fn shown(command: &Command) -> String {
    let environment = command.get_envs().filter_map(|(key, value)| {
        Some(format!("{}={}", key.to_string_lossy(), quoted(&value?.to_string_lossy())))
    });
    let program = command.get_program().to_string_lossy();
    // Cargo passes its own absolute path; what a reader would type is the name.
    let program = program.rsplit('/').next().filter(|name| *name == "cargo").unwrap_or(&program).to_owned();
    let args = command.get_args().map(|arg| quoted(&arg.to_string_lossy()));
    environment.chain([program]).chain(args).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    if word.contains('\n') {
        return "'...'".to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests;
