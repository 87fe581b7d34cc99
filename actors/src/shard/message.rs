//! What a shard actor is told.

use std::sync::Arc;

use consort_parallel::collective::Collective;

use crate::{error::ShardError, ids::Epoch, plan::StepPlan};

/// Messages of a shard actor. Bounded by the protocol: plans by the steps in flight, rejoins by the group's restart
/// budget, one end.
pub(crate) enum ShardMessage {
    /// Execute a step.
    Execute(Arc<StepPlan>),
    /// Enter a new epoch, keeping the weights; or, where nobody can tell which rank is broken, building all anew.
    Rejoin { epoch: Epoch, comm: Box<dyn Collective>, rebuild: bool },
    /// The compute thread has ended and dropped its executor.
    ComputeEnded(ShardError),
}
