//! The names of all tables and keys, and what sets each besides the file.

/// One key of a topology.
pub(super) struct Key {
    /// Table and name, as in `model.path`.
    pub(super) name: &'static str,
    /// The flag of the command line that sets it.
    pub(super) flag: Option<&'static str>,
    /// Whether a file may say it. `server.host` and `server.port` are parts of `server.listen` there.
    pub(super) in_file: bool,
    /// Whether an environment variable may say it.
    pub(super) in_environment: bool,
}

const fn key(name: &'static str, flag: &'static str) -> Key {
    Key { name, flag: Some(flag), in_file: true, in_environment: true }
}

/// Every key there is. [`RawTopology::slot`](super::raw::RawTopology::slot) has a place for each.
pub(super) const KEYS: [Key; 30] = [
    key("model.path", "--model"),
    key("model.dtype", "--dtype"),
    key("model.max_model_len", "--max-model-len"),
    key("model.served_model_name", "--served-model-name"),
    key("parallel.tensor_parallel_size", "--tensor-parallel-size"),
    key("parallel.data_parallel_size", "--data-parallel-size"),
    key("parallel.weights", "--weights"),
    key("parallel.threads_per_rank", "--threads-per-rank"),
    key("parallel.cpu_isa", "--cpu-isa"),
    key("parallel.batch_invariant", "--batch-invariant"),
    key("parallel.isolation", "--isolation"),
    key("parallel.all_reduce", "--all-reduce"),
    // There may be several nodes: only a file can tell them apart.
    Key { flag: None, in_environment: false, ..key("node.host", "") },
    key("node.devices", "--devices"),
    key("cache.block_size", "--block-size"),
    key("cache.kv_cache_memory_bytes", "--kv-cache-memory-bytes"),
    key("cache.kv_offloading_bytes", "--kv-offloading-bytes"),
    key("cache.gpu_memory_utilization", "--gpu-memory-utilization"),
    key("cache.enable_prefix_caching", "--enable-prefix-caching"),
    key("cache.salt_per_api_key", "--salt-per-api-key"),
    key("scheduler.max_num_seqs", "--max-num-seqs"),
    key("scheduler.max_num_batched_tokens", "--max-num-batched-tokens"),
    key("scheduler.max_waiting_requests", "--max-waiting-requests"),
    key("scheduler.priority_aging_ms", "--priority-aging-ms"),
    key("scheduler.async_scheduling", "--async-scheduling"),
    Key { flag: None, ..key("server.listen", "") },
    key("server.api_key_env", "--api-key-env"),
    key("server.max_body_bytes", "--max-body-bytes"),
    Key { in_file: false, ..key("server.host", "--host") },
    Key { in_file: false, ..key("server.port", "--port") },
];

/// The tables, in the order in which topologies are written. `node` may be repeated.
pub(super) const TABLES: [&str; 6] = ["model", "parallel", "node", "cache", "scheduler", "server"];

/// Short name of the one setting that scripts set for a whole machine.
pub(super) const CPU_ISA_VARIABLE: &str = "CONSORT_CPU_ISA";

impl Key {
    /// Its table, and its name there.
    pub(super) fn parts(&self) -> (&'static str, &'static str) {
        self.name.split_once('.').unwrap_or(("", self.name))
    }

    /// The environment variable that sets it.
    pub(super) fn variable(&self) -> String {
        let (table, name) = self.parts();
        format!("CONSORT_{}__{}", table.to_uppercase(), name.to_uppercase())
    }
}

/// The keys that a file may have in a table.
pub(super) fn keys_of(table: &str) -> impl Iterator<Item = &'static str> {
    KEYS.iter()
        .filter(|key| key.in_file)
        .map(Key::parts)
        .filter(move |(of, _)| *of == table)
        .map(|(_, name)| name)
}

/// A table as its header writes it.
pub(super) fn header(table: &str) -> String {
    if table == "node" { "[[node]]".to_owned() } else { format!("[{table}]") }
}

/// All environment variables that are settings.
pub(crate) fn setting_variables() -> Vec<String> {
    let of_keys = KEYS.iter().filter(|key| key.in_environment).map(Key::variable);
    of_keys.chain([CPU_ISA_VARIABLE.to_owned()]).collect()
}

/// Those that choose the instruction set, the short one first.
pub(crate) fn isa_variables() -> impl Iterator<Item = String> {
    std::iter::once(CPU_ISA_VARIABLE.to_owned()).chain(variable_of("parallel.cpu_isa"))
}

/// Whether a variable holds the name of the one that holds the API key.
pub(crate) fn is_key_name_variable(name: &str) -> bool {
    variable_of("server.api_key_env").is_some_and(|variable| variable == name)
}

fn variable_of(name: &str) -> Option<String> {
    KEYS.iter().find(|key| key.name == name).map(Key::variable)
}
