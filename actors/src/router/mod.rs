//! The router: which replica serves a request.
//!
//! [`Router`] is a plain value and decides; the actor around it passes requests on and hears how they go. It stands
//! before one replica too, where it has nothing to decide: requests then have one way in, whatever the number of
//! replicas. That costs one message on the way in and one for each of a request's turns, none for its tokens, which go
//! from the scheduler to the reader directly.

mod actor;
mod index;
mod message;
mod state;
mod work;

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

pub(crate) use actor::{RouterActor, RouterArguments};
pub(crate) use message::{Progress, RouterMessage};
pub use state::Router;
pub use work::{RouterConfig, Withdrawal, WorkShape};

/// What an open request weighs beside its prompt, in tokens of prefill. It takes a row of every step for as long as it
/// draws, typically some dozens to some hundreds of them. Without this weight a prefix that many ask for would keep
/// all of them at one replica; with more, their prefix would be computed again too soon.
pub const OPEN_REQUEST_TOKENS: usize = 64;

/// Times a request that waits may be moved because another replica could serve it sooner. What the router knows of
/// room is an estimate; this keeps a wrong one from sending a request to and fro. Losses of a replica do not count.
pub const MOVES_MAX: u8 = 3;

/// Most blocks remembered of one replica: some 100 bytes each. A pool has seldom more, and what is forgotten costs a
/// prefill at worst.
pub const INDEX_ENTRIES_MAX: usize = 1 << 18;
