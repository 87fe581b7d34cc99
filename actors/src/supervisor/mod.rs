//! Root of an ensemble's actor tree: the router, the replicas, and the order in which everything ends. It restarts no
//! replica: a replica restarts its children, and one that ends stays out while the others go on.

mod actor;
mod message;

pub(crate) use actor::{SupervisorActor, SupervisorArguments};
pub(crate) use message::SupervisorMessage;
