//! Root of an ensemble's actor tree: one replica today, and the order in which everything ends.

mod actor;
mod message;

pub(crate) use actor::{SupervisorActor, SupervisorArguments};
pub(crate) use message::SupervisorMessage;
