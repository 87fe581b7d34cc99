//! How far loading has come.

use std::sync::Arc;

use consort_parallel::ids::Rank;

use crate::ids::ReplicaId;

/// Bytes that one rank has loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Of which replica.
    pub replica: ReplicaId,
    /// Which rank.
    pub rank: Rank,
    /// Bytes in place.
    pub loaded_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

/// Receives progress, on the compute threads of the ranks that load.
pub type ProgressCallback = Arc<dyn Fn(LoadProgress) + Send + Sync>;

/// One rank's way to report progress.
#[derive(Clone)]
pub struct ProgressReporter {
    replica: ReplicaId,
    rank: Rank,
    callback: Option<ProgressCallback>,
}

impl ProgressReporter {
    /// Reports as `rank` of the first replica; without a callback reports go nowhere.
    pub fn new(rank: Rank, callback: Option<ProgressCallback>) -> Self {
        Self { replica: ReplicaId::default(), rank, callback }
    }

    /// Reports as the same rank of another replica.
    pub(crate) fn of(self, replica: ReplicaId) -> Self {
        Self { replica, ..self }
    }

    /// Says how far this rank is.
    pub fn report(&self, loaded_bytes: u64, total_bytes: u64) {
        if let Some(callback) = &self.callback {
            callback(LoadProgress { replica: self.replica, rank: self.rank, loaded_bytes, total_bytes });
        }
    }
}
