//! The shard group's actor: scatter, gather, and form anew.

use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use consort_parallel::{collective::Collective, ids::Rank};
use ractor::{Actor, ActorProcessingErr, ActorRef, SpawnErr, SupervisionEvent};
use tokio::sync::oneshot;

use super::{
    GroupMessage, RestartBudget,
    muster::{Muster, Mustered},
    owned::{CollectiveGuard, Timer, new_collective},
    state::{Gather, Incident, Silence, names},
};
use crate::{
    ensemble::{Home, THREAD_JOIN_MAX},
    error::{EnsembleError, ShardError},
    ids::Epoch,
    plan::{StepPlan, StepResult},
    router::RouterMessage,
    scheduler::SchedulerMessage,
    shard::{ShardActor, ShardArguments, ShardMessage},
    status::{EnsembleState, ShardState},
};

/// What a group starts from.
pub(crate) struct GroupArguments {
    pub(crate) home: Home,
    pub(crate) scheduler: ActorRef<SchedulerMessage>,
    /// Told once how the first loading went. Absent when the group is itself a successor.
    pub(crate) first_load: Option<oneshot::Sender<Result<(), EnsembleError>>>,
}

/// The actor. All state is in [`GroupState`].
pub(crate) struct GroupActor;

/// One life after another of N shards.
pub(crate) struct GroupState {
    home: Home,
    scheduler: ActorRef<SchedulerMessage>,
    first_load: Option<oneshot::Sender<Result<(), EnsembleError>>>,
    epoch: Epoch,
    phase: Phase,
    /// By rank. `None` between a shard's end and its successor's start.
    shards: Vec<Option<ActorRef<ShardMessage>>>,
    muster: Muster,
    collective: CollectiveGuard,
    gather: Gather,
    budget: RestartBudget,
    incident: Incident,
    /// Ranks that failed in this epoch and have not ended yet. Their memory is taken until they have.
    failing: BTreeSet<Rank>,
    /// What the last loss was.
    last_loss: String,
    silence: Silence,
    /// Progress reports of loading ranks that are known.
    load_reports: u64,
    _timer: Timer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Shards load or join.
    Forming,
    /// Plans are executed.
    Playing,
    /// A rank failed while plans were executed. All who waited were told; the next epoch forms once it has ended.
    Breaking,
    /// Given up.
    Failed,
}

/// How a group breaks: decides what its ranks do next.
enum Loss {
    /// This rank ended.
    Rank(Rank),
    /// Ranks disagree, and nobody can tell which is right: all are built anew.
    Trust,
    /// All ranks are sound, but the collective is not.
    Collective,
    /// Ranks do not answer. Which of them hangs shows when the collective is aborted: those that only waited for it
    /// join the next epoch.
    Silence,
}

