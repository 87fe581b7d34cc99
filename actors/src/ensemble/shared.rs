//! What the handle and the actors of one ensemble share. There are no process-wide statics.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use consort_parallel::ids::Rank;
use ractor::{ActorRef, MessagingErr};

use super::{EnsembleSpec, waiting::Gate};
use crate::{
    ids::{Epoch, ReplicaId, SequenceId},
    request::SubmitError,
    router::RouterMessage,
    scheduler::{SchedulerMessage, Submission},
    shard::{ProgressCallback, ShardFactory, ThreadLedger},
    status::{EnsembleState, FinishedCounts, RankStatus, ReplicaStatus, ShardState, StatusBoard},
};

/// One per ensemble.
pub(crate) struct Shared {
    pub(crate) spec: EnsembleSpec,
    pub(crate) progress: Option<ProgressCallback>,
    pub(crate) board: Arc<StatusBoard>,
    pub(crate) gate: Arc<Gate>,
    /// How long ranks may be silent.
    pub(crate) silence_max: Duration,
    /// By replica.
    homes: Vec<OfReplica>,
    port: Mutex<Port>,
    started: Instant,
}

/// What is shared within one replica.
struct OfReplica {
    threads: ThreadLedger,
    /// Progress reports of loading ranks so far: the sign that a rank which builds is alive.
    load_reports: Arc<AtomicU64>,
    next_epoch: AtomicU64,
}

/// Where messages go. One lock for all, so that sequences arrive in the order of their numbers.
struct Port {
    router: Option<ActorRef<RouterMessage>>,
    /// By replica.
    schedulers: Vec<Option<ActorRef<SchedulerMessage>>>,
    next_sequence: u64,
}

impl Shared {
    pub(crate) fn new(spec: EnsembleSpec, progress: Option<ProgressCallback>, silence_max: Duration) -> Self {
        let replicas = (0..).map(ReplicaId).zip(&spec.factories);
        let replicas: Vec<ReplicaStatus> =
            replicas.map(|(replica, factory)| unstarted(&spec, replica, factory.as_ref())).collect();
        let home = || OfReplica {
            threads: ThreadLedger::default(),
            load_reports: Arc::default(),
            next_epoch: AtomicU64::new(0),
        };
        let port = Port { router: None, schedulers: vec![None; replicas.len()], next_sequence: 0 };
        Self {
            homes: replicas.iter().map(|_| home()).collect(),
            board: Arc::new(StatusBoard::new(spec.cache.block_size, replicas)),
            gate: Arc::new(Gate::new(spec.scheduler.max_waiting_requests)),
            silence_max,
            port: Mutex::new(port),
            started: Instant::now(),
            spec,
            progress,
        }
    }

    /// Milliseconds since the ensemble began: the time by which requests are put in order.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn port(&self) -> MutexGuard<'_, Port> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_router(&self, router: ActorRef<RouterMessage>) {
        self.port().router = Some(router);
    }

    pub(crate) fn router(&self) -> Option<ActorRef<RouterMessage>> {
        self.port().router.clone()
    }

    /// One that has ended hears nothing; its successor begins with what it is told then.
    pub(crate) fn tell_router(&self, message: RouterMessage) {
        if let Some(router) = &self.port().router {
            let _ = router.cast(message);
        }
    }

    /// Schedulers that exist.
    pub(crate) fn schedulers(&self) -> Vec<ActorRef<SchedulerMessage>> {
        self.port().schedulers.iter().flatten().cloned().collect()
    }

    /// Sends groups of submissions to the router. Whoever builds them is given their numbers one after another.
    pub(super) fn send(
        &self,
        build: impl FnOnce(&mut dyn FnMut() -> SequenceId) -> Vec<Vec<Submission>>,
    ) -> Result<ActorRef<RouterMessage>, SubmitError> {
        let gone = || SubmitError::NotReady("its router ended and is being restarted".into());
        let mut port = self.port();
        let router = port.router.clone().ok_or_else(gone)?;
        let groups = build(&mut || {
            let sequence = SequenceId(port.next_sequence);
            port.next_sequence += 1;
            sequence
        });
        match router.cast(RouterMessage::Submit(groups)) {
            Ok(()) => Ok(router),
            Err(error) => {
                if let MessagingErr::SendErr(RouterMessage::Submit(groups)) = error {
                    // They are refused, and never were under way.
                    groups.into_iter().flatten().for_each(|mut submission| submission.transit.arrive());
                }
                Err(gone())
            }
        }
    }

    /// Compute threads that were not joined yet, of all replicas.
    #[cfg(test)]
    pub(crate) fn reap(&self) -> usize {
        self.homes.iter().map(|home| home.threads.reap()).sum()
    }
}

