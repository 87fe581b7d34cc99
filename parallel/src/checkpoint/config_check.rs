//! What must hold of every configuration, whatever file it came from.

use std::{num::NonZeroUsize, path::Path};

use crate::config::{ModelConfig, RopeConfig, RopeScaling};

use super::error::CheckpointError;

/// Longest context that is believed, in tokens: models build position tables of this length.
const CONTEXT_TOKENS_MAX: usize = 1 << 27;

/// Base of the rotary frequencies where a checkpoint of the Llama family does not give one.
pub(super) const DEFAULT_ROPE_THETA: f32 = 10_000.0;

/// Most layers that are believed.
const LAYERS_MAX: usize = 4096;

/// The same window for all layers.
pub(super) fn alike(
    path: &Path,
    num_layers: usize,
    window: Option<NonZeroUsize>,
) -> Result<Vec<Option<NonZeroUsize>>, CheckpointError> {
    if num_layers > LAYERS_MAX {
        let problem = format!("{num_layers} layers exceed the limit of {LAYERS_MAX}");
        return Err(CheckpointError::Inconsistent { path: path.to_owned(), problem });
    }
    Ok(vec![window; num_layers])
}

/// Width of a head where the checkpoint does not give it.
pub(super) fn derived_head_dim(hidden_size: usize, num_heads: usize) -> Result<usize, String> {
    match hidden_size.checked_div(num_heads) {
        Some(head_dim) if head_dim * num_heads == hidden_size => Ok(head_dim),
        _ => Err(format!("hidden size {hidden_size} is no multiple of {num_heads} attention heads")),
    }
}

/// Sorts the ids that end a generation and drops duplicates.
pub(super) fn unique_tokens(mut tokens: Vec<u32>) -> Vec<u32> {
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

/// Holds sizes and constants to the bounds that the layers rely on.
pub(super) fn check(path: &Path, config: &ModelConfig) -> Result<(), CheckpointError> {
    let result = check_sizes(config).and_then(|()| check_rope(config)).and_then(|()| check_tokens(config));
    result.map_err(|problem| CheckpointError::Inconsistent { path: path.to_owned(), problem })
}

fn check_sizes(config: &ModelConfig) -> Result<(), String> {
    let sizes = [
        ("hidden size", config.hidden_size),
        ("number of layers", config.num_layers),
        ("number of attention heads", config.num_heads),
        ("number of key/value heads", config.num_kv_heads),
        ("head width", config.head_dim),
        ("intermediate size", config.intermediate_size),
        ("vocabulary size", config.vocab_size),
        ("context length", config.max_position_embeddings),
    ];
    if let Some((what, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return Err(format!("the {what} is 0"));
    }
    if !config.num_heads.is_multiple_of(config.num_kv_heads) {
        return Err(format!(
            "{} attention heads cannot be divided among {} key/value heads",
            config.num_heads, config.num_kv_heads
        ));
    }
    if config.layer_windows.len() != config.num_layers {
        return Err(format!(
            "windows are given for {} layers, and there are {}",
            config.layer_windows.len(),
            config.num_layers
        ));
    }
    if !config.head_dim.is_multiple_of(2) {
        return Err(format!("the head width {} is odd, so it cannot be rotated in pairs", config.head_dim));
    }
    if config.num_heads.checked_mul(config.head_dim).is_none() {
        return Err(format!("{} heads of width {} overflow", config.num_heads, config.head_dim));
    }
    if config.max_position_embeddings > CONTEXT_TOKENS_MAX {
        return Err(format!(
            "a context of {} tokens exceeds the limit of {CONTEXT_TOKENS_MAX}",
            config.max_position_embeddings
        ));
    }
    let eps = config.rms_norm_eps;
    if !(eps > 0.0 && eps < 1.0) {
        return Err(format!("the epsilon of RMSNorm is {eps}; it must lie between 0 and 1"));
    }
    Ok(())
}

fn check_rope(config: &ModelConfig) -> Result<(), String> {
    let RopeConfig { theta, scaling } = &config.rope;
    let positive = |value: &f32| value.is_finite() && *value > 0.0;
    if !positive(theta) {
        return Err(format!("the base of the rotary embedding is {theta}; it must be positive"));
    }
    match scaling {
        // The readers hold the values of these two to `rope_scaling::problem`, which knows their keys.
        RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Yarn { .. } => Ok(()),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            if !positive(factor) || !positive(low_freq_factor) || !positive(high_freq_factor) {
                return Err("the factors of llama3 rope scaling must be positive".to_owned());
            }
            if low_freq_factor >= high_freq_factor {
                return Err(format!(
                    "llama3 rope scaling needs low_freq_factor < high_freq_factor, but {low_freq_factor} >= \
                     {high_freq_factor}"
                ));
            }
            if *original_context == 0 {
                return Err("llama3 rope scaling has an original context of 0".to_owned());
            }
            Ok(())
        }
        RopeScaling::Factors(factors) => {
            if factors.len() != config.head_dim / 2 {
                return Err(format!(
                    "there are {} rotary factors for heads of width {}, which need {}",
                    factors.len(),
                    config.head_dim,
                    config.head_dim / 2
                ));
            }
            match factors.iter().find(|factor| !positive(factor)) {
                Some(factor) => Err(format!("a rotary factor is {factor}; all must be positive")),
                None => Ok(()),
            }
        }
    }
}

fn check_tokens(config: &ModelConfig) -> Result<(), String> {
    let named = config.eos_token_ids.iter().map(|id| ("end-of-sequence", id));
    let named = named.chain(config.bos_token_id.iter().map(|id| ("begin-of-sequence", id)));
    for (what, id) in named {
        if *id as usize >= config.vocab_size {
            return Err(format!(
                "the {what} token {id} lies outside the vocabulary of {}",
                config.vocab_size
            ));
        }
    }
    Ok(())
}
