//! NCCL's communicator of one rank, and the thread that looks after it.
//!
//! Its end waits for what it does on the device, and that may wait for other ranks, who wait for theirs. So no end
//! happens on a thread that somebody needs: an abort of the group only tells the thread here. The same thread makes the
//! communicator, in a call that may hang; sees errors that NCCL notices while the rank waits for its device; and does
//! not let ranks wait for each other for ever, of which NCCL itself never tires.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use consort_kernels::{
    cuda::{
        device::CudaDevice,
        nccl::{Nccl, NcclCommunicator, NcclError, UniqueId},
    },
    progress,
};

use crate::collective::{AbortHandle, Collective};

/// How often the communicator is looked at while it is in use: a moment beside what an error costs.
const LOOK: Duration = Duration::from_millis(20);
/// How long an error of NCCL may wait for the group's abort. Whoever watches over the ranks knows why one of them is
/// gone; what NCCL tells the others is that a connection is, and not always that it is a peer's.
const ABORT_COMES_WITHIN: Duration = Duration::from_secs(1);
/// The same for an error that tells of a peer: should that have an error of its own, it is to tell that first.
const PEERS_ABORT_COMES_WITHIN: Duration = Duration::from_secs(3);
/// Longest wait for its end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A communicator that is looked after. Dropping it ends it, and waits for that; graphs that recorded it are gone.
pub(super) struct Watch {
    shared: Arc<Shared>,
    communicator: Arc<NcclCommunicator>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    made: Option<Result<Arc<NcclCommunicator>, NcclError>>,
    /// Since when ranks wait for each other.
    since: Option<Instant>,
    /// It shall end.
    ends: bool,
    /// It has, and the thread with it.
    ended: bool,
    /// What NCCL told of a failure of this rank.
    failure: Option<NcclError>,
}

/// What the thread starts from.
struct Task {
    library: Arc<Nccl>,
    id: UniqueId,
    device: Arc<CudaDevice>,
    place: (usize, usize),
    abort: AbortHandle,
    leave: Box<dyn Fn() + Send>,
    limit: Duration,
}

impl Watch {
    /// Begins to make the communicator of `comm`'s rank. Its call of NCCL should return at once; where it has not after
    /// `limit`, the error names this rank.
    pub(super) fn begin(
        library: &Arc<Nccl>,
        id: &UniqueId,
        device: &Arc<CudaDevice>,
        (comm, limit): (&dyn Collective, Duration),
        leave: Box<dyn Fn() + Send>,
    ) -> Result<Watch, NcclError> {
        let (rank, ranks) = (comm.rank().index(), comm.size());
        let task = Task {
            library: library.clone(),
            id: *id,
            device: device.clone(),
            place: (rank, ranks),
            abort: comm.abort_handle(),
            leave,
            // Before the rank takes its own device to hang.
            limit: limit * 3 / 4,
        };
        let shared = Arc::new(Shared::default());
        let for_thread = Arc::clone(&shared);
        let thread = thread::Builder::new().name(format!("consort-nccl-{rank}"));
        thread.spawn(move || for_thread.run(task)).map_err(|error| {
            let reason = format!("the thread that looks after NCCL could not be started: {error}");
            NcclError::Misuse { rank, ranks, reason }
        })?;
        // The group may keep the notice for longer than this lives.
        let told = Arc::downgrade(&shared);
        comm.on_abort(Box::new(move || {
            if let Some(shared) = told.upgrade() {
                shared.end();
            }
        }));
        let error = match shared.made(limit) {
            Some(Ok(communicator)) => return Ok(Watch { shared, communicator }),
            Some(Err(error)) => error,
            None if shared.state().ends => {
                NcclError::Ended { rank, ranks, reason: "the group was aborted".to_owned() }
            }
            None => {
                let (device, missing) = (label(device), vec![rank]);
                NcclError::JoinTimeout { rank, ranks, device, seconds: seconds(limit), missing, begun: false }
            }
        };
        shared.end();
        Err(error)
    }

    pub(super) fn communicator(&self) -> &NcclCommunicator {
        &self.communicator
    }

