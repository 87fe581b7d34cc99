//! `async-openai`, the Rust client that most programs use, against the real server.

use std::{collections::BTreeMap, time::Duration};

use async_openai::{
    Client,
    config::OpenAIConfig,
    error::OpenAIError,
    types::chat::{
        ChatChoiceLogprobs, ChatCompletionRequestSystemMessage, ChatCompletionRequestUserMessage,
        ChatCompletionStreamOptions, CompletionUsage, CreateChatCompletionRequest,
        CreateChatCompletionRequestArgs, CreateChatCompletionStreamResponse, FinishReason, StopConfiguration,
    },
};
use tokio_stream::StreamExt;

use crate::harness::{Served, one_model_at_a_time, root};

const TOKENS: u32 = 12;

fn served() -> Served {
    let topology = root().join("examples/topologies/three-cpu-shards.toml");
    Served::start(topology.to_str().unwrap(), &[])
}

fn end(server: Served) {
    server.terminate();
    assert_eq!(server.end(Duration::from_secs(20)).0, Some(0));
}

fn client(server: &Served) -> Client<OpenAIConfig> {
    Client::with_config(
        OpenAIConfig::new().with_api_base(format!("{}/v1", server.url)).with_api_key("unused"),
    )
}

/// A greedy chat; each test changes what it is about.
fn question(change: impl FnOnce(&mut CreateChatCompletionRequest)) -> CreateChatCompletionRequest {
    let mut request = CreateChatCompletionRequestArgs::default()
        .model("smollm2-135m")
        .messages([
            ChatCompletionRequestSystemMessage::from("You are a helpful assistant.").into(),
            ChatCompletionRequestUserMessage::from("What is the capital of France?").into(),
        ])
        .temperature(0.0)
        .max_completion_tokens(TOKENS)
        .build()
        .unwrap();
    change(&mut request);
    request
}

/// What the chunks of a stream say of one choice, joined.
#[derive(Debug, Default, PartialEq)]
struct Choice {
    text: String,
    tokens: Vec<String>,
    finish_reason: Option<FinishReason>,
}

/// Reads a stream to its end: the choices by index, and every chunk as it came.
async fn streamed(
    client: &Client<OpenAIConfig>,
    request: CreateChatCompletionRequest,
) -> (BTreeMap<u32, Choice>, Vec<CreateChatCompletionStreamResponse>) {
    let mut stream = client.chat().create_stream(request).await.unwrap();
    let (mut choices, mut chunks) = (BTreeMap::<u32, Choice>::new(), Vec::new());
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.unwrap();
        for part in &chunk.choices {
            let choice = choices.entry(part.index).or_default();
            assert_eq!(choice.finish_reason, None, "a choice goes on after its end: {chunk:?}");
            choice.text.push_str(part.delta.content.as_deref().unwrap_or_default());
            choice.tokens.extend(part.logprobs.iter().flat_map(tokens));
            choice.finish_reason = part.finish_reason;
        }
        chunks.push(chunk);
    }
    (choices, chunks)
}

fn tokens(logprobs: &ChatChoiceLogprobs) -> Vec<String> {
    logprobs.content.iter().flatten().map(|entry| entry.token.clone()).collect()
}

