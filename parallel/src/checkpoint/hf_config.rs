//! `config.json` and `generation_config.json` as `transformers` 4 and 5 write them.

use std::{num::NonZeroUsize, path::Path};

use consort_kernels::rope::Yarn;
use serde_json::{Map, Value};

use crate::config::{Architecture, GenerationDefaults, ModelConfig, RopeConfig, RopeScaling};

use super::{
    config_check::{self, DEFAULT_ROPE_THETA},
    error::CheckpointError,
    json::Fields,
    rope_scaling::{self, DEFAULT_BETAS},
};

/// What `config.json` says. `has_head` is whether the checkpoint holds an `lm_head.weight`, which decides where
/// the file is silent about tying. End-of-sequence ids are united with those of `generation_config.json`.
pub(super) fn parse(
    path: &Path,
    object: &Map<String, Value>,
    has_head: bool,
    generation_eos: &[u32],
) -> Result<ModelConfig, CheckpointError> {
    let fields = Fields::new(path, object);
    let architecture = architecture(path, &fields)?;
    refuse_variants(path, &fields)?;

    let hidden_size = fields.required_size("hidden_size")?;
    let num_heads = fields.required_size("num_attention_heads")?;
    let head_dim = match fields.size("head_dim")? {
        Some(head_dim) => head_dim,
        None => config_check::derived_head_dim(hidden_size, num_heads)
            .map_err(|problem| CheckpointError::Inconsistent { path: path.to_owned(), problem })?,
    };
    let mut eos_token_ids = fields.tokens("eos_token_id")?;
    eos_token_ids.extend_from_slice(generation_eos);
    let max_position_embeddings = fields.required_size("max_position_embeddings")?;
    let num_layers = fields.required_size("num_hidden_layers")?;
    let config = ModelConfig {
        architecture,
        hidden_size,
        num_layers,
        num_heads,
        num_kv_heads: num_kv_heads(&fields, architecture, num_heads)?,
        head_dim,
        intermediate_size: fields.required_size("intermediate_size")?,
        vocab_size: fields.required_size("vocab_size")?,
        max_position_embeddings,
        rms_norm_eps: fields.required_float("rms_norm_eps")?,
        rope: rope(path, &fields, max_position_embeddings)?,
        layer_windows: layer_windows(path, &fields, architecture, num_layers)?,
        tie_word_embeddings: fields.boolean("tie_word_embeddings")?.unwrap_or(!has_head),
        eos_token_ids: config_check::unique_tokens(eos_token_ids),
        bos_token_id: fields.token("bos_token_id")?,
    };
    config_check::check(path, &config)?;
    Ok(config)
}

/// What `generation_config.json` says: sampling defaults, and ids that end a generation. Like vLLM, the numbers that
/// are there count whatever `do_sample` says. Unlike there, a file that turns sampling off and gives no temperature
/// means what it means to `transformers`: the most probable token, a temperature of 0.
pub(super) fn parse_generation(
    path: &Path,
    object: &Map<String, Value>,
) -> Result<(GenerationDefaults, Vec<u32>), CheckpointError> {
    let fields = Fields::new(path, object);
    // A number out of range is the file's loss, not a reason to refuse the model: it is dropped.
    let within = |key: &str, expected: &str, holds: fn(f32) -> bool| -> Result<_, CheckpointError> {
        Ok(fields.float(key)?.filter(|value| {
            let good = holds(*value);
            if !good {
                tracing::warn!(path = %path.display(), key, value, expected, "sampling default out of range, ignored");
            }
            good
        }))
    };
    let defaults = GenerationDefaults {
        temperature: match fields.get("temperature") {
            None if fields.boolean("do_sample")? == Some(false) => Some(0.0),
            _ => within("temperature", "at least 0", |t| t >= 0.0)?,
        },
        top_k: top_k(&fields)?,
        top_p: within("top_p", "above 0 and at most 1", |p| p > 0.0 && p <= 1.0)?,
        min_p: within("min_p", "between 0 and 1", |p| (0.0..=1.0).contains(&p))?,
        repetition_penalty: within("repetition_penalty", "above 0", |r| r > 0.0)?,
    };
    Ok((defaults, fields.tokens("eos_token_id")?))
}

