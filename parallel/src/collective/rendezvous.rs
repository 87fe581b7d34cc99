//! A meeting point of threads that can be called off.
//!
//! Waiting spins briefly (peers usually arrive within microseconds), then yields the core (there may be more ranks
//! than cores), then sleeps. Every stage sees an abort.

use std::sync::{
    Arc, Condvar, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicUsize, Ordering::*},
};

/// Looks before the core is yielded: about a microsecond. Longer spinning only steals time from the rank waited for.
pub(super) const SPINS: u32 = 200;
/// Yields before sleeping.
pub(super) const YIELDS: u32 = 2000;

#[repr(align(128))]
struct Line<T>(T);

/// A barrier for `size` threads.
pub(crate) struct Rendezvous {
    size: usize,
    arrived: Line<AtomicUsize>,
    generation: Line<AtomicUsize>,
    aborted: AtomicBool,
    sleepers: AtomicUsize,
    reason: Mutex<Option<Arc<str>>>,
    wake: Condvar,
}

impl Rendezvous {
    /// For `size` threads.
    pub(crate) fn new(size: usize) -> Self {
        Rendezvous {
            size,
            arrived: Line(AtomicUsize::new(0)),
            generation: Line(AtomicUsize::new(0)),
            aborted: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            reason: Mutex::new(None),
            wake: Condvar::new(),
        }
    }

    /// The reason when the meeting was called off.
    pub(crate) fn check(&self) -> Result<(), Arc<str>> {
        if self.aborted.load(Acquire) { Err(self.abort_reason()) } else { Ok(()) }
    }

    /// Returns once all have called it; the reason when the meeting was called off before or meanwhile.
    pub(crate) fn wait(&self) -> Result<(), Arc<str>> {
        self.check()?;
        let generation = self.generation.0.load(Acquire);
        if self.arrived.0.fetch_add(1, AcqRel) + 1 == self.size {
            self.arrived.0.store(0, Relaxed);
            self.generation.0.store(generation.wrapping_add(1), SeqCst);
            self.wake_sleepers();
            return Ok(());
        }
        for round in 0..SPINS + YIELDS {
            if self.generation.0.load(Acquire) != generation {
                return Ok(());
            }
            if self.aborted.load(Acquire) {
                // The last to arrive may have finished and left since the look above: then all have met.
                let met = self.generation.0.load(Acquire) != generation;
                return if met { Ok(()) } else { Err(self.abort_reason()) };
            }
            if round < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        self.sleep(generation)
    }

    fn sleep(&self, generation: usize) -> Result<(), Arc<str>> {
        self.sleepers.fetch_add(1, SeqCst);
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        let result = loop {
            if self.generation.0.load(SeqCst) != generation {
                break Ok(());
            }
            if let Some(reason) = &*reason {
                break Err(Arc::clone(reason));
            }
            reason = self.wake.wait(reason).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, SeqCst);
        result
    }

    fn wake_sleepers(&self) {
        if self.sleepers.load(SeqCst) > 0 {
            // Taking the lock orders this wake-up after a sleeper's last look.
            drop(self.reason.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    /// Calls off this and all later meetings. The first reason stays.
    pub(crate) fn abort(&self, why: &str) {
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        reason.get_or_insert_with(|| Arc::from(why));
        self.aborted.store(true, Release);
        drop(reason);
        self.wake.notify_all();
    }

    fn abort_reason(&self) -> Arc<str> {
        let reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        reason.clone().unwrap_or_else(|| Arc::from("aborted"))
    }
}
