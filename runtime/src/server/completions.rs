//! `POST /v1/completions`.

#[cfg(test)]
mod tests;

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
        Common, CompletionAnswer, CompletionChoice, CompletionLogprobs, CompletionRequest, StreamOptions,
        TopLogprobs, Usage, finite,
    },
};
use crate::{
    engine::{self, Engine, TextStream},
    error::RequestError,
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
    let (common, prompts, streams) = body::prepare(&state, bytes, Work::Light, move |bytes| {
        let CompletionRequest { mut common, prompts, echo } = CompletionRequest::parse(&bytes)?;
        drop(bytes);
        super::check_model(common.model.as_deref(), &submitting)?;
        common.options.request_id = Some(request_id);
        let (prompts, streams) = submit(&submitting, prompts, echo, &common)?;
        Ok((common, prompts, streams))
    })
    .await?;

    let choices = streams
        .iter()
        .map(|stream| Choice {
            offset: 0,
            started: false,
            usage: engine::Usage { prompt_tokens: stream.prompt_tokens().len(), ..engine::Usage::default() },
        })
        .collect();
    let writer = CompletionWriter {
        id: format!("cmpl-{}", id.0),
        created: super::unix_seconds(),
        model: engine.model_name().to_owned(),
        tokenizer: Arc::clone(engine.tokenizer()),
        options: common.stream_options,
        with_logprobs: common.options.logprobs.is_some(),
        return_token_ids: common.return_token_ids,
        n: common.n,
        prompts,
        choices,
    };
    if common.stream {
        return Ok(sse::respond(streams, writer));
    }
    whole(writer, streams).await
}

/// Submits every prompt, `n` times. When one is refused, none is admitted.
fn submit(
    engine: &Engine,
    prompts: Vec<engine::Prompt>,
    echo: bool,
    common: &Common,
) -> Result<(Vec<Prompt>, Vec<TextStream>), RequestError> {
    let given = |prompt: &engine::Prompt| match prompt {
        engine::Prompt::Text(text) if echo => Some(text.clone()),
        _ => None,
    };
    let given: Vec<Option<String>> = prompts.iter().map(given).collect();
    let streams = engine.generate_n(prompts, &common.options, common.n)?;
    let told = |(given, stream): (Option<String>, &TextStream)| {
        let tokens = stream.shared_prompt();
        let decoded = || echo.then(|| engine.tokenizer().decode(&tokens, false));
        Prompt { echo: given.or_else(decoded), tokens, logprobs: Vec::new(), begun: 0, waiting: Vec::new() }
    };
    let prompts = given.into_iter().zip(streams.iter().step_by(common.n)).map(told).collect();
    Ok((prompts, streams))
}

/// The answer in one piece. All generations are read together: one left alone would count as a slow reader.
async fn whole(mut writer: CompletionWriter, streams: Vec<TextStream>) -> Result<Response, ApiError> {
    let done = try_join_all(streams.into_iter().map(TextStream::collect)).await?;
    let usage = Usage::sum(done.iter().map(|completion| completion.finish.usage), writer.n);
    let mut choices = Vec::with_capacity(done.len());
    for (index, completion) in done.into_iter().enumerate() {
        let delta = engine::TextDelta {
            text: completion.text,
            tokens: completion.tokens,
            logprobs: completion.logprobs,
        };
        let part = Part {
            prompt: completion.prompt_logprobs,
            delta: Some(delta),
            cached_tokens: completion.finish.usage.cached_tokens,
            finish: Some(completion.finish),
        };
        choices.extend(writer.choice(index, part));
    }
    let answer = CompletionAnswer {
        id: &writer.id,
        object: "text_completion",
        created: writer.created,
        model: &writer.model,
        choices,
        usage: Some(usage),
    };
    Ok(Json(answer).into_response())
}

/// What the choices of one prompt have in common.
struct Prompt {
    tokens: Arc<[u32]>,
    /// Text told before each choice's.
    echo: Option<String>,
    /// Complete once the first choice has begun, whose stream brings them.
    logprobs: Vec<TokenLogprobs>,
    /// Choices that have begun.
    begun: usize,
    /// Parts of other choices that came before the first one began.
    waiting: Vec<(usize, Part)>,
}

/// One choice on its way out.
struct Choice {
    /// Characters of all tokens told so far.
    offset: usize,
    started: bool,
    usage: engine::Usage,
}

struct CompletionWriter {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    options: StreamOptions,
    with_logprobs: bool,
    return_token_ids: bool,
    /// Choices of each prompt.
    n: usize,
    prompts: Vec<Prompt>,
    /// Those of each prompt in a row.
    choices: Vec<Choice>,
}

