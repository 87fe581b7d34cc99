//! Which tensors a configuration implies, and whether a checkpoint has them.

use crate::config::{Architecture, ModelConfig};

use super::{Checkpoint, CheckpointError};

/// The tensors of a layer, behind `model.layers.N.`.
pub(super) const LAYER_TENSORS: [&str; 9] = [
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
];

/// Fails on the first tensor that is missing, cannot be read, or has another shape than the configuration
/// implies; so that loading later fails on no rank for a reason that was known before.
pub(super) fn check(checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
    let config = checkpoint.config();
    match config.architecture {
        Architecture::Llama | Architecture::Mistral => check_llama(checkpoint, config),
    }
}

fn check_llama(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<(), CheckpointError> {
    let hidden = config.hidden_size;
    let intermediate = config.intermediate_size;
    // config_check holds both products within bounds.
    let q_rows = config.num_heads * config.head_dim;
    let kv_rows = config.num_kv_heads * config.head_dim;

    expect(checkpoint, "model.embed_tokens.weight", &[config.vocab_size, hidden])?;
    expect(checkpoint, "model.norm.weight", &[hidden])?;
    if !config.tie_word_embeddings {
        expect(checkpoint, "lm_head.weight", &[config.vocab_size, hidden])?;
    }
    let per_layer: [&[usize]; LAYER_TENSORS.len()] = [
        &[hidden],
        &[q_rows, hidden],
        &[kv_rows, hidden],
        &[kv_rows, hidden],
        &[hidden, q_rows],
        &[hidden],
        &[intermediate, hidden],
        &[intermediate, hidden],
        &[hidden, intermediate],
    ];
    // An absurd number of layers ends at the first one that is not there.
    for layer in 0..config.num_layers {
        for (tensor, shape) in LAYER_TENSORS.into_iter().zip(per_layer) {
            expect(checkpoint, &format!("model.layers.{layer}.{tensor}"), shape)?;
        }
    }
    Ok(())
}

fn expect(checkpoint: &Checkpoint, name: &str, expected: &[usize]) -> Result<(), CheckpointError> {
    let tensor = checkpoint.stored(name)?;
    if tensor.info.shape == expected {
        return Ok(());
    }
    Err(CheckpointError::Shape {
        path: checkpoint.path().to_owned(),
        name: name.into(),
        stored_name: checkpoint.stored_name(name),
        found: tensor.info.shape.clone().into(),
        expected: expected.into(),
    })
}
