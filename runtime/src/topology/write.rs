//! A validated topology as TOML: plain, or with the origin of each value.

use std::fmt::Write;

use consort_kernels::device::Isa;
use toml::Value;

use super::{
    Isolation, Topology,
    excerpt::{is_obeyed, shown_path},
};

/// What an engine makes of a topology: values that nobody gave, and what `auto` stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Computed {
    /// `bfloat16` or `float32`.
    pub(crate) dtype: &'static str,
    /// Longest sequence.
    pub(crate) max_model_len: usize,
    /// Cores of the machine.
    pub(crate) cores: usize,
    /// Threads of each rank.
    pub(crate) threads_per_rank: usize,
    /// Instruction set.
    pub(crate) isa: Isa,
    /// Blocks of the KV cache.
    pub(crate) num_blocks: usize,
    /// Their size, over all ranks.
    pub(crate) kv_cache_memory_bytes: u64,
}

/// Columns before the comments, where values leave that much room.
const COMMENT_COLUMN: usize = 48;

/// The settled values; what nobody gave and nothing settles is left out.
pub(super) fn plain(topology: &Topology) -> String {
    let mut out = Sections { topology, out: String::new(), is_annotated: false };
    out.all(None);
    out.out
}

/// All values, those that the engine computes included, each with its origin.
pub(super) fn annotated(topology: &Topology, computed: &Computed) -> String {
    let head =
        "# The effective configuration, each value with its origin: flags > environment > file > default.";
    let mut out = Sections { topology, out: format!("{head}\n"), is_annotated: true };
    out.all(Some(computed));
    out.out
}

struct Sections<'a> {
    topology: &'a Topology,
    out: String,
    is_annotated: bool,
}

