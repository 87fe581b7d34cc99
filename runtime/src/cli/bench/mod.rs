//! `consort bench`: how fast a model answers here, asked through the engine as any program would ask it.
//!
//! Prompts are drawn tokens, new ones in every round, so that no prefix cache helps; answers are greedy and go on to
//! their limit. Nothing is told of a speed but medians over rounds, with their ranges.

mod case;
mod machine;
mod tables;

use std::{
    io::{BufRead, Write},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::Args;
use serde::Serialize;

use self::{case::Case, machine::Machine};
use super::{
    args::{ModelArgs, ServerArgs},
    progress::LoadBars,
    report,
};
use crate::{
    Engine,
    engine::{GenerateOptions, Prompt, TextEvent},
};

/// Time for ranks to end after the last answer.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(1);

const BENCH_HELP: &str = "\
A case is PROMPT+TOKENS, or PROMPT+TOKENSxN for N requests at once: 32+128 decodes 128 tokens behind a prompt of 32,
512+1 does little but the prompt, 128+128x8 is eight of each at the same time.

  prefill     tokens of all prompts per second, until every request has its first token
  decode      tokens per second after the first, of all requests together while each runs
  end to end  generated tokens per second, from asking to the last token";

#[derive(Debug, Args)]
#[command(after_help = BENCH_HELP)]
pub(super) struct BenchArgs {
    /// A model folder, a GGUF file, or a topology (*.toml).
    #[arg(value_name = "MODEL")]
    source: PathBuf,
    /// What to ask.
    #[arg(
        long,
        value_name = "CASES",
        value_delimiter = ',',
        default_value = "32+128,512+1,2048+1,128+128x8,128+128x32"
    )]
    cases: Vec<Case>,
    /// How often each case is asked; one round before does not count.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Read cases from standard input and answer each with a line of JSON: for programs that compare.
    #[arg(long, hide = true)]
    stdin: bool,
    #[command(flatten)]
    model: ModelArgs,
}

/// What one round of a case took.
#[derive(Clone, Copy, Debug, Serialize)]
struct Round {
    /// Median over the requests.
    first_token_s: f64,
    prefill_tokens_per_s: f64,
    /// Absent where there is one token only.
    decode_tokens_per_s: Option<f64>,
    end_to_end_tokens_per_s: f64,
}

/// All rounds of a case.
#[derive(Debug, Serialize)]
struct Measured {
    case: Case,
    rounds: Vec<Round>,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    dtype: String,
    isa: String,
    ranks: usize,
    threads_per_rank: usize,
    load_s: f64,
    /// Of all ranks.
    weight_bytes: u64,
    /// Of this process, so far; absent where the system does not tell.
    peak_rss_bytes: Option<u64>,
    /// What the host's processors do at most; absent where the ranks are on others.
    machine: Option<Machine>,
    cases: Vec<Measured>,
}

pub(super) async fn bench(args: BenchArgs) -> anyhow::Result<()> {
    let started = Instant::now();
    let bars = LoadBars::new();
    let reporting = bars.clone();
    let model = args.source.display().to_string();
    let builder = args.model.builder(args.source, ServerArgs::default());
    let loading = builder.on_progress(move |progress| reporting.report(&progress)).start().await;
    bars.finish();
    let engine = loading?;
    let load_s = started.elapsed().as_secs_f64();
    if args.stdin {
        follow(&engine).await?;
        engine.shutdown(SHUTDOWN_GRACE).await;
        return Ok(());
    }
    let mut out = std::io::stdout();
    let compute = engine.compute();
    let ranks = engine.status().ensemble.ranks;
    let mut report = Report {
        model,
        dtype: compute.dtype.to_string(),
        isa: compute.isa.to_string(),
        ranks: ranks.len(),
        threads_per_rank: compute.threads_per_rank,
        load_s,
        weight_bytes: ranks.iter().map(|rank| rank.weight_bytes).sum(),
        peak_rss_bytes: None,
        machine: None,
        cases: Vec::new(),
    };
    if !args.json {
        writeln!(out, "{}", report::compute_line(compute))?;
        writeln!(out, "{}", tables::HEADER)?;
    }
    let mut seed = 0;
    for case in args.cases {
        let mut rounds = Vec::new();
        for number in 0..=args.rounds.max(1) {
            seed += 1;
            let round = run(&engine, case, seed).await.with_context(|| format!("case {case}"))?;
            if number > 0 {
                rounds.push(round);
            }
        }
        if !args.json {
            writeln!(out, "{}", tables::line(case, &rounds))?;
        }
        report.cases.push(Measured { case, rounds });
    }
    report.peak_rss_bytes = peak_rss();
    report.machine = machine::measure(&engine)?;
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?,
        false => writeln!(out, "{}", tables::footer(&report))?,
    }
    engine.shutdown(SHUTDOWN_GRACE).await;
    Ok(())
}

