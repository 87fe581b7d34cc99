//! The requests that are open right now, seen by every handler: a sharded map, never held across an await.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use dashmap::DashMap;
use tokio_util::sync::CancellationToken;

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
}

/// All open requests of one engine, by sequence.
#[derive(Clone, Default)]
pub(crate) struct LiveRequests {
    entries: Arc<DashMap<u64, Entry>>,
}

impl LiveRequests {
    /// Enters a request; it leaves when the returned guard is dropped.
    pub(crate) fn enter(&self, sequence: u64, request_id: String, prompt_tokens: usize) -> LiveGuard {
        let generated = Arc::new(AtomicUsize::new(0));
        let cancel = CancellationToken::new();
        let entry = Entry {
            request_id,
            started: Instant::now(),
            prompt_tokens,
            generated: Arc::clone(&generated),
            cancel: cancel.clone(),
        };
        self.entries.insert(sequence, entry);
        LiveGuard { requests: self.clone(), sequence, generated, cancel }
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

    /// Cancels the requests of that name; how many there were.
    pub(crate) fn cancel(&self, request_id: &str) -> usize {
        let matching = self.entries.iter().filter(|entry| entry.request_id == request_id);
        matching.map(|entry| entry.cancel.cancel()).count()
    }
}

/// Keeps a request in the registry.
pub(crate) struct LiveGuard {
    requests: LiveRequests,
    sequence: u64,
    generated: Arc<AtomicUsize>,
    cancel: CancellationToken,
}

impl LiveGuard {
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
