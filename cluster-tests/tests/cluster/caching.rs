//! What requests share of each other's work, over the real model.

use std::time::{Duration, Instant};

use consort::{Completion, Engine, GenerateOptions, Message};
use tokio::task::JoinSet;

use crate::harness::{model, one_model_at_a_time};

const CLIENTS: usize = 32;
const INSTRUCTION_TOKENS: usize = 1500;
const ANSWER_TOKENS: usize = 8;
/// Tokens of a block, by default.
const BLOCK: usize = 16;
/// Every so many clients are compared with an engine that caches nothing: each costs it a whole prefill.
const COMPARED: usize = 8;

/// The questions begin with different tokens.
const COUNTRIES: [&str; CLIENTS] = [
    "France", "Japan", "Peru", "Kenya", "Norway", "Chile", "Egypt", "Canada", "India", "Spain", "Italy",
    "Greece", "Turkey", "China", "Cuba", "Iran", "Iraq", "Poland", "Portugal", "Russia", "Mexico", "Brazil",
    "Austria", "Belgium", "Denmark", "Finland", "Hungary", "Ireland", "Israel", "Jordan", "Vietnam", "Yemen",
];

async fn engine(caching: bool) -> Engine {
    Engine::builder()
        .model(model())
        .tensor_parallel_size(1)
        .max_model_len(2048)
        .max_num_seqs(CLIENTS)
        .enable_prefix_caching(caching)
        .start()
        .await
        .unwrap()
}

/// Rules, of 1,500 tokens or a few more.
fn instructions(engine: &Engine) -> String {
    let mut text = String::from("You answer questions about countries, under these rules.");
    let tokens = |text: &str| engine.tokenizer().encode(text, false).unwrap().len();
    for rule in 1.. {
        if tokens(&text) >= INSTRUCTION_TOKENS {
            break;
        }
        text.push_str(&format!(
            " Rule {rule}: when {} things are asked, answer the last one first.",
            rule * 7
        ));
    }
    text
}

fn options() -> GenerateOptions {
    GenerateOptions {
        max_tokens: Some(ANSWER_TOKENS),
        temperature: Some(0.0),
        ignore_eos: true,
        ..GenerateOptions::default()
    }
}

/// What a client got.
struct Asked {
    prompt: Vec<u32>,
    done: Completion,
}

async fn ask(engine: &Engine, rules: &str, country: &str) -> Asked {
    let messages =
        [Message::system(rules), Message::user(format!("{country} has which city as its capital?"))];
    let stream = engine.chat(&messages, options()).unwrap();
    let prompt = stream.prompt_tokens().to_vec();
    Asked { prompt, done: stream.collect().await.unwrap() }
}

fn common(left: &[u32], right: &[u32]) -> usize {
    left.iter().zip(right).take_while(|(left, right)| left == right).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_two_clients_with_one_system_prompt_compute_it_once_and_get_what_a_cold_run_gets() {
    let _guard = one_model_at_a_time();
    let warm = engine(true).await;
    let rules = instructions(&warm);
    let begin = Instant::now();
    let mut clients = JoinSet::new();
    for (at, country) in COUNTRIES.into_iter().enumerate() {
        let (engine, rules) = (warm.clone(), rules.clone());
        clients.spawn(async move { (at, ask(&engine, &rules, country).await) });
    }
    let mut asked = clients.join_all().await;
    let together = begin.elapsed();
    asked.sort_by_key(|(at, _)| *at);
    let asked: Vec<Asked> = asked.into_iter().map(|(_, asked)| asked).collect();

    let shared = common(&asked[0].prompt, &asked[1].prompt) / BLOCK * BLOCK;
    assert!(shared + BLOCK > INSTRUCTION_TOKENS);
    for (at, left) in asked.iter().enumerate() {
        let others = asked.iter().skip(at + 1);
        assert!(
            others.into_iter().all(|right| common(&left.prompt, &right.prompt) / BLOCK * BLOCK == shared)
        );
    }
    let usages = || asked.iter().map(|asked| asked.done.finish.usage);
    let cached: usize = usages().map(|usage| usage.cached_tokens).sum();
    assert_eq!(cached, (CLIENTS - 1) * shared, "all but one found what they share, and no more");
    let own: usize = usages().map(|usage| usage.prompt_tokens - shared).sum();
    let status = warm.status().ensemble;
    // The shared part once, each client's own part, and each answer but its last token.
    assert_eq!(status.computed_tokens as usize, shared + own + CLIENTS * (ANSWER_TOKENS - 1));
    assert_eq!(status.prefix_cache_hits as usize, cached);
    assert_eq!(
        status.prefix_cache_queries as usize,
        usages().map(|usage| usage.prompt_tokens).sum::<usize>()
    );
    assert_eq!(status.preemptions, 0);

    let begin = Instant::now();
    let again = ask(&warm, &rules, COUNTRIES[0]).await;
    let hit = begin.elapsed();
    assert_eq!(again.done.tokens, asked[0].done.tokens);
    assert_eq!(again.done.finish.usage.cached_tokens, (again.prompt.len() - 1) / BLOCK * BLOCK);
    warm.shutdown(Duration::from_secs(5)).await;

    let cold = engine(false).await;
    let mut times = Vec::new();
    for (at, asked) in asked.iter().enumerate().step_by(COMPARED) {
        let begin = Instant::now();
        let alone = ask(&cold, &rules, COUNTRIES[at]).await;
        times.push(begin.elapsed());
        assert_eq!(alone.prompt, asked.prompt);
        assert_eq!(alone.done.tokens, asked.done.tokens, "{} got other tokens", COUNTRIES[at]);
        assert_eq!(alone.done.finish.usage.cached_tokens, 0);
    }
    times.sort();
    println!(
        "{} tokens computed for {CLIENTS} prompts of {} tokens each, {shared} of them shared, in {:.2} s; one more \
         such prompt takes {:.3} s, and {:.3} s where nothing is cached",
        status.computed_tokens,
        asked[0].prompt.len(),
        together.as_secs_f64(),
        hit.as_secs_f64(),
        times[times.len() / 2].as_secs_f64(),
    );
    cold.shutdown(Duration::from_secs(5)).await;
}
