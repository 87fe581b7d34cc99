//! Work that ranks do in each other's memory, and ranks that leave.
//!
//! A rank's device may read a peer's memory until the work that does so has ended. So whoever starts such work says so,
//! and a rank that leaves a group waits, before it gives its memory back, until nobody does any. After an abort none is
//! begun.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The work of one group in one life of it. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct SharedWork {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    under_way: usize,
    is_closed: bool,
    /// Some of it may go on for ever.
    is_stranded: bool,
}

/// Somebody's work that is under way; dropped when it has ended.
#[derive(Debug)]
pub struct WorkUnderWay {
    shared: Arc<Shared>,
}

impl SharedWork {
    /// Begins work; `None` once the group is aborted.
    pub fn begin(&self) -> Option<WorkUnderWay> {
        let mut state = self.shared.state();
        if state.is_closed {
            return None;
        }
        state.under_way += 1;
        Some(WorkUnderWay { shared: Arc::clone(&self.shared) })
    }

    /// From now on none is begun.
    pub(crate) fn close(&self) {
        self.shared.state().is_closed = true;
    }

    /// From now on none is begun. Returns whether all that was under way has ended within `limit`; at once where some
    /// of it may never end.
    pub fn close_and_wait(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut state = self.shared.state();
        state.is_closed = true;
        while state.under_way > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.is_stranded {
                return false;
            }
            state = self.shared.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl WorkUnderWay {
    /// Nobody can tell when it ends: its device hangs.
    pub fn strand(self) {
        self.shared.state().is_stranded = true;
        self.shared.ended.notify_all();
        // It never counts as ended.
        std::mem::forget(self);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WorkUnderWay {
    fn drop(&mut self) {
        self.shared.state().under_way -= 1;
        self.shared.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn whoever_leaves_waits_for_the_others_work_and_no_longer_than_the_limit() {
        let work = SharedWork::default();
        let first = work.begin().expect("nobody has left");
        let second = work.begin().expect("nobody has left");
        assert!(!work.close_and_wait(Duration::from_millis(10)), "two are at work");
        assert!(work.begin().is_none(), "somebody is leaving");
        drop(first);
        let leaver = work.clone();
        let left = thread::spawn(move || leaver.close_and_wait(Duration::from_secs(60)));
        drop(second);
        assert!(left.join().expect("it does not panic"));
        assert!(work.close_and_wait(Duration::ZERO), "nobody is at work any more");
    }

    #[test]
    fn nobody_waits_for_work_that_may_never_end() {
        let work = SharedWork::default();
        let (stuck, other) = (work.begin().expect("open"), work.begin().expect("open"));
        let leaver = work.clone();
        let left = thread::spawn(move || leaver.close_and_wait(Duration::from_secs(600)));
        stuck.strand();
        assert!(!left.join().expect("it does not panic"));
        drop(other);
        assert!(!work.close_and_wait(Duration::from_secs(600)), "it counts for ever");
    }
}
