//! A topology as typed, before any rule but TOML's own and the names and types of keys.

use std::ops::Range;

use serde::{Deserialize, Deserializer};
use toml::Spanned;

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

/// A value with its origin.
#[derive(Clone, Debug)]
pub(super) struct Sourced<T> {
    pub(super) value: T,
    pub(super) origin: Origin,
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Sourced<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Sourced<T>, D::Error> {
        let spanned = Spanned::<T>::deserialize(deserializer)?;
        let origin = Origin::File(spanned.span());
        Ok(Sourced { value: spanned.into_inner(), origin })
    }
}

pub(super) type Leaf<T> = Option<Sourced<T>>;

// Numbers are i64 and f64 here, so that -1 is a broken rule with a sentence of its own instead of a wrong
// type.

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table")]
pub(super) struct RawTopology {
    pub(super) model: RawModel,
    pub(super) parallel: RawParallel,
    pub(super) node: Vec<RawNode>,
    pub(super) cache: RawCache,
    pub(super) scheduler: RawScheduler,
    pub(super) server: RawServer,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table")]
pub(super) struct RawModel {
    pub(super) path: Leaf<String>,
    pub(super) dtype: Leaf<String>,
    pub(super) max_model_len: Leaf<i64>,
    pub(super) served_model_name: Leaf<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table")]
pub(super) struct RawParallel {
    pub(super) tensor_parallel_size: Leaf<i64>,
    pub(super) data_parallel_size: Leaf<i64>,
    pub(super) weights: Leaf<Vec<f64>>,
    pub(super) threads_per_rank: Leaf<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table")]
pub(super) struct RawNode {
    pub(super) host: Leaf<String>,
    pub(super) devices: Leaf<Vec<Sourced<String>>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table")]
pub(super) struct RawCache {
    pub(super) block_size: Leaf<i64>,
    pub(super) kv_cache_memory_bytes: Leaf<RawBytes>,
    pub(super) gpu_memory_utilization: Leaf<f64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table")]
pub(super) struct RawScheduler {
    pub(super) max_num_seqs: Leaf<i64>,
    pub(super) max_num_batched_tokens: Leaf<i64>,
    pub(super) max_waiting_requests: Leaf<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table")]
pub(super) struct RawServer {
    pub(super) listen: Leaf<String>,
    pub(super) api_key_env: Leaf<String>,
    pub(super) max_body_bytes: Leaf<RawBytes>,
    /// Replaces the host of `listen`; never in a file.
    #[serde(skip)]
    pub(super) host: Leaf<String>,
    /// Replaces the port of `listen`; never in a file.
    #[serde(skip)]
    pub(super) port: Leaf<i64>,
}

/// An amount of memory: bytes, or text with a unit.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "a number of bytes, or text with a unit such as \"512MiB\"")]
pub(super) enum RawBytes {
    Count(i64),
    Text(String),
}
