//! Waiting for a device, never for ever.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{CudaError, raw::Context};
use crate::progress;

/// A step takes milliseconds: until here the processor only asks again.
const EAGER: Duration = Duration::from_micros(50);
/// Until here others may run between two questions.
const YIELDING: Duration = Duration::from_millis(1);
/// Longest sleep between two questions.
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// Asks until `is_done`, or until `limit` has passed: the context is under suspicion then.
pub(super) fn until(
    context: &Context,
    doing: &str,
    limit: Duration,
    is_done: impl FnMut() -> Result<bool, CudaError>,
) -> Result<(), CudaError> {
    let waited = poll(context.label(), doing, limit, is_done);
    if let Err(CudaError::Timeout { .. }) = waited {
        context.suspect();
    }
    waited
}

fn poll(
    device: &str,
    doing: &str,
    limit: Duration,
    mut is_done: impl FnMut() -> Result<bool, CudaError>,
) -> Result<(), CudaError> {
    let started = Instant::now();
    loop {
        if is_done()? {
            return Ok(());
        }
        let waited = started.elapsed();
        if waited >= limit {
            return Err(timeout(device, doing, limit));
        }
        pause(waited, limit - waited);
    }
}

/// The error of work that did not end within `limit`: the context is under suspicion.
pub(super) fn late(context: &Context, doing: &str, limit: Duration) -> CudaError {
    context.suspect();
    timeout(context.label(), doing, limit)
}

fn timeout(device: &str, doing: &str, limit: Duration) -> CudaError {
    let seconds = limit.as_millis().div_ceil(1000) as u64;
    CudaError::Timeout { device: device.to_owned(), doing: doing.to_owned(), seconds }
}

/// Lets others run for a little while, the longer the longer was waited already, and no longer than what is `left`.
pub(in crate::cuda) fn pause(waited: Duration, left: Duration) {
    progress::note();
    match waited {
        _ if waited < EAGER => std::hint::spin_loop(),
        _ if waited < YIELDING => thread::yield_now(),
        _ => thread::sleep((waited / 32).min(SLEEP_MAX).min(left)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_when_its_work_is_done_and_no_later_than_its_limit() {
        let mut asked = 0;
        let done = poll("cuda:0", "end", Duration::from_secs(60), || {
            asked += 1;
            Ok(asked == 1000)
        });
        assert_eq!(done, Ok(()));
        let started = Instant::now();
        let late = poll("cuda:0", "end the step", Duration::from_millis(20), || Ok(false)).unwrap_err();
        assert!((20..5_000).contains(&started.elapsed().as_millis()));
        assert_eq!(
            late.to_string(),
            "cuda:0 did not end the step within 1 s: a kernel hangs or waits for a peer that is gone"
        );
    }

    #[test]
    fn an_error_ends_a_wait() {
        let lost = CudaError::Misuse { device: "cuda:0".into(), reason: "gone".into() };
        assert_eq!(poll("cuda:0", "end", Duration::from_secs(60), || Err(lost.clone())), Err(lost));
    }
}
