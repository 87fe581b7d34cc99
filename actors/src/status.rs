//! What an ensemble says of itself at any moment.

use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use consort_parallel::ids::Rank;
use tokio::sync::watch;

use crate::ids::ReplicaId;

/// A snapshot of an ensemble: sums over its replicas, and each of them. Counters only grow while the ensemble lives.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    /// Whether it serves: it does as long as one replica does.
    pub state: EnsembleState,
    /// Life of the shard group; of several, the one that has had most.
    pub epoch: u64,
    /// One entry per rank, replica by replica.
    pub ranks: Vec<RankStatus>,
    /// One entry per replica.
    pub replicas: Vec<ReplicaStatus>,
    /// Times a request that had not started was moved to another replica.
    pub moved_requests: u64,
    /// Sequences that hold blocks.
    pub running: usize,
    /// Sequences that wait for blocks, preempted ones included.
    pub waiting: usize,
    /// Blocks of the KV pools.
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

/// One replica: a scheduler and its shard group. The fields mean what they mean in [`Status`].
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaStatus {
    /// Which.
    pub replica: ReplicaId,
    /// Whether it serves. It drains and stops with its ensemble.
    pub state: EnsembleState,
    /// Life of its shard group.
    pub epoch: u64,
    /// One entry per rank.
    pub ranks: Vec<RankStatus>,
    /// Sequences that hold blocks.
    pub running: usize,
    /// Sequences that wait for blocks, preempted ones included.
    pub waiting: usize,
    /// Blocks of its KV pool.
    pub total_blocks: usize,
    /// Blocks that sequences hold, or that steps under way may touch.
    pub used_blocks: usize,
    /// Blocks that nobody holds and whose content may serve later requests.
    pub cached_blocks: usize,
    /// Blocks that the host keeps when they lose their place here.
    pub host_blocks: usize,
    /// Those of them that hold something.
    pub host_used_blocks: usize,
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
    /// Blocks copied to the host's pool.
    pub host_saves: u64,
    /// Blocks copied back.
    pub host_loads: u64,
    /// Tokens of prompts that came from there.
    pub host_hits: u64,
    /// Requests that ended here, by reason.
    pub finished: FinishedCounts,
}

impl ReplicaStatus {
    /// The scheduler has ended, and all that it held is gone. What is still said to be open has failed, and nobody has
    /// counted it; a scheduler that is stopped in good order ends its requests itself. One says what is open before it
    /// goes on to plan, so that nothing is missed, or counted twice, when it fails there.
    pub(crate) fn end_open(&mut self) {
        self.finished.failed += (self.running + self.waiting) as u64;
        (self.running, self.waiting) = (0, 0);
        (self.used_blocks, self.cached_blocks, self.host_used_blocks) = (0, 0, 0);
    }
}

/// Whether an ensemble, or one replica of it, serves.
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
    /// The group was lost more often than is tolerated, or one of its ranks hangs. Nothing restarts from here. An
    /// ensemble has failed once all its replicas have.
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

