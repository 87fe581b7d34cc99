//! The embedding API over the real model.

use std::time::{Duration, Instant};

use consort::{Completion, Engine, GenerateOptions, Prompt, TextEvent};

use crate::harness::{model, one_model_at_a_time};

const REQUESTS: u64 = 32;

async fn engine(ranks: usize) -> Engine {
    // Steps of 48 tokens cut most prompts into chunks that share steps with decodes.
    Engine::builder()
        .model(model())
        .tensor_parallel_size(ranks)
        .max_model_len(512)
        .max_num_seqs(32)
        .max_num_batched_tokens(48)
        .start()
        .await
        .unwrap()
}

/// Prompt of 2 to about 120 tokens and options of request `at`: greedy, sampled, filtered.
fn request(at: u64) -> (Prompt, GenerateOptions) {
    let len = 2 + at * 37 % 119;
    let tokens = (0..len).map(|i| (1000 + (i * 7919 + at * 104_729) % 40_000) as u32).collect::<Vec<u32>>();
    let options = GenerateOptions {
        max_tokens: Some(4 + (at * 5 % 13) as usize),
        temperature: Some([0.0, 0.7, 1.0, 1.3][(at % 4) as usize]),
        top_p: at.is_multiple_of(3).then_some(0.9),
        top_k: at.is_multiple_of(5).then_some(40),
        min_p: at.is_multiple_of(7).then_some(0.02),
        seed: Some(at as i64),
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    (Prompt::Tokens(tokens), options)
}

async fn complete(engine: &Engine, at: u64) -> Completion {
    let (prompt, options) = request(at);
    engine.generate(prompt, options).unwrap().collect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_two_requests_at_once_draw_what_each_draws_alone() {
    let _guard = one_model_at_a_time();
    let engine = engine(3).await;
    let together: Vec<_> = (0..REQUESTS)
        .map(|at| {
            let engine = engine.clone();
            tokio::spawn(async move { complete(&engine, at).await })
        })
        .collect();
    let mut answers = Vec::new();
    for task in together {
        answers.push(task.await.unwrap().tokens);
    }
    for (at, answer) in answers.iter().enumerate() {
        let alone = complete(&engine, at as u64).await.tokens;
        assert_eq!(*answer, alone, "request {at} depends on its company");
        assert_eq!(answer.len(), request(at as u64).1.max_tokens.unwrap());
    }
    engine.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_stream_frees_its_blocks_within_two_steps() {
    let _guard = one_model_at_a_time();
    let engine = engine(2).await;
    let options = GenerateOptions { max_tokens: Some(100), ignore_eos: true, ..GenerateOptions::default() };
    // One request goes on and keeps the steps coming; it never holds more than 7 blocks of 16.
    const BLOCKS_OF_THE_OTHER: usize = 7;
    let mut other = engine.generate(vec![1000; 4], options.clone()).unwrap();
    let mut dropped = engine.generate(vec![2000; 300], options).unwrap();
    while !matches!(dropped.next().await.unwrap().unwrap(), TextEvent::Delta(_)) {}
    assert!(engine.status().ensemble.used_blocks > BLOCKS_OF_THE_OTHER);
    drop(dropped);
    // The scheduler hears of the drop between two steps; from then on at most two may still touch the blocks.
    let begin = Instant::now();
    let mut heard_at = None;
    loop {
        let status = engine.status().ensemble;
        assert!(begin.elapsed() < Duration::from_secs(30), "the blocks never came back: {status:?}");
        if heard_at.is_none() && status.running == 1 {
            heard_at = Some(status.steps);
        }
        if heard_at.is_some() && status.used_blocks <= BLOCKS_OF_THE_OTHER {
            break;
        }
        if let Some(heard_at) = heard_at {
            assert!(status.steps <= heard_at + 2, "blocks are held for {} steps", status.steps - heard_at);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(other.next().await.unwrap().is_ok());
    engine.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_engines_live_in_one_process_and_agree_across_widths() {
    let _guard = one_model_at_a_time();
    let (one, three) = tokio::join!(engine(1), engine(3));
    let question = "The capital of France is";
    let options =
        GenerateOptions { temperature: Some(0.0), max_tokens: Some(5), ..GenerateOptions::default() };
    let (a, b) = tokio::join!(
        one.generate(question, options.clone()).unwrap().collect(),
        three.generate(question, options.clone()).unwrap().collect(),
    );
    let (a, b) = (a.unwrap(), b.unwrap());
    assert!(a.text.contains("Paris") && b.text.contains("Paris"), "{} / {}", a.text, b.text);
    assert_eq!(one.status().ensemble.ranks.len(), 1);
    assert_eq!(three.status().ensemble.ranks.len(), 3);
    one.shutdown(Duration::from_secs(5)).await;
    // The other one goes on.
    assert!(three.generate(question, options).unwrap().collect().await.is_ok());
}
