//! Tensors that a checkpoint holds and the model does not use: refused where the model would be computed without
//! something that it was trained with.

use crate::config::Architecture;

use super::{Checkpoint, CheckpointError, required::LAYER_TENSORS};

/// Parts of a layer in a GGUF file that change nothing: frequencies that follow from the configuration.
const HARMLESS_IN_GGUF: [&str; 1] = ["attn_rot_embd.weight"];
/// Ends of the names that change nothing, likewise, in a folder.
const HARMLESS_IN_FOLDERS: &str = "rotary_emb.inv_freq";
const SUPPORTED: &str = "the tensors of Llama and Mistral models, without biases and further norms";

/// Layer and rest of a name behind `prefix`. Only the canonical spelling of a number counts: two spellings must not
/// name the same tensor.
pub(super) fn in_layer<'a>(name: &'a str, prefix: &str) -> Option<(usize, &'a str)> {
    let (layer, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    let number: usize = layer.parse().ok().filter(|number: &usize| number.to_string() == layer)?;
    Some((number, rest))
}

/// Fails on the first tensor that the layers would leave out and that changes what they compute. What belongs to
/// layers beyond the configuration's stays unused without a word, as do tensors outside the model.
pub(super) fn check(checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
    match checkpoint.config().architecture {
        Architecture::Llama | Architecture::Mistral => check_llama(checkpoint),
    }
}

fn check_llama(checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
    let layers = checkpoint.config().num_layers;
    let refuse = |name: String| {
        Err(CheckpointError::Unsupported {
            path: checkpoint.path().to_owned(),
            needed: name,
            supported: SUPPORTED.to_owned(),
        })
    };
    // GGUF files hold nothing but the model, and a whole one: what has no name here belongs to another architecture.
    for name in &checkpoint.nameless {
        match in_layer(name, "blk.") {
            Some((layer, part)) if layer >= layers || HARMLESS_IN_GGUF.contains(&part) => {}
            _ => return refuse(format!("the tensor `{name}`")),
        }
    }
    let mut unused = checkpoint.tensors.keys().chain(checkpoint.unreadable.keys()).filter(|name| {
        let Some((layer, part)) = in_layer(name, "model.layers.") else {
            return is_bias_outside_layers(name);
        };
        layer < layers && !LAYER_TENSORS.contains(&part) && !part.ends_with(HARMLESS_IN_FOLDERS)
    });
    if let Some(name) = unused.clone().find(|name| changes_the_result(name)) {
        let stored = checkpoint.stored_name(name).unwrap_or_else(|| name.as_str().into());
        let what = if name.ends_with(".bias") { "bias" } else { "tensor" };
        return refuse(format!("the {what} `{stored}`"));
    }
    if let Some(first) = unused.next() {
        let count = unused.count() + 1;
        let path = checkpoint.path().display();
        tracing::warn!(%path, count, first, "the model's layers have tensors that are not used");
    }
    Ok(())
}

fn is_bias_outside_layers(name: &str) -> bool {
    matches!(name, "lm_head.bias" | "model.norm.bias")
}

/// Whether an unused tensor is one that no layer may be computed without: biases, attention sinks, and norms of any
/// spelling.
fn changes_the_result(name: &str) -> bool {
    name.ends_with(".bias") || name.ends_with(".sinks") || name.ends_with("norm.weight")
}