impl Actor for GroupActor {
    type Msg = GroupMessage;
    type State = GroupState;
    type Arguments = GroupArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<GroupMessage>,
        arguments: GroupArguments,
    ) -> Result<GroupState, ActorProcessingErr> {
        let GroupArguments { home, scheduler, first_load } = arguments;
        let ranks = home.spec().ranks;
        let (comms, collective) = new_collective(home.factory().as_ref(), ranks)?;
        let silence = Silence::new(home.silence_max(), Instant::now());
        let timer = myself.send_interval(silence.check_period(), || GroupMessage::CheckSilence);
        let mut state = GroupState {
            epoch: home.next_epoch(),
            home,
            scheduler,
            first_load,
            phase: Phase::Forming,
            shards: vec![None; ranks],
            muster: Muster::new(ranks),
            collective,
            gather: Gather::new(ranks),
            budget: RestartBudget::default(),
            incident: Incident::default(),
            failing: BTreeSet::new(),
            last_loss: String::new(),
            silence,
            load_reports: 0,
            _timer: Timer(timer),
        };
        state.join(&myself, comms, false).await;
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<GroupMessage>,
        message: GroupMessage,
        state: &mut GroupState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            GroupMessage::Execute(plan) => state.execute(&plan),
            GroupMessage::ShardBuilt { rank, epoch } => {
                if state.forms(epoch) {
                    state.muster.built(rank);
                    state.silence.broken(Instant::now());
                }
            }
            GroupMessage::ShardLoaded { rank, epoch, weight_bytes, kv_bytes } => {
                // Of another epoch: it will report again for the one that it was told of since.
                if state.forms(epoch) {
                    state.shard_loaded(&myself, rank, weight_bytes, kv_bytes).await;
                }
            }
            GroupMessage::ShardUnstarted { rank, epoch, error } => {
                // A later epoch has tried again.
                if epoch == state.epoch {
                    state.shard_lost(&myself, rank, error).await;
                }
            }
            GroupMessage::ShardExecuted { rank, result } => {
                if let Some(reason) = state.shard_executed(rank, result) {
                    state.lose(&myself, Loss::Trust, reason).await;
                }
            }
            GroupMessage::ShardFailing { rank, epoch, reason } => {
                // A later epoch has formed without it.
                if epoch == state.epoch {
                    state.shard_failing(rank, &reason);
                }
            }
            GroupMessage::ShardAborted { rank, epoch, reason } => {
                // Expected of survivors once a rank fails or this group has aborted, which also ends the play.
                if state.phase == Phase::Playing && epoch == state.epoch {
                    state.lose(&myself, Loss::Collective, told_by(rank, &reason)).await;
                } else if state.forms(epoch) {
                    let outcome = state.muster.aborted(rank, reason);
                    state.mustered(&myself, outcome).await;
                }
            }
            GroupMessage::ResultRefused { epoch, reason } => {
                if state.phase == Phase::Playing && epoch == state.epoch {
                    state.lose(&myself, Loss::Trust, reason).await;
                }
            }
            GroupMessage::CheckSilence => state.check_silence(&myself, Instant::now()).await,
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<GroupMessage>,
        event: SupervisionEvent,
        state: &mut GroupState,
    ) -> Result<(), ActorProcessingErr> {
        let (who, error) = match event {
            SupervisionEvent::ActorFailed(who, error) => {
                (who, error.downcast::<ShardError>().map_or_else(ShardError::load, |error| *error))
            }
            SupervisionEvent::ActorTerminated(who, ..) => (who, ShardError::ThreadEnded),
            _ => return Ok(()),
        };
        let is_it = |shard: &Option<ActorRef<ShardMessage>>| {
            shard.as_ref().is_some_and(|s| s.get_id() == who.get_id())
        };
        // A shard that was already replaced is no news.
        let Some(index) = state.shards.iter().position(is_it) else { return Ok(()) };
        state.shards[index] = None;
        let rank = Rank(index as u16);
        state.shard_lost(&myself, rank, error).await;
        Ok(())
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<GroupMessage>,
        state: &mut GroupState,
    ) -> Result<(), ActorProcessingErr> {
        state.end("the engine stops").await;
        Ok(())
    }
}

impl GroupState {
    /// Sends a plan to every shard, same plan, same order.
    fn execute(&mut self, plan: &Arc<StepPlan>) {
        if self.phase != Phase::Playing || plan.epoch != self.epoch {
            return; // Planned before the scheduler heard of the loss.
        }
        if self.gather.missing().is_none() {
            self.silence.broken(Instant::now());
        }
        self.gather.dispatched(plan.step);
        for shard in self.shards.iter().flatten() {
            // A shard that is gone is a supervision event on its way.
            let _ = shard.cast(ShardMessage::Execute(Arc::clone(plan)));
        }
    }

    /// Whether ranks may still join this epoch.
    fn forms(&self, epoch: Epoch) -> bool {
        epoch == self.epoch && self.phase == Phase::Forming
    }

