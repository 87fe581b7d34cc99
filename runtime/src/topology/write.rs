//! A validated topology as TOML.

use std::fmt::Write;

use toml::Value;

use super::Topology;

pub(super) fn to_toml(topology: &Topology) -> String {
    let mut out = Sections { out: String::new() };
    out.section("[model]");
    out.text("path", &topology.model_path.to_string_lossy());
    out.text("dtype", topology.dtype.name());
    out.optional("max_model_len", topology.max_model_len);
    out.text("served_model_name", &topology.served_model_name);
    out.section("[parallel]");
    out.number("tensor_parallel_size", topology.devices.len());
    if let Some(weights) = &topology.weights {
        out.value("weights", &Value::Array(weights.iter().copied().map(Value::Float).collect()));
    }
    out.optional("threads_per_rank", topology.threads_per_rank);
    out.section("[[node]]");
    let devices = topology.devices.iter().map(|device| Value::String(device.to_string())).collect();
    out.value("devices", &Value::Array(devices));
    out.section("[cache]");
    out.number("block_size", topology.block_size);
    out.optional("kv_cache_memory_bytes", topology.kv_cache_memory_bytes);
    out.value("gpu_memory_utilization", &Value::Float(topology.gpu_memory_utilization));
    out.section("[scheduler]");
    out.number("max_num_seqs", topology.max_num_seqs);
    out.number("max_num_batched_tokens", topology.max_num_batched_tokens);
    out.number("max_waiting_requests", topology.max_waiting_requests);
    out.section("[server]");
    out.text("listen", &topology.listen.to_string());
    if let Some(name) = &topology.api_key_env {
        out.text("api_key_env", name);
    }
    out.number("max_body_bytes", topology.max_body_bytes);
    out.out
}

struct Sections {
    out: String,
}

impl Sections {
    fn section(&mut self, header: &str) {
        self.line(format_args!("{header}"));
    }

    fn text(&mut self, key: &str, value: &str) {
        self.value(key, &Value::String(value.to_owned()));
    }

    fn number(&mut self, key: &str, value: impl std::fmt::Display) {
        self.line(format_args!("{key} = {value}"));
    }

    fn optional(&mut self, key: &str, value: Option<impl std::fmt::Display>) {
        if let Some(value) = value {
            self.number(key, value);
        }
    }

    fn value(&mut self, key: &str, value: &Value) {
        self.line(format_args!("{key} = {value}"));
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.out, "{line}");
    }
}
