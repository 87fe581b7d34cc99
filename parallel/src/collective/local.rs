//! Ranks that are threads of one process.
//!
//! Each rank copies its part into a slot of its own, all meet, and everybody reads the slots in rank order. Small
//! sums are made by every rank for itself; large ones by segments, each rank summing its own and publishing it. Both
//! add the same numbers in the same order. Slots come in pairs used alternately, so that a fast rank may start the
//! next exchange while a slow one still reads this one. Long arrays go through in pieces of [`PIECE_MAX`], so a slot
//! stays within the cache and the group's memory is bounded whatever a model exchanges.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use super::{
    AbortHandle, AbortNotice, Collective, CollectiveError, EXCHANGE_BYTES_MAX, SharedWork,
    rendezvous::Rendezvous, watchers::Watchers,
};
use crate::ids::Rank;

/// Up to this many elements every rank sums everything itself: one meeting instead of two.
const ONE_SHOT_MAX: usize = 8192;
/// Most elements of one exchange: 256 KiB of each rank, together with the sums a fraction of an L2 cache.
const PIECE_MAX: usize = 65_536;

/// What the ranks of a group share.
pub struct LocalGroup {
    meeting: Rendezvous,
    watchers: Watchers,
    work: SharedWork,
    /// `[rank][parity]`: what a rank brought.
    parts: Vec<[RwLock<Part>; 2]>,
    /// `[rank][parity]`: the segment that a rank summed.
    segments: Vec<[RwLock<Vec<f32>>; 2]>,
}

/// One rank's part of one exchange, and what the rank takes part in: compared before a number is used.
#[derive(Default)]
struct Part {
    operation: &'static str,
    /// Elements of the whole call, of which `data` may be a piece.
    call_len: usize,
    data: Vec<f32>,
    /// What an exchange of bytes carries, in place of `data`.
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

impl Local {
    /// Publishes `data` as this rank's part of `operation` and waits for everybody's.
    fn publish(
        &mut self,
        operation: &'static str,
        call_len: usize,
        data: &[f32],
    ) -> Result<(), CollectiveError> {
        self.publish_with(operation, |part| {
            part.call_len = call_len;
            part.data.clear();
            part.data.extend_from_slice(data);
        })
    }

    /// Has `fill` write this rank's part of `operation` and waits for everybody's.
    fn publish_with(
        &mut self,
        operation: &'static str,
        fill: impl FnOnce(&mut Part),
    ) -> Result<(), CollectiveError> {
        // After an abort nobody waits any more, and a part written now would replace one that peers still read.
        self.group.meeting.check().map_err(|reason| CollectiveError::Aborted { rank: self.rank, reason })?;
        self.parity ^= 1;
        {
            let mut part = write(&self.group.parts[self.rank.index()][self.parity]);
            part.operation = operation;
            fill(&mut part);
        }
        self.meet()?;
        for rank in 0..self.size() {
            let part = self.part(rank);
            if part.operation != operation {
                return Err(self.disagree(operation, Rank(rank as u16), part.operation));
            }
        }
        Ok(())
    }

    fn meet(&self) -> Result<(), CollectiveError> {
        self.group.meeting.wait().map_err(|reason| CollectiveError::Aborted { rank: self.rank, reason })
    }

    fn part(&self, rank: usize) -> RwLockReadGuard<'_, Part> {
        read(&self.group.parts[rank][self.parity])
    }

    /// Ends the group, since ranks that disagree once will never agree again.
    fn refuse(&self, error: CollectiveError) -> CollectiveError {
        self.group.abort(&error.to_string());
        error
    }

    fn disagree(&self, operation: &'static str, peer: Rank, theirs: &'static str) -> CollectiveError {
        self.refuse(CollectiveError::Disagreement { rank: self.rank, operation, peer, theirs })
    }

    fn check(&self, operation: &'static str, got: usize, expected: usize) -> Result<(), CollectiveError> {
        if got == expected {
            return Ok(());
        }
        Err(self.refuse(CollectiveError::Mismatch { rank: self.rank, operation, got, expected }))
    }

