//! A generation as text: token events in, text out, and cancelled when dropped.
//!
//! The pure part is [`Composer`]: it turns generation events into text events, with incremental detokenising and
//! stop strings. [`TextStream`] drives it with a real generation.

#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use consort_actors::{GenerationError, GenerationEvent, plan::TokenLogprobs};
use futures_util::{Stream, StreamExt};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::live::LiveGuard;
use crate::{
    error::RequestError,
    metrics::{Outcome, RequestTimer},
    text::{IncrementalDecoder, StopMatcher, StopPush},
};

/// What a [`TextStream`] yields, in order; [`TextEvent::Finished`] is the last.
#[derive(Clone, Debug, PartialEq)]
pub enum TextEvent {
    /// Log-probabilities of prompt tokens `1..`, in one or more parts, before any text.
    Prompt(Vec<TokenLogprobs>),
    /// More text.
    Delta(TextDelta),
    /// The end.
    Finished(Finish),
}

/// What one step added.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TextDelta {
    /// New text; empty while a character is incomplete or a stop string may be under way.
    pub text: String,
    /// New tokens, the ending one included.
    pub tokens: Vec<u32>,
    /// One entry per new token, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
}

/// How a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// Which stop string or stop token it was; absent for the model's own end-of-sequence tokens.
    pub stop_reason: Option<StopReason>,
    /// Tokens it took.
    pub usage: Usage,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model's end-of-sequence token, a stop token or a stop string.
    Stop,
    /// `max_tokens` or the context is used up.
    Length,
}

impl FinishReason {
    /// The word of the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// What the caller named as a stop and was met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A string of `stop`.
    Text(String),
    /// A token of `stop_token_ids`.
    Token(u32),
}

/// Tokens of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, the ending one included.
    pub completion_tokens: usize,
    /// Tokens of the prompt whose keys and values were there already, in the cache or because another request was
    /// computing them; known once the prompt is computed. Of several choices of a prompt, the first tells what the
    /// request did not compute; the others share what the first has computed, and count that too.
    pub cached_tokens: usize,
}

/// A whole generation, collected.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// All text.
    pub text: String,
    /// All tokens.
    pub tokens: Vec<u32>,
    /// One entry per token, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Entries of prompt tokens `1..`, when asked for; only in the first choice of a prompt.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// How it ended.
    pub finish: Finish,
}

/// Turns generation events into text events.
pub(crate) struct Composer {
    pub(crate) decoder: IncrementalDecoder,
    pub(crate) stops: StopMatcher,
    /// End-of-sequence tokens of the model; they are reported without a stop reason.
    pub(crate) eos_token_ids: Vec<u32>,
    /// Every token that ends this generation.
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) include_stop: bool,
    /// Stop strings count only in what comes after this many tokens.
    pub(crate) min_tokens: usize,
    pub(crate) max_tokens: usize,
    pub(crate) usage: Usage,
    pub(crate) ready: VecDeque<TextEvent>,
}

impl Composer {
    /// Takes one event in. True when another one must follow before the events so far are handed out: the last token
    /// is then told together with the end.
    fn absorb(&mut self, event: GenerationEvent) -> Result<bool, GenerationError> {
        match event {
            GenerationEvent::PromptLogprobs(part) => self.ready.push_back(TextEvent::Prompt(part)),
            GenerationEvent::Prefilled { cached_tokens } => self.usage.cached_tokens = cached_tokens,
            GenerationEvent::Token(sampled) => {
                self.usage.completion_tokens += 1;
                let ending = self.stop_token_ids.binary_search(&sampled.token).is_ok();
                let text = if ending && !self.include_stop {
                    String::new()
                } else {
                    self.decoder.push(sampled.token)
                };
                let (text, stopped) = match self.look_for_stops(&text) {
                    StopPush::Emit(text) => (text, None),
                    StopPush::Stopped { text, matched } => (text, Some(matched)),
                };
                let tokens = vec![sampled.token];
                let logprobs = sampled.logprobs.into_iter().collect();
                self.ready.push_back(TextEvent::Delta(TextDelta { text, tokens, logprobs }));
                if let Some(stop) = stopped {
                    self.finish(FinishReason::Stop, Some(StopReason::Text(stop)));
                    return Ok(false);
                }
                return Ok(ending || self.usage.completion_tokens >= self.max_tokens);
            }
            GenerationEvent::Finished(reason) => {
                let stopped = self.flush();
                match reason {
                    // The string ends before the token, and with its text the answer.
                    _ if stopped.is_some() => self.finish(FinishReason::Stop, stopped.map(StopReason::Text)),
                    consort_actors::FinishReason::Stop { token } => {
                        let own = self.eos_token_ids.contains(&token);
                        self.finish(FinishReason::Stop, (!own).then_some(StopReason::Token(token)));
                    }
                    consort_actors::FinishReason::Length => self.finish(FinishReason::Length, None),
                }
            }
            GenerationEvent::Failed(error) => return Err(error),
        }
        Ok(false)
    }

    fn look_for_stops(&mut self, text: &str) -> StopPush {
        if self.usage.completion_tokens > self.min_tokens {
            self.stops.push(text)
        } else {
            StopPush::Emit(self.stops.pass(text))
        }
    }

