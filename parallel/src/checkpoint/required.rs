//! Which tensors a configuration implies, and whether a checkpoint has them.

use crate::config::{Architecture, ModelConfig};

use super::{Checkpoint, CheckpointError};

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
    let per_layer: [(&str, &[usize]); 9] = [
        ("input_layernorm.weight", &[hidden]),
        ("self_attn.q_proj.weight", &[q_rows, hidden]),
        ("self_attn.k_proj.weight", &[kv_rows, hidden]),
        ("self_attn.v_proj.weight", &[kv_rows, hidden]),
        ("self_attn.o_proj.weight", &[hidden, q_rows]),
        ("post_attention_layernorm.weight", &[hidden]),
        ("mlp.gate_proj.weight", &[intermediate, hidden]),
        ("mlp.up_proj.weight", &[intermediate, hidden]),
        ("mlp.down_proj.weight", &[hidden, intermediate]),
    ];
    // An absurd number of layers ends at the first one that is not there.
    for layer in 0..config.num_layers {
        for (tensor, shape) in per_layer {
            expect(checkpoint, &format!("model.layers.{layer}.{tensor}"), shape)?;
        }
        refuse_bias(checkpoint, layer)?;
    }
    Ok(())
}

/// A bias that is there but never added would give wrong answers silently.
fn refuse_bias(checkpoint: &Checkpoint, layer: usize) -> Result<(), CheckpointError> {
    let projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
    let projections = projections.into_iter().chain(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]);
    for projection in projections {
        let name = format!("model.layers.{layer}.{projection}.bias");
        if checkpoint.contains(&name) {
            return Err(CheckpointError::Unsupported {
                path: checkpoint.path().to_owned(),
                needed: format!("the bias `{name}`"),
                supported: "projections without bias".to_owned(),
            });
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
        name: name.to_owned(),
        found: tensor.info.shape.clone(),
        expected: expected.to_owned(),
    })
}
