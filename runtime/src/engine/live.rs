//! The requests that are open right now, seen by every handler: a sharded map, never held across an await.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use consort_actors::GenerationEvent;
use dashmap::DashMap;
use futures_util::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;

/// Where a request's events come from. Dropping it before its end cancels the request in the scheduler.
pub(crate) type EventSource = Box<dyn Stream<Item = GenerationEvent> + Send + Sync + Unpin>;

/// One open request, as [`crate::EngineStatus`] shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveRequest {
    /// The caller's name for it, or a made-up one.
    pub request_id: String,
    /// Its sequence in the scheduler.
    pub sequence: u64,
    /// Time since admission.
    pub age: Duration,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Tokens its reader has taken so far.
    pub generated_tokens: usize,
}

struct Entry {
    request_id: String,
    started: Instant,
    prompt_tokens: usize,
    generated: Arc<AtomicUsize>,
    cancel: CancellationToken,
    events: SharedEvents,
}

/// The source of a request's events, shared by the stream that reads it and the registry that may cut it off.
#[derive(Clone)]
struct SharedEvents(Arc<Mutex<Option<EventSource>>>);

impl SharedEvents {
    fn lock(&self) -> MutexGuard<'_, Option<EventSource>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let source = self.lock().take();
        drop(source);
    }
}

/// All open requests of one engine, by sequence.
#[derive(Clone, Default)]
pub(crate) struct LiveRequests {
    entries: Arc<DashMap<u64, Entry>>,
}

impl LiveRequests {
    /// Enters a request; it leaves when the returned guard is dropped.
    pub(crate) fn enter(
        &self,
        sequence: u64,
        request_id: String,
        prompt_tokens: usize,
        events: EventSource,
    ) -> LiveGuard {
        let generated = Arc::new(AtomicUsize::new(0));
        let cancel = CancellationToken::new();
        let events = SharedEvents(Arc::new(Mutex::new(Some(events))));
        let entry = Entry {
            request_id,
            started: Instant::now(),
            prompt_tokens,
            generated: Arc::clone(&generated),
            cancel: cancel.clone(),
            events: events.clone(),
        };
        self.entries.insert(sequence, entry);
        LiveGuard { requests: self.clone(), sequence, generated, cancel, events }
    }

    /// Every open request, oldest first.
    pub(crate) fn list(&self) -> Vec<LiveRequest> {
        let mut all: Vec<LiveRequest> = self
            .entries
            .iter()
            .map(|entry| LiveRequest {
                request_id: entry.request_id.clone(),
                sequence: *entry.key(),
                age: entry.started.elapsed(),
                prompt_tokens: entry.prompt_tokens,
                generated_tokens: entry.generated.load(Ordering::Relaxed),
            })
            .collect();
        all.sort_by_key(|request| request.sequence);
        all
    }

    /// Cancels the requests of that name; how many there were. What they hold is given back whether or not anybody
    /// reads their streams.
    pub(crate) fn cancel(&self, request_id: &str) -> usize {
        let matching = self.entries.iter().filter(|entry| entry.request_id == request_id);
        let cancel = |entry: &Entry| {
            // In this order: a reader that finds the source gone has been told why.
            entry.cancel.cancel();
            entry.events.close();
        };
        matching.map(|entry| cancel(&entry)).count()
    }
}

/// Keeps a request in the registry.
pub(crate) struct LiveGuard {
    requests: LiveRequests,
    sequence: u64,
    generated: Arc<AtomicUsize>,
    cancel: CancellationToken,
    events: SharedEvents,
}

impl LiveGuard {
    /// The next event. Nothing more comes after the source was closed; [`LiveGuard::cancellation`] wakes a reader
    /// that waits then.
    pub(crate) fn poll_event(&self, context: &mut Context<'_>) -> Poll<Option<GenerationEvent>> {
        match self.events.lock().as_mut() {
            Some(source) => source.poll_next_unpin(context),
            None => Poll::Pending,
        }
    }

    /// Lets go of the source.
    pub(crate) fn close(&self) {
        self.events.close();
    }

    pub(crate) fn set_generated(&self, tokens: usize) {
        self.generated.store(tokens, Ordering::Relaxed);
    }

    pub(crate) fn cancellation(&self) -> CancellationToken {
        self.cancel.clone()
    }
}

impl Drop for LiveGuard {
    fn drop(&mut self) {
        self.requests.entries.remove(&self.sequence);
    }
}
