//! The command line as typed. What it means is decided in the commands.

use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::{bench::BenchArgs, doctor::WantedDevice, plan::PlanArgs};
use crate::{
    convert::DType,
    engine::EngineBuilder,
    topology::{Overrides, units},
};

const AFTER_HELP: &str = "\
Exit codes:
  0  done; a server that was asked to stop has finished its open requests
  1  failed: an invalid configuration, an unusable model, an address that is taken, an engine lost for good
  2  called wrongly: unknown flags, missing arguments, values that flags or requests do not take";

const SERVE_HELP: &str = "\
Configuration:
  Flags win over environment variables, those over the topology file, that over defaults. The key KEY of the table
  [SECTION] is set by the variable CONSORT_SECTION__KEY, as in CONSORT_SERVER__LISTEN=0.0.0.0:8000, and the instruction
  set by CONSORT_CPU_ISA too. --print-config shows the outcome, and where each value is from, without serving.

Exit codes:
  0  asked to stop, and all open requests finished; or --print-config with a configuration that fits the model
     (weights are not read, and the address is not taken)
  1  an invalid configuration (all problems are listed), an unusable model, an address that cannot be listened on, an
     engine lost for good, or open requests cut off by a second signal
  2  called wrongly: unknown flags, missing arguments";

const DOCTOR_HELP: &str = "\
A line `! what -> what to do` is a gap: something is missing or not as it should be. Nothing is changed by looking.

Exit codes:
  0  a model can be served, on the devices asked for if any are (on a CPU one always can)
  1  a device that --device or the topology names cannot be used, or the topology is invalid
  2  called wrongly: unknown flags, devices that are none";

/// Distributed inference for language models, over any number of devices.
#[derive(Debug, Parser)]
#[command(name = "consort", version, about, propagate_version = true, after_help = AFTER_HELP)]
pub(super) struct Cli {
    /// What to log to standard error, as in `info` or `consort=debug,warn`; RUST_LOG says the same.
    #[arg(long, global = true, value_name = "FILTER")]
    pub(super) log: Option<String>,
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Serve a model with OpenAI's API.
    Serve(ServeArgs),
    /// Answer one prompt on standard output.
    Run(RunArgs),
    /// Measure how fast a model answers on this machine: prefill, decode, and many requests at once.
    Bench(BenchArgs),
    /// Write a model as a folder that `transformers` loads: BF16 safetensors, configuration, tokenizer.
    Convert(ConvertArgs),
    /// Tell whether a model fits, for how many users, and how fast it could be, before anything is loaded.
    Plan(PlanArgs),
    /// Tell what this machine has for serving models, GPUs above all, and what to do about each gap.
    Doctor(DoctorArgs),
    /// One rank of a server whose ranks are processes; the server starts it.
    #[command(hide = true)]
    Shard,
    /// Start a topology and its server, ask a question through it, and tell who did what.
    #[command(hide = true)]
    Demo(DemoArgs),
}

#[derive(Debug, Args)]
#[command(after_help = SERVE_HELP)]
pub(super) struct ServeArgs {
    /// A topology (*.toml), a model folder, or a GGUF file.
    #[arg(value_name = "TOPOLOGY|MODEL")]
    pub(super) source: PathBuf,
    /// Print the effective configuration as a topology, with the origin of each value, and exit. Loads no weights.
    #[arg(long)]
    pub(super) print_config: bool,
    #[command(flatten)]
    pub(super) model: ModelArgs,
    #[command(flatten)]
    pub(super) server: ServerArgs,
}

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// A model folder, a GGUF file, or a topology (*.toml).
    #[arg(value_name = "MODEL")]
    pub(super) source: PathBuf,
    /// What to ask.
    pub(super) prompt: String,
    /// Continue the prompt as it stands instead of asking it as a chat's question.
    #[arg(long)]
    pub(super) raw: bool,
    /// Most tokens to generate.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(super) max_tokens: Option<usize>,
    /// 0 is greedy; at most 2. The model's own default where absent.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(super) temperature: Option<f32>,
    /// Divides the logits of tokens seen before (multiplies negative ones); 1 is neutral.
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub(super) repetition_penalty: Option<f32>,
    /// Taken off a token's logit for each time it was generated; -2 to 2.
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(super) frequency_penalty: Option<f32>,
    /// Taken off the logit of every token that was generated; -2 to 2.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(super) presence_penalty: Option<f32>,
    /// Tokens to generate before the answer may end.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = whole)]
    pub(super) min_tokens: usize,
    /// Fixes every draw.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(super) seed: Option<i64>,
    #[command(flatten)]
    pub(super) model: ModelArgs,
}

