//! The router actor: a switchboard between callers, the pure [`Router`] and the schedulers of the replicas.

use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, MessagingErr, RpcReplyPort};

use super::{Progress, Router, RouterConfig, RouterMessage, Withdrawal, WorkShape};
use crate::{
    ensemble::Shared,
    ids::{ReplicaId, SequenceId},
    order::Due,
    request::{GenerationError, GenerationEvent},
    scheduler::{SchedulerMessage, Submission},
};

/// What the router starts from.
pub(crate) struct RouterArguments {
    pub(crate) shared: Arc<Shared>,
}

/// The actor. All state is in [`RouterState`].
pub(crate) struct RouterActor;

/// The pure router, and the schedulers that it speaks to.
pub(crate) struct RouterState {
    shared: Arc<Shared>,
    router: Router,
    /// Of the replicas that are ready.
    schedulers: Vec<Option<ActorRef<SchedulerMessage>>>,
    /// Who waits for the last open request to end.
    drained: Vec<RpcReplyPort<()>>,
    draining: bool,
    /// Why the replica that was lost last was lost.
    last_loss: String,
}

impl Actor for RouterActor {
    type Msg = RouterMessage;
    type State = RouterState;
    type Arguments = RouterArguments;

    async fn pre_start(
        &self,
        _myself: ActorRef<RouterMessage>,
        arguments: RouterArguments,
    ) -> Result<RouterState, ActorProcessingErr> {
        let RouterArguments { shared } = arguments;
        let spec = &shared.spec;
        let replicas = spec.replicas();
        Ok(RouterState {
            router: Router::new(RouterConfig::new(replicas, &spec.scheduler, &spec.cache)),
            schedulers: vec![None; replicas],
            drained: Vec::new(),
            draining: false,
            last_loss: "no replica has formed yet".to_owned(),
            shared,
        })
    }

    async fn handle(
        &self,
        _myself: ActorRef<RouterMessage>,
        message: RouterMessage,
        state: &mut RouterState,
    ) -> Result<(), ActorProcessingErr> {
        state.observe();
        match message {
            RouterMessage::Submit(groups) => groups.into_iter().for_each(|group| state.submit(group)),
            RouterMessage::Cancel(sequence) => state.cancel(sequence),
            RouterMessage::ReplicaReady { replica, scheduler } => {
                state.router.ready(replica);
                state.set_scheduler(replica, Some(scheduler));
            }
            RouterMessage::ReplicaLost { replica, reason } => {
                state.router.lost(replica);
                state.last_loss = reason;
            }
            RouterMessage::ReplicaGone { replica } => {
                state.router.gone(replica);
                state.set_scheduler(replica, None);
            }
            RouterMessage::Progressed { replica, progress } => state.progressed(replica, progress),
            RouterMessage::GivenBack { groups, reason } => {
                groups.into_iter().for_each(|group| state.place_again(group, &reason));
            }
            RouterMessage::Drain(reply) => {
                state.draining = true;
                state.drained.push(reply);
            }
        }
        state.rebalance();
        if state.router.open() == 0 {
            for reply in state.drained.drain(..) {
                let _ = reply.send(()); // Whoever waited may have given up.
            }
        }
        Ok(())
    }
}

impl RouterState {
    fn set_scheduler(&mut self, replica: ReplicaId, scheduler: Option<ActorRef<SchedulerMessage>>) {
        if let Some(slot) = self.schedulers.get_mut(replica.index()) {
            *slot = scheduler;
        }
    }

    /// Looks how full the pools are, where that can decide something.
    fn observe(&mut self) {
        if self.schedulers.len() > 1 {
            let free = self.shared.board.free_blocks();
            (0..).map(ReplicaId).zip(free).for_each(|(replica, free)| self.router.observe(replica, free));
        }
    }

