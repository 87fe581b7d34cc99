//! The configuration that a GGUF file's metadata gives.

use std::{num::NonZeroUsize, path::Path};

use consort_kernels::rope::Yarn;

use crate::{
    checkpoint::{
        config_check::{self, DEFAULT_ROPE_THETA},
        error::CheckpointError,
        rope_scaling::{self, DEFAULT_BETAS},
    },
    config::{Architecture, GenerationDefaults, ModelConfig, RopeConfig, RopeScaling},
};

use super::{Gguf, Shapes};

const ARCHITECTURE: &str = "llama";

const TYPE: &str = "llama.rope.scaling.type";
const FACTOR: &str = "llama.rope.scaling.factor";
const ORIGINAL_CONTEXT: &str = "llama.rope.scaling.original_context_length";
const ATTENTION_FACTOR: &str = "llama.rope.scaling.attn_factor";
const BETA_FAST: &str = "llama.rope.scaling.yarn_beta_fast";
const BETA_SLOW: &str = "llama.rope.scaling.yarn_beta_slow";

/// Refuses files that hold something else than a whole model of the family.
pub(super) fn check_kind(path: &Path, gguf: &Gguf) -> Result<(), CheckpointError> {
    // Before anything else: all parts but the first lack what makes a model, the architecture included.
    check_whole(path, gguf)?;
    check_architecture(path, gguf)
}

/// Refuses models of other families.
pub(super) fn check_architecture(path: &Path, gguf: &Gguf) -> Result<(), CheckpointError> {
    let keys = Keys { path, gguf };
    match gguf.string("general.architecture") {
        Some(ARCHITECTURE) if keys.size("llama.expert_count")?.is_some_and(|count| count > 0) => {
            Err(keys.unsupported("a mixture of experts", "dense models"))
        }
        Some(ARCHITECTURE) => Ok(()),
        Some(other) => Err(keys.unsupported(format!("the architecture `{other}`"), ARCHITECTURE)),
        None => Err(keys.bad("general.architecture", "is missing or not a string")),
    }
}

/// Refuses a part of a model.
fn check_whole(path: &Path, gguf: &Gguf) -> Result<(), CheckpointError> {
    let keys = Keys { path, gguf };
    if let Some(count) = keys.size("split.count")?.filter(|count| *count > 1) {
        // Counted from 0 in the file, from 1 in the names of the parts.
        let number = keys.size("split.no")?.map(|number| number.saturating_add(1).to_string());
        let number = number.as_deref().unwrap_or("one");
        let needed = format!("the other parts of a model that was split (it is part {number} of {count})");
        return Err(
            keys.unsupported(needed, "one whole file; merge the parts with `llama-gguf-split --merge`")
        );
    }
    Ok(())
}

