//! Sums and exchanges among the ranks of one group.
//!
//! Every implementation adds in the same order, rank 0 first and rank N-1 last, at every size; so all ranks hold
//! identical bits, and neither timing nor batch size shows in a result. Called by model layers on a shard's compute
//! thread, never from async code.

mod local;
mod rendezvous;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use local::{Local, LocalGroup};

use crate::ids::Rank;

/// Why a collective ended without a result.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum CollectiveError {
    /// The group was aborted: a peer failed, or the epoch was fenced.
    #[error("collective aborted on {rank}: {reason}")]
    Aborted {
        /// The rank that noticed.
        rank: Rank,
        /// What the aborting side said.
        reason: Arc<str>,
    },
    /// Ranks disagree about how much they exchange: a bug, found before a number is used.
    #[error("{rank} called {operation} with {got} elements, {expected} expected")]
    Mismatch {
        /// The rank that noticed.
        rank: Rank,
        /// Name of the operation.
        operation: &'static str,
        /// Elements the caller brought.
        got: usize,
        /// Elements the group expects.
        expected: usize,
    },
    /// Ranks call different operations: a bug, likewise.
    #[error("{rank} called {operation} while {peer} called {theirs}")]
    Disagreement {
        /// The rank that noticed.
        rank: Rank,
        /// Name of its operation.
        operation: &'static str,
        /// The other rank.
        peer: Rank,
        /// Name of the other's operation.
        theirs: &'static str,
    },
}

/// Exchange among the ranks of a group. Every rank calls the same operations in the same order.
pub trait Collective: Send {
    /// This caller's rank.
    fn rank(&self) -> Rank;
    /// Ranks in the group.
    fn size(&self) -> usize;
    /// Replaces `data` on every rank by the sum over ranks, added in rank order.
    fn all_reduce_sum(&mut self, data: &mut [f32]) -> Result<(), CollectiveError>;
    /// Concatenates each rank's `mine` into `all`, rank order; `all.len()` is the sum of the parts, which may differ.
    fn all_gather(&mut self, mine: &[f32], all: &mut [f32]) -> Result<(), CollectiveError>;
    /// Copies `data` of `root` over everybody's.
    fn broadcast(&mut self, data: &mut [f32], root: Rank) -> Result<(), CollectiveError>;
    /// Returns once every rank has entered.
    fn barrier(&mut self) -> Result<(), CollectiveError>;
    /// A handle with which any thread may end all present and future calls of the group.
    fn abort_handle(&self) -> AbortHandle;
}

/// Ends a group's collectives from any thread. The first reason stays.
#[derive(Clone)]
pub struct AbortHandle {
    abort: Arc<dyn Fn(&str) + Send + Sync>,
}

impl AbortHandle {
    /// Wraps the function that does it.
    pub fn new(abort: Arc<dyn Fn(&str) + Send + Sync>) -> Self {
        Self { abort }
    }

    /// Makes every present and future call of the group return [`CollectiveError::Aborted`].
    pub fn abort(&self, reason: &str) {
        (self.abort)(reason);
    }
}

impl std::fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AbortHandle")
    }
}
