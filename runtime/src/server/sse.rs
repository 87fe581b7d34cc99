//! Server-sent events: several generations become one stream of `data:` lines.
//!
//! The body owns the generations. When the client goes away the HTTP layer drops the body, and with it every
//! generation is cancelled.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
};
use consort_actors::plan::TokenLogprobs;
use futures_util::{
    Stream, StreamExt,
    stream::{SelectAll, select_all, unfold},
};

use super::error::ApiError;
use crate::{
    engine::{Finish, TextDelta, TextEvent, TextStream},
    error::RequestError,
};

/// What one chunk tells: text and end together when both are known at once, so that a generation of n tokens is n
/// chunks.
#[derive(Debug, Default)]
pub(super) struct Part {
    pub(super) prompt: Vec<TokenLogprobs>,
    pub(super) delta: Option<TextDelta>,
    pub(super) finish: Option<Finish>,
    /// Tokens of the prompt that were cached; final from the first text on.
    pub(super) cached_tokens: usize,
}

/// Makes JSON payloads out of parts. Pure.
pub(super) trait ChunkWriter: Send + 'static {
    /// Payloads before any part.
    fn begin(&mut self) -> Vec<String>;
    /// Payloads of one part of choice `index`.
    fn part(&mut self, index: usize, part: Part) -> Vec<String>;
    /// Payloads after the last part.
    fn end(&mut self) -> Vec<String>;
}

/// A text stream in parts, with its place among the choices.
struct Parts {
    index: usize,
    stream: TextStream,
}

impl Stream for Parts {
    type Item = (usize, Result<Part, RequestError>);

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(event) = ready!(self.stream.poll_next_unpin(cx)) else { return Poll::Ready(None) };
        let empty = Part { cached_tokens: self.stream.usage().cached_tokens, ..Part::default() };
        let part = event.map(|event| match event {
            TextEvent::Prompt(prompt) => Part { prompt, ..empty },
            TextEvent::Delta(delta) => {
                Part { delta: Some(delta), finish: self.stream.take_finish(), ..empty }
            }
            TextEvent::Finished(finish) => Part { finish: Some(finish), ..empty },
        });
        Poll::Ready(Some((self.index, part)))
    }
}

enum Phase {
    Begin,
    Run,
    Done,
}

struct State<W> {
    parts: SelectAll<Parts>,
    writer: W,
    phase: Phase,
}

/// The streaming response of these generations.
pub(super) fn respond<W: ChunkWriter>(streams: Vec<TextStream>, writer: W) -> Response {
    let parts = select_all(streams.into_iter().enumerate().map(|(index, stream)| Parts { index, stream }));
    let lines = unfold(State { parts, writer, phase: Phase::Begin }, advance);
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // Asks nginx not to collect the lines.
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(lines)).into_response()
}

async fn advance<W: ChunkWriter>(mut state: State<W>) -> Option<(Result<Bytes, Infallible>, State<W>)> {
    loop {
        let lines = match state.phase {
            Phase::Done => return None,
            Phase::Begin => {
                state.phase = Phase::Run;
                frames(&state.writer.begin())
            }
            Phase::Run => match state.parts.next().await {
                Some((index, Ok(part))) => frames(&state.writer.part(index, part)),
                Some((_, Err(error))) => {
                    state.phase = Phase::Done;
                    state.parts.clear();
                    frames(&[ApiError::from(error).body(), "[DONE]".to_owned()])
                }
                None => {
                    state.phase = Phase::Done;
                    let mut payloads = state.writer.end();
                    payloads.push("[DONE]".to_owned());
                    frames(&payloads)
                }
            },
        };
        if !lines.is_empty() {
            return Some((Ok(Bytes::from(lines)), state));
        }
    }
}

/// One `data:` line and an empty line per payload. JSON has no raw line breaks, so a payload is always one line.
pub(super) fn frames(payloads: &[String]) -> String {
    payloads.iter().map(|payload| format!("data: {payload}\n\n")).collect()
}
