//! The part `kernels` once more under NVIDIA's compute-sanitizer, where the machine has it: accesses out of bounds,
//! races in shared memory, memory that was never written, barriers that some threads do not reach.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{
    figures::{Figure, Goal, Row},
    session::{Line, Session},
};

const PROGRAM: &str = "compute-sanitizer";
/// Where it is when it is not on `PATH`.
const TOOLKITS: [&str; 2] = ["/usr/local/cuda/bin", "/opt/cuda/bin"];
const TOOLS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];
/// Longest time of one: kernels are many times as slow.
const TOOL_LIMIT: Duration = Duration::from_secs(60);
/// What a tool says last.
const SUMMARIES: [&str; 2] = ["ERROR SUMMARY: ", "RACECHECK SUMMARY: "];

pub(crate) fn run(session: &mut Session) -> Result<()> {
    let Some(program) = find() else {
        return session.row(Row::without(PROGRAM, "not on this machine: it comes with CUDA's toolkit"));
    };
    // Two contexts on one card are no trouble; this one does nothing meanwhile.
    for tool in TOOLS {
        let row = match findings(&program, tool, session.folder.path()) {
            Ok((count, summary)) => Row::new(tool, Figure::cost(count, "findings")).note(summary),
            Err(error) => Row::without(tool, format!("{error:#}")),
        };
        session.row(row.goal(Goal::required(0.0, "clean kernels")))?;
    }
    Ok(())
}

fn find() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(TOOLKITS.iter().map(PathBuf::from));
    folders.map(|folder| folder.join(PROGRAM)).find(|program| program.is_file())
}

/// How many findings a tool has, and its own summary with the number of kernels that it saw.
fn findings(program: &Path, tool: &str, folder: &Path) -> Result<(f64, String)> {
    let log = env::temp_dir().join(format!("consort-device-check-{}-{tool}.log", std::process::id()));
    let rows = log.with_extension("jsonl");
    let outcome = run_tool(program, tool, folder, &log, &rows);
    let said = std::fs::read_to_string(&log).unwrap_or_default();
    let checked = kernels_in(&std::fs::read_to_string(&rows).unwrap_or_default());
    // Whatever was not made is not there to be removed.
    let _ = (std::fs::remove_file(&log), std::fs::remove_file(&rows));
    outcome?;
    let (count, summary) = summary(&said).with_context(|| format!("{tool} gave no summary"))?;
    if checked == 0 {
        bail!("{tool} saw no kernel: {summary}");
    }
    Ok((count, format!("{summary}; {checked} kernels")))
}

/// Kernels with a result.
fn kernels_in(lines: &str) -> usize {
    let rows = lines.lines().filter_map(|line| match serde_json::from_str(line) {
        Ok(Line::Row(row)) => Some(row),
        _ => None,
    });
    rows.filter(|row| row.ours.is_some()).count()
}

fn run_tool(program: &Path, tool: &str, folder: &Path, log: &Path, rows: &Path) -> Result<()> {
    let mut command = Command::new(program);
    command.args(["--tool", tool, "--log-file"]).arg(log).arg(env::current_exe()?);
    let part: [OsString; 5] =
        ["--folder".into(), folder.into(), "part".into(), "kernels".into(), "--report".into()];
    command.args(part).arg(rows).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            // A tool passes the part's status on, unless it was told another for findings.
            if status.success() {
                return Ok(());
            }
            bail!("the part ended with {status} under {tool}");
        }
        if started.elapsed() > TOOL_LIMIT {
            // It may have ended this very moment.
            let _ = child.kill();
            child.wait()?;
            bail!("{tool} did not end within {TOOL_LIMIT:?}");
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// `3` of "========= ERROR SUMMARY: 3 errors", and all that the line says.
fn summary(said: &str) -> Option<(f64, String)> {
    let (_, counted) =
        said.lines().rev().find_map(|line| SUMMARIES.iter().find_map(|summary| line.split_once(*summary)))?;
    let count = counted.split_whitespace().next()?.parse().ok()?;
    Some((count, counted.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_s_last_summary_is_what_counts() {
        let said = "========= COMPUTE-SANITIZER\n========= Invalid read\n========= ERROR SUMMARY: 3 errors\n";
        assert_eq!(summary(said), Some((3.0, "3 errors".to_owned())));
        let races = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n";
        assert_eq!(summary(races).unwrap().0, 0.0);
        assert_eq!(summary("========= Error: target application failed\n"), None);
    }
}