/// Every token has its log-probability and the best alternatives, best first; together they are the text.
fn assert_logprobs(logprobs: &ChatChoiceLogprobs, text: &str, top: usize) {
    let content = logprobs.content.as_ref().unwrap();
    let bytes: Vec<u8> = content.iter().flat_map(|entry| entry.bytes.clone().unwrap()).collect();
    assert!(String::from_utf8(bytes).unwrap().starts_with(text), "{content:?}");
    for entry in content {
        assert!(entry.logprob <= 0.0 && entry.logprob.is_finite(), "{entry:?}");
        assert_eq!(entry.top_logprobs.len(), top, "{entry:?}");
        assert!(entry.top_logprobs.is_sorted_by(|a, b| a.logprob >= b.logprob), "{entry:?}");
        if let Some(best) = entry.top_logprobs.first() {
            assert_eq!((&best.token, best.logprob), (&entry.token, entry.logprob), "greedy takes the best");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn async_openai_reads_chats_streams_and_logprobs() {
    let _guard = one_model_at_a_time();
    let server = served();
    let client = client(&server);

    let whole = client.chat().create(question(|_| {})).await.unwrap();
    let text = whole.choices[0].message.content.clone().unwrap();
    assert!(text.contains("Paris"), "{text}");
    assert_eq!((whole.choices.len(), whole.choices[0].index), (1, 0));
    let usage = whole.usage.unwrap();
    assert_eq!(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);

    let with_usage = question(|request| {
        request.stream_options =
            Some(ChatCompletionStreamOptions { include_usage: Some(true), include_obfuscation: None });
    });
    let (choices, chunks) = streamed(&client, with_usage).await;
    assert_eq!(choices.len(), 1);
    assert_eq!((&choices[&0].text, choices[&0].finish_reason), (&text, whole.choices[0].finish_reason));
    assert!(chunks.len() > 3, "the answer came in one piece: {chunks:?}");
    let last = chunks.last().unwrap();
    // The same question again: a whole block of it is found in the cache.
    let again = last.usage.clone().unwrap();
    let cached = |usage: &CompletionUsage| usage.prompt_tokens_details.clone().unwrap().cached_tokens;
    assert_eq!((cached(&usage), cached(&again)), (Some(0), Some(16)));
    let counts = |usage: &CompletionUsage| (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens);
    assert_eq!((last.choices.len(), counts(&again)), (0, counts(&usage)));

    let explained = question(|request| {
        request.logprobs = Some(true);
        request.top_logprobs = Some(3);
    });
    let answer = client.chat().create(explained.clone()).await.unwrap();
    let logprobs = answer.choices[0].logprobs.as_ref().unwrap();
    assert_logprobs(logprobs, &text, 3);
    let (choices, chunks) = streamed(&client, explained).await;
    assert_eq!((&choices[&0].text, &choices[&0].tokens), (&text, &tokens(logprobs)));
    for part in chunks.iter().flat_map(|chunk| &chunk.choices) {
        part.logprobs.iter().for_each(|logprobs| assert_logprobs(logprobs, "", 3));
    }
    let alone = client.chat().create(question(|request| request.logprobs = Some(true))).await.unwrap();
    assert_logprobs(alone.choices[0].logprobs.as_ref().unwrap(), &text, 0);
    end(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn async_openai_stops_draws_by_seed_and_reads_errors() {
    let _guard = one_model_at_a_time();
    let server = served();
    let client = client(&server);

    let stopped = client
        .chat()
        .create(question(|request| {
            request.stop = Some(StopConfiguration::StringArray(vec![" Paris".into()]))
        }))
        .await
        .unwrap();
    let choice = &stopped.choices[0];
    assert!(!choice.message.content.as_ref().unwrap().contains("Paris"), "{choice:?}");
    assert_eq!(choice.finish_reason, Some(FinishReason::Stop));

    #[expect(deprecated, reason = "the client calls `seed` so; people use it")]
    let seeded = |seed| {
        question(|request| {
            request.temperature = Some(1.5);
            request.seed = Some(seed);
        })
    };
    let draw = async |seed| {
        let answer = client.chat().create(seeded(seed)).await.unwrap();
        answer.choices[0].message.content.clone()
    };
    let first = draw(7).await;
    assert_eq!(first, draw(7).await);
    assert_ne!(first, draw(8).await);

    for (request, status, param) in [
        (question(|request| request.temperature = Some(9.0)), 400, Some("temperature")),
        (question(|request| request.model = "no-such-model".into()), 404, Some("model")),
        (
            question(|request| request.max_completion_tokens = Some(1 << 30)),
            400,
            Some("max_completion_tokens"),
        ),
    ] {
        let refused = client.chat().create(request.clone()).await.unwrap_err();
        let OpenAIError::ApiError(error) = refused else { panic!("{refused:?}") };
        assert_eq!(error.status_code.as_u16(), status, "{error:?}");
        assert_eq!(error.api_error.param.as_deref(), param, "{error:?}");
        assert!(client.chat().create_stream(request).await.is_err(), "refused before the stream begins");
    }
    end(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn async_openai_gets_every_choice_under_its_index() {
    let _guard = one_model_at_a_time();
    let server = served();
    let client = client(&server);

    #[expect(deprecated, reason = "the client calls `seed` so; people use it")]
    let two = question(|request| {
        request.n = Some(2);
        request.temperature = Some(1.5);
        request.seed = Some(11);
        request.logprobs = Some(true);
        request.top_logprobs = Some(1);
    });
    let whole = client.chat().create(two.clone()).await.unwrap();
    assert_eq!(whole.choices.iter().map(|choice| choice.index).collect::<Vec<_>>(), [0, 1]);
    let (choices, chunks) = streamed(&client, two).await;
    assert_eq!(choices.len(), 2);
    for choice in &whole.choices {
        let expected = Choice {
            text: choice.message.content.clone().unwrap(),
            tokens: tokens(choice.logprobs.as_ref().unwrap()),
            finish_reason: choice.finish_reason,
        };
        assert_eq!(choices[&choice.index], expected);
    }
    assert_ne!(choices[&0].tokens, choices[&1].tokens, "each choice draws for itself");
    let order: Vec<u32> =
        chunks.iter().flat_map(|chunk| chunk.choices.iter().map(|part| part.index)).collect();
    assert!(!order.is_sorted(), "they were streamed one after the other: {order:?}");

    let penalised = question(|request| {
        request.n = Some(2);
        request.frequency_penalty = Some(1.0);
        request.presence_penalty = Some(-1.0);
        request.logit_bias = Some([("4000".to_owned(), -100)].into());
    });
    let answer = client.chat().create(penalised).await.unwrap();
    assert_eq!(answer.choices[0].message.content, answer.choices[1].message.content, "greedy");
    for (request, param) in [
        (question(|request| request.n = Some(0)), "n"),
        (question(|request| request.frequency_penalty = Some(-2.5)), "frequency_penalty"),
        (question(|request| request.logit_bias = Some([("-1".to_owned(), 1)].into())), "logit_bias"),
    ] {
        let refused = client.chat().create(request).await.unwrap_err();
        let OpenAIError::ApiError(error) = refused else { panic!("{refused:?}") };
        assert_eq!((error.status_code.as_u16(), error.api_error.param.as_deref()), (400, Some(param)));
    }
    end(server);
}
