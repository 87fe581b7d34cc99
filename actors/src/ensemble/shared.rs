//! What the handle and the actors of one ensemble share. There are no process-wide statics.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use consort_parallel::ids::Rank;
use ractor::ActorRef;

use super::EnsembleSpec;
use crate::{
    ids::{Epoch, SequenceId},
    request::SubmitError,
    scheduler::{SchedulerMessage, Submission},
    shard::{ProgressCallback, ThreadLedger},
    status::{EnsembleState, FinishedCounts, RankStatus, ShardState, Status, StatusBoard},
};

/// One per ensemble.
pub(crate) struct Shared {
    pub(crate) spec: EnsembleSpec,
    pub(crate) progress: Option<ProgressCallback>,
    pub(crate) board: Arc<StatusBoard>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) threads: ThreadLedger,
    /// How long ranks may be silent.
    pub(crate) silence_max: Duration,
    /// Progress reports of loading ranks so far: the sign that a rank which builds is alive.
    pub(crate) load_reports: Arc<AtomicU64>,
    next_epoch: AtomicU64,
    port: Mutex<Port>,
}

/// Where submissions go. One lock for both, so that sequences arrive in the order of their numbers.
struct Port {
    scheduler: Option<ActorRef<SchedulerMessage>>,
    next_sequence: u64,
}

impl Shared {
    pub(crate) fn new(spec: EnsembleSpec, progress: Option<ProgressCallback>, silence_max: Duration) -> Self {
        let ranks = (0..spec.ranks).map(|index| {
            let rank = Rank(index as u16);
            let share = spec.factory.describe(rank);
            RankStatus {
                rank,
                query_heads: share.query_heads,
                kv_heads: share.kv_heads,
                weight_bytes: 0,
                kv_bytes: 0,
                kv_blocks: spec.cache.num_blocks,
                state: ShardState::Loading,
                restarts: 0,
            }
        });
        let status = Status {
            state: EnsembleState::Starting,
            epoch: 0,
            ranks: ranks.collect(),
            running: 0,
            waiting: 0,
            total_blocks: spec.cache.num_blocks,
            used_blocks: 0,
            cached_blocks: 0,
            host_blocks: spec.cache.host_blocks,
            host_used_blocks: 0,
            block_size: spec.cache.block_size,
            steps: 0,
            preemptions: 0,
            prompt_tokens: 0,
            prefix_cache_queries: 0,
            prefix_cache_hits: 0,
            computed_tokens: 0,
            generated_tokens: 0,
            host_saves: 0,
            host_loads: 0,
            host_hits: 0,
            finished: FinishedCounts::default(),
        };
        Self {
            board: Arc::new(StatusBoard::new(status)),
            gate: Arc::new(Gate { limit: spec.scheduler.max_waiting_requests, waiting: AtomicUsize::new(0) }),
            threads: ThreadLedger::default(),
            silence_max,
            load_reports: Arc::default(),
            next_epoch: AtomicU64::new(0),
            port: Mutex::new(Port { scheduler: None, next_sequence: 0 }),
            spec,
            progress,
        }
    }

    /// The next life of the group. Never the same twice in an ensemble.
    pub(crate) fn next_epoch(&self) -> Epoch {
        Epoch(self.next_epoch.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn set_scheduler(&self, scheduler: Option<ActorRef<SchedulerMessage>>) {
        self.port.lock().unwrap_or_else(PoisonError::into_inner).scheduler = scheduler;
    }

    pub(crate) fn scheduler(&self) -> Option<ActorRef<SchedulerMessage>> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner).scheduler.clone()
    }

    /// Numbers a submission and sends it.
    pub(super) fn send_submission(
        &self,
        submission: impl FnOnce(SequenceId) -> Submission,
    ) -> Result<(SequenceId, ActorRef<SchedulerMessage>), SubmitError> {
        let gone = || SubmitError::NotReady("its scheduler ended and is being restarted".into());
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        let scheduler = port.scheduler.clone().ok_or_else(gone)?;
        let sequence = SequenceId(port.next_sequence);
        port.next_sequence += 1;
        scheduler.cast(SchedulerMessage::Submit(submission(sequence))).map_err(|_| gone())?;
        Ok((sequence, scheduler))
    }
}

/// Bounds the requests that were accepted and have not run yet, before the scheduler's unbounded mailbox.
pub(crate) struct Gate {
    /// `max_waiting_requests`.
    limit: usize,
    waiting: AtomicUsize,
}

impl Gate {
    /// Takes that many places at once, or says that there are not as many.
    pub(crate) fn enter(self: &Arc<Self>, count: usize) -> Result<Vec<WaitingSlot>, SubmitError> {
        let entered = self.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, |waiting| {
            waiting.checked_add(count).filter(|after| *after <= self.limit)
        });
        match entered {
            Ok(_) => Ok((0..count).map(|_| WaitingSlot { gate: Arc::clone(self) }).collect()),
            Err(waiting) => Err(SubmitError::Overloaded { waiting, limit: self.limit }),
        }
    }
}

/// A place among the waiting; given back when dropped.
pub(crate) struct WaitingSlot {
    gate: Arc<Gate>,
}

impl Drop for WaitingSlot {
    fn drop(&mut self) {
        self.gate.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}
