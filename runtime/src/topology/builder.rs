//! Topologies made in code, under the same rules as files.

use std::path::{Path, PathBuf};

use super::{
    DType, Topology, TopologyError,
    env::Environment,
    error::Violations,
    raw::{Leaf, Origin, RawBytes, RawNode, RawTopology, Sourced},
    validate,
};

/// Builds a [`Topology`]. Setters take anything; [`build`](Self::build) reports every broken rule at once.
#[derive(Debug)]
pub struct TopologyBuilder {
    model: PathBuf,
    raw: RawTopology,
}

/// A value with the setter it came from.
fn by<T>(setter: &str, value: T) -> Leaf<T> {
    Some(Sourced { value, origin: Origin::Given(format!("TopologyBuilder::{setter}")) })
}

/// Numbers beyond i64 break every rule alike.
fn count(setter: &str, value: usize) -> Leaf<i64> {
    by(setter, i64::try_from(value).unwrap_or(i64::MAX))
}

fn bytes(setter: &str, value: u64) -> Leaf<RawBytes> {
    by(setter, RawBytes::Text(value.to_string()))
}

impl TopologyBuilder {
    pub(super) fn new(model: PathBuf) -> TopologyBuilder {
        TopologyBuilder { model, raw: RawTopology::default() }
    }

