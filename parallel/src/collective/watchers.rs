//! Who is told that a group was aborted, each once.
//!
//! Notices are called outside of the lock, one after another: they may take their time, call the group, or drop
//! ranks of it.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::AbortNotice;
use crate::ids::Rank;

/// The notices of one group.
#[derive(Default)]
pub(super) struct Watchers {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Whether the group was aborted: whoever comes later is told at once.
    told: bool,
    waiting: Vec<(Rank, AbortNotice)>,
}

impl Watchers {
    /// Keeps a notice of `rank` until the group is aborted.
    pub(super) fn add(&self, rank: Rank, notify: AbortNotice) {
        let mut state = self.lock();
        if state.told {
            drop(state);
            return call(rank, &notify);
        }
        state.waiting.push((rank, notify));
    }

    /// Drops the notices of a rank that leaves. One that was taken already is called nevertheless.
    pub(super) fn forget(&self, rank: Rank) {
        // Dropped after the lock is free: what a notice holds may itself be watching.
        let left: Vec<_> = self.lock().waiting.extract_if(.., |(of, _)| *of == rank).collect();
        drop(left);
    }

    /// Calls every notice that is left. The group refuses its members already.
    pub(super) fn tell(&self) {
        self.lock().told = true;
        // One by one: a rank that leaves meanwhile is not told any more.
        while let Some((rank, notify)) = self.next() {
            call(rank, &notify);
        }
    }

    fn next(&self) -> Option<(Rank, AbortNotice)> {
        self.lock().waiting.pop()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock can panic halfway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Calls a notice. Whoever aborts may itself be unwinding, so a panic stays here.
fn call(rank: Rank, notify: &AbortNotice) {
    if catch_unwind(AssertUnwindSafe(notify)).is_err() {
        tracing::error!(rank = rank.0, "what was to be told of an abort panicked");
    }
}
