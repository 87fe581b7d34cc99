//! A rank's place in its group, as the engine holds it while a process computes the rank.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use consort_parallel::{
    collective::{Collective, Seat},
    ids::Rank,
};

use super::error::ProcessError;

/// The seat of a rank whose process exchanges for it, and whether its group was aborted.
pub(super) struct Place {
    seat: Box<Seat>,
    is_aborted: Arc<AtomicBool>,
}

impl Place {
    pub(super) fn new(seat: Box<Seat>) -> Self {
        let is_aborted = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&is_aborted);
        seat.on_abort(Box::new(move || told.store(true, Ordering::Release)));
        Self { seat, is_aborted }
    }

    pub(super) fn rank(&self) -> Rank {
        self.seat.rank()
    }

    /// What its process needs to take it.
    pub(super) fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let all = std::iter::once(self.seat.descriptor()).chain(self.seat.mailbox());
        all.map(|descriptor| descriptor.try_clone_to_owned()).collect()
    }

    /// Ends this life of the group for what became of the rank.
    pub(super) fn abort(&self, error: &ProcessError) {
        self.seat.abort_handle().abort(&format!("{}: {error}", self.seat.rank()));
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::Acquire)
    }
}
