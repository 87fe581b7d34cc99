//! The shard actor: owns the compute thread, and fails when the thread does.

use std::sync::{Arc, atomic::Ordering};

use consort_parallel::{collective::Collective, ids::Rank};
use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::{
    ProgressCallback, ProgressReporter, ShardMessage,
    compute::{ComputeArguments, ComputeThread},
};
use crate::{ensemble::Home, error::ShardError, group::GroupMessage, ids::Epoch};

/// What a shard starts from.
pub(crate) struct ShardArguments {
    pub(crate) home: Home,
    pub(crate) rank: Rank,
    pub(crate) epoch: Epoch,
    pub(crate) comm: Box<dyn Collective>,
    pub(crate) group: ActorRef<GroupMessage>,
}

/// The actor. Its state is the thread.
pub(crate) struct ShardActor;

/// The thread. Taken when the actor stops: the state itself outlives it, as part of the supervision event.
pub(crate) struct ShardActorState {
    thread: Option<ComputeThread>,
}

impl Actor for ShardActor {
    type Msg = ShardMessage;
    type State = ShardActorState;
    type Arguments = ShardArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<ShardMessage>,
        arguments: ShardArguments,
    ) -> Result<ShardActorState, ActorProcessingErr> {
        let ShardArguments { home, rank, epoch, comm, group } = arguments;
        tracing::info!(replica = home.replica.0, rank = rank.0, epoch = epoch.0, "shard starts");
        let compute = ComputeArguments {
            rank,
            epoch,
            comm,
            factory: home.factory(),
            progress: ProgressReporter::new(rank, Some(counted(&home))).of(home.replica),
            group,
            shard: myself,
        };
        Ok(ShardActorState { thread: Some(ComputeThread::spawn(compute, home.threads())?) })
    }

    async fn handle(
        &self,
        _myself: ActorRef<ShardMessage>,
        message: ShardMessage,
        state: &mut ShardActorState,
    ) -> Result<(), ActorProcessingErr> {
        let Some(thread) = &state.thread else { return Ok(()) };
        let outcome = match message {
            ShardMessage::Execute(plan) => thread.execute(plan),
            ShardMessage::Rejoin { epoch, comm, rebuild } => thread.rejoin(epoch, comm, rebuild),
            ShardMessage::ComputeEnded(error) => Err(error),
        };
        match outcome {
            // The thread's last word is in the mailbox, and says more.
            Ok(()) | Err(ShardError::ThreadEnded) => Ok(()),
            // Ending with the error is how the group learns of it.
            Err(error) => Err(error.into()),
        }
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<ShardMessage>,
        state: &mut ShardActorState,
    ) -> Result<(), ActorProcessingErr> {
        state.thread = None;
        Ok(())
    }
}

/// The ensemble's progress callback, counting: who waits for this rank sees that it is alive. Holds no more of the
/// ensemble than it needs, because a thread that hangs keeps it.
fn counted(home: &Home) -> ProgressCallback {
    let (reports, callback) = (Arc::clone(home.load_reports()), home.progress());
    Arc::new(move |progress| {
        reports.fetch_add(1, Ordering::Relaxed);
        if let Some(callback) = &callback {
            callback(progress);
        }
    })
}
