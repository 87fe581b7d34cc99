//! Root of an ensemble's actor tree: one replica today, and the order in which everything ends. It restarts nothing: a
//! replica restarts its children, and its own end is the ensemble's failure.

mod actor;
mod message;

pub(crate) use actor::{SupervisorActor, SupervisorArguments};
pub(crate) use message::SupervisorMessage;