/// 0 and -1 both mean "all tokens" in the wild.
fn top_k(fields: &Fields<'_>) -> Result<Option<u32>, CheckpointError> {
    const KEY: &str = "top_k";
    let Some(value) = fields.get(KEY) else { return Ok(None) };
    match value.as_i64() {
        Some(-1 | 0) => Ok(None),
        Some(k) if k > 0 => Ok(Some(u32::try_from(k).unwrap_or(u32::MAX))),
        _ => Err(fields.bad(KEY, "must be a positive integer, or 0 or -1 for all tokens")),
    }
}

fn architecture(path: &Path, fields: &Fields<'_>) -> Result<Architecture, CheckpointError> {
    let class = match fields.get("architectures") {
        None => None,
        Some(classes) => {
            let first = classes.as_array().and_then(|classes| classes.first()).and_then(Value::as_str);
            Some(first.ok_or_else(|| fields.bad("architectures", "must be a list of class names"))?)
        }
    };
    let model_type = fields.string("model_type")?;
    match (class, model_type) {
        (Some("LlamaForCausalLM"), _) | (None, Some("llama")) => Ok(Architecture::Llama),
        (Some("MistralForCausalLM"), _) | (None, Some("mistral")) => Ok(Architecture::Mistral),
        (None, None) => Err(fields.bad("architectures", "is missing, and so is `model_type`")),
        (class, model_type) => Err(CheckpointError::Unsupported {
            path: path.to_owned(),
            needed: format!("the architecture `{}`", class.or(model_type).unwrap_or_default()),
            supported: "LlamaForCausalLM and MistralForCausalLM".to_owned(),
        }),
    }
}

/// Refuses what the Llama layers would silently compute wrongly.
fn refuse_variants(path: &Path, fields: &Fields<'_>) -> Result<(), CheckpointError> {
    let unsupported = |needed: String, supported: &str| {
        Err(CheckpointError::Unsupported { path: path.to_owned(), needed, supported: supported.to_owned() })
    };
    for key in ["attention_bias", "mlp_bias"] {
        if fields.boolean(key)? == Some(true) {
            return unsupported(format!("`{key}`"), "projections without bias");
        }
    }
    if let Some(activation) = fields.string("hidden_act")?
        && activation != "silu"
    {
        return unsupported(format!("the activation `{activation}`"), "silu");
    }
    if let Some(quantization) = fields.child("quantization_config")? {
        let method = quantization.string("quant_method")?.unwrap_or("unknown");
        return unsupported(
            format!("the quantisation method `{method}`"),
            "F32, F16 and BF16 safetensors, GGUF",
        );
    }
    Ok(())
}

fn num_kv_heads(
    fields: &Fields<'_>,
    architecture: Architecture,
    num_heads: usize,
) -> Result<usize, CheckpointError> {
    const KEY: &str = "num_key_value_heads";
    Ok(match (fields.size(KEY)?, architecture) {
        (Some(heads), _) => heads,
        (None, Architecture::Mistral) if !fields.is_null(KEY) => MISTRAL_KV_HEADS,
        (None, Architecture::Llama | Architecture::Mistral) => num_heads,
    })
}

/// Defaults of `transformers` for Mistral files that leave the keys out.
const MISTRAL_WINDOW: usize = 4096;
const MISTRAL_KV_HEADS: usize = 8;

const WINDOW: &str = "sliding_window";
const LAYER_TYPES: &str = "layer_types";