impl Sections<'_> {
    fn all(&mut self, computed: Option<&Computed>) {
        self.model(computed);
        self.parallel(computed);
        self.rest(computed);
    }

    fn model(&mut self, computed: Option<&Computed>) {
        let topology = self.topology;
        self.section("[model]");
        let path = match self.is_annotated {
            // Printed elsewhere and fed back, a relative path would mean another place.
            true => std::path::absolute(&topology.model_path).unwrap_or_else(|_| topology.model_path.clone()),
            false => topology.model_path.clone(),
        };
        match path.to_str() {
            Some(path) => self.text("model.path", path, ""),
            None => {
                let _ =
                    writeln!(self.out, "# path is not Unicode and cannot stand here: {}", shown_path(&path));
            }
        }
        let dtype = topology.dtype.name();
        let stands_for = computed.map(|computed| computed.dtype).filter(|actual| *actual != dtype);
        self.text(
            "model.dtype",
            dtype,
            &stands_for.map(|actual| format!("here {actual}")).unwrap_or_default(),
        );
        self.settled(
            "model.max_model_len",
            topology.max_model_len.map(|given| given as u64),
            computed.map(|computed| (computed.max_model_len as u64, "the model's own limit".to_owned())),
        );
        let is_given = topology.origin("model.served_model_name").is_some();
        let name = &topology.served_model_name;
        self.line_of(
            "model.served_model_name",
            &text(name),
            "",
            (!is_given).then_some("computed: from the path"),
        );
    }

    fn parallel(&mut self, computed: Option<&Computed>) {
        let topology = self.topology;
        let (ranks, replicas) = (topology.tensor_parallel_size(), topology.replicas);
        self.section("[parallel]");
        let has_devices = topology.origin("node.devices").is_some();
        let counted = has_devices.then_some(match replicas {
            1 => "computed: one rank for each device",
            _ => "computed: the devices shared out over the replicas",
        });
        self.line_of("parallel.tensor_parallel_size", &ranks.to_string(), "", counted);
        self.number("parallel.data_parallel_size", replicas);
        match &topology.weights {
            Some(weights) => {
                let list = Value::Array(weights.iter().copied().map(Value::Float).collect());
                self.line_of("parallel.weights", &list.to_string(), "", None);
            }
            None => self.absent("weights", "equal shares"),
        }
        self.settled(
            "parallel.threads_per_rank",
            topology.threads_per_rank.map(|given| given as u64),
            computed.map(|computed| {
                let reason = format!("{} cores shared out over {} ranks", computed.cores, ranks * replicas);
                (computed.threads_per_rank as u64, reason)
            }),
        );
        match (topology.cpu_isa, computed) {
            (Some(isa), _) => self.text("parallel.cpu_isa", isa.name(), ""),
            (None, Some(computed)) => {
                self.text("parallel.cpu_isa", "auto", &format!("here {}", computed.isa));
            }
            (None, None) => {}
        }
        self.batch_invariant(computed.is_some());
        let is_served = topology.isolation == Isolation::Process;
        let origin = is_served.then_some("the default of `consort serve` on GPUs");
        self.line_of("parallel.isolation", &text(topology.isolation.name()), "", origin);
        let note = if topology.is_on_cpus() { "no effect on CPUs" } else { "" };
        self.text("parallel.all_reduce", topology.all_reduce.name(), note);
        let devices = topology.devices.iter().map(|device| Value::String(device.to_string())).collect();
        let devices = Value::Array(devices).to_string();
        if has_devices {
            self.section("[[node]]");
            self.line_of("node.devices", &devices, "", None);
        } else if self.is_annotated {
            // As a value it would contradict another number of ranks, once that is written above.
            self.section("# [[node]]");
            let line = format!("# devices = {devices}");
            let _ = writeln!(self.out, "{line:<COMMENT_COLUMN$} # computed: one for each rank");
        }
    }

    /// What was asked for, or what the devices make of it.
    fn batch_invariant(&mut self, with_computed: bool) {
        let (key, topology) = ("parallel.batch_invariant", self.topology);
        let is_on_cpus = topology.is_on_cpus();
        if let Some(asked) = topology.batch_invariant {
            let note = if is_on_cpus && !asked { "no effect on CPUs: they always are" } else { "" };
            self.line_of(key, &asked.to_string(), note, None);
        } else if with_computed {
            let origin = is_on_cpus.then_some("computed: CPUs always are");
            self.line_of(key, &topology.batch_invariant().to_string(), "", origin);
        }
    }

    fn rest(&mut self, computed: Option<&Computed>) {
        let topology = self.topology;
        self.section("[cache]");
        self.number("cache.block_size", topology.block_size);
        self.settled(
            "cache.kv_cache_memory_bytes",
            topology.kv_cache_memory_bytes,
            computed.map(|computed| {
                let of = if topology.replicas > 1 { " of a replica" } else { "" };
                let reason = format!("{} blocks, over all ranks{of}", computed.num_blocks);
                (computed.kv_cache_memory_bytes, reason)
            }),
        );
        match topology.kv_offloading_bytes {
            Some(bytes) => self.number("cache.kv_offloading_bytes", bytes),
            None => self.absent("kv_offloading_bytes", "evicted blocks are not kept"),
        }
        let utilization = Value::Float(topology.gpu_memory_utilization).to_string();
        let note = if topology.is_on_cpus() { "no effect on CPUs" } else { "" };
        self.line_of("cache.gpu_memory_utilization", &utilization, note, None);
        self.number("cache.enable_prefix_caching", topology.enable_prefix_caching);
        let note = match topology.api_keys.len() {
            0 | 1 if topology.salt_per_api_key => "no effect with fewer than two keys",
            _ => "",
        };
        self.line_of("cache.salt_per_api_key", &topology.salt_per_api_key.to_string(), note, None);
        self.section("[scheduler]");
        self.number("scheduler.max_num_seqs", topology.max_num_seqs);
        self.number("scheduler.max_num_batched_tokens", topology.max_num_batched_tokens);
        self.number("scheduler.max_waiting_requests", topology.max_waiting_requests);
        self.number("scheduler.priority_aging_ms", topology.priority_aging_ms);
        self.number("scheduler.async_scheduling", topology.async_scheduling);
        self.section("[server]");
        self.listen();
        match &topology.api_key_env {
            Some(name) => self.text("server.api_key_env", name, ""),
            None => self.absent("api_key_env", "no key is asked for"),
        }
        self.number("server.max_body_bytes", topology.max_body_bytes);
    }

    /// The one value that may come from two flags and a file.
    fn listen(&mut self) {
        let topology = self.topology;
        let parts: Vec<String> =
            [("", "server.listen"), ("host from ", "server.host"), ("port from ", "server.port")]
                .iter()
                .filter_map(|(what, key)| Some(format!("{what}{}", topology.origin(key)?)))
                .collect();
        let origin = if parts.is_empty() { "default".to_owned() } else { parts.join(", ") };
        self.line("listen", &text(&topology.listen.to_string()), &origin, "");
    }

    fn section(&mut self, header: &str) {
        let gap = if self.is_annotated { "\n" } else { "" };
        let _ = writeln!(self.out, "{gap}{header}");
    }

    fn text(&mut self, key: &str, value: &str, note: &str) {
        self.line_of(key, &text(value), note, None);
    }

    fn number(&mut self, key: &str, value: impl std::fmt::Display) {
        self.line_of(key, &value.to_string(), "", None);
    }

    /// A number that somebody gave, or that the engine computes.
    fn settled(&mut self, key: &str, given: Option<u64>, computed: Option<(u64, String)>) {
        match (given, computed) {
            (Some(given), _) => self.number(key, given),
            (None, Some((value, reason))) => {
                self.line_of(key, &value.to_string(), "", Some(&format!("computed: {reason}")));
            }
            (None, None) => {}
        }
    }

    /// A key without a value, which TOML cannot say.
    fn absent(&mut self, name: &str, meaning: &str) {
        if self.is_annotated {
            let _ = writeln!(self.out, "# {name} is not set: {meaning}");
        }
    }

    /// `origin` stands in where nobody gave the value.
    fn line_of(&mut self, key: &str, value: &str, note: &str, origin: Option<&str>) {
        let given = self.topology.origin(key).or(origin).unwrap_or("default");
        self.line(key.rsplit('.').next().unwrap_or(key), value, given, note);
    }

    fn line(&mut self, name: &str, value: &str, origin: &str, note: &str) {
        let line = format!("{name} = {value}");
        let separator = if note.is_empty() { "" } else { "; " };
        let _ = match self.is_annotated {
            true => writeln!(self.out, "{line:<COMMENT_COLUMN$} # {origin}{separator}{note}"),
            false => writeln!(self.out, "{line}"),
        };
    }
}

/// A text in quotes. Unlike what TOML asks for, nothing that terminals obey stands in it as it is.
fn text(value: &str) -> String {
    let mut quoted = String::from("\"");
    for c in value.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            c if is_obeyed(c) => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted + "\""
}
