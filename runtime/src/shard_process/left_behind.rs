//! Processes that were given up and may not have ended yet, as one whose driver does not let go of its device. What
//! that still does may reach the memory of ranks that live on, so nobody takes its place before it has ended.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use consort_parallel::ids::Rank;
use rustix::{
    event::PollFlags,
    process::{WaitId, WaitIdOptions, waitid},
};

use super::{error::ProcessError, socket::poll};

/// A process that was killed.
#[derive(Clone)]
struct Remains {
    rank: Rank,
    pid: i32,
    /// Readable once it has ended (a pidfd).
    handle: Arc<OwnedFd>,
    killed: Instant,
}

/// Those of one group's ranks.
#[derive(Default)]
pub(super) struct LeftBehind(Mutex<Vec<Remains>>);

impl LeftBehind {
    pub(super) fn add(&self, rank: Rank, pid: i32, handle: Arc<OwnedFd>) {
        self.all().push(Remains { rank, pid, handle, killed: Instant::now() });
    }

    /// Waits until all have ended, for `limit` at most; else the error names one that has not.
    pub(super) fn wait(&self, limit: Duration) -> Result<(), ProcessError> {
        let deadline = Instant::now() + limit;
        loop {
            // Others may come meanwhile.
            let Some(last) = self.all().last().cloned() else { return Ok(()) };
            let left = deadline.saturating_duration_since(Instant::now());
            let has_ended =
                poll([(&last.handle, PollFlags::IN)], left).is_ok_and(|[flags]| !flags.is_empty());
            if has_ended {
                // Off the system's list, if nobody has done that.
                let _ =
                    waitid(WaitId::PidFd(last.handle.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
                self.all().retain(|remains| !Arc::ptr_eq(&remains.handle, &last.handle));
            } else if left.is_zero() {
                let (rank, pid, since) = (last.rank, last.pid, last.killed.elapsed());
                return Err(ProcessError::Undead { rank, pid, seconds: since.as_secs() });
            }
        }
    }

    /// Numbers of those that nobody has waited for yet.
    #[cfg(test)]
    pub(super) fn pids(&self) -> Vec<i32> {
        self.all().iter().map(|remains| remains.pid).collect()
    }

    fn all(&self) -> MutexGuard<'_, Vec<Remains>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn who_has_not_ended_is_named_and_waited_for() {
        let left_behind = LeftBehind::default();
        left_behind.wait(Duration::ZERO).expect("there is nobody");
        let (first, ends_first) = std::io::pipe().expect("a pipe");
        let (second, ends_second) = std::io::pipe().expect("a pipe");
        left_behind.add(Rank(2), 4242, Arc::new(first.into()));
        left_behind.add(Rank(0), 4343, Arc::new(second.into()));
        drop(ends_second);
        let error = left_behind.wait(Duration::from_millis(20)).expect_err("one has not ended").to_string();
        assert!(error.contains("process 4242 of rank 2 was killed 0 s ago and has not ended"), "{error}");
        let ender = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            drop(ends_first);
        });
        left_behind.wait(Duration::from_secs(60)).expect("it ends");
        left_behind.wait(Duration::ZERO).expect("it is forgotten");
        ender.join().expect("it does not panic");
    }
}
