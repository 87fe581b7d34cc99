//! The event queues of open requests, and the turns that the requests take.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::mpsc::{self, error::TrySendError};

use super::Submission;
use crate::{
    ensemble::{Transit, WaitingSlot},
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
    transit: Transit,
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
        let Submission { sequence, request, arrived_ms, leader, keys, events, slot, mut transit } =
            submission;
        transit.arrive();
        let spare =
            may_be_given_back.then(|| Spare { request: request.clone(), arrived_ms, leader, keys, transit });
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

    /// Takes out those of a group that are open, as they came in; none, where one of them has started.
    pub(super) fn give_back(&mut self, sequences: &[SequenceId]) -> Vec<Submission> {
        let is_open = |sequence: &&SequenceId| self.open.contains_key(sequence);
        let open: Vec<SequenceId> = sequences.iter().filter(is_open).copied().collect();
        let has_started =
            |sequence: &SequenceId| self.open.get(sequence).is_some_and(|stream| stream.spare.is_none());
        if open.iter().any(has_started) {
            self.progress.kept.extend(open);
            return Vec::new();
        }
        open.into_iter().filter_map(|sequence| self.take_out(sequence)).collect()
    }

    fn take_out(&mut self, sequence: SequenceId) -> Option<Submission> {
        let Stream { events, slot, spare, .. } = self.open.remove(&sequence)?;
        let (Spare { request, arrived_ms, leader, keys, mut transit }, slot) = (spare?, slot?);
        transit.depart();
        Some(Submission { sequence, request, arrived_ms, leader, keys, events, slot, transit })
    }

    /// Takes out all that have not started and may be given back, by group and in order.
    pub(super) fn give_back_all(&mut self) -> Vec<Vec<Submission>> {
        let unstarted = self.open.iter().filter(|(_, stream)| stream.spare.is_some());
        let unstarted: Vec<SequenceId> = unstarted.map(|(sequence, _)| *sequence).collect();
        let mut groups: BTreeMap<SequenceId, Vec<Submission>> = BTreeMap::new();
        for submission in unstarted.into_iter().filter_map(|sequence| self.take_out(sequence)) {
            let leader = submission.leader.unwrap_or(submission.sequence);
            groups.entry(leader).or_default().push(submission);
        }
        groups.into_values().collect()
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