    async fn shard_loaded(
        &mut self,
        myself: &ActorRef<GroupMessage>,
        rank: Rank,
        weight_bytes: u64,
        kv_bytes: u64,
    ) {
        tracing::info!(rank = rank.0, epoch = self.epoch.0, weight_bytes, kv_bytes, "shard ready");
        self.silence.broken(Instant::now());
        self.home.update(|status| {
            let of_rank = &mut status.ranks[rank.index()];
            (of_rank.weight_bytes, of_rank.kv_bytes) = (weight_bytes, kv_bytes);
            of_rank.state = ShardState::Ready;
        });
        let outcome = self.muster.joined(rank);
        self.mustered(myself, outcome).await;
    }

    /// Begins the epoch once every rank has joined it, or forms the next.
    async fn mustered(&mut self, myself: &ActorRef<GroupMessage>, outcome: Option<Mustered>) {
        match outcome {
            None => {}
            Some(Mustered::All) => self.play(myself),
            Some(Mustered::Aborted(rank, reason)) => match self.first_load.take() {
                Some(first_load) => {
                    self.fail(&told_by(rank, &reason));
                    let source = ShardError::Aborted { reason };
                    let _ = first_load.send(Err(EnsembleError::Load { rank, source }));
                }
                None => self.lose(myself, Loss::Collective, told_by(rank, &reason)).await,
            },
        }
    }

    fn play(&mut self, myself: &ActorRef<GroupMessage>) {
        self.phase = Phase::Playing;
        self.incident.end();
        // Before readiness, so that no request overtakes it; the scheduler before the router, which sends them on.
        let _ =
            self.scheduler.cast(SchedulerMessage::GroupFormed { epoch: self.epoch, group: myself.clone() });
        let (replica, scheduler) = (self.home.replica, self.scheduler.clone());
        self.home.tell_router(RouterMessage::ReplicaReady { replica, scheduler });
        self.home.transition(EnsembleState::Ready);
        if let Some(first_load) = self.first_load.take() {
            let _ = first_load.send(Ok(())); // Whoever started may have given up.
        }
    }

    /// Gathers; returns why the ranks cannot be trusted, if so.
    fn shard_executed(&mut self, rank: Rank, result: StepResult) -> Option<String> {
        if self.phase != Phase::Playing || result.epoch != self.epoch {
            return None; // From a survivor of the last epoch.
        }
        match self.gather.arrived(rank, result) {
            Ok(Some(result)) => {
                self.silence.broken(Instant::now());
                let _ = self.scheduler.cast(SchedulerMessage::StepExecuted(result));
                None
            }
            Ok(None) => None,
            Err(error) => Some(error.to_string()),
        }
    }

    /// A rank will end with an error, and may take long to give its memory back: nobody waits for that. Its end has
    /// overtaken this message where the rank is gone already, because supervision events do.
    fn shard_failing(&mut self, rank: Rank, reason: &str) {
        let reason = format!("{rank}: {reason}");
        self.collective.0.abort(&reason);
        let breaks = matches!(self.phase, Phase::Playing | Phase::Breaking);
        if !breaks || self.shards[rank.index()].is_none() {
            return;
        }
        self.silence.broken(Instant::now());
        self.failing.insert(rank);
        self.home.update(|status| status.ranks[rank.index()].state = ShardState::Lost);
        if self.phase == Phase::Playing && self.break_up(&Loss::Rank(rank), reason) {
            self.phase = Phase::Breaking;
        }
    }

