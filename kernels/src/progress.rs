//! That this process gets on, for whoever watches over it from outside: a count of the points that work comes by again
//! and again while nothing hangs. Waits for a device or for NCCL count as well, because they have limits of their own.

use std::sync::atomic::{AtomicU64, Ordering};

static NOTED: AtomicU64 = AtomicU64::new(0);

/// Work came by such a point: every layer of a model on CPUs, every question put to a device that is waited for.
pub fn note() {
    NOTED.fetch_add(1, Ordering::Relaxed);
}

/// How often any thread of this process did.
pub fn noted() -> u64 {
    NOTED.load(Ordering::Relaxed)
}