#[derive(Debug, Args)]
pub(super) struct ConvertArgs {
    /// A GGUF file, or a folder with config.json and safetensors.
    #[arg(value_name = "INPUT")]
    pub(super) input: PathBuf,
    /// The folder to write; it appears when everything is there.
    #[arg(value_name = "OUTPUT")]
    pub(super) output: PathBuf,
    /// Type of the weights.
    #[arg(long, value_enum, default_value_t = WeightType::Bfloat16)]
    pub(super) dtype: WeightType,
    /// Most bytes of one weights file; larger models are written as several files and an index.
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = shard_bytes)]
    pub(super) max_shard_size: u64,
    /// Replace the model that is in OUTPUT.
    #[arg(long)]
    pub(super) overwrite: bool,
}

#[derive(Debug, Args)]
#[command(after_help = DOCTOR_HELP)]
pub(super) struct DoctorArgs {
    /// A topology (*.toml), whose devices must be there.
    #[arg(value_name = "TOPOLOGY")]
    pub(super) topology: Option<PathBuf>,
    /// Devices that must be there: cuda for any GPU, else as in --devices of `consort serve`.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(super) device: Vec<WantedDevice>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(super) json: bool,
}

/// Types that weights are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum WeightType {
    /// Rounded to nearest, ties to even: what loading in bfloat16 computes with.
    Bfloat16,
    /// The values as they are stored, or as their blocks expand.
    Float32,
}

impl WeightType {
    pub(super) fn dtype(self) -> DType {
        match self {
            WeightType::Bfloat16 => DType::BF16,
            WeightType::Float32 => DType::F32,
        }
    }
}

/// A number of things, which no number below 0 is.
pub(super) fn whole(text: &str) -> Result<usize, String> {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    text.parse().map_err(|_| match digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.is_empty() {
        true if text.starts_with('-') => format!("must be at least 0, got {text}"),
        true => "too large".to_owned(),
        false => "not a whole number".to_owned(),
    })
}

/// Bytes of a size as people write it.
fn shard_bytes(text: &str) -> Result<u64, String> {
    match units::bytes_of_text(text.trim()) {
        Some(0) => Err("a file must hold something".to_owned()),
        Some(bytes) => Ok(bytes),
        None => Err("not a size; write 5GB, 512MiB or a number of bytes".to_owned()),
    }
}

#[derive(Debug, Args)]
pub(super) struct DemoArgs {
    /// A topology (*.toml), a model folder, or a GGUF file.
    #[arg(value_name = "TOPOLOGY|MODEL")]
    pub(super) source: PathBuf,
    /// Leave the server up until Ctrl-C.
    #[arg(long)]
    pub(super) serve: bool,
    /// What to ask.
    #[arg(long, default_value = "What is the capital of France?")]
    pub(super) question: String,
    #[command(flatten)]
    pub(super) model: ModelArgs,
    #[command(flatten)]
    pub(super) server: ServerArgs,
}

