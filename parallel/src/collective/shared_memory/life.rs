//! What one process holds of one segment: its way to abort the group, and whom it tells of an abort.
//!
//! An abort that this process makes is told on the thread that makes it. One that comes from elsewhere is told by a
//! thread that sleeps until then; it exists only where somebody wants to be told, and ends with the abort, which
//! comes at the latest when this process leaves the group.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::*},
    },
    thread,
};

use super::{meeting, segment::Segment};
use crate::{
    collective::{AbortHandle, AbortNotice, SharedWork, watchers::Watchers},
    ids::Rank,
};

/// One process's side of one segment.
pub(super) struct Life {
    segment: Segment,
    speaker: Speaker,
    watchers: Watchers,
    work: SharedWork,
    is_watched: AtomicBool,
    /// This process aborts the group: no other thread need tell anybody.
    tells: AtomicBool,
}

/// Who may give a reason, once.
struct Speaker {
    number: usize,
    has_spoken: Mutex<bool>,
}

impl Life {
    /// `speaker` is nobody else's: a rank that was taken, or the number of ranks for whoever made the segment.
    pub(super) fn new(segment: Segment, speaker: usize) -> Arc<Self> {
        Arc::new(Life {
            segment,
            speaker: Speaker { number: speaker, has_spoken: Mutex::new(false) },
            watchers: Watchers::default(),
            work: SharedWork::default(),
            is_watched: AtomicBool::new(false),
            tells: AtomicBool::new(false),
        })
    }

    pub(super) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// The reason once the group is aborted.
    pub(super) fn check(&self) -> Result<(), Arc<str>> {
        meeting::check(&self.segment).map_err(|_| self.reason())
    }

    /// Comes to the next meeting.
    pub(super) fn meet(&self) -> Result<(), Arc<str>> {
        meeting::meet(&self.segment).map_err(|_| self.reason())
    }

    fn reason(&self) -> Arc<str> {
        self.segment.reason().map_or_else(|| Arc::from("aborted"), Arc::from)
    }

    /// Calls off all meetings, then tells who wants to know.
    pub(super) fn abort(&self, reason: &str) {
        self.tells.store(true, SeqCst);
        self.speak(reason);
        meeting::call_off(&self.segment);
        self.tell();
    }

    /// Gives the reason, unless somebody has. One that ends in the middle has given none.
    fn speak(&self, reason: &str) {
        let mut has_spoken = self.speaker.has_spoken.lock().unwrap_or_else(PoisonError::into_inner);
        if *has_spoken || self.segment.aborted_by().load(Acquire) != 0 {
            return;
        }
        *has_spoken = true;
        // SAFETY: the number is this process's alone, the lock and `has_spoken` see to the once.
        unsafe { self.segment.write_reason(self.speaker.number, reason) };
        let number = self.speaker.number as u32 + 1;
        // Where somebody was faster, what was written is never looked at.
        let _ = self.segment.aborted_by().compare_exchange(0, number, AcqRel, Relaxed);
    }

    /// Has this process's ranks be told, and their shared work closed.
    fn tell(&self) {
        self.work.close();
        self.watchers.tell();
    }

    /// See [`Collective::on_abort`](crate::collective::Collective::on_abort).
    pub(super) fn on_abort(self: &Arc<Self>, rank: Rank, notify: AbortNotice) {
        self.watchers.add(rank, notify);
        self.watch();
    }

    /// Work that ranks of this process share. Those elsewhere have their own: what they map
    /// stays theirs whatever becomes of this process.
    pub(super) fn shared_work(self: &Arc<Self>) -> SharedWork {
        self.watch();
        self.work.clone()
    }

    /// Has aborts that come from elsewhere be told; at once, where there was one.
    fn watch(self: &Arc<Self>) {
        if meeting::check(&self.segment).is_err() {
            return self.tell();
        }
        if self.is_watched.swap(true, SeqCst) {
            return;
        }
        let life = Arc::clone(self);
        let watcher = thread::Builder::new().name("collective-abort".to_owned());
        if let Err(error) = watcher.spawn(move || life.await_abort()) {
            self.abort(&format!("no thread to watch for aborts: {error}"));
        }
    }

    fn await_abort(&self) {
        let aborted_by = self.segment.aborted_by();
        while aborted_by.load(Acquire) == 0 {
            meeting::sleep(aborted_by, 0);
        }
        // Whoever gave the reason may have ended before the rest.
        meeting::call_off(&self.segment);
        if !self.tells.load(SeqCst) {
            self.tell();
        }
    }

    /// A handle for any thread of this process.
    pub(super) fn abort_handle(self: &Arc<Self>) -> AbortHandle {
        let life = Arc::clone(self);
        AbortHandle::new(Arc::new(move |reason| life.abort(reason)))
    }

    /// Ends the membership of a rank of this process, and with it the group: it will not come to a meeting.
    pub(super) fn leave(&self, rank: Rank) {
        self.watchers.forget(rank);
        self.abort(&format!("{rank} left the group"));
    }
}
