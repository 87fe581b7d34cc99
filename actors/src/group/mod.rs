//! The shard group: N shards that execute the same plans, and their common life.
//!
//! It scatters plans, gathers results, compares what the ranks drew, and decides what follows when a shard is lost:
//! the epoch is fenced, the collective aborted, the lost rank built anew, the survivors joined to it. An epoch begins
//! once every rank has its weights and has met the others; a rank that could not meet them because another failed keeps
//! its own. A rank that does not answer at all is a loss too; see [`SILENCE_MAX`].

mod actor;
mod message;
mod muster;
mod owned;
mod state;

#[cfg(test)]
mod tests;

pub(crate) use actor::{GroupActor, GroupArguments};
pub(crate) use message::GroupMessage;
pub(crate) use state::{RESTARTS_MAX, RestartBudget, SILENCE_MAX};
