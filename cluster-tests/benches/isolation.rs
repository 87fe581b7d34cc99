//! What it costs that ranks are processes, over the real model on this machine's CPU.
//!
//! `cargo bench -p consort-cluster-tests --bench isolation`, after `cargo xtask model`. Two ranks of one thread each,
//! as threads of the engine and as processes of their own, are asked in turn; printed are medians and the ratio. Both
//! engines must say the same tokens.

#![expect(clippy::print_stdout, reason = "a bench prints its tables")]

mod support;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use consort::{Engine, Isolation};
use support::{Answer, median, together, words};

const RANKS: usize = 2;
const ROUNDS: usize = 15;
const PROMPT_TOKENS: usize = 32;
const TOKENS: usize = 96;
/// What decodes in processes must reach of those in threads.
const RATIO_MIN: f64 = 0.9;

async fn engine(isolation: Isolation) -> Result<Engine> {
    let engine = Engine::builder()
        .model(support::model()?)
        .dtype("bfloat16")
        .tensor_parallel_size(RANKS)
        .threads_per_rank(1)
        .max_model_len(512)
        .max_num_seqs(8)
        .isolation(isolation)
        .shard_executable(env!("CARGO_BIN_EXE_consort-under-test"))
        .start()
        .await?;
    Ok(engine)
}

/// Time between two tokens of a request, on average.
fn step_time(answers: &[Answer]) -> Result<Duration> {
    let times = answers.iter().map(|answer| {
        let last = answer.arrivals.last().context("no token came")?;
        let steps = u32::try_from(answer.arrivals.len() - 1)?;
        Ok((*last - answer.arrivals[0]) / steps.max(1))
    });
    let times: Vec<Duration> = times.collect::<Result<_>>()?;
    Ok(times.iter().sum::<Duration>() / u32::try_from(times.len())?)
}

async fn compare(threads: &Engine, processes: &Engine, at_once: usize) -> Result<f64> {
    let (mut steps, mut firsts) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 0..ROUNDS {
        let mut said = Vec::new();
        // Who is first takes turns as well.
        for side in [round % 2, 1 - round % 2] {
            let engine = [threads, processes][side];
            let requests = (0..at_once).map(|at| (words(round * 100 + at, PROMPT_TOKENS), TOKENS)).collect();
            let (answers, _) = together(engine, requests).await?;
            steps[side].push(step_time(&answers)?);
            firsts[side].push(answers[0].first);
            said.push(answers.into_iter().map(|answer| answer.tokens).collect::<Vec<_>>());
        }
        ensure!(said[0] == said[1], "threads and processes say different tokens");
    }
    let [of_threads, of_processes] = steps.map(median);
    let [first_of_threads, first_of_processes] = firsts.map(median);
    let ratio = of_threads / of_processes;
    println!(
        "| {at_once} | {:.2} ms | {:.2} ms | {ratio:.3} | {:.1} ms | {:.1} ms |",
        of_threads * 1e3,
        of_processes * 1e3,
        first_of_threads * 1e3,
        first_of_processes * 1e3
    );
    Ok(ratio)
}

fn main() -> Result<()> {
    tokio::runtime::Runtime::new()?.block_on(async {
        let (threads, processes) = (engine(Isolation::Thread).await?, engine(Isolation::Process).await?);
        println!("\nDecodes of {RANKS} ranks, a thread each; {TOKENS} tokens after {PROMPT_TOKENS}.\n");
        println!("| requests | step, threads | step, processes | ratio | first token, threads | processes |");
        println!("|--:|--:|--:|--:|--:|--:|");
        let mut ratios = Vec::new();
        for at_once in [1, 8] {
            ratios.push(compare(&threads, &processes, at_once).await?);
        }
        for engine in [threads, processes] {
            engine.shutdown(Duration::from_secs(5)).await;
        }
        let slow = ratios.iter().any(|ratio| *ratio < RATIO_MIN);
        ensure!(!slow, "decodes in processes are slower than {RATIO_MIN} of those in threads: {ratios:?}");
        Ok(())
    })
}