    /// From now on ranks wait for each other, and not for ever.
    pub(super) fn begins(&self) {
        self.shared.state().since = Some(Instant::now());
    }

    /// They have met.
    pub(super) fn ended(&self) {
        self.shared.state().since = None;
    }

    /// Has the communicator end, with all that it still does.
    pub(super) fn call_off(&self) {
        self.shared.end();
    }

    /// Whether the group is aborted, or soon is: then what NCCL tells is a consequence of that.
    pub(super) fn is_called_off(&self, error: &NcclError) -> bool {
        self.shared.is_called_off(error)
    }

    /// What NCCL told of a failure of this rank, if it did.
    pub(super) fn failure(&self) -> Option<NcclError> {
        self.shared.state().failure.clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.end();
        if !self.shared.wait(END_LIMIT, |state| state.ended).ended {
            tracing::warn!("NCCL has not ended within {END_LIMIT:?}; what it holds stays taken until it has");
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        self.state().ends = true;
        self.changed.notify_all();
    }

    /// What came of the making; `None` if that takes too long, or is to end.
    fn made(&self, limit: Duration) -> Option<Result<Arc<NcclCommunicator>, NcclError>> {
        let begun = Instant::now();
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            let mut state = self.wait(left.min(LOOK), |state| state.made.is_some() || state.ends);
            if state.made.is_some() || state.ends || left.is_zero() {
                return state.made.take();
            }
            progress::note();
        }
    }

    /// The state when it is as wanted, or after `limit`.
    fn wait(&self, limit: Duration, is_wanted: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let waited = self.changed.wait_timeout_while(self.state(), limit, |state| !is_wanted(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn is_called_off(&self, error: &NcclError) -> bool {
        let within = if error.is_of_a_peer() { PEERS_ABORT_COMES_WITHIN } else { ABORT_COMES_WITHIN };
        self.wait(within, |state| state.ends).ends
    }

    /// Body of the thread.
    fn run(&self, task: Task) {
        let Task { library, id, device, place: (rank, ranks), abort, leave, limit } = task;
        let late = NcclError::Timeout {
            rank,
            ranks,
            device: label(&device),
            doing: "end the sums of a step".to_owned(),
            seconds: seconds(limit),
        };
        let made = NcclCommunicator::begin(&library, &device, &id, rank, ranks);
        drop(device);
        let communicator = made.as_ref().ok().cloned();
        self.state().made = Some(made);
        self.changed.notify_all();
        if let Some(communicator) = communicator {
            let reason = match self.look_after(&communicator, (limit, late)) {
                None => "the group was aborted, or has ended".to_owned(),
                Some(error) => {
                    let reason = error.to_string();
                    match error {
                        NcclError::Timeout { .. } => abort.abort(&reason),
                        error if self.is_called_off(&error) => {}
                        error if error.is_of_a_peer() => abort.abort(&reason),
                        error => {
                            self.state().failure = Some(error);
                            leave();
                        }
                    }
                    reason
                }
            };
            communicator.abort(&reason);
        }
        let mut state = self.state();
        // Where nobody has taken it.
        let unclaimed = state.made.take();
        drop(state);
        drop(unclaimed);
        self.state().ended = true;
        self.changed.notify_all();
    }

    /// Looks until the communicator is to end, or for what it must.
    fn look_after(
        &self,
        communicator: &NcclCommunicator,
        (limit, late): (Duration, NcclError),
    ) -> Option<NcclError> {
        loop {
            let state = self.wait(LOOK, |state| state.ends);
            if state.ends {
                return None;
            }
            let since = state.since;
            drop(state);
            let Some(since) = since else { continue };
            if let Err(error) = communicator.check() {
                return Some(error);
            }
            if since.elapsed() >= limit && self.state().since == Some(since) {
                return Some(late);
            }
        }
    }
}

/// How messages call a device.
fn label(device: &CudaDevice) -> String {
    format!("cuda:{}", device.facts().ordinal)
}

/// Rounded up.
fn seconds(limit: Duration) -> u64 {
    limit.as_millis().div_ceil(1000) as u64
}
