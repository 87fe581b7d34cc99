//! What the router actor is told.

use ractor::{ActorRef, RpcReplyPort};

use crate::{
    ids::{ReplicaId, SequenceId},
    scheduler::{SchedulerMessage, Submission},
};

/// Messages of the router actor.
///
/// The mailbox is unbounded by construction and bounded by what may be sent: at most `max_waiting_requests` submissions
/// that have not started, one cancellation, four turns and a few moves of each open request, and what replicas say of
/// their lives.
pub(crate) enum RouterMessage {
    /// Place requests. Those of one group have the same prompt and stay together.
    Submit(Vec<Vec<Submission>>),
    /// End a request whose reader is gone.
    Cancel(SequenceId),
    /// A replica's group has formed: requests may be sent to its scheduler. Its cache is empty.
    ReplicaReady { replica: ReplicaId, scheduler: ActorRef<SchedulerMessage> },
    /// A replica's group was lost, its cache with it. Its scheduler answers for its requests.
    ReplicaLost { replica: ReplicaId, reason: String },
    /// A replica's scheduler ended, and its requests with it.
    ReplicaGone { replica: ReplicaId },
    /// How a replica's requests went.
    Progressed { replica: ReplicaId, progress: Progress },
    /// A replica gives back requests that have not started: it was asked to, or cannot serve them for the reason given.
    /// Those of one group go on together.
    GivenBack { groups: Vec<Vec<Submission>>, reason: String },
    /// Take no more requests in; reply once none is open.
    Drain(RpcReplyPort<()>),
}

/// Turns that requests took.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Admitted for the first time.
    pub(crate) started: Vec<SequenceId>,
    /// With their prompts computed.
    pub(crate) prefilled: Vec<SequenceId>,
    /// Ended, however.
    pub(crate) ended: Vec<SequenceId>,
    /// Asked back in vain: another one of the group had started.
    pub(crate) kept: Vec<SequenceId>,
}

impl Progress {
    /// Whether there is nothing to tell.
    pub(crate) fn is_empty(&self) -> bool {
        [&self.started, &self.prefilled, &self.ended, &self.kept].into_iter().all(Vec::is_empty)
    }
}