/// Flags about the model; each wins over environment and file.
#[derive(Debug, Args)]
pub(super) struct ModelArgs {
    /// Model folder or GGUF file, in place of the topology's.
    #[arg(long, value_name = "PATH")]
    model: Option<String>,
    /// Name under which the model is served.
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Number format: bfloat16, float32, or auto for the checkpoint's.
    #[arg(long)]
    dtype: Option<String>,
    /// Most tokens of one sequence, prompt and answer together.
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true, value_parser = whole)]
    max_model_len: Option<usize>,
    /// Ranks to split the model over, in each replica; any number.
    #[arg(long, visible_alias = "tp", value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    tensor_parallel_size: Option<usize>,
    /// Replicas of the model, each on devices of its own; requests go where their prefix is.
    #[arg(long, visible_alias = "dp", value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    data_parallel_size: Option<usize>,
    /// Device of each rank, replica by replica, as in cpu,cpu or cuda:0,cuda:1; cuda:GPU-UUID names a card for good.
    #[arg(long, value_name = "LIST")]
    devices: Option<String>,
    /// Relative share of each rank of a replica, as in 2,1,1.
    #[arg(long, value_name = "LIST", allow_negative_numbers = true)]
    weights: Option<String>,
    /// Compute threads of each rank.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    threads_per_rank: Option<usize>,
    /// Instruction set: portable, avx2, avx512, amx, or auto for the machine's best. All compute the same bits.
    #[arg(long, value_name = "ISA")]
    cpu_isa: Option<String>,
    /// A request's tokens do not depend on what else runs. Off on GPUs unless asked for, because it costs speed; CPUs
    /// always compute so.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    batch_invariant: Option<bool>,
    /// What separates ranks: thread, or process for one process of each rank, whose faults end only that rank. Threads
    /// unless said otherwise, but processes where a server is on GPUs.
    #[arg(long, value_name = "KIND")]
    isolation: Option<String>,
    /// What ranks on GPUs sum with: kernels, nccl, or auto for whichever is faster at a size. Without effect on CPUs.
    #[arg(long, value_name = "MEANS")]
    all_reduce: Option<String>,
    /// Tokens of one KV block.
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true, value_parser = whole)]
    block_size: Option<usize>,
    /// Memory for keys and values over all ranks of a replica: bytes, or an amount such as 512MiB.
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    kv_cache_memory_bytes: Option<String>,
    /// Memory of the host for evicted blocks, over all ranks: bytes, or an amount such as 2GiB. None unless given.
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    kv_offloading_bytes: Option<String>,
    /// Part of a GPU's memory that may be used; no effect on CPUs.
    #[arg(long, value_name = "PART", allow_negative_numbers = true)]
    gpu_memory_utilization: Option<f64>,
    /// Keep the keys and values of what was computed for requests that begin alike; on unless said otherwise.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    enable_prefix_caching: Option<bool>,
    /// Most sequences that run at a time.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    max_num_seqs: Option<usize>,
    /// Most tokens of one step.
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true, value_parser = whole)]
    max_num_batched_tokens: Option<usize>,
    /// Most requests that wait for their turn.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    max_waiting_requests: Option<usize>,
    /// How much earlier a request must have come to go before one whose priority is better by one; with 0 priorities
    /// have no effect.
    #[arg(long, value_name = "MS", allow_negative_numbers = true, value_parser = whole)]
    priority_aging_ms: Option<usize>,
    /// Plan and enqueue the next step while a GPU computes one; on unless said otherwise. Answers are the same.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    async_scheduling: Option<bool>,
}

/// Flags about the server.
#[derive(Debug, Default, Args)]
pub(super) struct ServerArgs {
    /// Address to listen on.
    #[arg(long)]
    host: Option<String>,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, allow_negative_numbers = true)]
    port: Option<u16>,
    /// Environment variable that holds the key which /v1/* asks for, or several with commas between.
    #[arg(long, value_name = "NAME")]
    api_key_env: Option<String>,
    /// Where several API keys exist, requests with different ones share no cached prefixes; on unless said otherwise.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    salt_per_api_key: Option<bool>,
    /// Largest request body: bytes, or an amount such as 16MiB.
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    max_body_bytes: Option<String>,
}

/// Whether a path names a topology rather than a model.
pub(super) fn is_topology(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("toml"))
}

impl ModelArgs {
    /// A builder for this source with these flags.
    pub(super) fn builder(self, source: PathBuf, server: ServerArgs) -> EngineBuilder {
        let builder = EngineBuilder::from_source(source.clone(), is_topology(&source));
        builder.with_overrides(|overrides| {
            *overrides = Overrides {
                model: self.model,
                served_model_name: self.served_model_name,
                dtype: self.dtype,
                max_model_len: self.max_model_len,
                tensor_parallel_size: self.tensor_parallel_size,
                data_parallel_size: self.data_parallel_size,
                devices: self.devices,
                weights: self.weights,
                threads_per_rank: self.threads_per_rank,
                cpu_isa: self.cpu_isa,
                batch_invariant: self.batch_invariant,
                isolation: self.isolation,
                isolates_gpus: false,
                all_reduce: self.all_reduce,
                block_size: self.block_size,
                kv_cache_memory_bytes: self.kv_cache_memory_bytes,
                kv_offloading_bytes: self.kv_offloading_bytes,
                gpu_memory_utilization: self.gpu_memory_utilization,
                enable_prefix_caching: self.enable_prefix_caching,
                salt_per_api_key: server.salt_per_api_key,
                max_num_seqs: self.max_num_seqs,
                max_num_batched_tokens: self.max_num_batched_tokens,
                max_waiting_requests: self.max_waiting_requests,
                priority_aging_ms: self.priority_aging_ms.map(|milliseconds| milliseconds as u64),
                async_scheduling: self.async_scheduling,
                host: server.host,
                port: server.port,
                api_key_env: server.api_key_env,
                max_body_bytes: server.max_body_bytes,
                without_server: false,
                server_as_written: false,
            };
        })
    }
}