/// One line for each line: `ready` first, then what each case took, or what the machine does where `machine` is asked.
async fn follow(engine: &Engine) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "ready")?;
    out.flush()?;
    let (lines, mut received) = tokio::sync::mpsc::channel(1);
    // Standard input blocks whoever reads it.
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if lines.blocking_send(line).is_err() {
                return;
            }
        }
    });
    let mut seed = 0;
    while let Some(line) = received.recv().await {
        let line = line?;
        let answer = match line.trim() {
            "machine" => serde_json::json!({ "machine": machine::measure(engine)? }),
            case => {
                let case: Case = case.parse().map_err(anyhow::Error::msg)?;
                seed += 1;
                let round = run(engine, case, seed).await?;
                serde_json::json!({ "round": round, "peak_rss_bytes": peak_rss() })
            }
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

/// When the tokens of one request came, since it was asked.
struct Arrivals {
    first: Duration,
    last: Duration,
    tokens: usize,
}

/// All requests of a case at once.
async fn run(engine: &Engine, case: Case, seed: u64) -> anyhow::Result<Round> {
    let begun = Instant::now();
    let vocabulary = engine.vocab_size() as u64;
    let mut asked = Vec::with_capacity(case.at_once);
    for request in 0..case.at_once as u64 {
        let prompt = case.prompt(seed * 1_000_003 + request, vocabulary);
        let options = GenerateOptions {
            max_tokens: Some(case.tokens),
            temperature: Some(0.0),
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        let mut stream = engine.generate(Prompt::Tokens(prompt), options)?;
        asked.push(tokio::spawn(async move {
            let (mut first, mut last, mut tokens) = (None, Duration::ZERO, 0);
            while let Some(event) = stream.next().await {
                if let TextEvent::Delta(delta) = event? {
                    last = begun.elapsed();
                    first.get_or_insert(last);
                    tokens += delta.tokens.len();
                }
            }
            let first = first.context("no token came")?;
            anyhow::Ok(Arrivals { first, last, tokens })
        }));
    }
    let mut all = Vec::with_capacity(asked.len());
    for request in asked {
        all.push(request.await??);
    }
    all.sort_by_key(|arrivals| arrivals.first);
    let seconds = |time: Duration| time.as_secs_f64().max(f64::MIN_POSITIVE);
    let (last_first, end) = (
        all.iter().map(|arrivals| arrivals.first).max().unwrap_or_default(),
        all.iter().map(|arrivals| arrivals.last).max().unwrap_or_default(),
    );
    let decode = all.iter().filter(|arrivals| arrivals.tokens > 1);
    let decode: f64 =
        decode.map(|one| (one.tokens - 1) as f64 / seconds(one.last.saturating_sub(one.first))).sum();
    let generated: usize = all.iter().map(|arrivals| arrivals.tokens).sum();
    Ok(Round {
        first_token_s: all[all.len() / 2].first.as_secs_f64(),
        prefill_tokens_per_s: (case.prompt_tokens * case.at_once) as f64 / seconds(last_first),
        decode_tokens_per_s: (case.tokens > 1).then_some(decode),
        end_to_end_tokens_per_s: generated as f64 / seconds(end),
    })
}

/// The most memory that this process has had at a time.
fn peak_rss() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}
