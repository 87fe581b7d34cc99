//! What stands above the file: environment variables, and above them the command line.

use std::collections::HashMap;

use config::{Config, Map, Value, ValueKind};

use super::{
    env::Environment,
    error::Violations,
    raw::{Leaf, Origin, RawBytes, RawServer, RawTopology, Sourced},
};

const PREFIX: &str = "CONSORT";
const SEPARATOR: &str = "__";

/// Values of the command line. Each one given wins over environment and file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Replaces `model.path`.
    pub model: Option<String>,
    /// Replaces `model.served_model_name`.
    pub served_model_name: Option<String>,
    /// Replaces `model.dtype`.
    pub dtype: Option<String>,
    /// Replaces `model.max_model_len`.
    pub max_model_len: Option<usize>,
    /// Replaces `parallel.tensor_parallel_size`.
    pub tensor_parallel_size: Option<usize>,
    /// Replaces `parallel.threads_per_rank`.
    pub threads_per_rank: Option<usize>,
    /// Replaces `cache.block_size`.
    pub block_size: Option<usize>,
    /// Replaces `cache.kv_cache_memory_bytes`.
    pub kv_cache_memory_bytes: Option<u64>,
    /// Replaces `scheduler.max_num_seqs`.
    pub max_num_seqs: Option<usize>,
    /// Replaces `scheduler.max_num_batched_tokens`.
    pub max_num_batched_tokens: Option<usize>,
    /// Replaces `scheduler.max_waiting_requests`.
    pub max_waiting_requests: Option<usize>,
    /// Replaces the host of `server.listen`.
    pub host: Option<String>,
    /// Replaces the port of `server.listen`.
    pub port: Option<u16>,
    /// Replaces `server.api_key_env`.
    pub api_key_env: Option<String>,
    /// Leaves `[server]` out, whoever wrote it: for an engine that nothing listens for, which must not fail on a key
    /// that it does not need.
    pub without_server: bool,
}

impl Overrides {
    /// Keys with the flag that sets each, and the value as text.
    fn entries(&self) -> Vec<(&'static str, &'static str, String)> {
        fn text<T: ToString>(value: &Option<T>) -> Option<String> {
            value.as_ref().map(ToString::to_string)
        }
        let all = [
            ("model.path", "--model", self.model.clone()),
            ("model.served_model_name", "--served-model-name", self.served_model_name.clone()),
            ("model.dtype", "--dtype", self.dtype.clone()),
            ("model.max_model_len", "--max-model-len", text(&self.max_model_len)),
            ("parallel.tensor_parallel_size", "--tensor-parallel-size", text(&self.tensor_parallel_size)),
            ("parallel.threads_per_rank", "--threads-per-rank", text(&self.threads_per_rank)),
            ("cache.block_size", "--block-size", text(&self.block_size)),
            ("cache.kv_cache_memory_bytes", "--kv-cache-memory-bytes", text(&self.kv_cache_memory_bytes)),
            ("scheduler.max_num_seqs", "--max-num-seqs", text(&self.max_num_seqs)),
            (
                "scheduler.max_num_batched_tokens",
                "--max-num-batched-tokens",
                text(&self.max_num_batched_tokens),
            ),
            ("scheduler.max_waiting_requests", "--max-waiting-requests", text(&self.max_waiting_requests)),
            ("server.host", "--host", self.host.clone()),
            ("server.port", "--port", text(&self.port)),
            ("server.api_key_env", "--api-key-env", self.api_key_env.clone()),
        ];
        all.into_iter().filter_map(|(key, flag, value)| Some((key, flag, value?))).collect()
    }
}

/// Lays environment and overrides over a raw topology.
pub(super) fn apply(
    raw: &mut RawTopology,
    overrides: &Overrides,
    environment: &Environment,
    violations: &mut Violations,
) {
    let entries = overrides.entries();
    // CONSORT_API_KEY and the like, without the separator, are not settings.
    let variables: HashMap<String, String> = environment
        .iter()
        .filter(|(name, _)| name.strip_prefix(PREFIX).is_some_and(|rest| rest.starts_with('_')))
        .filter(|(name, _)| name.contains(SEPARATOR))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let leaves = match layered(&entries, variables) {
        Ok(leaves) => leaves,
        Err(error) => {
            violations.add_missing("environment", &error.to_string(), "correct the CONSORT_* variables");
            return;
        }
    };
    for (key, value) in leaves {
        let origin = match entries.iter().find(|(known, ..)| *known == key) {
            Some((_, flag, _)) => Origin::Given((*flag).to_owned()),
            None => Origin::Variable(format!("{PREFIX}_{}", key.replace('.', SEPARATOR).to_uppercase())),
        };
        Override { key: &key, value, origin, violations }.put(raw);
    }
    if overrides.without_server {
        raw.server = RawServer::default();
    }
}

