//! Names of tensors: GGUF's to Hugging Face's.

/// The embedding, in Hugging Face's name.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The head, in Hugging Face's name; absent where it is tied to the embedding.
pub(super) const HEAD: &str = "lm_head.weight";
/// Divisors of the rotary frequencies, in GGUF's name.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";

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
    match name {
        "token_embd.weight" => return Some(EMBEDDING.to_owned()),
        "output_norm.weight" => return Some("model.norm.weight".to_owned()),
        "output.weight" => return Some(HEAD.to_owned()),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, suffix) = rest.rsplit_once('.')?;
    // Only the canonical spelling of a number: two spellings must not name the same tensor.
    let number: usize = layer.parse().ok().filter(|number: &usize| number.to_string() == layer)?;
    let (_, hf_part) = LAYER_PARTS.iter().find(|(gguf_part, _)| *gguf_part == part)?;
    matches!(suffix, "weight" | "bias").then(|| format!("model.layers.{number}.{hf_part}.{suffix}"))
}

/// Whether the rows of this tensor (Hugging Face's name) are stored pairwise within each head.
pub(super) fn is_rotated(name: &str) -> bool {
    name.ends_with(".self_attn.q_proj.weight") || name.ends_with(".self_attn.k_proj.weight")
}