impl FinishedCounts {
    fn add(&mut self, other: &FinishedCounts) {
        self.stop += other.stop;
        self.length += other.length;
        self.cancelled += other.cancelled;
        self.slow_reader += other.slow_reader;
        self.failed += other.failed;
    }
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

/// The latest snapshot. Writers hold the lock for a handful of assignments, readers for one copy and its sums.
pub(crate) struct StatusBoard {
    board: Mutex<Board>,
    /// The ensemble's state once more, for those who wait for it.
    states: watch::Sender<EnsembleState>,
}

struct Board {
    block_size: usize,
    replicas: Vec<ReplicaStatus>,
    /// Pages that each replica could give to newcomers, as its scheduler says.
    free_blocks: Vec<usize>,
    /// What the ensemble as a whole was told, which outweighs what its replicas are: that it drains, stopped, or
    /// failed.
    told: Option<EnsembleState>,
    state: EnsembleState,
    /// Requests that ended at no replica.
    unplaced: FinishedCounts,
    moved_requests: u64,
}

impl StatusBoard {
    pub(crate) fn new(block_size: usize, replicas: Vec<ReplicaStatus>) -> Self {
        let state = combined(&replicas);
        let states = watch::Sender::new(state.clone());
        let (told, unplaced) = (None, FinishedCounts::default());
        let free_blocks = replicas.iter().map(|replica| replica.total_blocks).collect();
        let board = Board { block_size, replicas, free_blocks, told, state, unplaced, moved_requests: 0 };
        Self { board: Mutex::new(board), states }
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn watch(&self) -> StateWatch {
        StateWatch { states: self.states.subscribe() }
    }

    pub(crate) fn snapshot(&self) -> Status {
        self.board().status()
    }

    pub(crate) fn state(&self) -> EnsembleState {
        self.board().state.clone()
    }

    pub(crate) fn replica(&self, replica: ReplicaId) -> ReplicaStatus {
        self.board().replicas[replica.index()].clone()
    }

    /// Pages that each replica could give to newcomers: fewer than are free where requests that run are still to take
    /// theirs.
    pub(crate) fn free_blocks(&self) -> Vec<usize> {
        self.board().free_blocks.clone()
    }

    pub(crate) fn set_free_blocks(&self, replica: ReplicaId, free_blocks: usize) {
        self.board().free_blocks[replica.index()] = free_blocks;
    }

    pub(crate) fn update(&self, replica: ReplicaId, change: impl FnOnce(&mut ReplicaStatus)) {
        change(&mut self.board().replicas[replica.index()]);
    }

    /// Counts requests that ended at no replica.
    pub(crate) fn unplaced(&self, change: impl FnOnce(&mut FinishedCounts)) {
        change(&mut self.board().unplaced);
    }

    /// Counts moves of requests. The total is kept here, so that it outlives a router.
    pub(crate) fn add_moved(&self, moved: u64) {
        self.board().moved_requests += moved;
    }

    /// Moves a replica to `next` unless its present state outlives it: what failed only ends, what stopped stays.
    pub(crate) fn replica_transition(&self, replica: ReplicaId, next: EnsembleState) {
        let mut board = self.board();
        let is_one_of_many = board.replicas.len() > 1;
        let status = &mut board.replicas[replica.index()];
        let allowed = match (&status.state, &next) {
            (EnsembleState::Stopped, _) => false,
            (EnsembleState::Failed { .. }, EnsembleState::Stopped) => true,
            (EnsembleState::Failed { .. }, _) => false,
            _ => true,
        };
        if !allowed || status.state == next {
            return;
        }
        if is_one_of_many {
            tracing::info!(%replica, from = ?status.state, to = ?next, "replica state");
        }
        status.state = next;
        self.settle(&mut board);
    }

    /// Moves the whole ensemble to `next` unless its present state outlives it: what drains never becomes ready again,
    /// what failed only ends, what stopped stays.
    pub(crate) fn transition(&self, next: EnsembleState) {
        let mut board = self.board();
        let allowed = match (&board.state, &next) {
            (EnsembleState::Stopped, _) => false,
            (EnsembleState::Draining, EnsembleState::Stopped) => true,
            (EnsembleState::Draining, _) => false,
            (EnsembleState::Failed { .. }, EnsembleState::Draining | EnsembleState::Stopped) => true,
            (EnsembleState::Failed { .. }, _) => false,
            _ => true,
        };
        if !allowed {
            return;
        }
        if next == EnsembleState::Stopped {
            board.replicas.iter_mut().for_each(|replica| replica.state = EnsembleState::Stopped);
        }
        board.told = Some(next);
        self.settle(&mut board);
    }

    /// Draws the ensemble's state from what it was told and what its replicas are.
    fn settle(&self, board: &mut Board) {
        let next = board.told.clone().unwrap_or_else(|| combined(&board.replicas));
        if board.state != next {
            tracing::info!(from = ?board.state, to = ?next, "ensemble state");
            // Under the lock, so that followers see changes in their order.
            self.states.send_replace(next.clone());
            board.state = next;
        }
    }
}

impl Board {
    fn status(&self) -> Status {
        let mut status = Status {
            state: self.state.clone(),
            epoch: 0,
            ranks: Vec::new(),
            replicas: self.replicas.clone(),
            moved_requests: self.moved_requests,
            running: 0,
            waiting: 0,
            total_blocks: 0,
            used_blocks: 0,
            cached_blocks: 0,
            host_blocks: 0,
            host_used_blocks: 0,
            block_size: self.block_size,
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
            finished: self.unplaced,
        };
        for replica in &self.replicas {
            status.epoch = status.epoch.max(replica.epoch);
            status.ranks.extend(replica.ranks.iter().cloned());
            status.running += replica.running;
            status.waiting += replica.waiting;
            status.total_blocks += replica.total_blocks;
            status.used_blocks += replica.used_blocks;
            status.cached_blocks += replica.cached_blocks;
            status.host_blocks += replica.host_blocks;
            status.host_used_blocks += replica.host_used_blocks;
            status.steps += replica.steps;
            status.preemptions += replica.preemptions;
            status.prompt_tokens += replica.prompt_tokens;
            status.prefix_cache_queries += replica.prefix_cache_queries;
            status.prefix_cache_hits += replica.prefix_cache_hits;
            status.computed_tokens += replica.computed_tokens;
            status.generated_tokens += replica.generated_tokens;
            status.host_saves += replica.host_saves;
            status.host_loads += replica.host_loads;
            status.host_hits += replica.host_hits;
            status.finished.add(&replica.finished);
        }
        status
    }
}

/// Whether replicas serve together: as long as one does. Otherwise what one of them is that may serve again, and a
/// failure once all have failed.
fn combined(replicas: &[ReplicaStatus]) -> EnsembleState {
    let named = |of: &ReplicaStatus, reason: &str| match replicas.len() {
        1 => reason.to_owned(),
        _ => format!("{}: {reason}", of.replica),
    };
    if replicas.iter().any(|replica| replica.state == EnsembleState::Ready) {
        return EnsembleState::Ready;
    }
    let restarting = replicas.iter().find_map(|replica| match &replica.state {
        EnsembleState::Restarting { attempt, reason } => {
            Some(EnsembleState::Restarting { attempt: *attempt, reason: named(replica, reason) })
        }
        _ => None,
    });
    if let Some(restarting) = restarting {
        return restarting;
    }
    if replicas.iter().any(|replica| replica.state == EnsembleState::Starting) {
        return EnsembleState::Starting;
    }
    let failures = replicas.iter().filter_map(|replica| match &replica.state {
        EnsembleState::Failed { reason } => Some(named(replica, reason)),
        _ => None,
    });
    let failures: Vec<String> = failures.collect();
    match failures.is_empty() {
        true => EnsembleState::Stopped,
        false => EnsembleState::Failed { reason: failures.join("; ") },
    }
}