/// The window of each layer: as `layer_types` says, or Mistral's over all. Other models of the family may carry a
/// window and do not heed it unless a layer is said to.
fn layer_windows(
    path: &Path,
    fields: &Fields<'_>,
    architecture: Architecture,
    num_layers: usize,
) -> Result<Vec<Option<NonZeroUsize>>, CheckpointError> {
    let Some(kinds) = fields.get(LAYER_TYPES) else {
        let window = match architecture {
            Architecture::Llama => None,
            Architecture::Mistral => sliding_window(fields, architecture)?,
        };
        return config_check::alike(path, num_layers, window);
    };
    let kinds =
        kinds.as_array().ok_or_else(|| fields.bad(LAYER_TYPES, "must be a list, a kind for each layer"))?;
    if kinds.len() != num_layers {
        let problem = format!("has {} kinds for {num_layers} layers", kinds.len());
        return Err(fields.bad(LAYER_TYPES, problem));
    }
    let slides = kinds.iter().any(|kind| kind == "sliding_attention");
    let window = if slides { sliding_window(fields, architecture)? } else { None };
    if slides && window.is_none() {
        return Err(fields.bad(WINDOW, "is missing or null, but `layer_types` has layers with a window"));
    }
    let of_kind = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") => Ok(window),
        Some(other) => Err(CheckpointError::Unsupported {
            path: path.to_owned(),
            needed: format!("layers of `{other}`"),
            supported: "`full_attention` and `sliding_attention`".to_owned(),
        }),
        None => Err(fields.bad(LAYER_TYPES, "must be a list of strings")),
    };
    kinds.iter().map(of_kind).collect()
}

/// The window of the layers that have one.
fn sliding_window(
    fields: &Fields<'_>,
    architecture: Architecture,
) -> Result<Option<NonZeroUsize>, CheckpointError> {
    let window = match (fields.size(WINDOW)?, architecture) {
        (Some(window), _) => window,
        // What `transformers` takes where the file is silent; it writes the key itself.
        (None, Architecture::Mistral) if !fields.is_null(WINDOW) => MISTRAL_WINDOW,
        (None, _) => return Ok(None),
    };
    match NonZeroUsize::new(window) {
        Some(window) => Ok(Some(window)),
        None => Err(fields.bad(WINDOW, "is 0; it must be positive, or null for full attention")),
    }
}

/// Rotary embedding: `rope_parameters` (5), or `rope_theta` beside `rope_scaling` (4).
fn rope(path: &Path, fields: &Fields<'_>, context: usize) -> Result<RopeConfig, CheckpointError> {
    let given = |key| Ok::<_, CheckpointError>(fields.child(key)?.filter(|child| !child.is_empty()));
    let parameters = given("rope_parameters")?;
    let scaling = given("rope_scaling")?;
    let rope = rope_of(path, fields, parameters.as_ref().or(scaling.as_ref()), context)?;
    // Releases of transformers differ in which of the two they heed, so the model's makers may have meant either.
    if parameters.is_some() && scaling.is_some() && rope_of(path, fields, scaling.as_ref(), context)? != rope
    {
        let problem = "says something else than `rope_parameters` does (`rope_theta` included, which \
                       `rope_scaling` takes from beside it); keep the one that the model was trained with and \
                       remove the other";
        return Err(fields.bad("rope_scaling", problem));
    }
    Ok(rope)
}

