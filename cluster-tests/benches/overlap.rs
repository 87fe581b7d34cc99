//! What it is worth that the next step is planned and enqueued while a device computes one.
//!
//! `cargo bench -p consort-cluster-tests --bench overlap`. The device is the software driver's, on which each decode's
//! graph takes so many milliseconds at least: the figures tell what the host adds to a step, and nothing of a GPU. Runs
//! with and without overlap are interleaved and figures medians, because the machine may be shared.

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Result, ensure};
use consort::{Engine, GenerateOptions, Prompt};
use serde_json::{Map, Value, json};

/// Least times that the device takes for a decode.
const GRAPH_MS: [&str; 3] = ["5", "10", "30"];
const CLIENTS: [usize; 2] = [1, 16];
const TOKENS: usize = 60;
const RUNS: usize = 5;
/// Says to this program that its environment is made, and how long graphs take in it.
const READY: &str = "CONSORT_BENCH_OVERLAP_READY";

/// The smallest fixture, with a tokenizer of one letter a token.
fn checkpoint(folder: &Path) -> Result<()> {
    const TOKENS: u32 = 48;
    let twin = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../parallel/fixtures/twin");
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(twin.join(name), folder.join(name))?;
    }
    let letters = (0..TOKENS).filter_map(|token| Some((char::from_u32(u32::from('0') + token)?, token)));
    let vocabulary: Map<String, Value> = letters.map(|(at, token)| (at.to_string(), json!(token))).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary,
                  "merges": []},
    });
    Ok(fs::write(folder.join("tokenizer.json"), tokenizer.to_string())?)
}

async fn engine(folder: &Path, overlaps: bool) -> Result<Engine> {
    let engine = Engine::builder().model(folder).dtype("bfloat16").max_model_len(128).max_num_seqs(16);
    Ok(engine.devices(["cuda:0"]).async_scheduling(overlaps).start().await?)
}

/// Tokens a second of so many clients at once, and what they were told.
async fn rate(engine: &Engine, clients: usize) -> Result<(f64, Vec<Vec<u32>>)> {
    let options = GenerateOptions {
        max_tokens: Some(TOKENS),
        temperature: Some(0.0),
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    let begun = Instant::now();
    let prompts = (0..clients as u32).map(|at| Prompt::Tokens(vec![1 + at, 7, 3])).collect();
    let mut answers = Vec::new();
    for stream in engine.generate_n(prompts, &options, 1)? {
        answers.push(stream.collect().await?.tokens);
    }
    Ok(((clients * TOKENS) as f64 / begun.elapsed().as_secs_f64(), answers))
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

async fn measure(graph_ms: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    checkpoint(folder.path())?;
    let engines = [engine(folder.path(), false).await?, engine(folder.path(), true).await?];
    println!("graphs of {graph_ms} ms; tokens/s without overlap, with it, ratio");
    for clients in CLIENTS {
        let mut rates = [Vec::new(), Vec::new()];
        let mut answers = Vec::new();
        // The first round makes graphs.
        for round in 0..=RUNS {
            for (engine, rates) in engines.iter().zip(&mut rates) {
                let (rate, answer) = rate(engine, clients).await?;
                answers.push(answer);
                if round > 0 {
                    rates.push(rate);
                }
            }
        }
        ensure!(answers.iter().all(|answer| *answer == answers[0]), "answers differ");
        let [without, with] = rates.map(median);
        println!("{clients} at once: {without:.1}, {with:.1}, {:.2}", with / without);
    }
    Ok(())
}

fn main() -> Result<()> {
    if let Ok(graph_ms) = env::var(READY) {
        return tokio::runtime::Runtime::new()?.block_on(measure(&graph_ms));
    }
    let cache = tempfile::tempdir()?;
    for graph_ms in GRAPH_MS {
        // The driver reads its environment once.
        let status = Command::new(env::current_exe()?)
            .env(READY, graph_ms)
            .env("CONSORT_CUDA_LIB_PATH", consort_software_driver::folder())
            .env("CONSORT_CACHE_DIR", cache.path())
            .env("CONSORT_SOFTWARE_DRIVER_ORDER", "eager")
            .env("CONSORT_SOFTWARE_DRIVER_GRAPH_MS", graph_ms)
            .status()?;
        ensure!(status.success(), "{status}");
    }
    Ok(())
}
