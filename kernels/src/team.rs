//! A fixed team of threads that executes one function together, and returns when all are done.
//!
//! A job of a few microseconds must not cost tens in waking threads, so members spin briefly, then yield, then sleep.
//! Never used by async code. Called by the CPU kernels only.
#![allow(unsafe_code)]

use std::{
    cell::UnsafeCell,
    fmt,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::*},
    },
    thread::JoinHandle,
};

use crate::KernelError;

/// Busy looks at the generation before a member yields its core: about 2 us.
const SPINS: u32 = 400;
/// Yields before a member sleeps. Long enough to bridge the gap between two operations of a step.
const YIELDS: u32 = 200;
/// Most threads of one team; far above any socket, low enough that a typing error cannot exhaust the machine.
const THREADS_MAX: usize = 1024;

/// Threads that run jobs together. The caller of [`Team::run`] is member 0.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    caller: Mutex<()>,
}

/// Who a thread is within a job.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// `0..size`.
    pub index: usize,
    /// Threads in the team.
    pub size: usize,
}

type Job<'a> = dyn Fn(Member) + Sync + 'a;

#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    size: usize,
    generation: Line<AtomicUsize>,
    remaining: Line<AtomicUsize>,
    job: UnsafeCell<Option<*const Job<'static>>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleeping: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is written only while no member reads it (between `remaining == 0` and the next generation) and the
// pointee outlives the generation, since `run` returns only when `remaining` is 0 again. All else is Sync itself.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer refers to a `Sync` function.
unsafe impl Send for Shared {}

impl Team {
    /// A team of `size` threads, `size - 1` of them new. At least one, at most 1024.
    pub fn new(size: usize) -> Result<Team, KernelError> {
        if size == 0 || size > THREADS_MAX {
            return Err(KernelError::Unsupported {
                operation: "team",
                reason: format!("{size} threads asked for; 1 to {THREADS_MAX} are possible"),
            });
        }
        let shared = Arc::new(Shared {
            size,
            generation: Line(AtomicUsize::new(0)),
            remaining: Line(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleeping: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        let mut team = Team { shared, workers: Vec::with_capacity(size - 1), caller: Mutex::new(()) };
        for index in 1..size {
            let shared = Arc::clone(&team.shared);
            let worker = std::thread::Builder::new()
                .name(format!("consort-team-{index}"))
                .spawn(move || shared.work(Member { index, size }))
                .map_err(|error| KernelError::Thread { thread: index, reason: error.to_string() })?;
            team.workers.push(worker);
        }
        Ok(team)
    }

    /// Threads in the team.
    pub fn size(&self) -> usize {
        self.shared.size
    }

    /// Runs `job` once on every member and returns when all have. Panics if a member panicked.
    pub fn run(&self, job: &Job<'_>) {
        let size = self.shared.size;
        if size == 1 {
            return job(Member { index: 0, size });
        }
        let _one_caller = lock(&self.caller);
        let shared = &*self.shared;
        // SAFETY: `remaining` is 0, so no member reads `job`. The lifetime is erased only until `remaining` is 0
        // again, which this function awaits before it returns, also when the caller's own part panics.
        unsafe { *shared.job.get() = Some(std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job)) };
        shared.remaining.0.store(size - 1, Relaxed);
        shared.generation.0.fetch_add(1, SeqCst);
        if shared.sleeping.load(SeqCst) > 0 {
            drop(lock(&shared.sleep));
            shared.wake.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(Member { index: 0, size })));
        let mut spins = 0;
        while shared.remaining.0.load(Acquire) != 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        // Taken before anything unwinds, so that the next job does not inherit it.
        let others = shared.panicked.swap(false, Relaxed);
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        assert!(!others, "a thread of the CPU team panicked");
    }

    /// Runs `job` for every index of `0..items`; members take the next index when they are done with one.
    pub fn for_each(&self, items: usize, job: impl Fn(usize) + Sync) {
        if items == 1 || self.size() == 1 {
            return (0..items).for_each(job);
        }
        let next = AtomicUsize::new(0);
        self.run(&|_| {
            loop {
                let item = next.fetch_add(1, Relaxed);
                if item >= items {
                    return;
                }
                job(item);
            }
        });
    }
}

impl Member {
    /// This member's contiguous part of `0..items`; the parts of all members cover it without overlap.
    pub fn part(self, items: usize) -> Range<usize> {
        items * self.index / self.size..items * (self.index + 1) / self.size
    }
}

impl Shared {
    fn work(&self, me: Member) {
        let mut seen = 0;
        loop {
            seen = self.wait_beyond(seen);
            if self.stop.load(Acquire) {
                return;
            }
            // SAFETY: the generation advanced, so `job` was written before and stays valid until this member
            // has decremented `remaining`.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            if let Some(job) = job
                && catch_unwind(AssertUnwindSafe(|| job(me))).is_err()
            {
                self.panicked.store(true, Relaxed);
            }
            self.remaining.0.fetch_sub(1, Release);
        }
    }

    fn wait_beyond(&self, seen: usize) -> usize {
        for round in 0..SPINS + YIELDS {
            let now = self.generation.0.load(Acquire);
            if now != seen {
                return now;
            }
            if round < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        self.sleeping.fetch_add(1, SeqCst);
        let mut guard = lock(&self.sleep);
        let mut now = self.generation.0.load(SeqCst);
        while now == seen {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
            now = self.generation.0.load(SeqCst);
        }
        self.sleeping.fetch_sub(1, SeqCst);
        now
    }
}

fn lock(mutex: &Mutex<()>) -> MutexGuard<'_, ()> {
    // The mutexes guard no data, so a panic elsewhere leaves nothing half-done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Release);
        self.shared.generation.0.fetch_add(1, SeqCst);
        drop(lock(&self.shared.sleep));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            if worker.join().is_err() {
                tracing::warn!("a thread of the CPU team ended by panic");
            }
        }
    }
}

impl fmt::Debug for Team {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Team").field("size", &self.size()).finish()
    }
}

#[cfg(test)]
mod tests;