/// The rotary embedding that one of the two keys describes, with what stands beside it.
fn rope_of(
    path: &Path,
    fields: &Fields<'_>,
    parameters: Option<&Fields<'_>>,
    context: usize,
) -> Result<RopeConfig, CheckpointError> {
    let unsupported = |needed: String, supported: &str| CheckpointError::Unsupported {
        path: path.to_owned(),
        needed,
        supported: supported.to_owned(),
    };
    let mut theta = fields.float("rope_theta")?;
    let mut scaling = RopeScaling::None;
    let mut partial = fields.float("partial_rotary_factor")?;
    if let Some(parameters) = parameters {
        for kind in ["full_attention", "sliding_attention"] {
            if parameters.get(kind).is_some() {
                return Err(parameters.bad(kind, "is not supported: one rotary embedding serves all layers"));
            }
        }
        theta = parameters.float("rope_theta")?.or(theta);
        partial = parameters.float("partial_rotary_factor")?.or(partial);
        let kind = match parameters.string("rope_type")? {
            Some(kind) => kind,
            None => parameters.string("type")?.unwrap_or("default"),
        };
        scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: parameters.required_float("factor")? },
            "yarn" => yarn(fields, parameters, context)?,
            "llama3" => RopeScaling::Llama3 {
                factor: parameters.required_float("factor")?,
                low_freq_factor: parameters.required_float("low_freq_factor")?,
                high_freq_factor: parameters.required_float("high_freq_factor")?,
                original_context: original_context(fields, parameters)?.unwrap_or(context),
            },
            other => {
                let supported = "default, linear, llama3 and yarn";
                return Err(unsupported(format!("rope scaling `{other}`"), supported));
            }
        };
    }
    if let Some(partial) = partial.filter(|partial| *partial != 1.0) {
        return Err(unsupported(format!("`partial_rotary_factor` {partial}"), "1.0"));
    }
    let rope = RopeConfig { theta: theta.unwrap_or(DEFAULT_ROPE_THETA), scaling };
    match (rope_scaling::problem(&rope), parameters) {
        (Some((value, problem)), Some(parameters)) => Err(parameters.bad(key_of(value, parameters), problem)),
        _ => Ok(rope),
    }
}

/// The context before the stretch, where it is given; otherwise it is the whole model's.
fn original_context(fields: &Fields<'_>, parameters: &Fields<'_>) -> Result<Option<usize>, CheckpointError> {
    const KEY: &str = "original_max_position_embeddings";
    // A value beside the parameters outranks theirs; some models write it there.
    Ok(fields.size(KEY)?.or(parameters.size(KEY)?))
}

/// YaRN with the defaults of `transformers`; `context` is the whole model's, in tokens.
fn yarn(
    fields: &Fields<'_>,
    parameters: &Fields<'_>,
    context: usize,
) -> Result<RopeScaling, CheckpointError> {
    let original = original_context(fields, parameters)?;
    let factor = match original {
        // An unset factor is the quotient of both contexts.
        Some(original) if parameters.is_null("factor") => (context as f64 / original as f64) as f32,
        _ => parameters.required_float("factor")?,
    };
    let weight = |key| Ok(parameters.float(key)?.unwrap_or(0.0));
    let attention_factor = match parameters.float("attention_factor")? {
        Some(attention_factor) => attention_factor,
        None => rope_scaling::attention_factor(factor, [weight("mscale")?, weight("mscale_all_dim")?]),
    };
    // Python's `or`: 0 is as good as absent.
    let beta = |key, default| Ok(parameters.float(key)?.filter(|beta| *beta != 0.0).unwrap_or(default));
    let yarn = Yarn {
        factor,
        original_context: original.unwrap_or(context),
        beta_fast: beta("beta_fast", DEFAULT_BETAS.0)?,
        beta_slow: beta("beta_slow", DEFAULT_BETAS.1)?,
        truncate: parameters.boolean("truncate")?.unwrap_or(true),
    };
    Ok(RopeScaling::Yarn { yarn, attention_factor })
}

fn key_of(value: rope_scaling::Value, parameters: &Fields<'_>) -> &'static str {
    match value {
        rope_scaling::Value::Theta => "rope_theta",
        rope_scaling::Value::Factor => "factor",
        rope_scaling::Value::OriginalContext => "original_max_position_embeddings",
        rope_scaling::Value::BetaFast => "beta_fast",
        rope_scaling::Value::BetaSlow => "beta_slow",
        rope_scaling::Value::AttentionFactor if parameters.get("attention_factor").is_none() => "mscale",
        rope_scaling::Value::AttentionFactor => "attention_factor",
    }
}