    /// The first loading fails with its first error; any later loss is a restart.
    async fn shard_lost(&mut self, myself: &ActorRef<GroupMessage>, rank: Rank, error: ShardError) {
        self.home.update(|status| status.ranks[rank.index()].state = ShardState::Lost);
        let reason = format!("{rank}: {error}");
        if self.phase == Phase::Failed {
            return;
        }
        if let Some(first_load) = self.first_load.take() {
            self.fail(&reason);
            let _ = first_load.send(Err(EnsembleError::Load { rank, source: error }));
            return;
        }
        if self.phase == Phase::Breaking {
            // This loss, or one more of the same incident.
            self.failing.remove(&rank);
            self.incident.absorbs(rank);
            self.home.update(|status| status.ranks[rank.index()].restarts += 1);
            if self.failing.is_empty() {
                self.form_anew(myself, false).await;
            }
            return;
        }
        self.lose(myself, Loss::Rank(rank), reason).await;
    }

    /// The one place where silence is judged. The first loading may take as long as it likes: whoever started it
    /// waits for it, sees its progress, and can give up.
    async fn check_silence(&mut self, myself: &ActorRef<GroupMessage>, now: Instant) {
        let reports = self.home.load_reports().load(Ordering::Relaxed);
        let progress = reports != std::mem::replace(&mut self.load_reports, reports);
        let awaited = match self.phase {
            Phase::Forming if self.first_load.is_none() && !progress => {
                Some((format!("{} was not joined", self.epoch), self.muster.missing()))
            }
            Phase::Playing => {
                self.gather.missing().map(|(step, ranks)| (format!("{step} was not answered"), ranks))
            }
            Phase::Breaking => {
                Some((format!("{} was not left", self.epoch), self.failing.iter().copied().collect()))
            }
            Phase::Forming | Phase::Failed => None,
        };
        let Some((what, ranks)) = awaited else { return self.silence.broken(now) };
        let Some(limit) = self.silence.exceeded(now) else { return };
        let reason = format!("{what} for {limit:?} by {}", names(&ranks));
        if self.phase == Phase::Playing {
            return self.lose(myself, Loss::Silence, reason).await;
        }
        // Before the state: whoever sees that it failed, sees who is lost.
        self.home.update(|status| {
            ranks.iter().for_each(|rank| status.ranks[rank.index()].state = ShardState::Lost);
        });
        self.fail(&format!("{reason}, after: {}", self.last_loss));
    }

    /// Breaks up and forms the next epoch from survivors and successors, or gives up.
    async fn lose(&mut self, myself: &ActorRef<GroupMessage>, loss: Loss, reason: String) {
        if self.phase == Phase::Failed || !self.break_up(&loss, reason) {
            return;
        }
        if let Loss::Rank(rank) = loss {
            self.home.update(|status| status.ranks[rank.index()].restarts += 1);
        }
        self.form_anew(myself, matches!(loss, Loss::Trust)).await;
    }

    /// The one place where a restart is decided: aborts the collective and tells all who wait. False where it gave up.
    fn break_up(&mut self, loss: &Loss, reason: String) -> bool {
        self.collective.0.abort(&reason);
        let attempt = if matches!(loss, Loss::Rank(rank) if self.incident.absorbs(*rank)) {
            Some(self.budget.attempt())
        } else if self.incident.may_restart() {
            self.budget.spend(Instant::now())
        } else {
            None
        };
        let Some(attempt) = attempt else {
            self.fail(&format!("{reason} (after {} restarts in a row)", super::RESTARTS_MAX));
            return false;
        };
        self.last_loss.clone_from(&reason);
        tracing::warn!(epoch = self.epoch.0, attempt, reason, "shard group lost; it forms anew");
        // State first: a request that arrives now is refused as not ready instead of being lost.
        self.home.transition(EnsembleState::Restarting { attempt, reason: reason.clone() });
        self.tell_of_the_loss(reason);
        true
    }

    /// The router first: the scheduler may give it requests back that are to go elsewhere.
    fn tell_of_the_loss(&self, reason: String) {
        let replica = self.home.replica;
        self.home.tell_router(RouterMessage::ReplicaLost { replica, reason: reason.clone() });
        let _ = self.scheduler.cast(SchedulerMessage::GroupLost { epoch: self.epoch, reason });
    }

