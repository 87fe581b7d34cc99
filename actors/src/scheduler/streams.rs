//! The event queues of open requests.

use std::collections::BTreeMap;

use tokio::sync::mpsc::{self, error::TrySendError};

use crate::{
    ensemble::WaitingSlot,
    ids::SequenceId,
    request::{GenerationError, GenerationEvent},
};

/// Events that one request's queue holds. A reader is a task that is woken for each token, so a queue this long means
/// that nobody has read for thousands of tokens; the request is then ended with `SlowReader`. The queue's memory
/// grows only as it fills.
pub(crate) const GENERATION_QUEUE_EVENTS: usize = 4096;

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    Sent,
    /// Nobody reads any more, or the reader is too slow and was told so: the sequence is to be cancelled.
    ReaderGone,
    /// As above, for slowness.
    ReaderSlow,
}

struct Stream {
    events: mpsc::Sender<GenerationEvent>,
    slot: Option<WaitingSlot>,
}

/// Queues by sequence. Sending never waits.
#[derive(Default)]
pub(super) struct Streams {
    open: BTreeMap<SequenceId, Stream>,
}

impl Streams {
    pub(super) fn insert(
        &mut self,
        sequence: SequenceId,
        events: mpsc::Sender<GenerationEvent>,
        slot: WaitingSlot,
    ) {
        self.open.insert(sequence, Stream { events, slot: Some(slot) });
    }

    /// Gives back the place among the waiting.
    pub(super) fn started(&mut self, sequence: SequenceId) {
        if let Some(stream) = self.open.get_mut(&sequence) {
            stream.slot = None;
        }
    }

    pub(super) fn remove(&mut self, sequence: SequenceId) {
        self.open.remove(&sequence);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Delivers an event; a last event closes the queue. One place is always kept for the last event.
    pub(super) fn deliver(&mut self, sequence: SequenceId, event: GenerationEvent) -> Delivery {
        let Some(stream) = self.open.get(&sequence) else { return Delivery::Sent };
        let last = matches!(event, GenerationEvent::Finished(_) | GenerationEvent::Failed(_));
        let full = !last && stream.events.capacity() < 2;
        let event = if full {
            let queued = stream.events.max_capacity() - stream.events.capacity();
            GenerationEvent::Failed(GenerationError::SlowReader { queued })
        } else {
            event
        };
        let sent = stream.events.try_send(event);
        if last || full || sent.is_err() {
            self.open.remove(&sequence);
        }
        match sent {
            _ if full => Delivery::ReaderSlow,
            Err(TrySendError::Closed(_) | TrySendError::Full(_)) => Delivery::ReaderGone,
            Ok(()) => Delivery::Sent,
        }
    }

    /// Ends every stream with `error` and says which.
    pub(super) fn fail_all(&mut self, error: &GenerationError) -> Vec<SequenceId> {
        let sequences: Vec<SequenceId> = self.open.keys().copied().collect();
        for &sequence in &sequences {
            self.deliver(sequence, GenerationEvent::Failed(error.clone()));
        }
        sequences
    }
}
