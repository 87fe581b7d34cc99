//! What benches of whole engines have in common: the real model, prompts, and requests whose tokens are timed.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use consort::{Engine, GenerateOptions, Prompt, TextEvent};

/// The real model's file.
pub(crate) fn model() -> Result<PathBuf> {
    let model =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    ensure!(model.exists(), "{} is missing: run `cargo xtask model` first", model.display());
    Ok(model)
}

/// What came of one request.
pub(crate) struct Answer {
    /// In order.
    pub(crate) tokens: Vec<u32>,
    /// From asking to the first token.
    pub(crate) first: Duration,
    /// When tokens came.
    pub(crate) arrivals: Vec<Instant>,
}

/// Tokens of ordinary words, the same for the same seed.
pub(crate) fn words(seed: usize, count: usize) -> Vec<u32> {
    (0..count).map(|at| (1000 + (at * 7919 + seed * 104_729 + seed * at % 13) % 40_000) as u32).collect()
}

/// One request of sampled tokens, to its end.
pub(crate) async fn ask(engine: &Engine, prompt: Vec<u32>, max_tokens: usize, seed: i64) -> Result<Answer> {
    let options = GenerateOptions {
        max_tokens: Some(max_tokens),
        temperature: Some(0.8),
        seed: Some(seed),
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    let begun = Instant::now();
    let mut stream = engine.generate(Prompt::Tokens(prompt), options)?;
    let (mut tokens, mut arrivals) = (Vec::new(), Vec::new());
    while let Some(event) = stream.next().await {
        let TextEvent::Delta(delta) = event? else { continue };
        arrivals.push(Instant::now());
        tokens.extend(delta.tokens);
    }
    let first = *arrivals.first().context("no token came")? - begun;
    Ok(Answer { tokens, first, arrivals })
}

/// All at once; the answers in their order and the time until the last has ended.
pub(crate) async fn together(
    engine: &Engine,
    requests: Vec<(Vec<u32>, usize)>,
) -> Result<(Vec<Answer>, Duration)> {
    let begun = Instant::now();
    let tasks = requests.into_iter().enumerate().map(|(at, (prompt, max_tokens))| {
        let engine = engine.clone();
        tokio::spawn(async move { ask(&engine, prompt, max_tokens, at as i64).await })
    });
    let tasks: Vec<_> = tasks.collect();
    let mut answers = Vec::new();
    for task in tasks {
        answers.push(task.await??);
    }
    Ok((answers, begun.elapsed()))
}

/// Seconds.
pub(crate) fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}