    /// Number format to compute in.
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.raw.model.dtype = by("dtype", dtype.name().to_owned());
        self
    }

    /// Longest sequence in tokens.
    #[must_use]
    pub fn max_model_len(mut self, tokens: usize) -> Self {
        self.raw.model.max_model_len = count("max_model_len", tokens);
        self
    }

    /// Name that clients use.
    #[must_use]
    pub fn served_model_name(mut self, name: impl Into<String>) -> Self {
        self.raw.model.served_model_name = by("served_model_name", name.into());
        self
    }

    /// Ranks to split the model over, in each replica.
    #[must_use]
    pub fn tensor_parallel_size(mut self, ranks: usize) -> Self {
        self.raw.parallel.tensor_parallel_size = count("tensor_parallel_size", ranks);
        self
    }

    /// Replicas of the model.
    #[must_use]
    pub fn data_parallel_size(mut self, replicas: usize) -> Self {
        self.raw.parallel.data_parallel_size = count("data_parallel_size", replicas);
        self
    }

    /// Device of each rank, replica by replica, as a topology file names them.
    #[must_use]
    pub fn devices<S: Into<String>>(mut self, devices: impl IntoIterator<Item = S>) -> Self {
        let devices = devices.into_iter().filter_map(|device| by("devices", device.into())).collect();
        self.raw.node = vec![RawNode { host: None, devices: by("devices", devices) }];
        self
    }

    /// Relative share of each rank.
    #[must_use]
    pub fn weights(mut self, weights: impl IntoIterator<Item = f64>) -> Self {
        self.raw.parallel.weights =
            by("weights", weights.into_iter().filter_map(|weight| by("weights", weight)).collect());
        self
    }

    /// Compute threads of each rank.
    #[must_use]
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.raw.parallel.threads_per_rank = count("threads_per_rank", threads);
        self
    }

    /// Instruction set of CPU ranks: `auto`, `portable`, `avx2`, `avx512` or `amx`.
    #[must_use]
    pub fn cpu_isa(mut self, isa: impl Into<String>) -> Self {
        self.raw.parallel.cpu_isa = by("cpu_isa", isa.into());
        self
    }

    /// What separates ranks: `thread` or `process`.
    #[must_use]
    pub fn isolation(mut self, isolation: impl Into<String>) -> Self {
        self.raw.parallel.isolation = by("isolation", isolation.into());
        self
    }

    /// What ranks on GPUs sum with: `auto`, `kernels` or `nccl`.
    #[must_use]
    pub fn all_reduce(mut self, means: impl Into<String>) -> Self {
        self.raw.parallel.all_reduce = by("all_reduce", means.into());
        self
    }

    /// Whether a request's tokens must not depend on what else runs: on GPUs a choice, on CPUs always so.
    #[must_use]
    pub fn batch_invariant(mut self, is_asked_for: bool) -> Self {
        self.raw.parallel.batch_invariant = by("batch_invariant", is_asked_for);
        self
    }

    /// Tokens of one KV block.
    #[must_use]
    pub fn block_size(mut self, tokens: usize) -> Self {
        self.raw.cache.block_size = count("block_size", tokens);
        self
    }

    /// Memory for keys and values, over all ranks of a replica.
    #[must_use]
    pub fn kv_cache_memory_bytes(mut self, amount: u64) -> Self {
        self.raw.cache.kv_cache_memory_bytes = bytes("kv_cache_memory_bytes", amount);
        self
    }

    /// Whether the keys and values of what was computed are kept for requests that begin alike.
    #[must_use]
    pub fn enable_prefix_caching(mut self, is_enabled: bool) -> Self {
        self.raw.cache.enable_prefix_caching = by("enable_prefix_caching", is_enabled);
        self
    }

    /// Whether requests with different API keys share no prefixes, where several keys exist.
    #[must_use]
    pub fn salt_per_api_key(mut self, is_salted: bool) -> Self {
        self.raw.cache.salt_per_api_key = by("salt_per_api_key", is_salted);
        self
    }

    /// Memory of the host, over all ranks, for blocks that lose their place in the cache.
    #[must_use]
    pub fn kv_offloading_bytes(mut self, amount: u64) -> Self {
        self.raw.cache.kv_offloading_bytes = bytes("kv_offloading_bytes", amount);
        self
    }

    /// Sequences that run at a time, at most.
    #[must_use]
    pub fn max_num_seqs(mut self, sequences: usize) -> Self {
        self.raw.scheduler.max_num_seqs = count("max_num_seqs", sequences);
        self
    }

    /// Tokens of one step, at most.
    #[must_use]
    pub fn max_num_batched_tokens(mut self, tokens: usize) -> Self {
        self.raw.scheduler.max_num_batched_tokens = count("max_num_batched_tokens", tokens);
        self
    }

    /// Requests that may wait before further ones are refused.
    #[must_use]
    pub fn max_waiting_requests(mut self, requests: usize) -> Self {
        self.raw.scheduler.max_waiting_requests = count("max_waiting_requests", requests);
        self
    }

    /// How much earlier a request must have come, in milliseconds, to go before one whose priority is better by one.
    #[must_use]
    pub fn priority_aging_ms(mut self, milliseconds: u64) -> Self {
        self.raw.scheduler.priority_aging_ms =
            by("priority_aging_ms", i64::try_from(milliseconds).unwrap_or(i64::MAX));
        self
    }

    /// Whether the next step is planned and enqueued while a device computes one; it is unless said otherwise.
    #[must_use]
    pub fn async_scheduling(mut self, is_enabled: bool) -> Self {
        self.raw.scheduler.async_scheduling = by("async_scheduling", is_enabled);
        self
    }

    /// Where the server listens: `HOST:PORT`.
    #[must_use]
    pub fn listen(mut self, address: impl Into<String>) -> Self {
        self.raw.server.listen = by("listen", address.into());
        self
    }

    /// Environment variable that holds the API key, or several with commas between.
    #[must_use]
    pub fn api_key_env(mut self, name: impl Into<String>) -> Self {
        self.raw.server.api_key_env = by("api_key_env", name.into());
        self
    }

    /// Largest request body in bytes.
    #[must_use]
    pub fn max_body_bytes(mut self, amount: u64) -> Self {
        self.raw.server.max_body_bytes = bytes("max_body_bytes", amount);
        self
    }

    /// Checks all rules. The environment is read for the API key alone: `CONSORT_*` settings do not apply in
    /// code.
    pub fn build(self) -> Result<Topology, TopologyError> {
        self.build_with(&Environment::of_process())
    }

    /// [`build`](Self::build) with an environment of the caller's.
    pub fn build_with(mut self, environment: &Environment) -> Result<Topology, TopologyError> {
        let mut violations = Violations::default();
        validate::model::named(&self.model, "TopologyBuilder::new", &mut self.raw, &mut violations);
        Ok(validate::validate(self.raw, Path::new(""), environment, violations)?)
    }
}
