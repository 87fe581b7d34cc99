//! What an accepted request carries until it runs: a place among the waiting, and somebody who counts it.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::{request::SubmitError, status::StatusBoard};

/// Bounds the requests that were accepted and have not run yet, before the scheduler's unbounded mailbox.
pub(crate) struct Gate {
    /// `max_waiting_requests`.
    limit: usize,
    waiting: AtomicUsize,
}

impl Gate {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, waiting: AtomicUsize::new(0) }
    }

    /// Takes that many places at once, or says that there are not as many.
    pub(crate) fn enter(self: &Arc<Self>, count: usize) -> Result<Vec<WaitingSlot>, SubmitError> {
        let entered = self.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, |waiting| {
            waiting.checked_add(count).filter(|after| *after <= self.limit)
        });
        match entered {
            Ok(_) => Ok((0..count).map(|_| WaitingSlot { gate: Arc::clone(self) }).collect()),
            Err(waiting) => Err(SubmitError::Overloaded { waiting, limit: self.limit }),
        }
    }
}

/// A place among the waiting; given back when dropped.
pub(crate) struct WaitingSlot {
    gate: Arc<Gate>,
}

impl Drop for WaitingSlot {
    fn drop(&mut self) {
        self.gate.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Counts a request as failed when it is dropped on its way, be it with the mailbox of an actor that ended. While it is
/// nobody's, nobody else would.
pub(crate) struct Transit {
    board: Arc<StatusBoard>,
    is_under_way: bool,
}

impl Transit {
    /// Of a request that sets out.
    pub(super) fn new(board: Arc<StatusBoard>) -> Self {
        Self { board, is_under_way: true }
    }

    /// From here on, whoever has the request counts its end.
    pub(crate) fn arrive(&mut self) {
        self.is_under_way = false;
    }

    /// It is sent on.
    pub(crate) fn depart(&mut self) {
        self.is_under_way = true;
    }

    /// It ends here, because it can be served nowhere.
    pub(crate) fn failed(self) {
        // Counted when dropped.
    }

    /// It ends here, because nobody waits for it any more.
    pub(crate) fn cancelled(mut self) {
        self.arrive();
        self.board.unplaced(|finished| finished.cancelled += 1);
    }
}

impl Drop for Transit {
    fn drop(&mut self) {
        if self.is_under_way {
            self.board.unplaced(|finished| finished.failed += 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_on_its_way_has_failed_and_what_arrives_is_counted_by_others() {
        let board = Arc::new(StatusBoard::new(16, Vec::new()));
        let counts = || {
            let finished = board.snapshot().finished;
            (finished.failed, finished.cancelled)
        };
        let set_out = || Transit::new(Arc::clone(&board));
        let mut arrived = set_out();
        arrived.arrive();
        drop(arrived);
        assert_eq!(counts(), (0, 0));
        drop(set_out());
        assert_eq!(counts(), (1, 0));
        let mut sent_on = set_out();
        sent_on.arrive();
        sent_on.depart();
        drop(sent_on);
        assert_eq!(counts(), (2, 0));
        set_out().failed();
        assert_eq!(counts(), (3, 0));
        set_out().cancelled();
        assert_eq!(counts(), (3, 1));
    }
}
