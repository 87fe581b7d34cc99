//! The handle of a running ensemble: start, submit, status, shutdown.

mod generation;
mod shared;
mod spec;

#[cfg(test)]
mod faults;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

pub use generation::Generation;
use ractor::{Actor, ActorRef};
pub(crate) use shared::{Shared, WaitingSlot};
pub use spec::EnsembleSpec;
use tokio::sync::{mpsc, oneshot};

use crate::{
    error::EnsembleError,
    group::SILENCE_MAX,
    request::{GenerationError, Request, SubmitError},
    scheduler::{GENERATION_QUEUE_EVENTS, SchedulerMessage, Submission},
    shard::ProgressCallback,
    status::{EnsembleState, StateWatch, Status},
    supervisor::{SupervisorActor, SupervisorArguments, SupervisorMessage},
};

/// How long the end of an ensemble waits for its compute threads. A step takes seconds at worst; what takes longer
/// hangs, and a thread cannot be killed.
pub(crate) const THREAD_JOIN_MAX: Duration =
    if cfg!(test) { Duration::from_millis(500) } else { Duration::from_secs(30) };

/// A running ensemble. Clones are handles of the same one; when the last is dropped, its actors and threads end.
#[derive(Clone)]
pub struct Ensemble {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    supervisor: ActorRef<SupervisorMessage>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.board.transition(EnsembleState::Draining);
        self.supervisor.stop(None);
    }
}

impl Ensemble {
    /// Starts the actor tree, loads every rank, and returns once all are ready, or with the first error. Must be
    /// called within a tokio runtime, which then runs the actors.
    pub async fn start(
        spec: EnsembleSpec,
        progress: Option<ProgressCallback>,
    ) -> Result<Self, EnsembleError> {
        Self::start_watched(spec, progress, SILENCE_MAX).await
    }

    /// As [`Self::start`], with ranks that may be silent for `silence_max`.
    async fn start_watched(
        spec: EnsembleSpec,
        progress: Option<ProgressCallback>,
        silence_max: Duration,
    ) -> Result<Self, EnsembleError> {
        spec.check()?;
        let shared = Arc::new(Shared::new(spec, progress, silence_max));
        let (first_load, loaded) = oneshot::channel();
        let arguments = SupervisorArguments { shared: Arc::clone(&shared), first_load };
        let spawned = Actor::spawn(None, SupervisorActor, arguments).await;
        let (supervisor, _) = spawned.map_err(|error| EnsembleError::Actors(error.to_string()))?;
        // From here on the handle's drop ends the tree, also when this future is dropped while it waits.
        let ensemble = Self { inner: Arc::new(Inner { shared, supervisor }) };
        let outcome = loaded.await.unwrap_or(Err(EnsembleError::Stopped));
        if let Err(error) = outcome {
            ensemble.stop().await;
            return Err(error);
        }
        Ok(ensemble)
    }

    /// Submits a request. Refuses at once what cannot be served; never waits.
    pub fn submit(&self, request: Request) -> Result<Generation, SubmitError> {
        let mut generations = self.submit_all(vec![request])?;
        Ok(generations.pop().expect("one request is one generation"))
    }

    /// Submits requests that belong together: all are accepted, or none is. The queue is asked for all places at once.
    pub fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<Generation>, SubmitError> {
        let shared = &self.inner.shared;
        match shared.board.state() {
            EnsembleState::Ready => {}
            EnsembleState::Draining | EnsembleState::Stopped => return Err(SubmitError::ShuttingDown),
            EnsembleState::Starting => return Err(SubmitError::NotReady("its shards are loading".into())),
            EnsembleState::Restarting { reason, .. } => {
                return Err(SubmitError::NotReady(format!("it restarts after a failure ({reason})")));
            }
            EnsembleState::Failed { reason } => {
                return Err(SubmitError::NotReady(format!("it failed ({reason}); it must be started anew")));
            }
        }
        let limits = shared.spec.limits();
        requests.iter().try_for_each(|request| limits.check(request))?;
        let slots = shared.gate.enter(requests.len())?;
        let leads = leaders(&requests);
        let mut generations: Vec<Generation> = Vec::with_capacity(requests.len());
        // Where the scheduler ends meanwhile, those that were sent are cancelled by being dropped.
        for ((request, slot), leader) in requests.into_iter().zip(slots).zip(leads) {
            let (events, receiver) = mpsc::channel(GENERATION_QUEUE_EVENTS);
            let leader = leader.map(|at| generations[at].sequence());
            let (sequence, scheduler) =
                shared.send_submission(|sequence| Submission { sequence, request, leader, events, slot })?;
            generations.push(Generation::new(sequence, receiver, scheduler, Arc::clone(&shared.board)));
        }
        Ok(generations)
    }

    /// What the ensemble does right now. Holds a lock for the time of a copy.
    pub fn status(&self) -> Status {
        self.inner.shared.board.snapshot()
    }

    /// Follows the state from here on, without keeping the ensemble alive.
    pub fn watch(&self) -> StateWatch {
        self.inner.shared.board.watch()
    }

    /// Takes no more requests in, lets the open ones finish for at most `grace`, ends the rest with
    /// [`GenerationError::ShuttingDown`], and returns once every actor and thread has ended.
    pub async fn shutdown(&self, grace: Duration) {
        let shared = &self.inner.shared;
        shared.board.transition(EnsembleState::Draining);
        if let Some(scheduler) = shared.scheduler() {
            let drained = scheduler.call(SchedulerMessage::Drain, Some(grace)).await;
            if !matches!(drained, Ok(ractor::rpc::CallResult::Success(()))) {
                tracing::info!("grace is over: open requests are ended");
            }
            // A scheduler that is gone has ended its requests.
            let _ = scheduler.cast(SchedulerMessage::EndAll(GenerationError::ShuttingDown));
        }
        self.stop().await;
    }

    async fn stop(&self) {
        self.inner.shared.board.transition(EnsembleState::Draining);
        // An error means that it has ended already.
        let _ = self.inner.supervisor.stop_and_wait(None, None).await;
        let _ = self.inner.supervisor.wait(None).await;
        self.inner.shared.board.transition(EnsembleState::Stopped);
    }
}

/// For each request the first one of the same prompt that stands right before it, with nothing but such between: choices of
/// one request come one after another.
fn leaders(requests: &[Request]) -> Vec<Option<usize>> {
    let mut first = 0;
    let leader = |at: usize| {
        let (leader, request) = (&requests[first], &requests[at]);
        let same = at > 0 && leader.cache_salt == request.cache_salt && leader.prompt == request.prompt;
        if !same {
            first = at;
        }
        same.then_some(first)
    };
    (0..requests.len()).map(leader).collect()
}

impl std::fmt::Debug for Ensemble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ensemble").field("status", &self.status()).finish()
    }
}