    /// Begins the next epoch, and has all ranks join it, with new weights if `rebuild`.
    async fn form_anew(&mut self, myself: &ActorRef<GroupMessage>, rebuild: bool) {
        let formed = new_collective(self.home.factory().as_ref(), self.shards.len());
        let (comms, collective) = match formed {
            Ok(formed) => formed,
            Err(error) => return self.fail(&format!("no collective: {error}")),
        };
        self.epoch = self.home.next_epoch();
        self.collective = collective;
        self.gather = Gather::new(self.shards.len());
        self.muster = Muster::new(self.shards.len());
        self.phase = Phase::Forming;
        self.join(myself, comms, rebuild).await;
    }

    /// Brings every rank into the present epoch: survivors rejoin, missing ones are started.
    async fn join(
        &mut self,
        myself: &ActorRef<GroupMessage>,
        comms: Vec<Box<dyn Collective>>,
        rebuild: bool,
    ) {
        let epoch = self.epoch;
        self.failing.clear();
        self.silence.broken(Instant::now());
        self.home.update(|status| {
            status.epoch = epoch.0;
            status.ranks.iter_mut().for_each(|rank| rank.state = ShardState::Loading);
            status.ranks.iter_mut().for_each(|rank| rank.restarts += u32::from(rebuild));
        });
        for (index, comm) in comms.into_iter().enumerate() {
            if let Some(shard) = &self.shards[index] {
                // A survivor that has ended since is a supervision event on its way, and a loss of this epoch.
                let _ = shard.cast(ShardMessage::Rejoin { epoch, comm, rebuild });
                continue;
            }
            let (home, rank, group) = (self.home.clone(), Rank(index as u16), myself.clone());
            let arguments = ShardArguments { home, rank, epoch, comm, group };
            match Actor::spawn_linked(None, ShardActor, arguments, myself.get_cell()).await {
                Ok((shard, _)) => self.shards[index] = Some(shard),
                Err(error) => {
                    // As a message, so that it is a loss like any other once this epoch is complete.
                    let error = spawn_error(error);
                    let _ = myself.cast(GroupMessage::ShardUnstarted { rank, epoch, error });
                }
            }
        }
    }

    /// Gives up. The shards end; the state says why.
    fn fail(&mut self, reason: &str) {
        tracing::error!(epoch = self.epoch.0, reason, "shard group failed");
        self.phase = Phase::Failed;
        self.collective.0.abort(reason);
        self.home.transition(EnsembleState::Failed { reason: reason.to_owned() });
        self.tell_of_the_loss(reason.to_owned());
        for shard in self.shards.iter_mut().filter_map(Option::take) {
            shard.stop(None);
        }
    }

    /// Ends shards and threads.
    async fn end(&mut self, reason: &str) {
        self.phase = Phase::Failed;
        self.collective.0.abort(reason);
        for shard in self.shards.iter_mut().filter_map(Option::take) {
            // An error means that it has ended already.
            let _ = shard.stop_and_wait(None, None).await;
        }
        let alive = self.home.threads().join_all(THREAD_JOIN_MAX).await;
        if alive > 0 {
            tracing::error!(alive, "compute threads hang and are left behind");
        }
        self.home.update(|status| {
            status.ranks.iter_mut().for_each(|rank| rank.state = ShardState::Stopped);
        });
    }
}

/// What a rank tells of the group's end, which mostly names whose fault it is.
fn told_by(rank: Rank, reason: &str) -> String {
    if reason.starts_with("rank ") { reason.to_owned() } else { format!("{rank}: {reason}") }
}

/// Why a shard's actor did not start: the error of its own start, where that is the reason.
fn spawn_error(error: SpawnErr) -> ShardError {
    match error {
        SpawnErr::StartupFailed(error) => {
            error.downcast::<ShardError>().map_or_else(ShardError::load, |error| *error)
        }
        error => ShardError::load(error),
    }
}
