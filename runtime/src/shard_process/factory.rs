//! Makes ranks that are processes.

use std::{any::Any, sync::Arc};

use consort_actors::{ProgressReporter, RankShare, ShardError, ShardExecutor, ShardFactory};
use consort_parallel::{
    collective::{Collective, Seat, SharedMemoryGroup},
    ids::Rank,
};

use super::{Processes, blueprint::Blueprint, left_behind::LeftBehind, remote::RemoteExecutor};
use crate::{engine::ModelFactory, topology::DeviceSpec};

/// Builds the ranks of one replica as processes.
pub(crate) struct ProcessFactory {
    model: ModelFactory,
    processes: Arc<Processes>,
    pub(super) left_behind: Arc<LeftBehind>,
}

impl ProcessFactory {
    pub(crate) fn new(model: ModelFactory, processes: Arc<Processes>) -> Self {
        Self { model, processes, left_behind: Arc::default() }
    }
}

impl ShardFactory for ProcessFactory {
    fn collective(&self, ranks: usize) -> Result<Vec<Box<dyn Collective>>, ShardError> {
        // Ranks on cards give each other descriptors of their memory.
        let seats = match self.model.devices.iter().all(DeviceSpec::is_cpu) {
            true => SharedMemoryGroup::create(ranks),
            false => SharedMemoryGroup::create_with_mailboxes(ranks),
        };
        let seats = seats.map_err(ShardError::load)?;
        Ok(seats.into_iter().map(|seat| Box::new(seat) as Box<dyn Collective>).collect())
    }

    fn build(
        &self,
        rank: Rank,
        comm: Box<dyn Collective>,
        progress: &ProgressReporter,
    ) -> Result<Box<dyn ShardExecutor>, ShardError> {
        let blueprint = Blueprint::of(&self.model, rank);
        if let Err(error) = self.left_behind.wait(self.processes.settings.left_behind_max) {
            if !blueprint.is_on_cpu() {
                return Err(error.into());
            }
            // It holds memory that may be missed, and reaches no one else's.
            tracing::warn!(%error, "a rank is started beside what is left of an earlier one");
        }
        let common = (&*self.processes, Arc::clone(&self.left_behind));
        let executor = RemoteExecutor::build(common, rank, seat(comm)?, blueprint, progress)?;
        Ok(Box::new(executor))
    }

    fn describe(&self, rank: Rank) -> RankShare {
        self.model.describe(rank)
    }
}

/// The seat that [`ProcessFactory::collective`] made.
pub(super) fn seat(comm: Box<dyn Collective>) -> Result<Box<Seat>, ShardError> {
    let comm: Box<dyn Any> = comm;
    let foreign = |_| ShardError::load("a rank in a process was given a collective of threads");
    comm.downcast::<Seat>().map_err(foreign)
}
