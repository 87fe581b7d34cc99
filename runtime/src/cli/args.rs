//! The command line as typed. What it means is decided in the commands.

use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};

use crate::engine::EngineBuilder;

/// Distributed inference for language models, over any number of devices.
#[derive(Debug, Parser)]
#[command(name = "consort", version, about, propagate_version = true)]
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
    /// Start a topology and its server, ask a question through it, and tell who did what.
    #[command(hide = true)]
    Demo(DemoArgs),
}

#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    /// A topology (*.toml), a model folder, or a GGUF file.
    #[arg(value_name = "TOPOLOGY|MODEL")]
    pub(super) source: PathBuf,
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
    #[arg(long, value_name = "N")]
    pub(super) max_tokens: Option<usize>,
    /// 0 is greedy; at most 2. The model's own default where absent.
    #[arg(long, value_name = "T")]
    pub(super) temperature: Option<f32>,
    /// Divides the logits of tokens seen before (multiplies negative ones); 1 is neutral.
    #[arg(long, value_name = "R")]
    pub(super) repetition_penalty: Option<f32>,
    /// Taken off a token's logit for each time it was generated; -2 to 2.
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(super) frequency_penalty: Option<f32>,
    /// Taken off the logit of every token that was generated; -2 to 2.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(super) presence_penalty: Option<f32>,
    /// Tokens to generate before the answer may end.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) min_tokens: usize,
    /// Fixes every draw.
    #[arg(long, value_name = "N")]
    pub(super) seed: Option<i64>,
    #[command(flatten)]
    pub(super) model: ModelArgs,
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
    /// Ranks to split the model over; any number.
    #[arg(long, visible_alias = "tp", value_name = "N")]
    tensor_parallel_size: Option<usize>,
    /// bfloat16 or float32.
    #[arg(long)]
    dtype: Option<String>,
    /// Most tokens of one sequence, prompt and answer together.
    #[arg(long, value_name = "TOKENS")]
    max_model_len: Option<usize>,
    /// Compute threads of each rank.
    #[arg(long, value_name = "N")]
    threads_per_rank: Option<usize>,
    /// Memory for keys and values, over all ranks.
    #[arg(long, value_name = "BYTES")]
    kv_cache_memory_bytes: Option<u64>,
    /// Most sequences that run at a time.
    #[arg(long, value_name = "N")]
    max_num_seqs: Option<usize>,
    /// Most tokens of one step.
    #[arg(long, value_name = "TOKENS")]
    max_num_batched_tokens: Option<usize>,
    /// Name under which the model is served.
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
}

/// Flags about the server.
#[derive(Debug, Default, Args)]
pub(super) struct ServerArgs {
    /// Address to listen on.
    #[arg(long)]
    host: Option<String>,
    /// Port to listen on; 0 takes a free one.
    #[arg(long)]
    port: Option<u16>,
    /// Environment variable that holds the key which /v1/* asks for.
    #[arg(long, value_name = "NAME")]
    api_key_env: Option<String>,
}

/// Whether a path names a topology rather than a model.
fn is_topology(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("toml"))
}

impl ModelArgs {
    /// A builder for this source with these flags.
    pub(super) fn builder(self, source: PathBuf, server: ServerArgs) -> EngineBuilder {
        let builder = EngineBuilder::from_source(source.clone(), is_topology(&source));
        builder.with_overrides(|overrides| {
            overrides.tensor_parallel_size = self.tensor_parallel_size;
            overrides.dtype = self.dtype;
            overrides.max_model_len = self.max_model_len;
            overrides.threads_per_rank = self.threads_per_rank;
            overrides.kv_cache_memory_bytes = self.kv_cache_memory_bytes;
            overrides.max_num_seqs = self.max_num_seqs;
            overrides.max_num_batched_tokens = self.max_num_batched_tokens;
            overrides.served_model_name = self.served_model_name;
            overrides.host = server.host;
            overrides.port = server.port;
            overrides.api_key_env = server.api_key_env;
        })
    }
}
