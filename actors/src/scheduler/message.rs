//! What the scheduler actor is told.

use std::sync::Arc;

use ractor::ActorRef;
use tokio::sync::mpsc;

use crate::{
    ensemble::{Transit, WaitingSlot},
    group::GroupMessage,
    ids::{Epoch, SequenceId},
    plan::StepResult,
    prefix::BlockKey,
    request::{GenerationEvent, Request},
};

/// A request that passed admission, with the queue its events go to.
pub(crate) struct Submission {
    pub(crate) sequence: SequenceId,
    pub(crate) request: Request,
    /// When it was submitted, in milliseconds since the ensemble began.
    pub(crate) arrived_ms: u64,
    /// The first choice of the same request, when this is another one.
    pub(crate) leader: Option<SequenceId>,
    /// Keys of its prompt's full blocks, where a router chooses by them.
    pub(crate) keys: Arc<[BlockKey]>,
    pub(crate) events: mpsc::Sender<GenerationEvent>,
    /// Its place among the waiting; given back when it first runs, or with the request.
    pub(crate) slot: WaitingSlot,
    /// Counts it, should it be lost on its way.
    pub(crate) transit: Transit,
}

/// Messages of the scheduler actor.
///
/// The mailbox is unbounded by construction and bounded by what may be sent: at most `max_waiting_requests`
/// submissions that have not started, one cancellation per open request, as many requests to give one back as a router
/// has moves, and one result per step in flight.
pub(crate) enum SchedulerMessage {
    /// Take requests of one group in.
    Submit(Vec<Submission>),
    /// End a request whose reader is gone.
    Cancel(SequenceId),
    /// Every shard of the group is ready in this epoch.
    GroupFormed { epoch: Epoch, group: ActorRef<GroupMessage> },
    /// The group's life ended; open requests end with it.
    GroupLost { epoch: Epoch, reason: String },
    /// All ranks executed a step and agree about it.
    StepExecuted(StepResult),
    /// Give requests of one group back to the router, or none where one of them has started.
    GiveBack(Vec<SequenceId>),
    /// A new router stands where one ended that knew of the open requests: they end, and it is told who is ready.
    RouterStarted,
    /// Let the plan that follows such a message fail.
    #[cfg(test)]
    FailPlanAfter(fn(&SchedulerMessage) -> bool),
}
