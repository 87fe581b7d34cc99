//! What a rank's main thread shows of itself: that it gets on, or that it waits for other ranks.
//!
//! That the process lives, its other thread tells. A main thread that hangs in a driver's call would be waited for as
//! long as one that computes, if nobody saw whether it moves.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use consort_parallel::{
    collective::{AbortHandle, AbortNotice, Collective, CollectiveError, SharedMemory, SharedWork},
    ids::Rank,
};

/// Moves of the main thread, and whether it waits.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    moves: AtomicU64,
    waits: AtomicBool,
}

impl Pulse {
    /// The thread came by a point that it comes by again and again while nothing hangs.
    pub(super) fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    /// Moves so far, and whether the thread waits for other ranks, for which there is no limit of its own.
    pub(super) fn read(&self) -> (u64, bool) {
        (self.moves.load(Ordering::Relaxed), self.waits.load(Ordering::Relaxed))
    }

    fn waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.waits.store(true, Ordering::Relaxed);
        let outcome = wait();
        self.waits.store(false, Ordering::Relaxed);
        self.moved();
        outcome
    }
}

/// A rank's place in its group, whose waits show in the pulse.
pub(super) struct Pulsing {
    place: SharedMemory,
    pulse: Arc<Pulse>,
}

impl Pulsing {
    pub(super) fn new(place: SharedMemory, pulse: Arc<Pulse>) -> Self {
        Self { place, pulse }
    }
}

impl Collective for Pulsing {
    fn rank(&self) -> Rank {
        self.place.rank()
    }

    fn size(&self) -> usize {
        self.place.size()
    }

    fn all_reduce_sum(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        self.pulse.waiting(|| self.place.all_reduce_sum(data))
    }

    fn all_gather(&mut self, mine: &[f32], all: &mut [f32]) -> Result<(), CollectiveError> {
        self.pulse.waiting(|| self.place.all_gather(mine, all))
    }

    fn broadcast(&mut self, data: &mut [f32], root: Rank) -> Result<(), CollectiveError> {
        self.pulse.waiting(|| self.place.broadcast(data, root))
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.pulse.waiting(|| self.place.barrier())
    }

    fn exchange(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.pulse.waiting(|| self.place.exchange(mine))
    }

    fn exchange_descriptors(
        &mut self,
        mine: &[BorrowedFd<'_>],
    ) -> Result<Vec<Vec<OwnedFd>>, CollectiveError> {
        self.pulse.waiting(|| self.place.exchange_descriptors(mine))
    }

    fn abort_handle(&self) -> AbortHandle {
        self.place.abort_handle()
    }

    fn on_abort(&self, notify: AbortNotice) {
        self.place.on_abort(notify);
    }

    fn shared_work(&self) -> SharedWork {
        self.place.shared_work()
    }
}
