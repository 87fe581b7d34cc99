//! What the KV cache does for users, over the real model on this machine's CPU.
//!
//! `cargo bench -p consort-cluster-tests --bench cache`, after `cargo xtask model`. Prints three tables: time to the
//! first token of prompts that are found in the prefix cache and of others; 32 clients with one system prompt, with and
//! without the cache; and 64 mixed requests in an ample pool and in a quarter of it. Runs are interleaved and figures
//! medians, because the machine may be shared.

#![expect(clippy::print_stdout, reason = "a bench prints its tables")]

mod support;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use consort::Engine;
use support::{Answer, ask, median, together, words};

const SYSTEM_PROMPT_TOKENS: usize = 1500;
const CLIENTS: usize = 32;
const MIXED: usize = 64;
const BLOCK_SIZE: usize = 16;
/// Of SmolLM2 in bfloat16: 30 layers of 3 KV heads of 64, keys and values.
const TOKEN_BYTES: u64 = 30 * 3 * 64 * 2 * 2;
/// Times that the engine takes a sequence's blocks, at most.
const PREEMPTIONS_MAX: u64 = 4;
/// Most time between two tokens of a stream, in steps as long as the longest of the run. Whoever gives way waits until
/// others have ended and is then computed anew in two or three full steps: 1.4 such steps were seen, of a run of 60.
const GAP_STEPS_MAX: f64 = 8.0;