    /// Sums one piece of an array whose whole length is `call_len`.
    fn sum_piece(&mut self, call_len: usize, data: &mut [f32]) -> Result<(), CollectiveError> {
        let (size, len) = (self.size(), data.len());
        self.publish("all_reduce_sum", call_len, data)?;
        for rank in 0..size {
            let theirs = self.part(rank).call_len;
            self.check("all_reduce_sum", call_len, theirs)?;
        }
        if call_len <= ONE_SHOT_MAX {
            for rank in 0..size {
                accumulate(data, &self.part(rank).data, rank);
            }
            return Ok(());
        }
        let segment = |rank: usize| len * rank / size..len * (rank + 1) / size;
        let mine = segment(self.rank.index());
        {
            let mut sum = write(&self.group.segments[self.rank.index()][self.parity]);
            sum.resize(mine.len(), 0.0);
            for rank in 0..size {
                accumulate(&mut sum, &self.part(rank).data[mine.clone()], rank);
            }
        }
        self.meet()?;
        for rank in 0..size {
            data[segment(rank)].copy_from_slice(&read(&self.group.segments[rank][self.parity]));
        }
        Ok(())
    }
}

impl Collective for Local {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.parts.len()
    }

    fn all_reduce_sum(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        if self.size() == 1 {
            return self.meet();
        }
        let call_len = data.len();
        if call_len == 0 {
            return self.sum_piece(0, data);
        }
        data.chunks_mut(PIECE_MAX).try_for_each(|piece| self.sum_piece(call_len, piece))
    }

    fn all_gather(&mut self, mine: &[f32], all: &mut [f32]) -> Result<(), CollectiveError> {
        const NAME: &str = "all_gather";
        let mut first = 0;
        loop {
            let piece = &mine[mine.len().min(first)..mine.len().min(first + PIECE_MAX)];
            self.publish(NAME, mine.len(), piece)?;
            let total = (0..self.size()).map(|rank| self.part(rank).call_len).sum();
            self.check(NAME, all.len(), total)?;
            let (mut start, mut longest) = (0, 0);
            for rank in 0..self.size() {
                let part = self.part(rank);
                all[start + first.min(part.call_len)..][..part.data.len()].copy_from_slice(&part.data);
                start += part.call_len;
                longest = longest.max(part.call_len);
            }
            first += PIECE_MAX;
            if first >= longest {
                return Ok(());
            }
        }
    }

    fn broadcast(&mut self, data: &mut [f32], root: Rank) -> Result<(), CollectiveError> {
        const NAME: &str = "broadcast";
        if root.index() >= self.size() {
            return self.check("broadcast from a rank", root.index(), self.size() - 1);
        }
        let call_len = data.len();
        let mut first = 0;
        while first == 0 || first < call_len {
            let range = first..call_len.min(first + PIECE_MAX);
            let own: &[f32] = if self.rank == root { &data[range.clone()] } else { &[] };
            self.publish(NAME, call_len, own)?;
            for rank in 0..self.size() {
                let theirs = self.part(rank).call_len;
                self.check(NAME, call_len, theirs)?;
            }
            data[range].copy_from_slice(&read(&self.group.parts[root.index()][self.parity]).data);
            first += PIECE_MAX;
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.publish("barrier", 0, &[])
    }

    fn exchange(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        if mine.len() > EXCHANGE_BYTES_MAX {
            return Err(self.refuse(CollectiveError::TooLong { rank: self.rank, bytes: mine.len() }));
        }
        self.publish_with("exchange", |part| {
            part.bytes.clear();
            part.bytes.extend_from_slice(mine);
        })?;
        Ok((0..self.size()).map(|rank| self.part(rank).bytes.clone()).collect())
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

/// The sum in rank order: rank 0's numbers stand first, the others are added one rank after the other.
fn accumulate(sum: &mut [f32], part: &[f32], rank: usize) {
    if rank == 0 {
        sum.copy_from_slice(part);
    } else {
        sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
}

fn write<T>(slot: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    // A slot is overwritten whole: whatever a panicking writer left behind does not matter.
    slot.write().unwrap_or_else(PoisonError::into_inner)
}

fn read<T>(slot: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    slot.read().unwrap_or_else(PoisonError::into_inner)
}
