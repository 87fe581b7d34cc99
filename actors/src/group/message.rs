//! What the shard group is told.

use std::sync::Arc;

use consort_parallel::ids::Rank;

use crate::{
    error::ShardError,
    ids::Epoch,
    plan::{StepPlan, StepResult},
};

/// Messages of the shard group. Bounded by the protocol: plans by the steps in flight, one report of each rank per plan
/// and two per epoch, its failure and end, and a timer's tick per period.
pub(crate) enum GroupMessage {
    /// Have every shard execute a step.
    Execute(Arc<StepPlan>),
    /// A shard has its weights, and meets the others of an epoch.
    ShardBuilt { rank: Rank, epoch: Epoch },
    /// A shard has met the others, and is ready in an epoch.
    ShardLoaded { rank: Rank, epoch: Epoch, weight_bytes: u64, kv_bytes: u64 },
    /// A shard could not even be started.
    ShardUnstarted { rank: Rank, epoch: Epoch, error: ShardError },
    /// A shard that joined this epoch will end with this failure, which its end repeats: that follows once the shard
    /// has given its memory back, which may take long where a device hangs.
    ShardFailing { rank: Rank, epoch: Epoch, reason: String },
    /// A shard executed a step.
    ShardExecuted { rank: Rank, result: StepResult },
    /// A sound shard could not meet the others, or not finish a step, because the collective was aborted.
    ShardAborted { rank: Rank, epoch: Epoch, reason: String },
    /// The scheduler could make no sense of a result.
    ResultRefused { epoch: Epoch, reason: String },
    /// Look whether the ranks have been silent for too long. Sent by the group's own timer, at a fixed period.
    CheckSilence,
}
