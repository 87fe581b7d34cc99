//! A topology as typed, before any rule but the names and types of keys.

use std::ops::Range;

/// Where a value came from, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Bytes of the topology file.
    File(Range<usize>),
    /// An environment variable.
    Variable(String),
    /// A flag of the command line, or a call in code.
    Given(String),
}

impl Origin {
    /// How far up it is among the layers: what is higher wins.
    pub(super) fn layer(&self) -> u8 {
        match self {
            Origin::File(_) => 0,
            Origin::Variable(_) => 1,
            Origin::Given(_) => 2,
        }
    }
}

/// A value with its origin.
#[derive(Clone, Debug)]
pub(super) struct Sourced<T> {
    pub(super) value: T,
    pub(super) origin: Origin,
}

pub(super) type Leaf<T> = Option<Sourced<T>>;

// Numbers are i64 and f64 here, so that -1 is a broken rule with a sentence of its own instead of a wrong
// type.

#[derive(Debug, Default)]
pub(super) struct RawTopology {
    pub(super) model: RawModel,
    pub(super) parallel: RawParallel,
    pub(super) node: Vec<RawNode>,
    pub(super) cache: RawCache,
    pub(super) scheduler: RawScheduler,
    pub(super) server: RawServer,
}

/// What is run.
#[derive(Debug, Default)]
pub(super) struct RawModel {
    /// Folder or GGUF file; relative to the file that says so.
    pub(super) path: Leaf<String>,
    /// `bfloat16`, `float32` or `auto`.
    pub(super) dtype: Leaf<String>,
    /// Longest sequence in tokens.
    pub(super) max_model_len: Leaf<i64>,
    /// Name that clients use.
    pub(super) served_model_name: Leaf<String>,
}

/// How it is split.
#[derive(Debug, Default)]
pub(super) struct RawParallel {
    /// Ranks of each replica; any number.
    pub(super) tensor_parallel_size: Leaf<i64>,
    /// Replicas of the model, each on devices of its own.
    pub(super) data_parallel_size: Leaf<i64>,
    /// Relative share of each rank of a replica.
    pub(super) weights: Leaf<Vec<Sourced<f64>>>,
    /// Compute threads of each rank.
    pub(super) threads_per_rank: Leaf<i64>,
    /// Instruction set of CPU ranks: `auto`, `portable`, `avx2`, `avx512` or `amx`.
    pub(super) cpu_isa: Leaf<String>,
    /// Whether a request's tokens must not depend on its company.
    pub(super) batch_invariant: Leaf<bool>,
    /// What separates ranks: `thread` or `process`.
    pub(super) isolation: Leaf<String>,
    /// Whether ranks on GPUs are processes where nobody says what separates them; never in a file.
    pub(super) isolates_gpus: bool,
    /// What ranks on GPUs sum with: `auto`, `kernels` or `nccl`.
    pub(super) all_reduce: Leaf<String>,
}

/// Where it runs: one host of the ensemble.
#[derive(Debug, Default)]
pub(super) struct RawNode {
    /// Name of the host, with or without a port.
    pub(super) host: Leaf<String>,
    /// One device for each rank, replica by replica.
    pub(super) devices: Leaf<Vec<Sourced<String>>>,
}

/// What is remembered.
#[derive(Debug, Default)]
pub(super) struct RawCache {
    /// Tokens of one KV block.
    pub(super) block_size: Leaf<i64>,
    /// Memory for keys and values, over all ranks of a replica.
    pub(super) kv_cache_memory_bytes: Leaf<RawBytes>,
    /// Memory of the host for blocks that are evicted, over all ranks.
    pub(super) kv_offloading_bytes: Leaf<RawBytes>,
    /// Part of a GPU's memory that may be used.
    pub(super) gpu_memory_utilization: Leaf<f64>,
    /// Whether the keys and values of what was computed are kept for requests that begin alike; true unless said
    /// otherwise.
    pub(super) enable_prefix_caching: Leaf<bool>,
    /// Whether requests with different API keys share no prefixes, where several keys exist; true unless said
    /// otherwise.
    pub(super) salt_per_api_key: Leaf<bool>,
}

/// What a step may carry.
#[derive(Debug, Default)]
pub(super) struct RawScheduler {
    /// Sequences that run at a time.
    pub(super) max_num_seqs: Leaf<i64>,
    /// Tokens of one step.
    pub(super) max_num_batched_tokens: Leaf<i64>,
    /// Requests that may wait.
    pub(super) max_waiting_requests: Leaf<i64>,
    /// How much earlier a request must have come, in milliseconds, to go before one whose priority is better by one;
    /// 10000 unless said otherwise. With 0 the order is that of arrival, and priorities have no effect.
    pub(super) priority_aging_ms: Leaf<i64>,
    /// Whether the next step is planned and enqueued while a device computes one; it is unless said otherwise. What
    /// comes of requests is the same.
    pub(super) async_scheduling: Leaf<bool>,
}

/// Who may ask, and where.
#[derive(Debug, Default)]
pub(super) struct RawServer {
    /// `HOST:PORT`.
    pub(super) listen: Leaf<String>,
    /// Environment variable that holds the API key, or several with commas between.
    pub(super) api_key_env: Leaf<String>,
    /// Largest request body.
    pub(super) max_body_bytes: Leaf<RawBytes>,
    /// Replaces the host of `listen`; never in a file.
    pub(super) host: Leaf<String>,
    /// Replaces the port of `listen`; never in a file.
    pub(super) port: Leaf<i64>,
    /// Whether it is another machine that has the keys; never in a file.
    pub(super) is_elsewhere: bool,
}

/// An amount of memory: bytes, or text with a unit.
#[derive(Clone, Debug)]
pub(super) enum RawBytes {
    Count(i64),
    Text(String),
}