    fn submit(&mut self, group: Vec<Submission>) {
        let Some(first) = group.first() else { return };
        if self.draining {
            let refuse = |one| self.fail(one, GenerationError::ShuttingDown);
            return group.into_iter().for_each(refuse);
        }
        let shape = WorkShape {
            prompt_tokens: first.request.prompt.len(),
            due: Due::new(
                first.arrived_ms,
                first.request.priority,
                self.shared.spec.scheduler.priority_aging_ms,
            ),
            keys: Arc::clone(&first.keys),
            is_whole: first.request.prompt_logprobs.is_some(),
        };
        let sequences: Vec<SequenceId> = group.iter().map(|one| one.sequence).collect();
        match self.router.place(&sequences, &shape) {
            Some(replica) => {
                tracing::debug!(sequence = sequences[0].0, count = sequences.len(), %replica, "request placed");
                self.send(replica, group);
            }
            // The handle saw one that was ready; it was lost since.
            None => {
                let reason = self.last_loss.clone();
                group.into_iter().for_each(|one| self.fail(one, none_is_ready(&reason)));
            }
        }
    }

    /// Sends requests that are placed, all of a group at once: a scheduler that begins with one of them has them all. A
    /// scheduler that is gone has not said so yet.
    fn send(&mut self, replica: ReplicaId, group: Vec<Submission>) {
        let scheduler = self.schedulers.get(replica.index()).cloned().flatten();
        let refused = match scheduler {
            Some(scheduler) => match scheduler.cast(SchedulerMessage::Submit(group)) {
                Ok(()) => return,
                Err(MessagingErr::SendErr(SchedulerMessage::Submit(group))) => group,
                // No other message was sent, and nothing came back: its stream tells its reader.
                Err(_) => return,
            },
            None => group,
        };
        self.router.lost(replica);
        self.place_again(refused, "its scheduler ended and is being restarted");
    }

    /// Requests of one group that have not started go elsewhere together, or end for this reason.
    fn place_again(&mut self, group: Vec<Submission>, reason: &str) {
        let is_open = |one: &Submission| self.router.place_of(one.sequence).is_some();
        let (open, cancelled): (Vec<_>, Vec<_>) = group.into_iter().partition(is_open);
        // Cancelled on their way: their readers are gone.
        cancelled.into_iter().for_each(|one| one.transit.cancelled());
        let sequences: Vec<SequenceId> = open.iter().map(|one| one.sequence).collect();
        let Some(first) = sequences.first() else { return };
        let moved = self.router.moved();
        match self.router.given_back(&sequences) {
            Some(replica) => {
                tracing::debug!(sequence = first.0, count = sequences.len(), %replica, "request moved");
                self.shared.board.add_moved(self.router.moved() - moved);
                self.send(replica, open);
            }
            None => open.into_iter().for_each(|one| self.fail(one, none_is_ready(reason))),
        }
    }

    fn fail(&self, submission: Submission, error: GenerationError) {
        let Submission { events, transit, .. } = submission;
        // Counted before its reader hears of it.
        transit.failed();
        // Its queue is empty, so there is a place; a reader that is gone needs no word.
        let _ = events.try_send(GenerationEvent::Failed(error));
    }

    fn cancel(&mut self, sequence: SequenceId) {
        // One that was placed again since will be found at its new place: messages of one sender keep their order.
        let Some(replica) = self.router.place_of(sequence) else { return };
        self.router.ended(sequence);
        if let Some(scheduler) = self.schedulers.get(replica.index()).and_then(Option::as_ref) {
            let _ = scheduler.cast(SchedulerMessage::Cancel(sequence)); // One that is gone has nothing to cancel.
        }
    }

    fn progressed(&mut self, replica: ReplicaId, progress: Progress) {
        let Progress { started, prefilled, ended, kept } = progress;
        // One that was placed elsewhere since is none of that replica's any more.
        let mut turn = |sequences: Vec<SequenceId>, turn: fn(&mut Router, SequenceId)| {
            for sequence in sequences {
                if self.router.place_of(sequence) == Some(replica) {
                    turn(&mut self.router, sequence);
                }
            }
        };
        turn(kept, Router::kept);
        turn(started, Router::started);
        turn(prefilled, Router::prefilled);
        turn(ended, Router::ended);
    }

    /// Asks back what would be served sooner elsewhere.
    fn rebalance(&mut self) {
        for Withdrawal { sequences, from, to } in self.router.rebalance() {
            tracing::debug!(?sequences, %from, %to, "requests asked back");
            if let Some(scheduler) = self.schedulers.get(from.index()).and_then(Option::as_ref) {
                // One that is gone answers by its end.
                let _ = scheduler.cast(SchedulerMessage::GiveBack(sequences));
            }
        }
    }
}

fn none_is_ready(reason: &str) -> GenerationError {
    GenerationError::ShardLost { reason: reason.to_owned() }
}
