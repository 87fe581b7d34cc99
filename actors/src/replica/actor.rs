//! The replica's actor: starts scheduler and group, and restarts them rest-for-one.

use std::time::Instant;

use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::oneshot;

use super::ReplicaMessage;
use crate::{
    ensemble::Home,
    error::EnsembleError,
    group::{GroupActor, GroupArguments, GroupMessage, RestartBudget},
    ids::Epoch,
    router::RouterMessage,
    scheduler::{SchedulerActor, SchedulerArguments, SchedulerMessage},
    status::{EnsembleState, ReplicaStatus},
};

/// What a replica starts from.
pub(crate) struct ReplicaArguments {
    pub(crate) home: Home,
    pub(crate) first_load: oneshot::Sender<Result<(), EnsembleError>>,
}

/// The actor. All state is in [`ReplicaState`].
pub(crate) struct ReplicaActor;

/// The two children, in starting order.
pub(crate) struct ReplicaState {
    home: Home,
    scheduler: Option<ActorRef<SchedulerMessage>>,
    group: Option<ActorRef<GroupMessage>>,
    budget: RestartBudget,
}

impl Actor for ReplicaActor {
    type Msg = ReplicaMessage;
    type State = ReplicaState;
    type Arguments = ReplicaArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<ReplicaMessage>,
        arguments: ReplicaArguments,
    ) -> Result<ReplicaState, ActorProcessingErr> {
        let ReplicaArguments { home, first_load } = arguments;
        let mut state = ReplicaState { home, scheduler: None, group: None, budget: RestartBudget::default() };
        state.start_missing(&myself, Some(first_load)).await?;
        Ok(state)
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<ReplicaMessage>,
        event: SupervisionEvent,
        state: &mut ReplicaState,
    ) -> Result<(), ActorProcessingErr> {
        let (who, reason) = match event {
            SupervisionEvent::ActorFailed(who, error) => (who.get_id(), error.to_string()),
            SupervisionEvent::ActorTerminated(who, _, reason) => (who.get_id(), reason.unwrap_or_default()),
            _ => return Ok(()),
        };
        if state.scheduler.as_ref().is_some_and(|scheduler| scheduler.get_id() == who) {
            state.scheduler = None;
            state.restart(&myself, format!("the scheduler ended: {reason}")).await?;
        } else if state.group.as_ref().is_some_and(|group| group.get_id() == who) {
            state.group = None;
            state.restart(&myself, format!("the shard group ended: {reason}")).await?;
        }
        Ok(())
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<ReplicaMessage>,
        state: &mut ReplicaState,
    ) -> Result<(), ActorProcessingErr> {
        state.home.set_scheduler(None);
        if let Some(scheduler) = state.scheduler.take() {
            // An error means that it has ended already; so below.
            let _ = scheduler.stop_and_wait(None, None).await;
        }
        state.end_rest().await;
        Ok(())
    }
}

impl ReplicaState {
    /// The one place where a restart is decided: a child that ended and all started after it are started anew.
    async fn restart(
        &mut self,
        myself: &ActorRef<ReplicaMessage>,
        mut reason: String,
    ) -> Result<(), ActorProcessingErr> {
        if self.scheduler.is_none() {
            self.home.update(ReplicaStatus::end_open);
        }
        loop {
            let Some(attempt) = self.budget.spend(Instant::now()) else {
                self.home.transition(EnsembleState::Failed { reason: reason.clone() });
                self.end(&reason).await;
                return Err(reason.into());
            };
            tracing::warn!(replica = %self.home.replica, attempt, reason, "replica restarts");
            self.home.transition(EnsembleState::Restarting { attempt, reason: reason.clone() });
            self.end_younger(&reason).await;
            // A child that does not start has used up this attempt, and no more than it.
            match self.start_missing(myself, None).await {
                Ok(()) => return Ok(()),
                Err(error) => reason = format!("{reason}; the restart failed: {error}"),
            }
        }
    }

    /// The restarts are used up: ends what is left, in good order. What has not started goes to other replicas.
    async fn end(&mut self, reason: &str) {
        self.end_younger(reason).await;
        if let Some(scheduler) = self.scheduler.take() {
            // Once it has read why.
            let _ = scheduler.drain_and_wait(None).await;
            self.home.set_scheduler(None);
        }
        self.end_rest().await;
    }

    /// Ends the group after its scheduler, which leaves nothing behind.
    async fn end_rest(&mut self) {
        self.home.update(ReplicaStatus::end_open);
        if let Some(group) = self.group.take() {
            let _ = group.stop_and_wait(None, None).await;
        }
    }

    /// Ends what was started after the child that is gone, or tells the elder one.
    async fn end_younger(&mut self, reason: &str) {
        match &self.scheduler {
            Some(scheduler) => {
                let (replica, epoch) = (self.home.replica, Epoch(self.home.status().epoch));
                // Before the scheduler, which may give requests back that are to go elsewhere.
                let reason = reason.to_owned();
                self.home.tell_router(RouterMessage::ReplicaLost { replica, reason: reason.clone() });
                let _ = scheduler.cast(SchedulerMessage::GroupLost { epoch, reason });
            }
            None => {
                self.home.set_scheduler(None);
                if let Some(group) = self.group.take() {
                    // Waits for its threads too: two generations of weights may not fit.
                    let _ = group.stop_and_wait(Some(reason.to_owned()), None).await;
                }
            }
        }
    }

    async fn start_missing(
        &mut self,
        myself: &ActorRef<ReplicaMessage>,
        first_load: Option<oneshot::Sender<Result<(), EnsembleError>>>,
    ) -> Result<(), ActorProcessingErr> {
        let scheduler = match &self.scheduler {
            Some(scheduler) => scheduler.clone(),
            None => {
                let arguments = SchedulerArguments { home: self.home.clone() };
                let (scheduler, _) =
                    Actor::spawn_linked(None, SchedulerActor, arguments, myself.get_cell()).await?;
                self.home.set_scheduler(Some(scheduler.clone()));
                self.scheduler.insert(scheduler).clone()
            }
        };
        if self.group.is_none() {
            let arguments = GroupArguments { home: self.home.clone(), scheduler, first_load };
            let (group, _) = Actor::spawn_linked(None, GroupActor, arguments, myself.get_cell()).await?;
            self.group = Some(group);
        }
        Ok(())
    }
}
