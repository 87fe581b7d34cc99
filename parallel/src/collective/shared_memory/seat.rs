//! The side of a rank that is computed elsewhere.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use super::{
    SharedMemoryError,
    life::Life,
    mailbox::{self, Pair},
    segment::Segment,
};
use crate::{
    collective::{AbortHandle, AbortNotice, Collective, CollectiveError, SharedWork},
    ids::Rank,
};

/// Makes the segment of one life of a group.
pub struct SharedMemoryGroup(());

impl SharedMemoryGroup {
    /// A group of `size` ranks; element `r` of the result is the seat of rank `r`.
    pub fn create(size: usize) -> Result<Vec<Seat>, SharedMemoryError> {
        Self::seats(size, Vec::new())
    }

    /// The same with mailboxes, so that ranks can exchange descriptors: of
    /// [`MAILBOX_RANKS_MAX`](super::MAILBOX_RANKS_MAX) ranks at most.
    pub fn create_with_mailboxes(size: usize) -> Result<Vec<Seat>, SharedMemoryError> {
        Self::seats(size, mailbox::pairs(size)?)
    }

    fn seats(size: usize, mailboxes: Vec<Pair>) -> Result<Vec<Seat>, SharedMemoryError> {
        let (descriptor, segment) = Segment::create(size)?;
        let held = Arc::new(Held { life: Life::new(segment, size), descriptor, mailboxes });
        Ok((0..size).map(|rank| Seat { held: Arc::clone(&held), rank: Rank(rank as u16) }).collect())
    }
}

/// What the seats of a group share.
struct Held {
    life: Arc<Life>,
    descriptor: OwnedFd,
    /// Of each rank, or none.
    mailboxes: Vec<Pair>,
}

/// A rank's place in a group for whoever has it computed by another process: it can end the group and be told of its
/// end, and exchanges nothing. Dropping it ends the group, as dropping the member does.
pub struct Seat {
    held: Arc<Held>,
    rank: Rank,
}

impl Seat {
    /// What the process that computes this rank attaches; it is closed in programs that this one starts, unless it is
    /// handed on.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.held.descriptor.as_fd()
    }

    /// What that process gives [`SharedMemory::with_mailbox`](super::SharedMemory::with_mailbox), as many as there are
    /// ranks; none where the group has no mailboxes.
    pub fn mailbox(&self) -> Vec<BorrowedFd<'_>> {
        mailbox::descriptors(&self.held.mailboxes, self.rank)
    }

    fn refuse<T>(&self, operation: &'static str) -> Result<T, CollectiveError> {
        Err(CollectiveError::Elsewhere { rank: self.rank, operation })
    }
}

impl Collective for Seat {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> usize {
        self.held.life.segment().ranks()
    }

    fn all_reduce_sum(&mut self, _data: &mut [f32]) -> Result<(), CollectiveError> {
        self.refuse("all_reduce_sum")
    }

    fn all_gather(&mut self, _mine: &[f32], _all: &mut [f32]) -> Result<(), CollectiveError> {
        self.refuse("all_gather")
    }

    fn broadcast(&mut self, _data: &mut [f32], _root: Rank) -> Result<(), CollectiveError> {
        self.refuse("broadcast")
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.refuse("barrier")
    }

    fn exchange(&mut self, _mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.refuse("exchange")
    }

    fn exchange_descriptors(
        &mut self,
        _mine: &[BorrowedFd<'_>],
    ) -> Result<Vec<Vec<OwnedFd>>, CollectiveError> {
        self.refuse("exchange_descriptors")
    }

    fn abort_handle(&self) -> AbortHandle {
        self.held.life.abort_handle()
    }

    fn on_abort(&self, notify: AbortNotice) {
        self.held.life.on_abort(self.rank, notify);
    }

    fn shared_work(&self) -> SharedWork {
        self.held.life.shared_work()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.held.life.leave(self.rank);
    }
}
