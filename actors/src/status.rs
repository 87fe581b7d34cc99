//! What an ensemble says of itself at any moment.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use consort_parallel::ids::Rank;
use tokio::sync::watch;

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
    /// Blocks that sequences hold, or that steps under way may touch.
    pub used_blocks: usize,
    /// Blocks that nobody holds and whose content may serve later requests; any of them is taken when one is needed.
    pub cached_blocks: usize,
    /// Pages of the host's pool, where cached blocks are kept beyond their eviction; 0 where there is none.
    pub host_blocks: usize,
    /// Those of them that hold something.
    pub host_used_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Steps executed and absorbed.
    pub steps: u64,
    /// Times a sequence lost its blocks to another.
    pub preemptions: u64,
    /// Prompt tokens of requests that started.
    pub prompt_tokens: u64,
    /// Tokens of prompts that were looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Those of them whose keys and values were there.
    pub prefix_cache_hits: u64,
    /// Rows planned: tokens whose keys and values were computed, replays included.
    pub computed_tokens: u64,
    /// Tokens emitted.
    pub generated_tokens: u64,
    /// Pages copied to the host's pool.
    pub host_saves: u64,
    /// Pages that came back from it.
    pub host_loads: u64,
    /// Tokens that need not be computed because of these; part of the prefix cache's hits.
    pub host_hits: u64,
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

impl EnsembleState {
    /// Whether this is the end: nothing serves again from here.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Stopped | Self::Failed { .. })
    }
}

/// Follows the state of an ensemble without keeping it alive, for supervisors of programs that embed one. A state
/// that lasts shorter than the follower takes to look may be skipped; the last one never is.
#[derive(Clone, Debug)]
pub struct StateWatch {
    states: watch::Receiver<EnsembleState>,
}

impl StateWatch {
    /// The present state. What [`changed`](Self::changed) waits for is a change from here on.
    pub fn state(&mut self) -> EnsembleState {
        self.states.borrow_and_update().clone()
    }

    /// Waits for the next change and returns the state after it; `None` once no further change can come, whoever holds
    /// handles: after [`Stopped`](EnsembleState::Stopped), which itself is told once. After
    /// [`Failed`](EnsembleState::Failed) the shutdown is still to come, so this waits until somebody shuts the ensemble
    /// down or drops its last handle. May be cancelled and called again: no change is lost.
    pub async fn changed(&mut self) -> Option<EnsembleState> {
        let stopped_is_seen = {
            let state = self.states.borrow();
            *state == EnsembleState::Stopped && !state.has_changed()
        };
        if stopped_is_seen {
            return None;
        }
        // An error means that all handles and actors of the ensemble are gone.
        self.states.changed().await.ok()?;
        Some(self.state())
    }

    /// Waits until the ensemble serves no more, and says how it ended: [`Failed`](EnsembleState::Failed), or
    /// [`Stopped`](EnsembleState::Stopped) by a shutdown or because its last handle was dropped.
    pub async fn ended(&mut self) -> EnsembleState {
        match self.states.wait_for(EnsembleState::is_final).await {
            Ok(state) => state.clone(),
            // Its runtime was torn down before its actors could say so.
            Err(_) => EnsembleState::Stopped,
        }
    }
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
    /// Failed. It ends, or has ended; its supervisor decides what follows.
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
    /// The snapshot's state once more, for those who wait for it.
    states: watch::Sender<EnsembleState>,
}

impl StatusBoard {
    pub(crate) fn new(status: Status) -> Self {
        let states = watch::Sender::new(status.state.clone());
        Self { status: Mutex::new(status), states }
    }

    pub(crate) fn watch(&self) -> StateWatch {
        StateWatch { states: self.states.subscribe() }
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
                // Under the lock, so that followers see changes in their order.
                self.states.send_replace(next.clone());
                status.state = next;
            }
        });
    }
}
