//! One rank of the group: an actor that owns a compute thread, and what runs on that thread.
//!
//! The actor never computes. The thread builds an executor through the [`ShardFactory`], executes plans in order, and
//! reports to the group; its panic or error becomes the actor's failure, which is a supervision event.

mod actor;
mod compute;
mod executor;
mod message;
mod progress;
mod sequence;
mod step;

#[cfg(test)]
mod beside;
#[cfg(test)]
mod bits_tests;
#[cfg(test)]
mod tests;

use std::{ops::Range, sync::Arc, time::Duration};

pub(crate) use actor::{ShardActor, ShardArguments};
pub(crate) use compute::ThreadLedger;
use consort_parallel::{
    collective::{Collective, LocalGroup},
    ids::Rank,
};
pub use executor::ModelExecutor;
pub(crate) use message::ShardMessage;
pub use progress::{LoadProgress, ProgressCallback, ProgressReporter};

use crate::{
    error::ShardError,
    ids::Epoch,
    plan::{StepPlan, StepResult},
};

/// What a rank holds of the model, for status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankShare {
    /// Query heads it computes.
    pub query_heads: Range<usize>,
    /// Key/value heads it holds.
    pub kv_heads: Range<usize>,
}

/// Builds executors. Shared by all ranks; `build` runs on the rank's own compute thread, so what it returns may stay
/// bound to that thread.
pub trait ShardFactory: Send + Sync + 'static {
    /// What the `ranks` of one life of a group exchange through, in rank order, each to be given to the rank's
    /// [`ShardFactory::build`] or [`ShardExecutor::rejoin`]. Unless it is said otherwise ranks are threads of this
    /// process.
    fn collective(&self, ranks: usize) -> Result<Vec<Box<dyn Collective>>, ShardError> {
        let comms = LocalGroup::new(ranks).into_iter();
        Ok(comms.map(|comm| Box::new(comm) as Box<dyn Collective>).collect())
    }

    /// Builds the executor of `rank`. Called at the start, and again for a rank that was lost.
    fn build(
        &self,
        rank: Rank,
        comm: Box<dyn Collective>,
        progress: &ProgressReporter,
    ) -> Result<Box<dyn ShardExecutor>, ShardError>;

    /// What the rank will hold.
    fn describe(&self, rank: Rank) -> RankShare;
}

/// Executes plans on one rank. Lives on the rank's compute thread.
pub trait ShardExecutor {
    /// Meets the other ranks of the epoch, before its first step: called once it is built, and after each
    /// [`ShardExecutor::rejoin`] that keeps it. Waits for ranks that still load. [`ShardError::Aborted`] says that this
    /// rank is sound and the group is not; any other error ends the executor.
    fn join(&mut self) -> Result<(), ShardError> {
        Ok(())
    }

    /// Executes one step. [`ShardError::Aborted`] says that this rank is sound and the group is not; any other error
    /// ends the executor.
    fn execute(&mut self, plan: &StepPlan) -> Result<StepResult, ShardError>;

    /// Called while there is nothing to do: looks whether all is well, and says when to look again. Unless it is said
    /// otherwise nothing can happen meanwhile.
    fn check(&mut self) -> Result<Option<Duration>, ShardError> {
        Ok(None)
    }

    /// Where the next step may begin before the last has ended: then steps come this way, and not through
    /// [`ShardExecutor::execute`].
    fn pipeline(&mut self) -> Option<&mut dyn Pipeline> {
        None
    }

    /// Bytes of weights it holds.
    fn weight_bytes(&self) -> u64;

    /// Bytes of its KV pool.
    fn kv_bytes(&self) -> u64;

    /// Enters a new epoch with a new collective, keeping weights and forgetting sequences. An executor that cannot
    /// gives the collective back, and is dropped and built anew.
    fn rejoin(&mut self, epoch: Epoch, comm: Box<dyn Collective>) -> Result<Rejoined, ShardError> {
        let _ = epoch;
        Ok(Rejoined::Rebuild(comm))
    }
}

/// Steps of which one begins while another is under way. Errors are those of [`ShardExecutor::execute`]; after one
/// nothing is under way any more.
pub trait Pipeline {
    /// Steps that may be under way together, at least one.
    fn depth(&self) -> usize;

    /// Begins a step behind those under way, of which there are fewer than [`Pipeline::depth`]. Need not wait for any.
    fn begin(&mut self, plan: &Arc<StepPlan>) -> Result<(), ShardError>;

    /// Waits for the oldest step under way, about as long as `patience` where it does not end before. Called only
    /// while there is one.
    fn finish(&mut self, patience: Duration) -> Result<Option<StepResult>, ShardError>;
}

/// Outcome of [`ShardExecutor::rejoin`].
pub enum Rejoined {
    /// The executor is part of the new epoch.
    Kept,
    /// Build a new one with this collective.
    Rebuild(Box<dyn Collective>),
}