/// A replica before its first life.
fn unstarted(spec: &EnsembleSpec, replica: ReplicaId, factory: &dyn ShardFactory) -> ReplicaStatus {
    let ranks = (0..spec.ranks).map(|index| {
        let rank = Rank(index as u16);
        let share = factory.describe(rank);
        RankStatus {
            rank,
            query_heads: share.query_heads,
            kv_heads: share.kv_heads,
            weight_bytes: 0,
            kv_bytes: 0,
            kv_blocks: spec.cache.num_blocks,
            state: ShardState::Loading,
            restarts: 0,
        }
    });
    ReplicaStatus {
        replica,
        state: EnsembleState::Starting,
        epoch: 0,
        ranks: ranks.collect(),
        running: 0,
        waiting: 0,
        total_blocks: spec.cache.num_blocks,
        used_blocks: 0,
        cached_blocks: 0,
        host_blocks: spec.cache.host_blocks,
        host_used_blocks: 0,
        steps: 0,
        preemptions: 0,
        prompt_tokens: 0,
        prefix_cache_queries: 0,
        prefix_cache_hits: 0,
        computed_tokens: 0,
        generated_tokens: 0,
        host_saves: 0,
        host_loads: 0,
        host_hits: 0,
        finished: FinishedCounts::default(),
    }
}

/// What the actors of one replica see of all this.
#[derive(Clone)]
pub(crate) struct Home {
    shared: Arc<Shared>,
    pub(crate) replica: ReplicaId,
}

impl Home {
    /// `replica` is one of the ensemble's.
    pub(crate) fn new(shared: Arc<Shared>, replica: ReplicaId) -> Self {
        assert!(replica.index() < shared.homes.len(), "{replica} is none of this ensemble");
        Self { shared, replica }
    }

    fn own(&self) -> &OfReplica {
        &self.shared.homes[self.replica.index()]
    }

    pub(crate) fn spec(&self) -> &EnsembleSpec {
        &self.shared.spec
    }

    /// What builds this replica's ranks.
    pub(crate) fn factory(&self) -> Arc<dyn ShardFactory> {
        Arc::clone(&self.shared.spec.factories[self.replica.index()])
    }

    pub(crate) fn progress(&self) -> Option<ProgressCallback> {
        self.shared.progress.clone()
    }

    pub(crate) fn silence_max(&self) -> Duration {
        self.shared.silence_max
    }

    pub(crate) fn threads(&self) -> &ThreadLedger {
        &self.own().threads
    }

    pub(crate) fn load_reports(&self) -> &Arc<AtomicU64> {
        &self.own().load_reports
    }

    /// The next life of the group. Never the same twice in a replica.
    pub(crate) fn next_epoch(&self) -> Epoch {
        Epoch(self.own().next_epoch.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn status(&self) -> ReplicaStatus {
        self.shared.board.replica(self.replica)
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut ReplicaStatus)) {
        self.shared.board.update(self.replica, change);
    }

    /// Says how many pages this replica could give to newcomers.
    pub(crate) fn set_free_blocks(&self, free_blocks: usize) {
        self.shared.board.set_free_blocks(self.replica, free_blocks);
    }

    pub(crate) fn transition(&self, next: EnsembleState) {
        self.shared.board.replica_transition(self.replica, next);
    }

    pub(crate) fn tell_router(&self, message: RouterMessage) {
        self.shared.tell_router(message);
    }

    /// Says where this replica's scheduler is. Without one, its requests are gone.
    pub(crate) fn set_scheduler(&self, scheduler: Option<ActorRef<SchedulerMessage>>) {
        let is_gone = scheduler.is_none();
        self.shared.port().schedulers[self.replica.index()] = scheduler;
        if is_gone {
            self.tell_router(RouterMessage::ReplicaGone { replica: self.replica });
        }
    }

    #[cfg(test)]
    pub(crate) fn scheduler(&self) -> Option<ActorRef<SchedulerMessage>> {
        self.shared.port().schedulers[self.replica.index()].clone()
    }
}
