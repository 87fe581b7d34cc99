//! Sums and exchanges among the ranks of one group.
//!
//! Every implementation adds in the same order, rank 0 first and rank N-1 last, at every size; so all ranks hold
//! identical bits, and neither timing nor batch size shows in a result. Called by model layers on a shard's compute
//! thread, never from async code.

mod board;
mod local;
mod rendezvous;
#[cfg(target_os = "linux")]
mod shared_memory;
mod shared_work;
#[cfg(test)]
mod tests;
mod watchers;

#[cfg(unix)]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::{any::Any, sync::Arc};

pub use local::{Local, LocalGroup};
#[cfg(target_os = "linux")]
pub use shared_memory::{
    MAILBOX_RANKS_MAX, RANKS_MAX as SHARED_MEMORY_RANKS_MAX, Seat, SharedMemory, SharedMemoryError,
    SharedMemoryGroup,
};
pub use shared_work::{SharedWork, WorkUnderWay};

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
    /// More bytes than one exchange carries: a bug of the caller, likewise.
    #[error("{rank} called exchange with {bytes} bytes; it carries {EXCHANGE_BYTES_MAX} of each rank")]
    TooLong {
        /// The rank that brought them.
        rank: Rank,
        /// How many.
        bytes: usize,
    },
    /// Descriptors did not come from everybody, or not to everybody.
    #[error("{rank} could not exchange descriptors: {problem}")]
    Descriptors {
        /// The rank that noticed.
        rank: Rank,
        /// What was wrong.
        problem: String,
    },
    /// The rank is computed by another process: a bug of the caller, likewise.
    #[error("{rank} is computed by another process: its seat here takes no part in {operation}")]
    Elsewhere {
        /// The rank.
        rank: Rank,
        /// Name of the operation.
        operation: &'static str,
    },
}

/// Most bytes that a rank may bring to one [`Collective::exchange`]: it carries names, addresses and handles, a few
/// hundred bytes each. Ranks keep what they last brought, so this bounds a group's memory too.
pub const EXCHANGE_BYTES_MAX: usize = 64 << 10;

/// Most descriptors that a rank may bring to one [`Collective::exchange_descriptors`].
pub const EXCHANGED_DESCRIPTORS_MAX: usize = 4;

/// What [`Collective::on_abort`] calls.
pub type AbortNotice = Box<dyn Fn() + Send + Sync>;

/// Exchange among the ranks of a group. Every rank calls the same operations in the same order. Whoever made one may
/// find it again behind `dyn Any`.
pub trait Collective: Any + Send {
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
    /// Every rank's `mine`, in rank order. Lengths may differ, up to [`EXCHANGE_BYTES_MAX`] each: what ranks tell
    /// each other when they meet, never activations.
    fn exchange(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError>;
    /// Every rank's descriptors, in rank order, for ranks that are processes; this rank's own place is empty. Numbers
    /// may differ, up to [`EXCHANGED_DESCRIPTORS_MAX`] each. An error ends the group, and what has come until then is
    /// closed.
    ///
    /// Ranks of one process need none and have no way for them, and neither have processes whose group was not made for
    /// it.
    #[cfg(unix)]
    fn exchange_descriptors(
        &mut self,
        mine: &[BorrowedFd<'_>],
    ) -> Result<Vec<Vec<OwnedFd>>, CollectiveError> {
        let problem = format!("its group has no way for them ({} were brought)", mine.len());
        let error = CollectiveError::Descriptors { rank: self.rank(), problem };
        self.abort_handle().abort(&error.to_string());
        Err(error)
    }
    /// A handle with which any thread may end all present and future calls of the group.
    fn abort_handle(&self) -> AbortHandle;
    /// Has `notify` called once when the group is aborted: on the thread that aborts, or soon after on another of this
    /// process where that is elsewhere; at once, on this thread, if it is already. For work that waits for peers where
    /// no call of this trait would see the abort, on a device say.
    ///
    /// No lock of the group is held meanwhile, so `notify` may call the group, though it should only tell somebody:
    /// whoever aborts waits for it. A panic in it is logged and goes no further. Notices end with their rank: once
    /// this value is dropped no further one of its is begun (one may still run), and its own end is not told to it.
    /// A group keeps all that it is given: register once for each life of what is to be told.
    fn on_abort(&self, notify: AbortNotice);
    /// What ranks do in each other's memory in this life of the group, as far as they are of this process. Closed by an
    /// abort.
    fn shared_work(&self) -> SharedWork;
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
