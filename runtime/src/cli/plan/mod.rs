//! `consort plan`: whether a model fits, for how many users, and how fast it could be, before anything is loaded.
//!
//! [`request`] makes of the command line what the planner is asked, [`report`] of its answer what `--json` shows;
//! `text` and `svg` draw it, and `toml` writes the topology that `consort serve` would take.

mod args;
mod report;
mod request;
mod svg;
#[cfg(test)]
mod tests;
mod text;
mod toml;

use std::{
    fs,
    io::{self, IsTerminal, Write},
};

use anyhow::Context;
use consort_parallel::plan::Plan;

pub(super) use self::args::PlanArgs;
use self::{report::Report, request::ask, text::Style};
use super::{FAILED, USAGE};

/// The command was called wrongly.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Usage(String);

/// The model cannot be served so; the plan says why.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct DoesNotFit(String);

/// Scripts ask whether a model fits, so that is the only thing that 1 says.
pub(super) fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<DoesNotFit>() { FAILED } else { USAGE }
}

/// What the command prints, and what its exit code is made of.
struct Answer {
    text: String,
    svg: Option<String>,
    problem: Option<String>,
}

pub(super) async fn plan(args: PlanArgs) -> anyhow::Result<()> {
    let style = Style::of_terminal(io::stdout().is_terminal(), std::env::var_os("NO_COLOR").as_deref());
    let svg_file = args.svg.clone();
    let answer = tokio::task::spawn_blocking(move || answer(&args, style)).await??;
    if let (Some(file), Some(svg)) = (svg_file, answer.svg) {
        fs::write(&file, svg).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let mut out = io::stdout().lock();
    out.write_all(answer.text.as_bytes())?;
    out.flush()?;
    answer.problem.map_or(Ok(()), |problem| Err(DoesNotFit(problem).into()))
}

fn answer(args: &PlanArgs, style: Style) -> anyhow::Result<Answer> {
    let asked = ask(args)?;
    let plan = Plan::new(&asked.request).map_err(|error| Usage(report::with_cause(&error)))?;
    let report = Report::new(&plan, &asked);
    let problem = (!report.fits).then(|| report.verdict.clone());
    let text = if args.emit_toml {
        toml::topology(&plan, &asked)?
    } else if args.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        text::text(&report, style)
    };
    Ok(Answer { text, svg: args.svg.is_some().then(|| svg::svg(&report)), problem })
}
