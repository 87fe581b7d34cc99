//! The meeting point of a segment's members: counters, and one word that all wait on.
//!
//! The word counts the meetings held and has a bit that says the group is aborted, so one look tells both, and whoever
//! goes to sleep on it misses neither. Members wait as threads of one process do: they spin, then yield the core, then
//! sleep. A member that ends in the middle leaves counts that are wrong, and these only matter to meetings that it
//! would have had to come to.

use std::sync::atomic::{AtomicU32, Ordering::*};

use rustix::{
    io::Errno,
    thread::futex::{self, Flags},
};

use super::segment::Segment;
use crate::collective::rendezvous::{SPINS, YIELDS};

/// The bit of the state that says the group is aborted.
const ABORTED: u32 = 1;
/// What one meeting adds to the state.
const HELD: u32 = 2;

/// The group is aborted.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CalledOff;

/// Whether meetings are still held.
pub(super) fn check(segment: &Segment) -> Result<(), CalledOff> {
    if segment.state().load(Acquire) & ABORTED == 0 { Ok(()) } else { Err(CalledOff) }
}

/// Returns once all have called it, or meetings are called off. Where both happen, members may see it differently.
pub(super) fn meet(segment: &Segment) -> Result<(), CalledOff> {
    let seen = segment.state().load(Acquire);
    if seen & ABORTED != 0 {
        return Err(CalledOff);
    }
    if segment.arrived().fetch_add(1, AcqRel) + 1 == segment.ranks() as u32 {
        segment.arrived().store(0, Relaxed);
        segment.state().fetch_add(HELD, SeqCst);
        if segment.sleepers().load(SeqCst) > 0 {
            wake(segment.state());
        }
        return Ok(());
    }
    for round in 0..SPINS + YIELDS {
        if let Some(outcome) = look(segment, seen) {
            return outcome;
        }
        if round < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
    segment.sleepers().fetch_add(1, SeqCst);
    let outcome = loop {
        if let Some(outcome) = look(segment, seen) {
            break outcome;
        }
        sleep(segment.state(), seen);
    };
    segment.sleepers().fetch_sub(1, SeqCst);
    outcome
}

/// What came of the meeting that began at `seen`.
fn look(segment: &Segment, seen: u32) -> Option<Result<(), CalledOff>> {
    let now = segment.state().load(SeqCst);
    // The last to arrive may have held the meeting before the abort: then all have met.
    if now & !ABORTED != seen {
        return Some(Ok(()));
    }
    (now & ABORTED != 0).then_some(Err(CalledOff))
}

/// Calls off this and all later meetings. Wakes in any case: whoever did it before may have ended before that.
pub(super) fn call_off(segment: &Segment) {
    segment.state().fetch_or(ABORTED, SeqCst);
    wake(segment.state());
    wake(segment.aborted_by());
}

/// Sleeps until the word is no longer `seen`, as far as the system lets. Look again in any case.
pub(super) fn sleep(word: &AtomicU32, seen: u32) {
    // Not private: the others are in other processes.
    match futex::wait(word, Flags::empty(), seen, None) {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
        // A sandbox may forbid the call: then looking is all that is left.
        Err(_) => std::thread::sleep(std::time::Duration::from_micros(100)),
    }
}

fn wake(word: &AtomicU32) {
    // Where the call is forbidden nobody sleeps in it.
    let _ = futex::wake(word, Flags::empty(), i32::MAX as u32);
}
