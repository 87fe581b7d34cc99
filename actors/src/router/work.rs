//! What the router is told of replicas and requests, and what it asks for.

use std::sync::Arc;

use super::INDEX_ENTRIES_MAX;
use crate::{
    config::{CacheSpec, SchedulerConfig},
    ids::{ReplicaId, SequenceId},
    order::Due,
    prefix::BlockKey,
};

/// What a router must know of the replicas, which are all alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterConfig {
    /// How many there are.
    pub replicas: usize,
    /// Most sequences that one runs at a time.
    pub max_num_seqs: usize,
    /// Pages of one's pool, and how many of them tokens take.
    pub cache: CacheSpec,
}

impl RouterConfig {
    /// That of replicas with these schedulers and caches.
    pub fn new(replicas: usize, scheduler: &SchedulerConfig, cache: &CacheSpec) -> Self {
        Self { replicas, max_num_seqs: scheduler.max_num_seqs, cache: *cache }
    }

    /// Most blocks of tokens of which a replica can hold what a prefix needs, its host's pool included.
    pub(super) fn blocks_remembered(&self) -> usize {
        let pages = self.cache.num_blocks.saturating_add(self.cache.host_blocks);
        (pages / self.cache.groups.full().max(1)).clamp(1, INDEX_ENTRIES_MAX)
    }

    /// Pages that a prompt takes beside those of its first `known` tokens, which are there. Of what lies within a
    /// window nothing is taken for known: most of it has passed.
    pub(super) fn pages(&self, prompt_tokens: usize, known: usize) -> usize {
        let shared = known / self.cache.block_size * self.cache.groups.full();
        self.cache.pages_for(prompt_tokens).saturating_sub(shared)
    }
}

/// What a router must know of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkShape {
    /// Tokens of its prompt, at least one.
    pub prompt_tokens: usize,
    /// By which it is put in order among those that wait.
    pub due: Due,
    /// Keys of the prompt's full blocks; none where nothing is cached, or where there is no choice.
    pub keys: Arc<[BlockKey]>,
    /// Whether it computes all of its prompt, whatever is there of it: the prompt's log-probabilities are asked for. Of
    /// a group this is said of the first one, and the others take over what that one computes.
    pub is_whole: bool,
}

/// Requests of one group that wait at one replica, to be asked back and given to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Withdrawal {
    /// Which: all of the group that are open.
    pub sequences: Vec<SequenceId>,
    /// Where they wait.
    pub from: ReplicaId,
    /// Where they would be served sooner.
    pub to: ReplicaId,
}