/// Builds the configuration of a file that [`check_kind`] has let pass. `factors` are what `rope_freqs.weight` holds.
pub(super) fn parse(
    path: &Path,
    gguf: &Gguf,
    shapes: &Shapes,
    factors: Option<Vec<f32>>,
) -> Result<ModelConfig, CheckpointError> {
    let keys = Keys { path, gguf };
    let hidden_size = keys.required_size("llama.embedding_length")?;
    let num_heads = keys.required_size("llama.attention.head_count")?;
    let head_dim = match keys.size("llama.attention.key_length")? {
        Some(head_dim) => head_dim,
        None => config_check::derived_head_dim(hidden_size, num_heads)
            .map_err(|problem| CheckpointError::Inconsistent { path: path.to_owned(), problem })?,
    };
    refuse_variants(&keys, head_dim)?;
    let sliding_window = sliding_window(&keys)?;
    let num_layers = keys.required_size("llama.block_count")?;
    let max_position_embeddings = keys.required_size("llama.context_length")?;
    let config = ModelConfig {
        // One name serves both families here, and the window is what tells them apart.
        architecture: if sliding_window.is_some() { Architecture::Mistral } else { Architecture::Llama },
        hidden_size,
        num_layers,
        num_heads,
        num_kv_heads: keys.size("llama.attention.head_count_kv")?.unwrap_or(num_heads),
        head_dim,
        intermediate_size: keys.required_size("llama.feed_forward_length")?,
        vocab_size: vocab_size(&keys, shapes)?,
        max_position_embeddings,
        rms_norm_eps: keys
            .float("llama.attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| keys.bad("llama.attention.layer_norm_rms_epsilon", "is missing"))?,
        rope: rope(&keys, factors, max_position_embeddings)?,
        layer_windows: config_check::alike(path, num_layers, sliding_window)?,
        tie_word_embeddings: !shapes.has_head,
        eos_token_ids: eos_token_ids(&keys)?,
        bos_token_id: bos_token_id(&keys)?,
    };
    config_check::check(path, &config)?;
    check_tokens_fit(&keys, config.vocab_size)?;
    Ok(config)
}

/// Sampling defaults, which newer files carry. Values out of range are the file's loss, not a reason to refuse
/// the model: they are dropped.
pub(super) fn generation_defaults(gguf: &Gguf) -> GenerationDefaults {
    let within = |key: &str, holds: fn(f32) -> bool| gguf.f32(key).filter(|value| holds(*value));
    GenerationDefaults {
        temperature: within("general.sampling.temp", |t| t.is_finite() && t >= 0.0),
        top_k: gguf.u32("general.sampling.top_k").filter(|k| *k > 0),
        top_p: within("general.sampling.top_p", |p| p > 0.0 && p <= 1.0),
        min_p: within("general.sampling.min_p", |p| (0.0..=1.0).contains(&p)),
        repetition_penalty: within("general.sampling.penalty_repeat", |r| r.is_finite() && r > 0.0),
    }
}

/// The embedding's rows are the truth, where there is one that can be read; a vocabulary may have padding rows beyond
/// the tokenizer's tokens.
fn vocab_size(keys: &Keys<'_>, shapes: &Shapes) -> Result<usize, CheckpointError> {
    const KEY: &str = "llama.vocab_size";
    let claimed = keys.size(KEY)?;
    if let (Some(claimed), Some(rows)) = (claimed, shapes.vocab_size)
        && claimed != rows
    {
        tracing::warn!(path = %keys.path.display(), claimed, rows, "{KEY} is not the embedding's rows, ignored");
    }
    let tokens = || keys.gguf.strings("tokenizer.ggml.tokens").map(<[String]>::len);
    shapes
        .vocab_size
        .or(claimed)
        .or_else(tokens)
        .ok_or_else(|| keys.bad(KEY, "is missing, and there are neither tokens nor an embedding to count"))
}

fn check_tokens_fit(keys: &Keys<'_>, vocab_size: usize) -> Result<(), CheckpointError> {
    const KEY: &str = "tokenizer.ggml.tokens";
    match keys.gguf.strings(KEY) {
        Some(tokens) if tokens.len() > vocab_size => {
            Err(keys.bad(KEY, format!("has {} entries, but the vocabulary has {vocab_size}", tokens.len())))
        }
        _ => Ok(()),
    }
}

/// The end of the text, and the end of a turn where that is another token.
fn eos_token_ids(keys: &Keys<'_>) -> Result<Vec<u32>, CheckpointError> {
    let mut ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        ids.extend(keys.token(key)?);
    }
    Ok(config_check::unique_tokens(ids))
}

/// The token before a prompt, if the file wants one there.
fn bos_token_id(keys: &Keys<'_>) -> Result<Option<u32>, CheckpointError> {
    Ok(keys.token("tokenizer.ggml.bos_token_id")?.filter(|_| keys.gguf.adds_bos()))
}

