//! The scheduler: which sequences run in which step, over which blocks.
//!
//! [`Scheduler`] and [`PagePool`] are plain values and decide everything; the actor around them only receives,
//! calls one method, and sends what it returns. Nothing here reads a clock or touches a tensor.

mod actor;
mod admission;
mod bugs;
mod host_pool;
mod invariants;
mod message;
mod names;
mod planning;
mod pool;
mod sequence;
mod sharing;
mod slots;
mod state;
mod streams;
mod tiers;

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

pub(crate) use actor::{SchedulerActor, SchedulerArguments};
pub(crate) use message::{SchedulerMessage, Submission};
pub use pool::{Admission, PagePool};
pub use state::{AbsorbError, Event, Scheduler, SchedulerCounters};
pub(crate) use streams::GENERATION_QUEUE_EVENTS;
pub use tiers::TRANSFERS_PER_STEP;

/// Steps that may be planned and not absorbed. Two keep a shard busy while the result of its last step travels;
/// more would only waste work on sequences that have already stopped.
pub const STEPS_IN_FLIGHT_MAX: usize = 2;

/// Times one sequence may lose its blocks. Each time it waits for more room before it runs again, and after this many
/// for so much that nothing can take its blocks any more; see [`Scheduler`].
pub const PREEMPTIONS_MAX: u8 = 4;

/// Admission leaves `1 << (this * preemptions)` free blocks for each running sequence: 1, 4, 16, 64. With one, a
/// newcomer lives for a block's worth of steps at least, instead of being the victim of the next block boundary.
const RESERVE_GROWTH_BITS: u32 = 2;
