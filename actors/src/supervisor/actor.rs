//! The supervisor's actor.

use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::oneshot;

use super::SupervisorMessage;
use crate::{
    ensemble::Shared,
    error::EnsembleError,
    replica::{ReplicaActor, ReplicaArguments, ReplicaMessage},
    status::EnsembleState,
};

/// What the supervisor starts from.
pub(crate) struct SupervisorArguments {
    pub(crate) shared: Arc<Shared>,
    pub(crate) first_load: oneshot::Sender<Result<(), EnsembleError>>,
}

/// The actor. All state is in [`SupervisorState`].
pub(crate) struct SupervisorActor;

/// The replica.
pub(crate) struct SupervisorState {
    shared: Arc<Shared>,
    replica: Option<ActorRef<ReplicaMessage>>,
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
        let SupervisorArguments { shared, first_load } = arguments;
        let replica = ReplicaArguments { shared: Arc::clone(&shared), first_load };
        let (replica, _) = Actor::spawn_linked(None, ReplicaActor, replica, myself.get_cell()).await?;
        Ok(SupervisorState { shared, replica: Some(replica) })
    }

    async fn handle_supervisor_evt(
        &self,
        _myself: ActorRef<SupervisorMessage>,
        event: SupervisionEvent,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        let reason = match event {
            SupervisionEvent::ActorFailed(_, error) => error.to_string(),
            SupervisionEvent::ActorTerminated(_, _, reason) => reason.unwrap_or_default(),
            _ => return Ok(()),
        };
        // A replica restarts its children; when it ends itself, it has used up its restarts.
        state.replica = None;
        state.shared.set_scheduler(None);
        tracing::error!(reason, "the replica ended");
        state.shared.board.transition(EnsembleState::Failed { reason });
        Ok(())
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<SupervisorMessage>,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        if let Some(replica) = state.replica.take() {
            // An error means that it has ended already.
            let _ = replica.stop_and_wait(None, None).await;
        }
        state.shared.board.transition(EnsembleState::Stopped);
        Ok(())
    }
}
