//! Names of tensors: GGUF's to Hugging Face's and back.

use crate::checkpoint::surplus::in_layer;

/// The embedding, in Hugging Face's name.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The head, in Hugging Face's name; absent where it is tied to the embedding.
pub(super) const HEAD: &str = "lm_head.weight";
/// Divisors of the rotary frequencies, in GGUF's name.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";

/// Tensors outside layers: GGUF's name, Hugging Face's name.
const OUTSIDE_LAYERS: [(&str, &str); 3] =
    [("token_embd.weight", EMBEDDING), ("output_norm.weight", "model.norm.weight"), ("output.weight", HEAD)];

/// The parts of a layer: GGUF's name, Hugging Face's name.
const LAYER_PARTS: [(&str, &str); 9] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Hugging Face's name of a tensor, where it has one.
pub(super) fn to_hugging_face(name: &str) -> Option<String> {
    if let Some((_, hf_name)) = OUTSIDE_LAYERS.iter().find(|(gguf_name, _)| *gguf_name == name) {
        return Some((*hf_name).to_owned());
    }
    let (number, rest) = in_layer(name, "blk.")?;
    let (part, suffix) = rest.rsplit_once('.')?;
    let (_, hf_part) = LAYER_PARTS.iter().find(|(gguf_part, _)| *gguf_part == part)?;
    matches!(suffix, "weight" | "bias").then(|| format!("model.layers.{number}.{hf_part}.{suffix}"))
}

/// GGUF's name of a tensor, by Hugging Face's.
pub(in crate::checkpoint) fn stored_name(name: &str) -> Option<String> {
    if let Some((gguf_name, _)) = OUTSIDE_LAYERS.iter().find(|(_, hf_name)| *hf_name == name) {
        return Some((*gguf_name).to_owned());
    }
    let (number, rest) = in_layer(name, "model.layers.")?;
    let (part, suffix) = rest.rsplit_once('.')?;
    let (gguf_part, _) = LAYER_PARTS.iter().find(|(_, hf_part)| *hf_part == part)?;
    Some(format!("blk.{number}.{gguf_part}.{suffix}"))
}

/// Whether the rows of this tensor (Hugging Face's name) are stored pairwise within each head.
pub(super) fn is_rotated(name: &str) -> bool {
    name.ends_with(".self_attn.q_proj.weight") || name.ends_with(".self_attn.k_proj.weight")
}