    /// Hands out what detokeniser and stop matcher still hold. A stop string that the last of it completes is returned.
    fn flush(&mut self) -> Option<String> {
        let rest = self.decoder.flush();
        let (mut text, stopped) = match self.look_for_stops(&rest) {
            StopPush::Emit(text) => (text, None),
            StopPush::Stopped { text, matched } => (text, Some(matched)),
        };
        text.push_str(&self.stops.flush());
        if text.is_empty() {
            return stopped;
        }
        match self.ready.back_mut() {
            Some(TextEvent::Delta(delta)) => delta.text.push_str(&text),
            _ => self.ready.push_back(TextEvent::Delta(TextDelta { text, ..TextDelta::default() })),
        }
        stopped
    }

    fn finish(&mut self, reason: FinishReason, stop_reason: Option<StopReason>) {
        self.ready.push_back(TextEvent::Finished(Finish { reason, stop_reason, usage: self.usage }));
    }
}

/// An owned stream of a generation's text. Dropping it cancels the generation and frees what it holds.
///
/// A reader that falls far behind is cancelled too: the queue before it is bounded.
pub struct TextStream {
    composer: Composer,
    /// The last token is in `composer.ready` and waits for the end, which is on its way.
    held: bool,
    ended: bool,
    timer: RequestTimer,
    live: LiveGuard,
    cancelled: Pin<Box<WaitForCancellationFutureOwned>>,
    prompt: Arc<[u32]>,
    request_id: String,
}

impl TextStream {
    pub(crate) fn new(
        composer: Composer,
        timer: RequestTimer,
        live: LiveGuard,
        prompt: Arc<[u32]>,
        request_id: String,
    ) -> Self {
        let cancelled = Box::pin(live.cancellation().cancelled_owned());
        Self { composer, held: false, ended: false, timer, live, cancelled, prompt, request_id }
    }

    /// The prompt's tokens.
    pub fn prompt_tokens(&self) -> &[u32] {
        &self.prompt
    }

    /// The same, shared by all choices of the prompt.
    pub(crate) fn shared_prompt(&self) -> Arc<[u32]> {
        Arc::clone(&self.prompt)
    }

    /// Tokens so far, those included that wait to be read. It is final once the end was read.
    pub fn usage(&self) -> Usage {
        self.composer.usage
    }

    /// The request's name, given or made up.
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// The next event; `None` after the end.
    pub async fn next(&mut self) -> Option<Result<TextEvent, RequestError>> {
        StreamExt::next(self).await
    }

    /// Waits for the end and returns everything at once.
    pub async fn collect(mut self) -> Result<Completion, RequestError> {
        let mut text = String::new();
        let (mut tokens, mut logprobs, mut prompt_logprobs) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(event) = self.next().await {
            match event? {
                TextEvent::Prompt(part) => prompt_logprobs.extend(part),
                TextEvent::Delta(delta) => {
                    text.push_str(&delta.text);
                    tokens.extend(delta.tokens);
                    logprobs.extend(delta.logprobs);
                }
                TextEvent::Finished(finish) => {
                    return Ok(Completion { text, tokens, logprobs, prompt_logprobs, finish });
                }
            }
        }
        Err(GenerationError::ShuttingDown.into())
    }

    /// The end, if it is known already: lets the server tell it together with the last text.
    pub(crate) fn take_finish(&mut self) -> Option<Finish> {
        match self.composer.ready.pop_front() {
            Some(TextEvent::Finished(finish)) => Some(finish),
            Some(other) => {
                self.composer.ready.push_front(other);
                None
            }
            None => None,
        }
    }

    fn end(&mut self, outcome: Outcome) {
        self.timer.finish(outcome);
        self.ended = true;
        self.held = false;
        self.live.close();
    }

    /// Ends with an error, which is the last that is told.
    fn fail(&mut self, outcome: Outcome, error: RequestError) -> Poll<Option<<Self as Stream>::Item>> {
        self.end(outcome);
        self.composer.ready.clear();
        Poll::Ready(Some(Err(error)))
    }

    /// Reads one generation event into the composer.
    fn read(&mut self, event: Option<GenerationEvent>) -> Result<bool, GenerationError> {
        // A stream that ends without a last event was cut by the end of its engine.
        let event = event.unwrap_or(GenerationEvent::Failed(GenerationError::ShuttingDown));
        if matches!(event, GenerationEvent::Token(_)) {
            self.timer.token();
        }
        let held = self.composer.absorb(event)?;
        self.live.set_generated(self.composer.usage.completion_tokens);
        if let Some(TextEvent::Finished(finish)) = self.composer.ready.back() {
            let outcome = match finish.reason {
                FinishReason::Stop => Outcome::Stop,
                FinishReason::Length => Outcome::Length,
            };
            self.end(outcome);
        }
        Ok(held)
    }
}

impl Stream for TextStream {
    type Item = Result<TextEvent, RequestError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if !this.held
                && let Some(event) = this.composer.ready.pop_front()
            {
                return Poll::Ready(Some(Ok(event)));
            }
            if this.ended {
                return Poll::Ready(None);
            }
            if this.cancelled.as_mut().poll(cx).is_ready() {
                return this.fail(Outcome::Abort, RequestError::Cancelled);
            }
            let event = ready!(this.live.poll_event(cx));
            match this.read(event) {
                Ok(must_wait) => this.held = must_wait,
                Err(error) => return this.fail(Outcome::Error, error.into()),
            }
        }
    }
}
