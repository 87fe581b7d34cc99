//! One validator: a mistake is told in the same words by the server, the embedding API and the command line.

use clap::Parser;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{
    super::{
        args::{Cli, Command},
        report, run,
        serve::{Running, Signals},
    },
    ServerSettings, testing,
};
use crate::engine::{Engine, GenerateOptions, Prompt};

/// A mistake as each entry point spells it. The command line has no flags for some.
struct Mistake {
    prompt: &'static str,
    options: GenerateOptions,
    fields: Value,
    flags: Option<&'static [&'static str]>,
    expected: &'static str,
}

fn options(change: impl FnOnce(&mut GenerateOptions)) -> GenerateOptions {
    // As the completions endpoint has it where nothing is said.
    let mut options = GenerateOptions { max_tokens: Some(16), ..GenerateOptions::default() };
    change(&mut options);
    options
}

#[rustfmt::skip]
fn mistakes() -> Vec<Mistake> {
    let mistake = |options, fields, flags, expected| Mistake { prompt: "hi", options, fields, flags, expected };
    let long: &'static str = "x".repeat(testing::CONTEXT + 1).leak();
    vec![
        mistake(options(|o| o.temperature = Some(-1.0)), json!({"temperature": -1}), Some(&["--temperature", "-1"]),
                "temperature: must be in [0, 2], got -1"),
        mistake(options(|o| o.temperature = Some(1e9)), json!({"temperature": 1e9}), Some(&["--temperature", "1e9"]),
                "temperature: must be in [0, 2], got 1000000000"),
        mistake(options(|o| o.repetition_penalty = Some(0.0)), json!({"repetition_penalty": 0}),
                Some(&["--repetition-penalty", "0"]),
                "repetition_penalty: must be in [0.01, 100], got 0"),
        mistake(options(|o| o.frequency_penalty = Some(2.5)), json!({"frequency_penalty": 2.5}),
                Some(&["--frequency-penalty", "2.5"]),
                "frequency_penalty: must be in [-2, 2], got 2.5"),
        mistake(options(|o| o.presence_penalty = Some(-2.5)), json!({"presence_penalty": -2.5}),
                Some(&["--presence-penalty", "-2.5"]),
                "presence_penalty: must be in [-2, 2], got -2.5"),
        mistake(options(|o| o.max_tokens = Some(0)), json!({"max_tokens": 0}), Some(&["--max-tokens", "0"]),
                "max_tokens: must be in [1, 4096] (this model's maximum context length), got 0"),
        mistake(options(|o| o.max_tokens = Some(5000)), json!({"max_tokens": 5000}), Some(&["--max-tokens", "5000"]),
                "max_tokens: must be in [1, 4096] (this model's maximum context length), got 5000"),
        mistake(options(|o| o.max_tokens = Some(4096)), json!({"max_tokens": 4096}), Some(&["--max-tokens", "4096"]),
                "this model's maximum context length is 4096 tokens, but the prompt has 2 and 4096 more were \
                 requested; shorten the prompt or lower max_tokens"),
        mistake(options(|o| o.min_tokens = 17), json!({"min_tokens": 17}), Some(&["--min-tokens", "17"]),
                "min_tokens: must be at most max_tokens = 16, got 17"),
        mistake(options(|o| o.top_p = Some(0.0)), json!({"top_p": 0}), None, "top_p: must be in (0, 1], got 0"),
        mistake(options(|o| o.top_p = Some(2.0)), json!({"top_p": 2}), None, "top_p: must be in (0, 1], got 2"),
        mistake(options(|o| o.top_k = Some(-2)), json!({"top_k": -2}), None,
                "top_k: must be at least -1 (0 and -1 keep all), got -2"),
        mistake(options(|o| o.min_p = Some(1.5)), json!({"min_p": 1.5}), None, "min_p: must be in [0, 1], got 1.5"),
        mistake(options(|o| o.logprobs = Some(21)), json!({"logprobs": 21}), None,
                "logprobs: must be in [0, 20], got 21"),
        mistake(options(|o| o.stop = vec![String::new()]), json!({"stop": ""}), None,
                "stop: must not have an empty string, which would stop everything"),
        mistake(options(|o| o.stop_token_ids = vec![320]), json!({"stop_token_ids": [320]}), None,
                "stop_token_ids: token id 320 is outside the vocabulary of 320"),
        mistake(options(|o| o.logit_bias = [(320, 1.0)].into()), json!({"logit_bias": {"320": 1}}), None,
                "logit_bias: token id 320 is outside the vocabulary of 320"),
        mistake(options(|o| o.logit_bias = [(5, 101.0)].into()), json!({"logit_bias": {"5": 101}}), None,
                "logit_bias: the bias of token 5 must be in [-100, 100], got 101"),
        Mistake { prompt: "", ..mistake(options(|_| ()), json!({}), Some(&[]), "the prompt has no tokens") },
        Mistake { prompt: long, ..mistake(options(|_| ()), json!({}), Some(&[]),
                "this model's maximum context length is 4096 tokens, but the prompt has 4097 and 16 more were \
                 requested; shorten the prompt or lower max_tokens") },
    ]
}

