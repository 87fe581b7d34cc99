//! The command line of `consort plan`.

use std::path::PathBuf;

use clap::Args;
use consort_parallel::plan::{GpuSpec, KvFormat, WeightFormat, gpus};

use crate::{cli::args::whole, topology::units};

const HELP: &str = "\
Examples:
  consort plan gpt-oss-120b --gpus 3xH100-80GB --dtype bfloat16
  consort plan models/my-llama --gpus 2x48GB@864GBps --json
  consort plan cluster.toml

Nothing is loaded and no GPU is needed. docs/plan.md says what the numbers mean and how they are computed.

Exit codes:
  0  the model fits
  1  it does not; the smallest change that makes it fit is told
  2  there is no answer: called wrongly, a model or topology that cannot be read or breaks rules, any other error";

#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(in crate::cli) struct PlanArgs {
    /// A model's name such as gpt-oss-120b, a model folder, a GGUF file, or a topology (*.toml).
    #[arg(value_name = "MODEL")]
    pub(super) source: String,
    /// Cards, one rank on each: 3xH100-80GB, H200, 2x48GB@864GBps, several with commas between; where a topology has
    /// replicas, those of replica 0 first. This machine's, or its processor, where a folder, file or topology is
    /// planned without.
    #[arg(long, value_name = "LIST", value_parser = cards)]
    pub(super) gpus: Option<Cards>,
    /// How weights are held: auto for the checkpoint's own format, bfloat16, float32, fp8 or mxfp4.
    #[arg(long, value_name = "FORMAT", value_parser = format)]
    pub(super) dtype: Option<Wanted<WeightFormat>>,
    /// How keys and values are held: auto, bfloat16, float32 or fp8.
    #[arg(long, value_name = "FORMAT", value_parser = kv_format)]
    pub(super) kv_cache_dtype: Option<Wanted<KvFormat>>,
    /// Most tokens of one sequence; what the model was trained for unless said.
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true, value_parser = whole)]
    pub(super) max_model_len: Option<usize>,
    /// Most sequences that run at a time.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(super) max_num_seqs: Option<usize>,
    /// Most tokens of one step, which activations grow with.
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true, value_parser = whole)]
    pub(super) max_num_batched_tokens: Option<usize>,
    /// Tokens of one KV block.
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true, value_parser = whole)]
    pub(super) block_size: Option<usize>,
    /// Part of a card's memory that may be used; all but the stated reserves unless said.
    #[arg(long, value_name = "PART", value_parser = part)]
    pub(super) gpu_memory_utilization: Option<f64>,
    /// Memory for keys and values over all ranks of a replica: bytes, or an amount such as 40GiB.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub(super) kv_cache_memory_bytes: Option<u64>,
    /// Tokens that each sequence has when the time of a step is estimated.
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, allow_negative_numbers = true, value_parser = whole)]
    pub(super) step_context: usize,
    /// Print one JSON object instead of text.
    #[arg(long, conflicts_with = "emit_toml")]
    pub(super) json: bool,
    /// Draw each rank's memory into this file besides.
    #[arg(long, value_name = "FILE")]
    pub(super) svg: Option<PathBuf>,
    /// Print a topology for `consort serve` instead of text.
    #[arg(long)]
    pub(super) emit_toml: bool,
}

/// Cards of a list.
#[derive(Clone, Debug)]
pub(super) struct Cards(pub(super) Vec<GpuSpec>);

/// A format, or whatever the checkpoint has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted<F> {
    Auto,
    This(F),
}

fn cards(text: &str) -> Result<Cards, String> {
    gpus::parse(text).map(Cards).map_err(|error| error.to_string())
}

fn format(text: &str) -> Result<Wanted<WeightFormat>, String> {
    if text.trim().eq_ignore_ascii_case("auto") {
        return Ok(Wanted::Auto);
    }
    text.parse().map(Wanted::This)
}

fn kv_format(text: &str) -> Result<Wanted<KvFormat>, String> {
    const FORMATS: [KvFormat; 3] = [KvFormat::BFloat16, KvFormat::Float32, KvFormat::Fp8];
    if text.trim().eq_ignore_ascii_case("auto") {
        return Ok(Wanted::Auto);
    }
    let known = FORMATS.into_iter().find(|format| format.name().eq_ignore_ascii_case(text.trim()));
    known.map(Wanted::This).ok_or_else(|| "use auto, bfloat16, float32 or fp8".to_owned())
}

fn part(text: &str) -> Result<f64, String> {
    let part = text.trim().parse::<f64>().ok().filter(|part| *part > 0.0 && *part <= 1.0);
    part.ok_or_else(|| "must be above 0 and at most 1".to_owned())
}

fn bytes(text: &str) -> Result<u64, String> {
    units::bytes_of_text(text.trim())
        .ok_or_else(|| "not an amount of memory; write 40GiB or a number of bytes".to_owned())
}
