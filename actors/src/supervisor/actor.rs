//! The supervisor's actor.

use std::{sync::Arc, time::Instant};

use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::oneshot;

use super::SupervisorMessage;
use crate::{
    ensemble::{Home, Shared},
    error::EnsembleError,
    group::RestartBudget,
    ids::ReplicaId,
    replica::{ReplicaActor, ReplicaArguments, ReplicaMessage},
    router::{RouterActor, RouterArguments, RouterMessage},
    scheduler::SchedulerMessage,
    status::{EnsembleState, ReplicaStatus},
};

/// What the supervisor starts from.
pub(crate) struct SupervisorArguments {
    pub(crate) shared: Arc<Shared>,
    /// One for each replica.
    pub(crate) first_loads: Vec<oneshot::Sender<Result<(), EnsembleError>>>,
}

/// The actor. All state is in [`SupervisorState`].
pub(crate) struct SupervisorActor;

/// The router, and the replicas by number.
pub(crate) struct SupervisorState {
    shared: Arc<Shared>,
    router: Option<ActorRef<RouterMessage>>,
    replicas: Vec<Option<ActorRef<ReplicaMessage>>>,
    /// Restarts of the router.
    budget: RestartBudget,
}

impl Actor for SupervisorActor {
    type Msg = SupervisorMessage;
    type State = SupervisorState;
    type Arguments = SupervisorArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<SupervisorMessage>,
        arguments: SupervisorArguments,
    ) -> Result<SupervisorState, ActorProcessingErr> {
        let SupervisorArguments { shared, first_loads } = arguments;
        let (replicas, budget) = (Vec::new(), RestartBudget::default());
        let mut state = SupervisorState { shared, router: None, replicas, budget };
        // First, so that it hears of every replica.
        state.start_router(&myself).await?;
        for (replica, first_load) in (0..).map(ReplicaId).zip(first_loads) {
            let home = Home::new(Arc::clone(&state.shared), replica);
            let arguments = ReplicaArguments { home, first_load };
            let (replica, _) = Actor::spawn_linked(None, ReplicaActor, arguments, myself.get_cell()).await?;
            state.replicas.push(Some(replica));
        }
        Ok(state)
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<SupervisorMessage>,
        event: SupervisionEvent,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorFailed(who, error) => {
                state.ended(&myself, who.get_id(), error.to_string()).await;
            }
            SupervisionEvent::ActorTerminated(who, _, reason) => {
                state.ended(&myself, who.get_id(), reason.unwrap_or_default()).await;
            }
            _ => {}
        }
        Ok(())
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<SupervisorMessage>,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        let replicas: Vec<_> = state.replicas.iter_mut().filter_map(Option::take).collect();
        // All at once: each waits for its threads.
        replicas.iter().for_each(|replica| replica.stop(None));
        for replica in replicas {
            // An error means that it has ended already; so below.
            let _ = replica.wait(None).await;
        }
        if let Some(router) = state.router.take() {
            let _ = router.stop_and_wait(None, None).await;
        }
        state.shared.board.transition(EnsembleState::Stopped);
        Ok(())
    }
}

impl SupervisorState {
    /// The one place where it is decided what follows an end. A replica restarts its own children: when it ends
    /// itself, it has used up its restarts and stays out, and the others go on. The router holds nothing that cannot
    /// be had back, so it is started anew, within a budget; without one, nothing can be served.
    async fn ended(&mut self, myself: &ActorRef<SupervisorMessage>, who: ActorId, reason: String) {
        let is_it = |replica: &Option<ActorRef<ReplicaMessage>>| {
            replica.as_ref().is_some_and(|replica| replica.get_id() == who)
        };
        if let Some(index) = self.replicas.iter().position(is_it) {
            self.replicas[index] = None;
            let home = Home::new(Arc::clone(&self.shared), ReplicaId(index as u16));
            tracing::error!(replica = %home.replica, reason, "the replica ended");
            home.transition(EnsembleState::Failed { reason });
            home.set_scheduler(None);
            // Of one that died, and could not do so itself.
            home.update(ReplicaStatus::end_open);
        } else if self.router.as_ref().is_some_and(|router| router.get_id() == who) {
            self.router = None;
            let failed = match self.budget.spend(Instant::now()) {
                Some(attempt) => {
                    tracing::error!(attempt, reason, "the router ended; it starts anew");
                    self.start_router(myself).await.err().map(|error| format!("{reason}; {error}"))
                }
                None => Some(reason),
            };
            if let Some(reason) = failed {
                let reason = format!("the router ended: {reason}");
                self.shared.board.transition(EnsembleState::Failed { reason });
            }
        }
    }

    /// Schedulers that are there already end what the last router sent them, and tell the new one of themselves.
    async fn start_router(&mut self, myself: &ActorRef<SupervisorMessage>) -> Result<(), ActorProcessingErr> {
        let arguments = RouterArguments { shared: Arc::clone(&self.shared) };
        let (router, _) = Actor::spawn_linked(None, RouterActor, arguments, myself.get_cell()).await?;
        self.shared.set_router(router.clone());
        self.router = Some(router);
        for scheduler in self.shared.schedulers() {
            // One that is gone begins anew in any case.
            let _ = scheduler.cast(SchedulerMessage::RouterStarted);
        }
        Ok(())
    }
}
