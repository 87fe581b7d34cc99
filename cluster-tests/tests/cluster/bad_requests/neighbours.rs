//! Sixteen well-behaved clients, whose tokens nothing may change.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use serde_json::{Value, json};

use crate::harness::Served;

pub(super) const NEIGHBOURS: usize = 16;

/// Path and body of a neighbour: chats and completions, streamed and whole, greedy and sampled, penalised and biased,
/// with one choice and with two, with prompts of 3 to about 130 tokens.
fn request(at: usize) -> (&'static str, Value) {
    let temperatures = [0.7, 1.0, 1.3, 0.0];
    let mut body = json!({
        "temperature": temperatures[at % 4],
        "seed": at,
        "max_tokens": 8 + at % 5,
        "ignore_eos": at % 2 == 1,
        "return_token_ids": true,
        "stream": at.is_multiple_of(2),
        "n": if at.is_multiple_of(5) { 2 } else { 1 },
    });
    let extra = match at % 8 {
        1 => json!({"repetition_penalty": 1.3, "top_k": 40}),
        2 => json!({"frequency_penalty": 0.7, "presence_penalty": -0.5}),
        3 => json!({"logit_bias": {"28": -100, "253": 2.5}}),
        4 => json!({"min_tokens": 8, "top_p": 0.9}),
        6 => json!({"stop": ["\n\n"], "min_p": 0.05}),
        _ => json!({}),
    };
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    if at.is_multiple_of(3) {
        let question = format!("Tell me something about the number {at}.");
        body["messages"] = json!([{"role": "user", "content": question}]);
        ("/v1/chat/completions", body)
    } else {
        let ids: Vec<usize> =
            (0..3 + at * 37 % 128).map(|i| 1000 + (i * 7919 + at * 104_729) % 40_000).collect();
        body["prompt"] = json!(ids);
        ("/v1/completions", body)
    }
}

/// What one choice said.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Choice {
    tokens: Vec<u64>,
    text: String,
    finish_reason: String,
}

impl Choice {
    fn extend(&mut self, part: &Value) {
        let tokens = part["token_ids"].as_array();
        self.tokens.extend(tokens.into_iter().flatten().map(|token| token.as_u64().unwrap()));
        for text in [&part["text"], &part["message"]["content"], &part["delta"]["content"]] {
            self.text.push_str(text.as_str().unwrap_or_default());
        }
        self.finish_reason.push_str(part["finish_reason"].as_str().unwrap_or_default());
    }
}

pub(super) type Choices = BTreeMap<u64, Choice>;

/// Asks once as neighbour `at`.
pub(super) fn ask(server: &Served, at: usize) -> Choices {
    let (path, body) = request(at);
    let answers: Vec<Value> = if body["stream"] == true {
        let events = server.stream(path, &body).filter(|event| event != "[DONE]");
        events.map(|event| serde_json::from_str(&event).unwrap()).collect()
    } else {
        let (status, answer) = server.post(path, &body);
        assert_eq!(status, 200, "neighbour {at}: {answer}");
        vec![answer]
    };
    let mut choices = Choices::new();
    for part in answers.iter().flat_map(|answer| answer["choices"].as_array().unwrap()) {
        choices.entry(part["index"].as_u64().unwrap()).or_default().extend(part);
    }
    assert_eq!(choices.len() as u64, body["n"].as_u64().unwrap(), "neighbour {at}: {answers:?}");
    assert!(choices.values().all(|choice| !choice.tokens.is_empty() && !choice.finish_reason.is_empty()));
    choices
}

/// How often each neighbour got its answer.
#[derive(Default)]
pub(super) struct Rounds([AtomicUsize; NEIGHBOURS]);

impl Rounds {
    /// Of the one that got the fewest.
    pub(super) fn fewest(&self) -> usize {
        self.each().into_iter().min().unwrap()
    }

    pub(super) fn each(&self) -> Vec<usize> {
        self.0.iter().map(|rounds| rounds.load(Ordering::Acquire)).collect()
    }
}

/// Asks as neighbour `at`, over and over until `over`. Every answer must be `alone`.
pub(super) fn live(server: &Served, at: usize, alone: &Choices, rounds: &Rounds, over: &AtomicBool) {
    while !over.load(Ordering::Acquire) {
        let asked = rounds.0[at].load(Ordering::Relaxed);
        assert_eq!(ask(server, at), *alone, "neighbour {at} was changed in round {asked}");
        rounds.0[at].store(asked + 1, Ordering::Release);
    }
}
