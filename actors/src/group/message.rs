//! What the shard group is told.

use std::sync::Arc;

use consort_parallel::ids::Rank;

use crate::{
    ids::Epoch,
    plan::{StepPlan, StepResult},
};

/// Messages of the shard group. Bounded by the protocol: plans by the steps in flight, and one report of each rank
/// per plan and per epoch.
pub(crate) enum GroupMessage {
    /// Have every shard execute a step.
    Execute(Arc<StepPlan>),
    /// A shard is ready in an epoch.
    ShardLoaded { rank: Rank, epoch: Epoch, weight_bytes: u64, kv_bytes: u64 },
    /// A shard executed a step.
    ShardExecuted { rank: Rank, result: StepResult },
    /// A sound shard could not finish a step, because the collective was aborted.
    ShardAborted { rank: Rank, epoch: Epoch, reason: String },
    /// The scheduler could make no sense of a result.
    ResultRefused { epoch: Epoch, reason: String },
}
