//! The side of a rank that computes.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, atomic::Ordering::*},
};

use super::{SharedMemoryError, life::Life, mailbox::Mailbox, segment::Segment};
use crate::{
    collective::{
        AbortHandle, AbortNotice, Collective, CollectiveError, SharedWork,
        board::{self, Board, Part},
    },
    ids::Rank,
};

/// One rank of a group whose others may be in other processes. Dropping it ends the group: a rank that is gone will
/// not come to a meeting.
///
/// Its [`SharedWork`] is of this process alone. Device memory that ranks elsewhere touch is memory that all of them
/// map, and which the end of one takes from nobody: nobody waits for that.
pub struct SharedMemory {
    life: Arc<Life>,
    rank: Rank,
    parity: usize,
    mailbox: Option<Mailbox>,
}

impl SharedMemory {
    /// Joins the group behind a [`Seat`](super::Seat)'s descriptor as `rank`. Each rank joins once.
    pub fn attach(descriptor: OwnedFd, rank: Rank) -> Result<Self, SharedMemoryError> {
        let segment = Segment::attach(descriptor.as_fd())?;
        let ranks = segment.ranks();
        if rank.index() >= ranks {
            return Err(SharedMemoryError::NoSuchRank { rank, ranks });
        }
        if segment.claim(rank.index()).compare_exchange(0, 1, SeqCst, SeqCst).is_err() {
            return Err(SharedMemoryError::Taken { rank });
        }
        Ok(SharedMemory { life: Life::new(segment, rank.index()), rank, parity: 0, mailbox: None })
    }

    /// With the seat's [`mailbox`](super::Seat::mailbox), so that descriptors can be exchanged; the same without any.
    pub fn with_mailbox(mut self, descriptors: Vec<OwnedFd>) -> Result<Self, SharedMemoryError> {
        if !descriptors.is_empty() {
            self.mailbox = Some(Mailbox::new(self.rank, self.life.segment().ranks(), descriptors)?);
        }
        Ok(self)
    }

    /// Ends the group: descriptors that did not reach everybody will not do so later.
    fn without_descriptors(&self, problem: String) -> CollectiveError {
        let error = CollectiveError::Descriptors { rank: self.rank, problem };
        self.life.abort(&error.to_string());
        error
    }
}

impl Board for SharedMemory {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> usize {
        self.life.segment().ranks()
    }

    fn check(&self) -> Result<(), Arc<str>> {
        self.life.check()
    }

    fn meet(&self) -> Result<(), Arc<str>> {
        self.life.meet()
    }

    fn abort(&self, reason: &str) {
        self.life.abort(reason);
    }

    fn lay(&mut self, part: Part<'_>) {
        self.parity ^= 1;
        // SAFETY: the rank was taken by this value alone. The last part in this place is two exchanges old; the one
        // between went well, or the group would be aborted and the board would not get here, and whoever met for that
        // one had read this.
        unsafe { self.life.segment().write_part(self.rank.index(), self.parity, &part) }
    }

    fn read<R>(&self, rank: usize, reader: impl FnOnce(Part<'_>) -> R) -> R {
        // SAFETY: the board has met the others since, and comes to no meeting while it reads.
        reader(unsafe { self.life.segment().part(rank, self.parity) })
    }

    fn lay_segment(&self, len: usize, fill: impl FnOnce(&mut [f32])) {
        // SAFETY: as in `lay`; the board makes one at a time.
        fill(unsafe { self.life.segment().segment_mut(self.rank.index(), self.parity, len) });
    }

    fn read_segment(&self, rank: usize, len: usize, reader: impl FnOnce(&[f32])) {
        // SAFETY: as in `read`.
        reader(unsafe { self.life.segment().segment(rank, self.parity, len) });
    }
}

impl Collective for SharedMemory {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> usize {
        Board::size(self)
    }

    fn all_reduce_sum(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        board::all_reduce_sum(self, data)
    }

    fn all_gather(&mut self, mine: &[f32], all: &mut [f32]) -> Result<(), CollectiveError> {
        board::all_gather(self, mine, all)
    }

    fn broadcast(&mut self, data: &mut [f32], root: Rank) -> Result<(), CollectiveError> {
        board::broadcast(self, data, root)
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        board::barrier(self)
    }

    fn exchange(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        board::exchange(self, mine)
    }

    fn exchange_descriptors(
        &mut self,
        mine: &[BorrowedFd<'_>],
    ) -> Result<Vec<Vec<OwnedFd>>, CollectiveError> {
        let sent = match &self.mailbox {
            Some(mailbox) => mailbox.send(mine),
            None => Err("its group was made without mailboxes".to_owned()),
        };
        sent.map_err(|problem| self.without_descriptors(problem))?;
        // All have sent when all have come here.
        let met = board::barrier(self);
        let Some(mailbox) = &self.mailbox else { return met.map(|()| Vec::new()) };
        if met.is_err() {
            mailbox.empty();
        }
        met?;
        mailbox.take().map_err(|problem| self.without_descriptors(problem))
    }

    fn abort_handle(&self) -> AbortHandle {
        self.life.abort_handle()
    }

    fn on_abort(&self, notify: AbortNotice) {
        self.life.on_abort(self.rank, notify);
    }

    fn shared_work(&self) -> SharedWork {
        self.life.shared_work()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        self.life.leave(self.rank);
    }
}