/// The longest time between two of these moments, which are in order.
fn longest_gap(moments: &[Instant]) -> Duration {
    moments.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

async fn engine(prefix_caching: bool, kv_tokens: usize, max_num_seqs: usize) -> Result<Engine> {
    let engine = Engine::builder()
        .model(support::model()?)
        .dtype("bfloat16")
        .max_model_len(2048)
        .max_num_seqs(max_num_seqs)
        .max_num_batched_tokens(512)
        .kv_cache_memory_bytes(kv_tokens as u64 * TOKEN_BYTES)
        .enable_prefix_caching(prefix_caching)
        .start()
        .await?;
    Ok(engine)
}

/// Time to the first token, one request at a time.
async fn hits_and_misses() -> Result<()> {
    let engine = engine(true, 64 * 1024, 32).await?;
    let (mut misses, mut hits) = (Vec::new(), Vec::new());
    for round in 0..9 {
        let mut prompt = words(100 + round, SYSTEM_PROMPT_TOKENS);
        prompt.extend(words(1, 20));
        misses.push(ask(&engine, prompt.clone(), 4, 0).await?.first);
        prompt.truncate(SYSTEM_PROMPT_TOKENS);
        prompt.extend(words(2, 20));
        hits.push(ask(&engine, prompt, 4, 0).await?.first);
    }
    let (miss, hit) = (median(misses), median(hits));
    println!("\n| prompt of {} tokens | first token after | ratio |", SYSTEM_PROMPT_TOKENS + 20);
    println!("|---|--:|--:|");
    println!("| not seen before | {miss:.3} s | 1 |");
    println!("| first {SYSTEM_PROMPT_TOKENS} tokens seen before | {hit:.3} s | {:.3} |", hit / miss);
    ensure!(hit < miss / 2.0, "a prefix that is found saves less than half of the time to the first token");
    engine.shutdown(Duration::from_secs(5)).await;
    Ok(())
}

/// 32 clients at once whose prompts begin with the same 1,500 tokens.
async fn one_system_prompt() -> Result<()> {
    let requests = || -> Vec<(Vec<u32>, usize)> {
        let prompt = |at| [words(7, SYSTEM_PROMPT_TOKENS), words(200 + at, 20)].concat();
        (0..CLIENTS).map(|at| (prompt(at), 16)).collect()
    };
    println!(
        "\n| {CLIENTS} clients, one system prompt | tokens computed | median first token | all done after |"
    );
    println!("|---|--:|--:|--:|");
    let (mut tokens, mut rows) = (Vec::new(), Vec::new());
    for prefix_caching in [false, true] {
        let engine = engine(prefix_caching, 64 * 1024, CLIENTS).await?;
        let (answers, took) = together(&engine, requests()).await?;
        let computed = engine.status().ensemble.computed_tokens;
        let first = median(answers.iter().map(|answer| answer.first).collect());
        let name = if prefix_caching { "prefix cache" } else { "without" };
        println!("| {name} | {computed} | {first:.2} s | {:.2} s |", took.as_secs_f64());
        tokens.push(answers.into_iter().map(|answer| answer.tokens).collect::<Vec<_>>());
        rows.push(computed);
        engine.shutdown(Duration::from_secs(5)).await;
    }
    ensure!(tokens[0] == tokens[1], "tokens differ with and without hits");
    // The system prompt once, what each prompt has of its own, and every token of the answers.
    let each = (SYSTEM_PROMPT_TOKENS % BLOCK_SIZE + 20 + 16) * CLIENTS;
    ensure!(rows[1] <= (SYSTEM_PROMPT_TOKENS + each) as u64, "the system prompt was computed more than once");
    println!("tokens: identical");
    Ok(())
}

/// Prompts of 40 to 630 tokens, answers of 16 to 200.
fn mixed() -> Vec<(Vec<u32>, usize)> {
    (0..MIXED).map(|at| (words(300 + at, 40 + at * 389 % 591), 16 + at * 131 % 185)).collect()
}

/// What a pool came to, over all of its runs.
#[derive(Default)]
struct Row {
    times: Vec<Duration>,
    /// Most of a run.
    preemptions: u64,
    /// Longest between two tokens of a stream, and the same in longest steps of its run.
    gap: Duration,
    gap_steps: f64,
    /// Longest steps that a run took, at least.
    run_steps: f64,
}

impl Row {
    fn add(&mut self, answers: &[Answer], took: Duration, preemptions: u64) -> Result<()> {
        // Everyone who runs has a token in every step, so what lies between two tokens of anyone is a step.
        let mut all: Vec<Instant> =
            answers.iter().flat_map(|answer| answer.arrivals.iter().copied()).collect();
        all.sort();
        let step = longest_gap(&all).as_secs_f64();
        let gap = answers.iter().map(|answer| longest_gap(&answer.arrivals)).max().unwrap_or_default();
        let gap_steps = gap.as_secs_f64() / step;
        // The engine counts them for all requests together.
        ensure!(
            preemptions <= PREEMPTIONS_MAX * MIXED as u64,
            "{preemptions} preemptions: more than {PREEMPTIONS_MAX} for each of {MIXED} requests"
        );
        ensure!(
            gap_steps <= GAP_STEPS_MAX,
            "a stream waited {gap:?} for its next token: {gap_steps:.0} steps of {step:.2} s, the longest of the run"
        );
        let run_steps = took.as_secs_f64() / step;
        self.run_steps = if self.times.is_empty() { run_steps } else { self.run_steps.min(run_steps) };
        self.times.push(took);
        self.preemptions = self.preemptions.max(preemptions);
        self.gap = self.gap.max(gap);
        self.gap_steps = self.gap_steps.max(gap_steps);
        Ok(())
    }
}

async fn ample_and_quarter() -> Result<()> {
    let need: usize = mixed().iter().map(|(prompt, max_tokens)| prompt.len() + max_tokens).sum();
    let quarter = (need / 4).next_multiple_of(BLOCK_SIZE).max(2048);
    let pools = [("ample", 2 * need), ("a quarter", quarter)];
    let generated: usize = mixed().iter().map(|(_, max_tokens)| max_tokens).sum();
    let mut rows = [Row::default(), Row::default()];
    let mut tokens: Option<Vec<Vec<u32>>> = None;
    for _ in 0..3 {
        for ((name, kv_tokens), row) in pools.iter().zip(&mut rows) {
            let engine = engine(true, *kv_tokens, MIXED).await?;
            let (answers, took) = together(&engine, mixed()).await?;
            let preemptions = engine.status().ensemble.preemptions;
            // In a quarter admission alone may keep everybody within it.
            ensure!(
                preemptions == 0 || *kv_tokens < need,
                "{preemptions} preemptions in a pool that is {name}"
            );
            row.add(&answers, took, preemptions)?;
            let all: Vec<Vec<u32>> = answers.into_iter().map(|answer| answer.tokens).collect();
            ensure!(tokens.get_or_insert_with(|| all.clone()) == &all, "tokens depend on the pool");
            engine.shutdown(Duration::from_secs(5)).await;
        }
    }
    println!(
        "\n| {MIXED} mixed requests, need {need} tokens | pool, tokens | tokens/s | ratio | preemptions | longest gap \
         | in longest steps | of |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|");
    let speeds = rows.each_ref().map(|row| generated as f64 / median(row.times.clone()));
    for (((name, kv_tokens), row), speed) in pools.iter().zip(&rows).zip(&speeds) {
        let Row { preemptions, gap, gap_steps, run_steps, .. } = row;
        let (ratio, gap) = (speed / speeds[0], gap.as_secs_f64());
        println!(
            "| {name} | {kv_tokens} | {speed:.0} | {ratio:.2} | {preemptions} | {gap:.2} s | {gap_steps:.1} \
             | {run_steps:.0} |"
        );
    }
    ensure!(speeds[1] >= 0.6 * speeds[0], "a quarter of the pool costs more than four tenths of the speed");
    println!("tokens: identical");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    hits_and_misses().await?;
    one_system_prompt().await?;
    ample_and_quarter().await
}
