//! What an ensemble is built from.

use std::sync::Arc;

use crate::{
    config::{CacheSpec, Limits, SchedulerConfig},
    error::EnsembleError,
    shard::ShardFactory,
};

/// All that an ensemble needs to know. Checked by [`crate::Ensemble::start`].
#[derive(Clone)]
pub struct EnsembleSpec {
    /// Ranks of each replica (`tensor_parallel_size`).
    pub ranks: usize,
    /// Token ids below this exist.
    pub vocab_size: usize,
    /// Pages of the KV cache of each replica, the same on every rank.
    pub cache: CacheSpec,
    /// Bounds of scheduling. Those of steps are each replica's, that of waiting requests is the whole ensemble's.
    pub scheduler: SchedulerConfig,
    /// One for each replica (`data_parallel_size`): builds the executor of each of its ranks, on that rank's compute
    /// thread.
    pub factories: Vec<Arc<dyn ShardFactory>>,
}

impl EnsembleSpec {
    /// Replicas of the model.
    pub fn replicas(&self) -> usize {
        self.factories.len()
    }

    /// What single requests are held against.
    pub(crate) fn limits(&self) -> Limits {
        Limits { vocab_size: self.vocab_size, max_model_len: self.scheduler.max_model_len, cache: self.cache }
    }

    /// Names every violation at once.
    pub(crate) fn check(&self) -> Result<(), EnsembleError> {
        let scheduler = &self.scheduler;
        let positive = [
            ("ranks", self.ranks),
            ("replicas", self.replicas()),
            ("vocab_size", self.vocab_size),
            ("block_size", self.cache.block_size),
            ("num_blocks", self.cache.num_blocks),
            ("max_num_seqs", scheduler.max_num_seqs),
            ("max_num_batched_tokens", scheduler.max_num_batched_tokens),
            ("max_model_len", scheduler.max_model_len),
            ("max_waiting_requests", scheduler.max_waiting_requests),
        ];
        let zero = positive.iter().filter(|(_, value)| *value == 0);
        let mut problems: Vec<String> = zero.map(|(name, _)| format!("{name} must be at least 1")).collect();
        for (name, count) in [("ranks", self.ranks), ("replicas", self.replicas())] {
            if count > usize::from(u16::MAX) {
                problems.push(format!("{name} is {count} and may be at most {}", u16::MAX));
            }
        }
        if u32::try_from(self.cache.num_blocks).is_err() {
            problems.push(format!("num_blocks is {} and may be at most {}", self.cache.num_blocks, u32::MAX));
        }
        if u32::try_from(scheduler.max_model_len).is_err() {
            problems.push(format!(
                "max_model_len is {} and may be at most {}",
                scheduler.max_model_len,
                u32::MAX
            ));
        }
        if scheduler.max_num_batched_tokens < scheduler.max_num_seqs {
            problems.push(format!(
                "max_num_batched_tokens ({}) must be at least max_num_seqs ({}), so that every running sequence can \
                 decode in a step",
                scheduler.max_num_batched_tokens, scheduler.max_num_seqs
            ));
        }
        if problems.is_empty() { Ok(()) } else { Err(EnsembleError::Spec { problems }) }
    }
}