async fn served(running: &Running, mistake: &Mistake) -> Value {
    let mut body = mistake.fields.clone();
    body["prompt"] = json!(mistake.prompt);
    let body = body.to_string();
    let mut socket = TcpStream::connect(running.address).await.expect("the server listens");
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(format!("{head}{body}").as_bytes()).await.expect("sent");
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    serde_json::from_str(answer.split("\r\n\r\n").nth(1).expect("a body")).expect("JSON")
}

async fn commanded(folder: &TempDir, prompt: &str, flags: &[&str]) -> String {
    let path = folder.path().to_str().expect("UTF-8");
    let mut arguments = vec!["consort", "run", "--raw", path, prompt];
    if !flags.contains(&"--max-tokens") {
        arguments.extend(["--max-tokens", "16"]);
    }
    arguments.extend(flags);
    let Command::Run(args) = Cli::try_parse_from(&arguments).expect("well spelt").command else {
        panic!("`run` was typed")
    };
    let error = run::run(args).await.expect_err("refused");
    assert_eq!(super::super::exit_code(&error), super::super::USAGE, "{error}");
    report::chain(&error)
}

#[tokio::test(flavor = "multi_thread")]
async fn server_engine_and_command_line_tell_a_mistake_in_the_same_words() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    let settings = ServerSettings { listen: "127.0.0.1:0".into(), ..ServerSettings::default() };
    let mut signals = Signals::new().expect("signals");
    let builder = Engine::builder().model(folder.path());
    let running = Running::start(builder, settings, &mut signals).await.expect("starts").expect("no signal");
    for mistake in mistakes() {
        let Mistake { prompt, options, flags, expected, .. } = &mistake;
        assert_eq!(served(&running, &mistake).await["error"]["message"], *expected);
        let embedded = running.engine.generate(Prompt::from(*prompt), options.clone());
        let error = embedded.err().expect("refused");
        assert!(error.is_about_the_request());
        assert_eq!(error.to_string(), *expected);
        if let Some(flags) = flags {
            assert_eq!(commanded(&folder, prompt, flags).await, format!("error: {expected}"));
        }
    }
    assert_eq!(running.engine.status().requests.len(), 0);
    running.end(&mut signals).await.expect("ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_that_json_cannot_spell_are_refused_alike_by_engine_and_command_line() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    let engine = Engine::builder().model(folder.path()).start().await.expect("starts");
    for (value, word) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let expected = format!("temperature: must be in [0, 2], got {word}");
        let embedded = engine.generate("hi", options(|o| o.temperature = Some(value)));
        assert_eq!(embedded.err().expect("refused").to_string(), expected);
        let flag = format!("--temperature={word}");
        assert_eq!(commanded(&folder, "hi", &[&flag]).await, format!("error: {expected}"));
    }
}
