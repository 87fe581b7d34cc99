//! Ranks that are threads of one process: the places of their [`Board`] are vectors behind locks.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use super::{
    AbortHandle, AbortNotice, Collective, CollectiveError, SharedWork,
    board::{self, Board, Operation, Part},
    rendezvous::Rendezvous,
    watchers::Watchers,
};
use crate::ids::Rank;

/// What the ranks of a group share.
pub struct LocalGroup {
    meeting: Rendezvous,
    watchers: Watchers,
    work: SharedWork,
    /// `[rank][parity]`: what a rank brought.
    parts: Vec<[RwLock<OwnedPart>; 2]>,
    /// `[rank][parity]`: the segment that a rank summed.
    segments: Vec<[RwLock<Vec<f32>>; 2]>,
}

/// A [`Part`] as it is kept.
#[derive(Default)]
struct OwnedPart {
    operation: Operation,
    call_len: usize,
    numbers: Vec<f32>,
    bytes: Vec<u8>,
}

/// One rank of a [`LocalGroup`]. Dropping it ends the group: a rank that is gone will not come to a meeting.
pub struct Local {
    group: Arc<LocalGroup>,
    rank: Rank,
    parity: usize,
}

impl LocalGroup {
    /// A group of `size` ranks; element `r` of the result is rank `r`.
    #[expect(clippy::new_ret_no_self, reason = "a group is only ever held through its ranks")]
    pub fn new(size: usize) -> Vec<Local> {
        let parts = (0..size).map(|_| Default::default()).collect();
        let segments = (0..size).map(|_| Default::default()).collect();
        let (meeting, watchers) = (Rendezvous::new(size), Watchers::default());
        let work = SharedWork::default();
        let group = Arc::new(LocalGroup { meeting, watchers, work, parts, segments });
        (0..size)
            .map(|rank| Local { group: Arc::clone(&group), rank: Rank(rank as u16), parity: 0 })
            .collect()
    }

    /// Calls off all meetings, then tells who wants to know.
    fn abort(&self, reason: &str) {
        self.meeting.abort(reason);
        self.work.close();
        self.watchers.tell();
    }
}

impl Board for Local {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.parts.len()
    }

    fn check(&self) -> Result<(), Arc<str>> {
        self.group.meeting.check()
    }

    fn meet(&self) -> Result<(), Arc<str>> {
        self.group.meeting.wait()
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }

    fn lay(&mut self, part: Part<'_>) {
        self.parity ^= 1;
        let mut mine = write(&self.group.parts[self.rank.index()][self.parity]);
        (mine.operation, mine.call_len) = (part.operation, part.call_len);
        mine.numbers.clear();
        mine.numbers.extend_from_slice(part.numbers);
        mine.bytes.clear();
        mine.bytes.extend_from_slice(part.bytes);
    }

    fn read<R>(&self, rank: usize, reader: impl FnOnce(Part<'_>) -> R) -> R {
        let OwnedPart { operation, call_len, numbers, bytes } = &*read(&self.group.parts[rank][self.parity]);
        reader(Part { operation: *operation, call_len: *call_len, numbers, bytes })
    }

    fn lay_segment(&self, len: usize, fill: impl FnOnce(&mut [f32])) {
        let mut sum = write(&self.group.segments[self.rank.index()][self.parity]);
        sum.resize(len, 0.0);
        fill(&mut sum);
    }

    fn read_segment(&self, rank: usize, _len: usize, reader: impl FnOnce(&[f32])) {
        reader(&read(&self.group.segments[rank][self.parity]));
    }
}

impl Collective for Local {
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

    fn abort_handle(&self) -> AbortHandle {
        let group = Arc::clone(&self.group);
        AbortHandle::new(Arc::new(move |reason| group.abort(reason)))
    }

    fn on_abort(&self, notify: AbortNotice) {
        self.group.watchers.add(self.rank, notify);
    }

    fn shared_work(&self) -> SharedWork {
        self.group.work.clone()
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.group.watchers.forget(self.rank);
        // Exchanges that all ranks have met for are read to their end; only later ones are refused.
        self.group.abort(&format!("{} left the group", self.rank));
    }
}

fn write<T>(slot: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    // A slot is overwritten whole: whatever a panicking writer left behind does not matter.
    slot.write().unwrap_or_else(PoisonError::into_inner)
}

fn read<T>(slot: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    slot.read().unwrap_or_else(PoisonError::into_inner)
}
