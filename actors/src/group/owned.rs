//! What a group owns and ends with itself.

use consort_parallel::collective::{AbortHandle, Collective, LocalGroup};
use ractor::concurrency::JoinHandle;

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

/// A fresh collective of `ranks` members, and the handle that ends it.
pub(super) fn new_collective(ranks: usize) -> (Vec<Box<dyn Collective>>, AbortHandle) {
    let comms = LocalGroup::new(ranks);
    let abort = comms.first().expect("an ensemble has at least one rank; checked by its spec").abort_handle();
    (comms.into_iter().map(|comm| Box::new(comm) as Box<dyn Collective>).collect(), abort)
}