fn layered(
    entries: &[(&'static str, &'static str, String)],
    variables: HashMap<String, String>,
) -> Result<Vec<(String, String)>, config::ConfigError> {
    let source = config::Environment::with_prefix(PREFIX)
        .prefix_separator("_")
        .separator(SEPARATOR)
        .ignore_empty(true)
        .source(Some(variables));
    let mut builder = Config::builder().add_source(source);
    for (key, _, value) in entries {
        builder = builder.set_override(key, value.as_str())?;
    }
    let merged: Map<String, Value> = builder.build()?.try_deserialize()?;
    let mut leaves = Vec::new();
    flatten("", merged, &mut leaves)?;
    leaves.sort();
    Ok(leaves)
}

fn flatten(
    prefix: &str,
    table: Map<String, Value>,
    leaves: &mut Vec<(String, String)>,
) -> Result<(), config::ConfigError> {
    for (name, value) in table {
        let key = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
        match value.kind {
            ValueKind::Table(inner) => flatten(&key, inner, leaves)?,
            _ => leaves.push((key, value.into_string()?)),
        }
    }
    Ok(())
}

struct Override<'a> {
    key: &'a str,
    value: String,
    origin: Origin,
    violations: &'a mut Violations,
}

impl Override<'_> {
    fn put(self, raw: &mut RawTopology) {
        match self.key {
            "model.path" => self.text(&mut raw.model.path),
            "model.dtype" => self.text(&mut raw.model.dtype),
            "model.max_model_len" => self.parsed(&mut raw.model.max_model_len, "a whole number"),
            "model.served_model_name" => self.text(&mut raw.model.served_model_name),
            "parallel.tensor_parallel_size" => {
                self.parsed(&mut raw.parallel.tensor_parallel_size, "a whole number")
            }
            "parallel.data_parallel_size" => {
                self.parsed(&mut raw.parallel.data_parallel_size, "a whole number")
            }
            "parallel.weights" => self.numbers(&mut raw.parallel.weights),
            "parallel.threads_per_rank" => self.parsed(&mut raw.parallel.threads_per_rank, "a whole number"),
            "cache.block_size" => self.parsed(&mut raw.cache.block_size, "a whole number"),
            "cache.kv_cache_memory_bytes" => self.bytes(&mut raw.cache.kv_cache_memory_bytes),
            "cache.gpu_memory_utilization" => self.parsed(&mut raw.cache.gpu_memory_utilization, "a number"),
            "scheduler.max_num_seqs" => self.parsed(&mut raw.scheduler.max_num_seqs, "a whole number"),
            "scheduler.max_num_batched_tokens" => {
                self.parsed(&mut raw.scheduler.max_num_batched_tokens, "a whole number");
            }
            "scheduler.max_waiting_requests" => {
                self.parsed(&mut raw.scheduler.max_waiting_requests, "a whole number")
            }
            "server.listen" => self.text(&mut raw.server.listen),
            "server.api_key_env" => self.text(&mut raw.server.api_key_env),
            "server.max_body_bytes" => self.bytes(&mut raw.server.max_body_bytes),
            "server.host" => self.text(&mut raw.server.host),
            "server.port" => self.parsed(&mut raw.server.port, "a whole number"),
            _ => {
                let remedy = "unset it, or correct its spelling: CONSORT_SECTION__KEY, with section and key \
                              as in the topology file";
                self.violations.add(self.key, &self.origin, "there is no such key", remedy);
            }
        }
    }

    fn text(self, leaf: &mut Leaf<String>) {
        *leaf = Some(Sourced { value: self.value, origin: self.origin });
    }

    fn bytes(self, leaf: &mut Leaf<RawBytes>) {
        *leaf = Some(Sourced { value: RawBytes::Text(self.value), origin: self.origin });
    }

    fn parsed<T: std::str::FromStr>(self, leaf: &mut Leaf<T>, what: &str) {
        match self.value.trim().parse() {
            Ok(value) => *leaf = Some(Sourced { value, origin: self.origin }),
            Err(_) => self.violations.add(
                self.key,
                &self.origin,
                format!("`{}` is not {what}", self.value),
                format!("give {what}"),
            ),
        }
    }

    fn numbers(self, leaf: &mut Leaf<Vec<f64>>) {
        let numbers = self.value.trim_matches(['[', ']']).split(',').map(|part| part.trim().parse());
        match numbers.collect::<Result<Vec<f64>, _>>() {
            Ok(value) => *leaf = Some(Sourced { value, origin: self.origin }),
            Err(_) => self.violations.add(
                self.key,
                &self.origin,
                format!("`{}` is not a list of numbers", self.value),
                "give numbers with commas between, such as 2,1,1",
            ),
        }
    }
}
