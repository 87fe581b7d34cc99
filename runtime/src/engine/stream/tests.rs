use std::{
    collections::VecDeque,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use consort_actors::{
    CacheSpec, FinishReason as ActorsReason, GenerationError, GenerationEvent,
    plan::{Sampled, TokenLogprobs},
};
use futures_util::{Stream, StreamExt, stream::iter};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{Composer, Finish, FinishReason, StopReason, TextDelta, TextEvent, TextStream, Usage};
use crate::{
    engine::{
        Engine, GenerateOptions,
        live::{EventSource, LiveRequests},
    },
    error::RequestError,
    metrics::{EngineMetrics, RequestTimer, Siblings},
    testing::{self, IM_END},
    text::{IncrementalDecoder, StopMatcher, StopStrings, Tokenizer},
};

/// A stop token of the caller's.
const CALLERS: u32 = b'!' as u32;

fn composer(stops: &[&str], include_stop: bool, max_tokens: usize) -> Composer {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    let tokenizer = Arc::new(Tokenizer::from_folder(folder.path()).expect("the tokenizer is valid"));
    Composer {
        decoder: IncrementalDecoder::new(tokenizer, true),
        stops: StopMatcher::new(
            StopStrings::new(stops.iter().copied()).expect("no empty string"),
            include_stop,
        ),
        eos_token_ids: vec![IM_END],
        stop_token_ids: vec![CALLERS, IM_END],
        include_stop,
        min_tokens: 0,
        max_tokens,
        usage: Usage { prompt_tokens: 4, ..Usage::default() },
        ready: VecDeque::new(),
    }
}

fn token(token: u32) -> GenerationEvent {
    GenerationEvent::Token(Sampled { token, logprobs: None })
}

fn tokens(text: &str) -> Vec<GenerationEvent> {
    text.bytes().map(|byte| token(u32::from(byte))).collect()
}

/// Feeds events until the end, and tells what came out and how often an event was held back.
fn run(mut composer: Composer, events: Vec<GenerationEvent>) -> (Vec<TextEvent>, usize) {
    let mut held = 0;
    for event in events {
        held += usize::from(composer.absorb(event).expect("no failure among the events"));
        if matches!(composer.ready.back(), Some(TextEvent::Finished(_))) {
            break;
        }
    }
    (composer.ready.into(), held)
}

fn text(events: &[TextEvent]) -> String {
    let deltas = events.iter().filter_map(|event| match event {
        TextEvent::Delta(delta) => Some(delta.text.as_str()),
        _ => None,
    });
    deltas.collect()
}

fn finish(events: &[TextEvent]) -> &Finish {
    match events.last() {
        Some(TextEvent::Finished(finish)) => finish,
        other => panic!("the last event must be the end, got {other:?}"),
    }
}

#[test]
fn every_token_is_an_event_and_the_end_comes_with_the_last() {
    let mut events = tokens("abc");
    events.push(GenerationEvent::Finished(ActorsReason::Length));
    let (out, held) = run(composer(&[], false, 3), events);
    assert_eq!(held, 1, "the third token waits for the end");
    assert_eq!(out.len(), 4);
    assert_eq!(text(&out), "abc");
    let usage = Usage { prompt_tokens: 4, completion_tokens: 3, cached_tokens: 0 };
    assert_eq!(*finish(&out), Finish { reason: FinishReason::Length, stop_reason: None, usage });
}

#[test]
fn the_models_own_end_is_counted_and_not_shown() {
    let mut events = tokens("ab");
    events.extend([token(IM_END), GenerationEvent::Finished(ActorsReason::Stop { token: IM_END })]);
    let (out, held) = run(composer(&[], false, 100), events);
    assert_eq!((text(&out).as_str(), held), ("ab", 1));
    assert_eq!(out[2], TextEvent::Delta(TextDelta { tokens: vec![IM_END], ..TextDelta::default() }));
    assert_eq!(finish(&out).stop_reason, None);
    assert_eq!(finish(&out).usage.completion_tokens, 3);
}

#[test]
fn a_callers_stop_token_is_the_stop_reason_and_shown_only_when_asked() {
    for (include, expected) in [(false, "ab"), (true, "ab!")] {
        let mut events = tokens("ab!");
        events.push(GenerationEvent::Finished(ActorsReason::Stop { token: CALLERS }));
        let (out, _) = run(composer(&[], include, 100), events);
        assert_eq!(text(&out), expected);
        assert_eq!(finish(&out).stop_reason, Some(StopReason::Token(CALLERS)));
    }
}

#[test]
fn a_stop_string_over_several_tokens_ends_at_once_and_never_shows() {
    let (out, _) = run(composer(&["END"], false, 100), tokens("xENENDmore"));
    assert_eq!(text(&out), "xEN");
    let end = finish(&out);
    assert_eq!((end.reason, &end.stop_reason), (FinishReason::Stop, &Some(StopReason::Text("END".into()))));
    assert_eq!(end.usage.completion_tokens, 6);
    assert!(out.iter().all(|event| !matches!(event, TextEvent::Delta(delta) if delta.text.contains("END"))));
}

#[test]
fn an_included_stop_string_is_the_last_text() {
    let (out, _) = run(composer(&["END"], true, 100), tokens("xENDmore"));
    assert_eq!(text(&out), "xEND");
}

#[test]
fn stop_strings_count_only_after_the_minimum_and_may_begin_before_it() {
    let run_with = |min_tokens, text: &str, max_tokens| {
        let mut events = tokens(text);
        events.push(GenerationEvent::Finished(ActorsReason::Length));
        run(Composer { min_tokens, ..composer(&["END"], false, max_tokens) }, events).0
    };
    // Complete with token 4: one more than the minimum, as with stop tokens.
    let out = run_with(3, "xEND..", 6);
    assert_eq!((text(&out).as_str(), finish(&out).usage.completion_tokens), ("x", 4));
    let out = run_with(4, "xENDxEND", 8);
    assert_eq!((text(&out).as_str(), finish(&out).usage.completion_tokens), ("xENDx", 8));
    assert_eq!(finish(&out).stop_reason, Some(StopReason::Text("END".into())));
    let out = run_with(4, "xEND", 4);
    assert_eq!((text(&out).as_str(), finish(&out).reason), ("xEND", FinishReason::Length));
    let events = run_with(4, "xENEND", 6);
    assert_eq!(text(&events), "xEN");
}

#[test]
fn what_was_held_back_for_a_stop_string_is_told_when_the_length_is_used_up() {
    let mut events = tokens("xEN");
    events.push(GenerationEvent::Finished(ActorsReason::Length));
    let (out, _) = run(composer(&["END"], false, 3), events);
    assert_eq!(text(&out), "xEN");
    assert_eq!(finish(&out).reason, FinishReason::Length);
    assert_eq!(out.len(), 4, "the rest joins the last token's event");
}

#[test]
fn a_character_of_several_tokens_comes_whole() {
    let mut events = tokens("é");
    events.push(GenerationEvent::Finished(ActorsReason::Length));
    let (out, _) = run(composer(&[], false, 2), events);
    let parts: Vec<&str> = out
        .iter()
        .filter_map(|event| match event {
            TextEvent::Delta(delta) => Some(delta.text.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(parts, ["", "é"]);
}

#[test]
fn a_character_cut_by_the_length_is_told_as_broken() {
    let events = vec![token(0xc3), GenerationEvent::Finished(ActorsReason::Length)];
    let (out, _) = run(composer(&[], false, 1), events);
    assert_eq!(text(&out), "\u{fffd}");
}

#[test]
fn a_stop_string_that_the_last_text_completes_is_the_reason() {
    for reason in [ActorsReason::Length, ActorsReason::Stop { token: IM_END }] {
        let ending = matches!(reason, ActorsReason::Stop { .. }).then(|| token(IM_END));
        let events = || {
            let cut = [token(u32::from(b'x')), token(0xc3)];
            cut.into_iter()
                .chain(ending.clone())
                .chain([GenerationEvent::Finished(reason)])
                .collect::<Vec<_>>()
        };
        for (include, expected) in [(false, ""), (true, "x\u{fffd}")] {
            let (out, _) = run(composer(&["x\u{fffd}"], include, 100), events());
            assert_eq!(text(&out), expected);
            let end = finish(&out);
            assert_eq!(end.reason, FinishReason::Stop, "{reason:?}");
            assert_eq!(end.stop_reason, Some(StopReason::Text("x\u{fffd}".into())));
        }
        let out = run(Composer { min_tokens: 9, ..composer(&["x\u{fffd}"], false, 100) }, events()).0;
        assert_eq!(text(&out), "x\u{fffd}");
        assert_eq!(finish(&out).stop_reason, None, "it does not count yet");
    }
}

#[test]
fn prompt_logprobs_pass_through_before_the_text() {
    let part = vec![TokenLogprobs { token: 97, logprob: -0.5, top: vec![(97, -0.5)] }];
    let events =
        vec![GenerationEvent::PromptLogprobs(part.clone()), GenerationEvent::Finished(ActorsReason::Length)];
    let (out, _) = run(composer(&[], false, 0), events);
    assert_eq!(out[0], TextEvent::Prompt(part));
    assert_eq!(finish(&out).usage.completion_tokens, 0);
}

#[test]
fn a_failure_is_the_streams_failure() {
    let failed = GenerationEvent::Failed(GenerationError::ShuttingDown);
    assert_eq!(composer(&[], false, 5).absorb(failed), Err(GenerationError::ShuttingDown));
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_a_request_share_its_stop_strings_and_each_prompts_tokens() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    let engine = Engine::builder().model(folder.path()).start().await.expect("the tiny model starts");
    let options =
        GenerateOptions { max_tokens: Some(1), stop: vec!["x".repeat(1024); 256], ..Default::default() };
    let streams = engine.generate_n(vec!["ab".into(), "cd".into()], &options, 8).expect("admitted");
    for (index, stream) in streams.iter().enumerate() {
        assert!(stream.composer.stops.shares_tables_with(&streams[0].composer.stops), "{index}");
        let first = &streams[index / 8 * 8];
        assert_eq!(stream.prompt_tokens().as_ptr(), first.prompt_tokens().as_ptr(), "{index}");
    }
    assert_ne!(streams[0].prompt_tokens(), streams[8].prompt_tokens());
}

fn stream(composer: Composer, requests: &LiveRequests, source: EventSource) -> TextStream {
    let metrics = EngineMetrics::new("tiny", 1, &CacheSpec::new(16, 8)).expect("buckets are valid");
    let metrics = Arc::new(metrics);
    let timer = RequestTimer::start(metrics, 4, None, Arc::new(Siblings::new(1)));
    let live = requests.enter(0, "mine".into(), 4, source);
    TextStream::new(composer, timer, live, [1; 4].into(), "mine".into())
}

fn poll(stream: &mut TextStream) -> Poll<Option<Result<TextEvent, RequestError>>> {
    stream.poll_next_unpin(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn the_last_token_waits_for_the_end_also_across_polls() {
    let (sender, receiver) = mpsc::channel(4);
    let source = Box::new(ReceiverStream::new(receiver));
    let mut stream = stream(composer(&[], false, 1), &LiveRequests::default(), source);
    sender.try_send(token(97)).expect("room");
    assert!(poll(&mut stream).is_pending(), "the end is not there yet");
    assert!(poll(&mut stream).is_pending(), "nor is it when polled once more");
    sender.try_send(GenerationEvent::Finished(ActorsReason::Length)).expect("room");
    let Poll::Ready(Some(Ok(TextEvent::Delta(delta)))) = poll(&mut stream) else {
        panic!("the token is due")
    };
    assert_eq!(delta.text, "a");
    assert!(stream.take_finish().is_some(), "and its end with it");
    assert!(matches!(poll(&mut stream), Poll::Ready(None)));
}

#[test]
fn a_held_token_does_not_hide_a_cancellation_or_a_failure() {
    let requests = LiveRequests::default();
    let (_sender, receiver) = mpsc::channel(4);
    let held = iter([token(97)]).chain(ReceiverStream::new(receiver));
    let mut cancelled = stream(composer(&[], false, 1), &requests, Box::new(held));
    assert!(poll(&mut cancelled).is_pending());
    assert_eq!(requests.cancel("mine"), 1);
    assert!(matches!(poll(&mut cancelled), Poll::Ready(Some(Err(RequestError::Cancelled)))));
    assert!(matches!(poll(&mut cancelled), Poll::Ready(None)));

    let failing = iter([token(97), GenerationEvent::Failed(GenerationError::ShuttingDown)]);
    let mut failed = stream(composer(&[], false, 1), &requests, Box::new(failing));
    assert!(matches!(poll(&mut failed), Poll::Ready(Some(Err(RequestError::Generation(_))))));
    assert!(matches!(poll(&mut failed), Poll::Ready(None)));
}

/// Tells when it is dropped.
struct Dropped(Option<std::sync::mpsc::Sender<()>>);

impl Stream for Dropped {
    type Item = GenerationEvent;

    fn poll_next(self: std::pin::Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<GenerationEvent>> {
        Poll::Pending
    }
}

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|sender| sender.send(()).expect("the test listens"));
    }
}

#[test]
fn a_source_is_let_go_when_cancelled_whether_or_not_anybody_polls() {
    let requests = LiveRequests::default();
    let (sender, dropped) = std::sync::mpsc::channel();
    let source = Box::new(Dropped(Some(sender)));
    let mut unread = stream(composer(&[], false, 9), &requests, source);
    assert_eq!(requests.cancel("mine"), 1);
    dropped.try_recv().expect("the source is gone");
    assert!(matches!(poll(&mut unread), Poll::Ready(Some(Err(RequestError::Cancelled)))));
}