/// Refuses what the Llama layers would silently compute wrongly.
fn refuse_variants(keys: &Keys<'_>, head_dim: usize) -> Result<(), CheckpointError> {
    for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
        if let Some(width) = keys.size(key)?.filter(|width| *width != head_dim) {
            let needed = format!("`{key}` {width} beside heads of width {head_dim}");
            return Err(keys.unsupported(needed, "the same width for both"));
        }
    }
    let scales = ["attention.scale", "logit_scale", "residual_scale", "embedding_scale"];
    for key in scales.map(|scale| format!("llama.{scale}")) {
        // 0 is how converters write "unset".
        if let Some(scale) = keys.float(&key)?.filter(|scale| *scale != 0.0 && *scale != 1.0) {
            return Err(keys.unsupported(format!("`{key}` {scale}"), "models without it"));
        }
    }
    Ok(())
}

/// A window over all layers; 0 is how converters write "none". Which layers have one where not all do, the format says
/// in a pattern whose meaning differs from model to model.
fn sliding_window(keys: &Keys<'_>) -> Result<Option<NonZeroUsize>, CheckpointError> {
    let window = keys.size("llama.attention.sliding_window")?.and_then(NonZeroUsize::new);
    if window.is_some() && keys.gguf.contains("llama.attention.sliding_window_pattern") {
        let needed = "`llama.attention.sliding_window_pattern`";
        return Err(keys.unsupported(needed, "one window over all layers"));
    }
    Ok(window)
}

