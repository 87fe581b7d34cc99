//! What an ensemble says of itself at any moment.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use consort_parallel::ids::Rank;

/// A snapshot of an ensemble. Counters only grow while the ensemble lives.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    /// Whether it serves.
    pub state: EnsembleState,
    /// Life of the shard group.
    pub epoch: u64,
    /// One entry per rank.
    pub ranks: Vec<RankStatus>,
    /// Sequences that hold blocks.
    pub running: usize,
    /// Sequences that wait for blocks, preempted ones included.
    pub waiting: usize,
    /// Blocks of the KV pool.
    pub total_blocks: usize,
    /// Blocks that are not free.
    pub used_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Steps executed and absorbed.
    pub steps: u64,
    /// Times a sequence lost its blocks to another.
    pub preemptions: u64,
    /// Prompt tokens of requests that started.
    pub prompt_tokens: u64,
    /// Tokens emitted.
    pub generated_tokens: u64,
    /// Requests that ended, by reason.
    pub finished: FinishedCounts,
}

/// Whether an ensemble serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnsembleState {
    /// Shards load.
    Starting,
    /// Requests are served.
    Ready,
    /// A shard was lost; the group forms anew.
    Restarting {
        /// Restarts within the present window, this one included.
        attempt: u32,
        /// What was lost, and why.
        reason: String,
    },
    /// Running requests may finish, new ones are refused.
    Draining,
    /// All actors and threads have ended.
    Stopped,
    /// The group was lost more often than is tolerated, or one of its ranks hangs. Nothing restarts from here.
    Failed {
        /// The last loss.
        reason: String,
    },
}

/// One rank's share and health.
#[derive(Clone, Debug, PartialEq)]
pub struct RankStatus {
    /// Which.
    pub rank: Rank,
    /// Query heads it computes.
    pub query_heads: Range<usize>,
    /// Key/value heads it holds.
    pub kv_heads: Range<usize>,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes of keys and values.
    pub kv_bytes: u64,
    /// Blocks of the pool it stores.
    pub kv_blocks: usize,
    /// Health.
    pub state: ShardState,
    /// Times it was built anew.
    pub restarts: u32,
}

/// Health of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardState {
    /// Builds its model, or joins a new epoch.
    Loading,
    /// Executes.
    Ready,
    /// Ended; its supervisor decides what follows.
    Lost,
    /// Ended with the ensemble.
    Stopped,
}

/// Ended requests by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FinishedCounts {
    /// A stop token was drawn.
    pub stop: u64,
    /// `max_tokens` or the context was used up.
    pub length: u64,
    /// The caller dropped the stream.
    pub cancelled: u64,
    /// The caller did not read the stream.
    pub slow_reader: u64,
    /// A shard was lost, or the engine shut down.
    pub failed: u64,
}

/// The latest snapshot. Writers hold the lock for a handful of assignments, readers for one clone.
pub(crate) struct StatusBoard {
    status: Mutex<Status>,
}

impl StatusBoard {
    pub(crate) fn new(status: Status) -> Self {
        Self { status: Mutex::new(status) }
    }

    pub(crate) fn snapshot(&self) -> Status {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn state(&self) -> EnsembleState {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).state.clone()
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Moves to `next` unless the present state outlives it: what drains never becomes ready again, what failed only
    /// ends, what stopped stays.
    pub(crate) fn transition(&self, next: EnsembleState) {
        self.update(|status| {
            let allowed = match (&status.state, &next) {
                (EnsembleState::Stopped, _) => false,
                (EnsembleState::Draining, EnsembleState::Stopped) => true,
                (EnsembleState::Draining, _) => false,
                (EnsembleState::Failed { .. }, EnsembleState::Draining | EnsembleState::Stopped) => true,
                (EnsembleState::Failed { .. }, _) => false,
                _ => true,
            };
            if allowed && status.state != next {
                tracing::info!(from = ?status.state, to = ?next, "ensemble state");
                status.state = next;
            }
        });
    }
}
