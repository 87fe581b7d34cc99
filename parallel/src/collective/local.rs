//! Ranks that are threads of one process.
//!
//! Each rank copies its part into a slot of its own, all meet, and everybody reads the slots in rank order. Small
//! sums are made by every rank for itself; large ones by segments, each rank summing its own and publishing it. Both
//! add the same numbers in the same order. Slots come in pairs used alternately, so that a fast rank may start the
//! next exchange while a slow one still reads this one.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use super::{AbortHandle, Collective, CollectiveError, rendezvous::Rendezvous};
use crate::ids::Rank;

/// Up to this many elements every rank sums everything itself: one meeting instead of two.
const ONE_SHOT_MAX: usize = 8192;

/// What the ranks of a group share.
pub struct LocalGroup {
    meeting: Rendezvous,
    /// `[rank][parity]`: what a rank brought.
    parts: Vec<[RwLock<Vec<f32>>; 2]>,
    /// `[rank][parity]`: the segment that a rank summed.
    segments: Vec<[RwLock<Vec<f32>>; 2]>,
}

/// One rank of a [`LocalGroup`].
pub struct Local {
    group: Arc<LocalGroup>,
    rank: Rank,
    parity: usize,
}

impl LocalGroup {
    /// A group of `size` ranks; element `r` of the result is rank `r`.
    #[expect(clippy::new_ret_no_self, reason = "a group is only ever held through its ranks")]
    pub fn new(size: usize) -> Vec<Local> {
        let slots = || (0..size).map(|_| Default::default()).collect();
        let group =
            Arc::new(LocalGroup { meeting: Rendezvous::new(size), parts: slots(), segments: slots() });
        (0..size)
            .map(|rank| Local { group: Arc::clone(&group), rank: Rank(rank as u16), parity: 0 })
            .collect()
    }
}

impl Local {
    /// Publishes `data` as this rank's part of the exchange and waits for everybody's.
    fn exchange(&mut self, data: &[f32]) -> Result<(), CollectiveError> {
        self.parity ^= 1;
        store(&self.group.parts[self.rank.index()][self.parity], data);
        self.meet()
    }

    fn meet(&self) -> Result<(), CollectiveError> {
        self.group.meeting.wait().map_err(|reason| CollectiveError::Aborted { rank: self.rank, reason })
    }

    fn part(&self, rank: usize) -> RwLockReadGuard<'_, Vec<f32>> {
        read(&self.group.parts[rank][self.parity])
    }

    fn check(&self, operation: &'static str, got: usize, expected: usize) -> Result<(), CollectiveError> {
        if got == expected {
            return Ok(());
        }
        let error = CollectiveError::Mismatch { rank: self.rank, operation, got, expected };
        self.group.meeting.abort(&error.to_string());
        Err(error)
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
        let size = self.size();
        if size == 1 {
            return self.meet();
        }
        self.exchange(data)?;
        for rank in 0..size {
            self.check("all_reduce_sum", data.len(), self.part(rank).len())?;
        }
        if data.len() <= ONE_SHOT_MAX {
            for rank in 0..size {
                accumulate(data, &self.part(rank), rank);
            }
            return Ok(());
        }
        let len = data.len();
        let segment = |rank: usize| len * rank / size..len * (rank + 1) / size;
        let mine = segment(self.rank.index());
        let mut sum = vec![0.0; mine.len()];
        for rank in 0..size {
            accumulate(&mut sum, &self.part(rank)[mine.clone()], rank);
        }
        store(&self.group.segments[self.rank.index()][self.parity], &sum);
        self.meet()?;
        for rank in 0..size {
            data[segment(rank)].copy_from_slice(&read(&self.group.segments[rank][self.parity]));
        }
        Ok(())
    }

    fn all_gather(&mut self, mine: &[f32], all: &mut [f32]) -> Result<(), CollectiveError> {
        self.exchange(mine)?;
        let total = (0..self.size()).map(|rank| self.part(rank).len()).sum();
        self.check("all_gather", all.len(), total)?;
        let mut rest = all;
        for rank in 0..self.size() {
            let part = self.part(rank);
            let (to, after) = rest.split_at_mut(part.len());
            to.copy_from_slice(&part);
            rest = after;
        }
        Ok(())
    }

    fn broadcast(&mut self, data: &mut [f32], root: Rank) -> Result<(), CollectiveError> {
        if root.index() >= self.size() {
            return self.check("broadcast from a rank", root.index(), self.size() - 1);
        }
        let own: &[f32] = if self.rank == root { data } else { &[] };
        self.exchange(own)?;
        let part = read(&self.group.parts[root.index()][self.parity]);
        self.check("broadcast", data.len(), part.len())?;
        data.copy_from_slice(&part);
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.meet()
    }

    fn abort_handle(&self) -> AbortHandle {
        let group = Arc::clone(&self.group);
        AbortHandle::new(Arc::new(move |reason| group.meeting.abort(reason)))
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

fn store(slot: &RwLock<Vec<f32>>, data: &[f32]) {
    // A slot is overwritten whole: whatever a panicking writer left behind does not matter.
    let mut slot = slot.write().unwrap_or_else(PoisonError::into_inner);
    slot.clear();
    slot.extend_from_slice(data);
}

fn read(slot: &RwLock<Vec<f32>>) -> RwLockReadGuard<'_, Vec<f32>> {
    slot.read().unwrap_or_else(PoisonError::into_inner)
}
