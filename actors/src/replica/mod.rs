//! One replica of the model: a scheduler, then the shard group that it feeds (rest for one).
//!
//! The scheduler holds the journal, so its end takes the group with it; the group's end leaves the scheduler in place.

mod actor;
mod message;

pub(crate) use actor::{ReplicaActor, ReplicaArguments};
pub(crate) use message::ReplicaMessage;
