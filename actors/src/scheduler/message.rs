//! What the scheduler actor is told.

use ractor::{ActorRef, RpcReplyPort};
use tokio::sync::mpsc;

use crate::{
    ensemble::WaitingSlot,
    group::GroupMessage,
    ids::{Epoch, SequenceId},
    plan::StepResult,
    request::{GenerationError, GenerationEvent, Request},
};

/// A request that passed admission, with the queue its events go to.
pub(crate) struct Submission {
    pub(crate) sequence: SequenceId,
    pub(crate) request: Request,
    /// The first choice of the same request, when this is another one.
    pub(crate) leader: Option<SequenceId>,
    pub(crate) events: mpsc::Sender<GenerationEvent>,
    /// Its place among the waiting; given back when it first runs, or with the request.
    pub(crate) slot: WaitingSlot,
}

/// Messages of the scheduler actor.
///
/// The mailbox is unbounded by construction and bounded by what may be sent: at most `max_waiting_requests`
/// submissions that have not started, one cancellation per open request, and one result per step in flight.
pub(crate) enum SchedulerMessage {
    /// Take a request in.
    Submit(Submission),
    /// End a request whose reader is gone.
    Cancel(SequenceId),
    /// Every shard of the group is ready in this epoch.
    GroupFormed { epoch: Epoch, group: ActorRef<GroupMessage> },
    /// The group's life ended; open requests end with it.
    GroupLost { epoch: Epoch, reason: String },
    /// All ranks executed a step and agree about it.
    StepExecuted(StepResult),
    /// Take no more requests in; reply once none is open.
    Drain(RpcReplyPort<()>),
    /// End every open request.
    EndAll(GenerationError),
}
