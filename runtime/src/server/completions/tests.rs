use std::sync::Arc;

use consort_actors::plan::TokenLogprobs;
use serde_json::{Value, json};

use super::{Choice, CompletionWriter, Prompt};
use crate::{
    engine::{TextDelta, Usage},
    server::sse::{ChunkWriter, Part},
    testing,
    text::Tokenizer,
};

fn writer(n: usize) -> CompletionWriter {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    let choice = |_| Choice { offset: 0, started: false, usage: Usage::default() };
    let prompt = Prompt {
        tokens: b"hi".map(u32::from).into(),
        echo: Some("hi".into()),
        logprobs: Vec::new(),
        begun: 0,
        waiting: Vec::new(),
    };
    CompletionWriter {
        id: "cmpl-1".into(),
        created: 0,
        model: "tiny".into(),
        tokenizer: Arc::new(Tokenizer::from_folder(folder.path()).expect("the tokenizer is valid")),
        options: Default::default(),
        with_logprobs: true,
        return_token_ids: false,
        n,
        prompts: vec![prompt],
        choices: (0..n).map(choice).collect(),
    }
}

fn entry(token: u8) -> TokenLogprobs {
    TokenLogprobs { token: u32::from(token), logprob: -0.5, top: Vec::new() }
}

fn delta(token: u8) -> Part {
    let text = char::from(token).to_string();
    let delta = TextDelta { text, tokens: vec![u32::from(token)], logprobs: vec![entry(token)] };
    Part { delta: Some(delta), ..Part::default() }
}

/// Index, text and log-probabilities of each chunk.
fn told(payloads: &[String]) -> Vec<Value> {
    let choice = |payload: &String| {
        let chunk: Value = serde_json::from_str(payload).expect("JSON");
        let choice = &chunk["choices"][0];
        json!([choice["index"], choice["text"], choice["logprobs"]["token_logprobs"]])
    };
    payloads.iter().map(choice).collect()
}

#[test]
fn an_echoing_choice_that_is_ahead_waits_for_the_prompts_logprobs_of_the_first() {
    let mut writer = writer(3);
    assert!(writer.part(1, delta(b'a')).is_empty());
    assert!(writer.part(1, delta(b'b')).is_empty());
    assert!(writer.part(0, Part { prompt: vec![entry(b'i')], ..Part::default() }).is_empty());
    assert_eq!(
        told(&writer.part(0, delta(b'x'))),
        [
            json!([0, "hix", [null, -0.5, -0.5]]),
            json!([1, "hia", [null, -0.5, -0.5]]),
            json!([1, "b", [-0.5]])
        ]
    );
    assert!(!writer.prompts[0].logprobs.is_empty(), "one choice is still to come");
    assert_eq!(told(&writer.part(2, delta(b'c'))), [json!([2, "hic", [null, -0.5, -0.5]])]);
    assert!(writer.prompts[0].logprobs.is_empty(), "all have told them");
    assert_eq!(told(&writer.part(2, delta(b'd'))), [json!([2, "d", [-0.5]])]);
}
