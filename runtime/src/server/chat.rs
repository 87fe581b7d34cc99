//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use consort_actors::plan::TokenLogprobs;
use futures_util::future::try_join_all;

use super::{
    AppState, Caller, RequestId,
    body::{self, Work},
    error::ApiError,
    sse::{self, ChunkWriter, Part},
    wire::{
        ChatAnswer, ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessageOut,
        ChatRequest, StreamOptions, TokenEntry, TopEntry, Usage, finite,
    },
};
use crate::{
    engine::{self, Completion, TextStream},
    text::Tokenizer,
};

pub(super) async fn handle(
    State(state): State<Arc<AppState>>,
    id: RequestId,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    let engine = state.engine_of(caller)?;
    let bytes = body::read(request, state.settings.body_limit_bytes).await?;
    let (submitting, request_id) = (engine.clone(), id.0.clone());
    let (common, streams) = body::prepare(&state, bytes, Work::Template, move |bytes| {
        let ChatRequest { mut common, limit_name, messages, add_generation_prompt, template_kwargs } =
            ChatRequest::parse(&bytes)?;
        drop(bytes);
        super::check_model(common.model.as_deref(), &submitting)?;
        common.options.request_id = Some(request_id);
        let generate = std::mem::take(&mut common.options);
        let options = engine::ChatOptions { generate, add_generation_prompt, template_kwargs };
        let streams = submitting.chat_n(&messages, &options, common.n);
        let streams = streams.map_err(|error| {
            let error = ApiError::from(error).renamed("prompt", "messages");
            error.renamed("max_tokens", limit_name).renamed("logprobs", "top_logprobs")
        })?;
        Ok((common, streams))
    })
    .await?;

    let prompt = streams.first().map_or(&[][..], TextStream::prompt_tokens);
    let usage = engine::Usage { prompt_tokens: prompt.len(), ..engine::Usage::default() };
    let prompt_token_ids = common.return_token_ids.then(|| prompt.to_vec());
    let head = Head {
        id: format!("chatcmpl-{}", id.0),
        created: super::unix_seconds(),
        model: engine.model_name().to_owned(),
        tokenizer: Arc::clone(engine.tokenizer()),
    };
    if common.stream {
        let (options, usages) = (common.stream_options, vec![usage; streams.len()]);
        return Ok(sse::respond(streams, ChatWriter { head, options, prompt_token_ids, usages }));
    }
    // All are read together: one left alone would count as a slow reader.
    let done = try_join_all(streams.into_iter().map(TextStream::collect)).await?;
    let usage = Usage::sum(done.iter().map(|completion| completion.finish.usage), done.len());
    let with_ids = common.return_token_ids;
    let choices = done.into_iter().enumerate();
    let answer = ChatAnswer {
        id: &head.id,
        object: "chat.completion",
        created: head.created,
        model: &head.model,
        choices: choices.map(|(index, done)| choice(&head.tokenizer, index, done, with_ids)).collect(),
        usage,
        prompt_token_ids: prompt_token_ids.as_deref(),
    };
    Ok(Json(answer).into_response())
}

fn choice(tokenizer: &Tokenizer, index: usize, done: Completion, with_ids: bool) -> ChatChoice {
    ChatChoice {
        index,
        message: ChatMessageOut { role: "assistant", content: done.text },
        logprobs: logprobs(tokenizer, &done.logprobs),
        finish_reason: done.finish.reason.as_str(),
        stop_reason: done.finish.stop_reason.map(Into::into),
        token_ids: with_ids.then_some(done.tokens),
    }
}

/// What every chunk repeats.
struct Head {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
}

struct ChatWriter {
    head: Head,
    options: StreamOptions,
    /// Told in the first chunk; its presence also asks for `token_ids`.
    prompt_token_ids: Option<Vec<u32>>,
    /// By choice.
    usages: Vec<engine::Usage>,
}

impl ChatWriter {
    fn chunk(&self, choice: Option<ChatChunkChoice>, first: bool) -> String {
        let usage = match &choice {
            Some(choice) if self.options.continuous_usage() => Some(Usage::one(self.usages[choice.index])),
            Some(_) => None,
            None => Some(Usage::sum(self.usages.iter().copied(), self.usages.len())),
        };
        let chunk = ChatChunk {
            id: &self.head.id,
            object: "chat.completion.chunk",
            created: self.head.created,
            model: &self.head.model,
            choices: choice.into_iter().collect(),
            prompt_token_ids: self.prompt_token_ids.as_deref().filter(|_| first),
            usage,
        };
        serde_json::to_string(&chunk).expect("strings and numbers always serialise")
    }
}

impl ChunkWriter for ChatWriter {
    fn begin(&mut self) -> Vec<String> {
        let opening = |index| {
            let choice = ChatChunkChoice {
                index,
                delta: ChatDelta { role: Some("assistant"), content: Some(String::new()) },
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
            };
            self.chunk(Some(choice), index == 0)
        };
        (0..self.usages.len()).map(opening).collect()
    }

    fn part(&mut self, index: usize, part: Part) -> Vec<String> {
        if part.delta.is_none() && part.finish.is_none() {
            return Vec::new();
        }
        let delta = part.delta.unwrap_or_default();
        self.usages[index].completion_tokens += delta.tokens.len();
        self.usages[index].cached_tokens = part.cached_tokens;
        let (finish_reason, stop_reason) = match part.finish {
            Some(finish) => {
                self.usages[index] = finish.usage;
                (Some(finish.reason.as_str()), finish.stop_reason)
            }
            None => (None, None),
        };
        let choice = ChatChunkChoice {
            index,
            logprobs: logprobs(&self.head.tokenizer, &delta.logprobs),
            delta: ChatDelta { role: None, content: Some(delta.text) },
            finish_reason,
            stop_reason: stop_reason.map(Into::into),
            token_ids: self.prompt_token_ids.is_some().then_some(delta.tokens),
        };
        vec![self.chunk(Some(choice), false)]
    }

    fn end(&mut self) -> Vec<String> {
        if !self.options.include_usage() {
            return Vec::new();
        }
        vec![self.chunk(None, false)]
    }
}

fn logprobs(tokenizer: &Tokenizer, entries: &[TokenLogprobs]) -> Option<ChatLogprobs> {
    if entries.is_empty() {
        return None;
    }
    Some(ChatLogprobs { content: entries.iter().map(|entry| token_entry(tokenizer, entry)).collect() })
}

fn token_entry(tokenizer: &Tokenizer, entry: &TokenLogprobs) -> TokenEntry {
    TokenEntry {
        token: tokenizer.token_text(entry.token),
        logprob: finite(entry.logprob),
        bytes: tokenizer.token_bytes(entry.token).to_vec(),
        top_logprobs: entry
            .top
            .iter()
            .map(|(token, logprob)| TopEntry {
                token: tokenizer.token_text(*token),
                logprob: finite(*logprob),
                bytes: tokenizer.token_bytes(*token).to_vec(),
            })
            .collect(),
    }
}
