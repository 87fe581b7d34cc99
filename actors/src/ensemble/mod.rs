//! The handle of a running ensemble: start, submit, status, shutdown.

mod generation;
mod shared;
mod spec;
mod waiting;

#[cfg(test)]
mod faults;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

pub use generation::Generation;
use ractor::{Actor, ActorRef};
pub(crate) use shared::{Home, Shared};
pub use spec::EnsembleSpec;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};
pub(crate) use waiting::{Transit, WaitingSlot};

use crate::{
    error::EnsembleError,
    group::SILENCE_MAX,
    ids::{ReplicaId, SequenceId},
    prefix::BlockKey,
    request::{Request, SubmitError},
    router::RouterMessage,
    scheduler::{GENERATION_QUEUE_EVENTS, Submission},
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
    /// Starts the actor tree, loads every rank of every replica, and returns once all are ready, or with the first
    /// error. Must be called within a tokio runtime, which then runs the actors.
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
        let (first_loads, loaded): (Vec<_>, Vec<_>) =
            (0..shared.spec.replicas()).map(|_| oneshot::channel()).unzip();
        let arguments = SupervisorArguments { shared: Arc::clone(&shared), first_loads };
        let spawned = Actor::spawn(None, SupervisorActor, arguments).await;
        let (supervisor, _) = spawned.map_err(|error| EnsembleError::Actors(error.to_string()))?;
        // From here on the handle's drop ends the tree, also when this future is dropped while it waits.
        let ensemble = Self { inner: Arc::new(Inner { shared, supervisor }) };
        if let Err(error) = all_loaded(loaded).await {
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
    /// Neighbours with the same prompt are served by the same replica, where one can take over what the other computes.
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
        let mut slots = shared.gate.enter(requests.len())?.into_iter();
        let groups = self.grouped(requests);
        let arrived_ms = shared.now_ms();
        // Where the router ends meanwhile, those that were sent are cancelled by being dropped.
        let mut streams = Vec::with_capacity(slots.len());
        let router = shared.send(|number| {
            let mut submission = |(request, keys), leader: &mut Option<SequenceId>| {
                let (events, receiver) = mpsc::channel(GENERATION_QUEUE_EVENTS);
                let sequence = number();
                let leader = leader.replace(leader.unwrap_or(sequence));
                streams.push((sequence, receiver));
                let slot = slots.next().expect("a slot was taken for each request");
                let transit = Transit::new(Arc::clone(&shared.board));
                Submission { sequence, request, arrived_ms, leader, keys, events, slot, transit }
            };
            let mut submissions = |group: Vec<_>| {
                let mut leader = None;
                group.into_iter().map(|request| submission(request, &mut leader)).collect()
            };
            groups.into_iter().map(&mut submissions).collect()
        })?;
        let generation = |(sequence, receiver)| {
            Generation::new(sequence, receiver, router.clone(), Arc::clone(&shared.board))
        };
        Ok(streams.into_iter().map(generation).collect())
    }

    /// Puts neighbours of the same prompt together, with the keys by which a replica is chosen. They are reckoned
    /// here, by whoever submits, and not by the one router; where there is no choice, not at all. One that asks for its
    /// prompt's log-probabilities takes nothing over from those before it, so it begins a group of its own.
    fn grouped(&self, requests: Vec<Request>) -> Vec<Vec<(Request, Arc<[BlockKey]>)>> {
        let spec = &self.inner.shared.spec;
        let has_choice = spec.replicas() > 1 && spec.cache.prefix_caching;
        let mut groups: Vec<Vec<(Request, Arc<[BlockKey]>)>> = Vec::new();
        for request in requests {
            let takes_over = request.prompt_logprobs.is_none();
            let same = groups.last_mut().filter(|_| takes_over).filter(|group| {
                group.first().is_some_and(|(other, _)| {
                    (&other.prompt, other.cache_salt, other.priority)
                        == (&request.prompt, request.cache_salt, request.priority)
                })
            });
            match same {
                Some(group) => {
                    let keys = Arc::clone(&group[0].1);
                    group.push((request, keys));
                }
                None => {
                    let keys = match has_choice {
                        true => BlockKey::chain(request.cache_salt, &request.prompt, spec.cache.block_size),
                        false => Vec::new(),
                    };
                    groups.push(vec![(request, keys.into())]);
                }
            }
        }
        groups
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
    /// [`GenerationError::ShuttingDown`](crate::GenerationError::ShuttingDown), and returns once every actor and
    /// thread has ended.
    pub async fn shutdown(&self, grace: Duration) {
        let shared = &self.inner.shared;
        shared.board.transition(EnsembleState::Draining);
        if let Some(router) = shared.router() {
            let drained = router.call(RouterMessage::Drain, Some(grace)).await;
            if !matches!(drained, Ok(ractor::rpc::CallResult::Success(()))) {
                tracing::info!("grace is over: open requests are ended");
            }
        }
        self.stop().await;
    }

    /// Ends all actors. Each scheduler ends its open requests.
    async fn stop(&self) {
        self.inner.shared.board.transition(EnsembleState::Draining);
        // An error means that it has ended already.
        let _ = self.inner.supervisor.stop_and_wait(None, None).await;
        let _ = self.inner.supervisor.wait(None).await;
        self.inner.shared.board.transition(EnsembleState::Stopped);
    }
}

impl std::fmt::Debug for Ensemble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ensemble").field("status", &self.status()).finish()
    }
}

/// Waits until every replica has loaded, or one could not.
async fn all_loaded(loads: Vec<oneshot::Receiver<Result<(), EnsembleError>>>) -> Result<(), EnsembleError> {
    let is_one_of_many = loads.len() > 1;
    let mut waits = JoinSet::new();
    for (replica, load) in (0..).map(ReplicaId).zip(loads) {
        waits.spawn(async move {
            let outcome = load.await.unwrap_or(Err(EnsembleError::Stopped));
            outcome.map_err(|source| match is_one_of_many {
                true => EnsembleError::Replica { replica, source: Box::new(source) },
                false => source,
            })
        });
    }
    while let Some(outcome) = waits.join_next().await {
        // Tasks that only wait do not panic.
        outcome.unwrap_or(Err(EnsembleError::Stopped))?;
    }
    Ok(())
}
