//! Actors of Consort: a supervised tree per ensemble that turns requests into steps and steps into tokens.
//!
//! ```text
//! Supervisor -> Router
//!            -> Replica x M (rest for one) -> Scheduler
//!                                          -> ShardGroup -> Shard x N, each with a compute thread of its own
//! ```
//!
//! | Module | What it is |
//! |---|---|
//! | [`Ensemble`] | the handle: start, submit, status, shutdown |
//! | [`router`] | the pure [`Router`](router::Router), which chooses a replica for each request, and its actor |
//! | [`scheduler`] | the pure [`Scheduler`](scheduler::Scheduler) and its actor |
//! | [`shard`] | executors on compute threads, and the actors that own them |
//! | [`plan`] | what crosses between scheduler and shards |
//! | [`prefix`] | names of cached blocks |
//! | [`order`] | the order of service, one for all replicas |
//! | [`request`] | what callers hand in and get back |
//! | [`status`] | what an ensemble says of itself |
//!
//! Absent on purpose: text (this crate speaks token ids), sockets, configuration files, model arithmetic, and any
//! process-wide state: ractor's registry of names is never used, so that many ensembles live in one process.

pub mod config;
mod ensemble;
pub mod error;
mod group;
pub mod ids;
pub mod order;
pub mod plan;
pub mod prefix;
mod replica;
pub mod request;
pub mod router;
pub mod scheduler;
pub mod shard;
pub mod status;
mod supervisor;

pub use config::{CacheSpec, LayerGroups, SchedulerConfig};
pub use ensemble::{Ensemble, EnsembleSpec, Generation};
pub use error::{EnsembleError, ShardError};
pub use ids::{Epoch, ReplicaId, SequenceId, Step};
pub use prefix::CacheSalt;
pub use request::{FinishReason, GenerationError, GenerationEvent, Request, SubmitError};
pub use shard::{
    LoadProgress, ModelExecutor, Pipeline, ProgressCallback, ProgressReporter, RankShare, Rejoined,
    ShardExecutor, ShardFactory,
};
pub use status::{EnsembleState, FinishedCounts, RankStatus, ReplicaStatus, ShardState, StateWatch, Status};
