//! The event queues of open requests, and the turns that the requests take.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::mpsc::{self, error::TrySendError};

use super::Submission;
use crate::{
    ensemble::WaitingSlot,
    ids::SequenceId,
    prefix::BlockKey,
    request::{GenerationError, GenerationEvent, Request},
    router::Progress,
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
    /// Of a request that has not started.
    slot: Option<WaitingSlot>,
    /// As above, where it may be given back.
    spare: Option<Spare>,
    is_prefilled: bool,
}

/// What a request is submitted with once more, elsewhere.
struct Spare {
    request: Request,
    arrived_ms: u64,
    leader: Option<SequenceId>,
    keys: Arc<[BlockKey]>,
}

/// Queues by sequence. Sending never waits.
#[derive(Default)]
pub(super) struct Streams {
    open: BTreeMap<SequenceId, Stream>,
    /// What happened since it was last asked for.
    progress: Progress,
}

impl Streams {
    /// Opens a request's queue, and hands out what is to be scheduled. One that may be given back is kept in full
    /// until it starts: prompts that wait exist twice then.
    pub(super) fn insert(
        &mut self,
        submission: Submission,
        may_be_given_back: bool,
    ) -> (SequenceId, Request) {
        let Submission { sequence, request, arrived_ms, leader, keys, events, slot } = submission;
        let spare = may_be_given_back.then(|| Spare { request: request.clone(), arrived_ms, leader, keys });
        self.open.insert(sequence, Stream { events, slot: Some(slot), spare, is_prefilled: false });
        (sequence, request)
    }

    /// Gives back the place among the waiting.
    pub(super) fn started(&mut self, sequence: SequenceId) {
        let Some(stream) = self.open.get_mut(&sequence) else { return };
        stream.spare = None;
        if stream.slot.take().is_some() {
            self.progress.started.push(sequence);
        }
    }

    pub(super) fn remove(&mut self, sequence: SequenceId) {
        if self.open.remove(&sequence).is_some() {
            self.progress.ended.push(sequence);
        }
    }

    /// Takes out a request that has not started, as it came in.
    pub(super) fn give_back(&mut self, sequence: SequenceId) -> Option<Submission> {
        self.open.get(&sequence)?.spare.as_ref()?;
        let Stream { events, slot, spare, .. } = self.open.remove(&sequence)?;
        let (Spare { request, arrived_ms, leader, keys }, slot) = (spare?, slot?);
        Some(Submission { sequence, request, arrived_ms, leader, keys, events, slot })
    }

    /// Takes out all that have not started and may be given back, in order.
    pub(super) fn give_back_all(&mut self) -> Vec<Submission> {
        let unstarted = self.open.iter().filter(|(_, stream)| stream.spare.is_some());
        let unstarted: Vec<SequenceId> = unstarted.map(|(sequence, _)| *sequence).collect();
        unstarted.into_iter().filter_map(|sequence| self.give_back(sequence)).collect()
    }

    /// The turns that requests took since the last call.
    pub(super) fn take_progress(&mut self) -> Progress {
        std::mem::take(&mut self.progress)
    }

    /// Delivers an event; a last event closes the queue. One place is always kept for the last event.
    pub(super) fn deliver(&mut self, sequence: SequenceId, event: GenerationEvent) -> Delivery {
        let Some(stream) = self.open.get_mut(&sequence) else { return Delivery::Sent };
        let draws = matches!(event, GenerationEvent::Prefilled { .. } | GenerationEvent::Token(_));
        if draws && !std::mem::replace(&mut stream.is_prefilled, true) {
            self.progress.prefilled.push(sequence);
        }
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
            self.remove(sequence);
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
