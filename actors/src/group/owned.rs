//! What a group owns and ends with itself.

use consort_parallel::collective::{AbortHandle, Collective};
use ractor::concurrency::JoinHandle;

use crate::{error::ShardError, shard::ShardFactory};

/// The group's timer; it ends with the group.
pub(super) struct Timer(pub(super) JoinHandle<()>);

impl Drop for Timer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Aborts the collective when dropped, so that no thread stays in it whatever ends the group.
pub(super) struct CollectiveGuard(pub(super) AbortHandle);

impl Drop for CollectiveGuard {
    fn drop(&mut self) {
        self.0.abort("the group ended");
    }
}

/// A fresh collective of `ranks` members, and the guard that ends it.
pub(super) fn new_collective(
    factory: &dyn ShardFactory,
    ranks: usize,
) -> Result<(Vec<Box<dyn Collective>>, CollectiveGuard), ShardError> {
    let comms = factory.collective(ranks)?;
    let first = comms.first().filter(|_| comms.len() == ranks);
    let abort = first.ok_or_else(|| ShardError::load("a factory made a collective of another size"))?;
    let abort = abort.abort_handle();
    Ok((comms, CollectiveGuard(abort)))
}
