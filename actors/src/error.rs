//! Failures of shards and ensembles.

use std::error::Error;

use consort_parallel::{collective::CollectiveError, ids::Rank, model::ModelError};

use crate::ids::{Epoch, ReplicaId, Step};

/// Why a shard could not be built, or could not execute a step.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// The factory could not build the executor. The cause says what failed on what.
    #[error("loading failed: {source}")]
    Load {
        /// The factory's error.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The model refused the step or its device failed.
    #[error("the model failed in {step}: {source}")]
    Model {
        /// Which step.
        step: Step,
        /// The model's error.
        source: ModelError,
    },
    /// The model could not be joined to its peers.
    #[error("the model could not join its group: {source}")]
    Join {
        /// The model's error.
        source: ModelError,
    },
    /// The group's collective was aborted while this rank waited in it: the rank itself is sound.
    #[error("the collective was aborted: {reason}")]
    Aborted {
        /// What the aborting side said.
        reason: String,
    },
    /// A plan of another epoch.
    #[error("a plan of {got} was refused in {expected}")]
    WrongEpoch {
        /// The plan's.
        got: Epoch,
        /// The shard's.
        expected: Epoch,
    },
    /// A plan out of turn.
    #[error("{got} was refused where {expected} was due")]
    WrongStep {
        /// The plan's.
        got: Step,
        /// The shard's next.
        expected: Step,
    },
    /// The plan contradicts what the shard knows: a bug of the scheduler.
    #[error("the plan of {step} was refused: {what}")]
    Plan {
        /// Which.
        step: Step,
        /// The contradiction.
        what: String,
    },
    /// The compute thread panicked.
    #[error("the compute thread panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// The compute thread's queue is full: it does not keep up with a protocol that never fills it.
    #[error("the compute thread does not take commands ({queued} queued)")]
    Stuck {
        /// Commands in the queue.
        queued: usize,
    },
    /// The process that computes for the rank ended, or does not answer. The cause names it and says how.
    #[error("{source}")]
    Process {
        /// What became of it.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The compute thread is gone without a word.
    #[error("the compute thread ended")]
    ThreadEnded,
    /// The operating system refused a thread.
    #[error("the compute thread could not be spawned: {source}")]
    Spawn {
        /// Its reason.
        source: std::io::Error,
    },
}

impl ShardError {
    /// Wraps a factory's error.
    pub fn load(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Load { source: source.into() }
    }

    /// Tells an aborted collective, which is nobody's fault here, from a failure of this rank.
    pub(crate) fn model(step: Step, source: ModelError) -> Self {
        Self::unless_aborted(source, |source| Self::Model { step, source })
    }

    /// [`ShardError::model`], before the first step.
    pub(crate) fn join(source: ModelError) -> Self {
        Self::unless_aborted(source, |source| Self::Join { source })
    }

    fn unless_aborted(source: ModelError, failed: impl FnOnce(ModelError) -> Self) -> Self {
        match source {
            ModelError::Collective(CollectiveError::Aborted { reason, .. }) => {
                Self::Aborted { reason: reason.to_string() }
            }
            source => failed(source),
        }
    }
}

/// Why an ensemble did not start.
#[derive(Debug, thiserror::Error)]
pub enum EnsembleError {
    /// The specification contradicts itself. Every violation is named.
    #[error("the ensemble cannot be built as specified: {}", problems.join("; "))]
    Spec {
        /// One sentence each.
        problems: Vec<String>,
    },
    /// A shard could not be built.
    #[error("{rank}: {source}")]
    Load {
        /// Whose.
        rank: Rank,
        /// Why.
        source: ShardError,
    },
    /// One of several replicas did not start.
    #[error("{replica}: {source}")]
    Replica {
        /// Which.
        replica: ReplicaId,
        /// Why.
        source: Box<EnsembleError>,
    },
    /// An actor could not be started.
    #[error("the actor tree could not be started: {0}")]
    Actors(String),
    /// The ensemble was stopped while it loaded.
    #[error("the ensemble was stopped while it loaded")]
    Stopped,
}