impl CompletionWriter {
    /// The wire's form of a part; nothing while only prompt log-probabilities have arrived.
    fn choice(&mut self, index: usize, part: Part) -> Option<CompletionChoice> {
        let (tokenizer, with_logprobs) = (&self.tokenizer, self.with_logprobs);
        let (choice, prompt) = (&mut self.choices[index], &mut self.prompts[index / self.n]);
        prompt.logprobs.extend(part.prompt);
        if part.delta.is_none() && part.finish.is_none() {
            return None;
        }
        let first = !std::mem::replace(&mut choice.started, true);
        let delta = part.delta.unwrap_or_default();
        choice.usage.completion_tokens += delta.tokens.len();
        choice.usage.cached_tokens = part.cached_tokens;
        let echo = prompt.echo.as_ref().filter(|_| first);
        let echoed = echo.is_some();
        let mut text = echo.cloned().unwrap_or_default();
        text.push_str(&delta.text);
        let logprobs = with_logprobs.then(|| {
            let mut out = CompletionLogprobs::default();
            if echoed {
                push_prompt(&mut out, &mut choice.offset, tokenizer, &prompt.tokens, &prompt.logprobs);
            }
            for entry in &delta.logprobs {
                push(&mut out, &mut choice.offset, tokenizer, entry.token, Some(entry));
            }
            out
        });
        prompt.begun += usize::from(first);
        if prompt.begun == self.n {
            (prompt.echo, prompt.logprobs) = (None, Vec::new());
        }
        let (finish_reason, stop_reason) = match part.finish {
            Some(finish) => {
                choice.usage = finish.usage;
                (Some(finish.reason.as_str()), finish.stop_reason)
            }
            None => (None, None),
        };
        Some(CompletionChoice {
            index,
            text,
            logprobs,
            finish_reason,
            stop_reason: stop_reason.map(Into::into),
            token_ids: self.return_token_ids.then_some(delta.tokens),
            prompt_token_ids: (self.return_token_ids && first).then(|| Arc::clone(&prompt.tokens)),
        })
    }

    /// The chunk of a part, if it says something.
    fn payload(&mut self, index: usize, part: Part) -> Option<String> {
        let choice = self.choice(index, part)?;
        let usage = self.options.continuous_usage().then(|| Usage::one(self.choices[index].usage));
        Some(self.chunk(vec![choice], usage))
    }

    fn chunk(&self, choices: Vec<CompletionChoice>, usage: Option<Usage>) -> String {
        let chunk = CompletionAnswer {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.model,
            choices,
            usage,
        };
        serde_json::to_string(&chunk).expect("strings and numbers always serialise")
    }
}

impl ChunkWriter for CompletionWriter {
    fn begin(&mut self) -> Vec<String> {
        Vec::new()
    }

    fn part(&mut self, index: usize, part: Part) -> Vec<String> {
        let prompt = index / self.n;
        let first = prompt * self.n;
        let waits = self.with_logprobs && self.prompts[prompt].echo.is_some() && !self.choices[first].started;
        if waits && index != first {
            self.prompts[prompt].waiting.push((index, part));
            return Vec::new();
        }
        let mut payloads: Vec<String> = self.payload(index, part).into_iter().collect();
        if self.choices[first].started {
            let waiting = std::mem::take(&mut self.prompts[prompt].waiting);
            payloads.extend(waiting.into_iter().filter_map(|(index, part)| self.payload(index, part)));
        }
        payloads
    }

    fn end(&mut self) -> Vec<String> {
        if !self.options.include_usage() {
            return Vec::new();
        }
        let usage = Usage::sum(self.choices.iter().map(|choice| choice.usage), self.n);
        vec![self.chunk(Vec::new(), Some(usage))]
    }
}

/// Entries of a prompt: its first token was predicted by nothing.
fn push_prompt(
    out: &mut CompletionLogprobs,
    offset: &mut usize,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    logprobs: &[TokenLogprobs],
) {
    for (position, token) in prompt.iter().enumerate() {
        let entry = position.checked_sub(1).and_then(|before| logprobs.get(before));
        push(out, offset, tokenizer, *token, entry);
    }
}

fn push(
    out: &mut CompletionLogprobs,
    offset: &mut usize,
    tokenizer: &Tokenizer,
    token: u32,
    entry: Option<&TokenLogprobs>,
) {
    let text = tokenizer.token_text(token);
    let length = text.chars().count();
    out.token_logprobs.push(entry.map(|entry| finite(entry.logprob)));
    out.top_logprobs.push(entry.map(|entry| {
        let mut top = TopLogprobs::default();
        top.insert(text.clone(), finite(entry.logprob));
        for (other, logprob) in &entry.top {
            top.insert(tokenizer.token_text(*other), finite(*logprob));
        }
        top
    }));
    out.tokens.push(text);
    out.text_offset.push(*offset);
    *offset += length;
}