/// Rotary embedding; `context` is the whole model's, in tokens.
fn rope(keys: &Keys<'_>, factors: Option<Vec<f32>>, context: usize) -> Result<RopeConfig, CheckpointError> {
    let theta = keys.float("llama.rope.freq_base")?.unwrap_or(DEFAULT_ROPE_THETA);
    let kind = keys.string(TYPE)?;
    let factor = match keys.float(FACTOR)? {
        Some(factor) => Some(factor),
        // The spelling of files from 2023.
        None => keys.float("llama.rope.scale_linear")?,
    };
    let scaling = match (kind, factor) {
        (Some("none"), _) | (None | Some("linear"), None) => RopeScaling::None,
        // A factor without a type means linear, by the format's definition; 0 is how converters write "unset".
        (None, Some(0.0)) | (None | Some("linear"), Some(1.0)) => RopeScaling::None,
        (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
        (Some("yarn"), Some(factor)) => yarn(keys, factor, context)?,
        (Some("yarn"), None) => return Err(keys.bad(FACTOR, "is missing")),
        (Some(other), _) => {
            let supported = "none, linear, yarn and `rope_freqs.weight`";
            return Err(keys.unsupported(format!("rope scaling `{other}`"), supported));
        }
    };
    if !matches!(scaling, RopeScaling::Yarn { .. }) {
        let attention_factor = keys.float(ATTENTION_FACTOR)?;
        if let Some(factor) = attention_factor.filter(|factor| *factor != 0.0 && *factor != 1.0) {
            return Err(keys.unsupported(format!("`{ATTENTION_FACTOR}` {factor}"), "it beside yarn scaling"));
        }
    }
    let rope = RopeConfig { theta, scaling };
    if let Some((value, problem)) = rope_scaling::problem(&rope) {
        return Err(keys.bad(key_of(value), problem));
    }
    match (factors, &rope.scaling) {
        (None, _) => Ok(rope),
        (Some(factors), RopeScaling::None) => {
            Ok(RopeConfig { theta, scaling: RopeScaling::Factors(factors) })
        }
        _ => Err(keys.unsupported("both rope scaling and `rope_freqs.weight`", "one of them")),
    }
}

/// YaRN as llama.cpp computes it: the recommended attention factor, or that of `yarn_log_multiplier`, times
/// `attn_factor`.
fn yarn(keys: &Keys<'_>, factor: f32, context: usize) -> Result<RopeScaling, CheckpointError> {
    const EXTRAPOLATION: &str = "llama.rope.scaling.yarn_ext_factor";
    const YARN_ATTENTION_FACTOR: &str = "llama.rope.scaling.yarn_attn_factor";
    // Negative means unset.
    if let Some(part) = keys.float(EXTRAPOLATION)?.filter(|part| *part >= 0.0 && *part != 1.0) {
        return Err(keys.unsupported(format!("`{EXTRAPOLATION}` {part}"), "1"));
    }
    let weights = [1.0, keys.float("llama.rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0)];
    let recommended = rope_scaling::attention_factor(factor, weights);
    // Converters write the model's own factor here, and llama.cpp puts the recommended one in its place. Where they
    // differ, nobody can tell which of the two the file's maker tried.
    let written = keys.float(YARN_ATTENTION_FACTOR)?;
    if let Some(written) = written.filter(|written| (written - recommended).abs() > 1e-3) {
        let needed = format!("`{YARN_ATTENTION_FACTOR}` {written}");
        return Err(keys.unsupported(needed, &format!("{recommended}, which follows from the factor")));
    }
    let yarn = Yarn {
        factor,
        original_context: keys.size(ORIGINAL_CONTEXT)?.unwrap_or(context),
        beta_fast: keys.float(BETA_FAST)?.unwrap_or(DEFAULT_BETAS.0),
        beta_slow: keys.float(BETA_SLOW)?.unwrap_or(DEFAULT_BETAS.1),
        truncate: true,
    };
    let attention_factor = recommended * keys.float(ATTENTION_FACTOR)?.unwrap_or(1.0);
    Ok(RopeScaling::Yarn { yarn, attention_factor })
}

fn key_of(value: rope_scaling::Value) -> &'static str {
    match value {
        rope_scaling::Value::Theta => "llama.rope.freq_base",
        rope_scaling::Value::Factor => FACTOR,
        rope_scaling::Value::OriginalContext => ORIGINAL_CONTEXT,
        rope_scaling::Value::BetaFast => BETA_FAST,
        rope_scaling::Value::BetaSlow => BETA_SLOW,
        rope_scaling::Value::AttentionFactor => ATTENTION_FACTOR,
    }
}

/// Metadata looked up with errors that name the key: unlike the public getters, a value of the wrong type (such
/// as one head count per layer) is an error and not an absence.
pub(super) struct Keys<'a> {
    pub(super) path: &'a Path,
    pub(super) gguf: &'a Gguf,
}

impl<'a> Keys<'a> {
    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, CheckpointError> {
        let value = self.gguf.unsigned(key).and_then(|value| usize::try_from(value).ok());
        self.typed(key, value, "one non-negative integer")
    }

    /// A size that may stand there once for each layer, if it is the same for all.
    pub(super) fn uniform_size(&self, key: &str) -> Result<Option<usize>, CheckpointError> {
        let Some(values) = self.gguf.i32s(key) else { return self.size(key) };
        let first = values.first().filter(|first| values.iter().all(|value| value == *first));
        let size = first.and_then(|first| usize::try_from(*first).ok());
        self.typed(key, size, "one non-negative integer, or the same one for every layer")
    }

    fn required_size(&self, key: &str) -> Result<usize, CheckpointError> {
        self.size(key)?.ok_or_else(|| self.bad(key, "is missing"))
    }

    fn float(&self, key: &str) -> Result<Option<f32>, CheckpointError> {
        self.typed(key, self.gguf.f32(key).filter(|value| value.is_finite()), "a finite number")
    }

    fn string(&self, key: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.typed(key, self.gguf.string(key), "a string")
    }

    fn token(&self, key: &str) -> Result<Option<u32>, CheckpointError> {
        let token = self.typed(key, self.gguf.u32(key), "a token id")?;
        Ok(token.filter(|token| *token != Gguf::NO_TOKEN))
    }

    fn typed<T>(&self, key: &str, value: Option<T>, expected: &str) -> Result<Option<T>, CheckpointError> {
        if value.is_none() && self.gguf.contains(key) {
            return Err(self.bad(key, format!("must be {expected}")));
        }
        Ok(value)
    }

    fn bad(&self, key: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::Key { path: self.path.to_owned(), key: key.to_owned(), problem: problem.into() }
    }

    fn unsupported(&self, needed: impl Into<String>, supported: &str) -> CheckpointError {
        CheckpointError::Unsupported {
            path: self.path.to_owned(),
            needed: needed.into(),
            supported: supported.to_owned(),
        }
    }
}