/// The place of one key's value, by type.
pub(super) enum Slot<'a> {
    Text(&'a mut Leaf<String>),
    Whole(&'a mut Leaf<i64>),
    Number(&'a mut Leaf<f64>),
    Truth(&'a mut Leaf<bool>),
    Bytes(&'a mut Leaf<RawBytes>),
    Numbers(&'a mut Leaf<Vec<Sourced<f64>>>),
    Texts(&'a mut Leaf<Vec<Sourced<String>>>),
}

impl RawTopology {
    /// The place of a key that a dotted name stands for. `node.devices` is the one list that replaces all nodes.
    pub(super) fn slot(&mut self, key: &str) -> Option<Slot<'_>> {
        let (model, parallel, cache) = (&mut self.model, &mut self.parallel, &mut self.cache);
        let (scheduler, server) = (&mut self.scheduler, &mut self.server);
        Some(match key {
            "model.path" => Slot::Text(&mut model.path),
            "model.dtype" => Slot::Text(&mut model.dtype),
            "model.max_model_len" => Slot::Whole(&mut model.max_model_len),
            "model.served_model_name" => Slot::Text(&mut model.served_model_name),
            "parallel.tensor_parallel_size" => Slot::Whole(&mut parallel.tensor_parallel_size),
            "parallel.data_parallel_size" => Slot::Whole(&mut parallel.data_parallel_size),
            "parallel.weights" => Slot::Numbers(&mut parallel.weights),
            "parallel.threads_per_rank" => Slot::Whole(&mut parallel.threads_per_rank),
            "parallel.cpu_isa" => Slot::Text(&mut parallel.cpu_isa),
            "parallel.batch_invariant" => Slot::Truth(&mut parallel.batch_invariant),
            "parallel.isolation" => Slot::Text(&mut parallel.isolation),
            "parallel.all_reduce" => Slot::Text(&mut parallel.all_reduce),
            "node.devices" => {
                self.node = vec![RawNode::default()];
                return self.node.first_mut()?.slot("devices");
            }
            "cache.block_size" => Slot::Whole(&mut cache.block_size),
            "cache.kv_cache_memory_bytes" => Slot::Bytes(&mut cache.kv_cache_memory_bytes),
            "cache.kv_offloading_bytes" => Slot::Bytes(&mut cache.kv_offloading_bytes),
            "cache.gpu_memory_utilization" => Slot::Number(&mut cache.gpu_memory_utilization),
            "cache.enable_prefix_caching" => Slot::Truth(&mut cache.enable_prefix_caching),
            "cache.salt_per_api_key" => Slot::Truth(&mut cache.salt_per_api_key),
            "scheduler.max_num_seqs" => Slot::Whole(&mut scheduler.max_num_seqs),
            "scheduler.max_num_batched_tokens" => Slot::Whole(&mut scheduler.max_num_batched_tokens),
            "scheduler.max_waiting_requests" => Slot::Whole(&mut scheduler.max_waiting_requests),
            "scheduler.priority_aging_ms" => Slot::Whole(&mut scheduler.priority_aging_ms),
            "scheduler.async_scheduling" => Slot::Truth(&mut scheduler.async_scheduling),
            "server.listen" => Slot::Text(&mut server.listen),
            "server.api_key_env" => Slot::Text(&mut server.api_key_env),
            "server.max_body_bytes" => Slot::Bytes(&mut server.max_body_bytes),
            "server.host" => Slot::Text(&mut server.host),
            "server.port" => Slot::Whole(&mut server.port),
            _ => return None,
        })
    }

    /// Where a key's value came from, if it has one.
    pub(super) fn origin(&mut self, key: &str) -> Option<Origin> {
        match key {
            "node.devices" => self.node.iter().find_map(|node| Some(node.devices.as_ref()?.origin.clone())),
            "node.host" => None,
            _ => self.slot(key)?.origin(),
        }
    }
}

impl RawNode {
    /// The place of a key of `[[node]]`.
    pub(super) fn slot(&mut self, name: &str) -> Option<Slot<'_>> {
        match name {
            "host" => Some(Slot::Text(&mut self.host)),
            "devices" => Some(Slot::Texts(&mut self.devices)),
            _ => None,
        }
    }
}

impl Slot<'_> {
    fn origin(&self) -> Option<Origin> {
        fn of<T>(leaf: &Leaf<T>) -> Option<Origin> {
            leaf.as_ref().map(|given| given.origin.clone())
        }
        match self {
            Slot::Text(leaf) => of(leaf),
            Slot::Whole(leaf) => of(leaf),
            Slot::Number(leaf) => of(leaf),
            Slot::Truth(leaf) => of(leaf),
            Slot::Bytes(leaf) => of(leaf),
            Slot::Numbers(leaf) => of(leaf),
            Slot::Texts(leaf) => of(leaf),
        }
    }

    /// What may stand there.
    pub(super) fn expected(&self) -> &'static str {
        match self {
            Slot::Text(_) => "text",
            Slot::Whole(_) => "a whole number",
            Slot::Number(_) => "a number",
            Slot::Truth(_) => "true or false",
            Slot::Bytes(_) => "an amount of memory",
            Slot::Numbers(_) => "a list of numbers",
            Slot::Texts(_) => "a list of texts",
        }
    }

    /// An example of it, in TOML.
    pub(super) fn example(&self) -> &'static str {
        match self {
            Slot::Text(_) => "\"text in quotes\"",
            Slot::Whole(_) => "3",
            Slot::Number(_) => "0.9",
            Slot::Truth(_) => "true",
            Slot::Bytes(_) => "\"512MiB\"",
            Slot::Numbers(_) => "[2, 1, 1]",
            Slot::Texts(_) => "[\"cpu\", \"cpu\"]",
        }
    }
}
