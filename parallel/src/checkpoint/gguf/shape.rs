//! The shape of a model from a GGUF file's header, whether this version runs the model or not.
//!
//! The header's keys are put under the names that `config.json` has for them, and read as that would be.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{
    super::{
        CheckpointError, Encoding,
        json::Fields,
        shape::{SUPPORTED, shape, with_config},
    },
    Shapes,
    config::{self, Keys},
    parse::TensorEntry,
    parts::{self, Headers},
    types,
};
use crate::plan::ModelShape;

/// Architectures as GGUF and as `config.json` names them.
const ARCHITECTURES: [(&str, &str); 7] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("qwen3moe", "Qwen3MoeForCausalLM"),
    ("gpt-oss", "GptOssForCausalLM"),
    ("deepseek2", "DeepseekV3ForCausalLM"),
    ("glm4moe", "Glm4MoeForCausalLM"),
];

/// Sizes: `config.json`'s name, and GGUF's behind the architecture's.
const SIZES: [(&str, &str); 18] = [
    ("hidden_size", "embedding_length"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("intermediate_size", "feed_forward_length"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
    ("num_experts", "expert_count"),
    ("num_local_experts", "expert_count"),
    ("n_routed_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("n_shared_experts", "expert_shared_count"),
    ("first_k_dense_replace", "leading_dense_block_count"),
    ("max_position_embeddings", "context_length"),
    ("sliding_window", "attention.sliding_window"),
    ("q_lora_rank", "attention.q_lora_rank"),
    ("kv_lora_rank", "attention.kv_lora_rank"),
    ("qk_rope_head_dim", "rope.dimension_count"),
    ("head_dim", "attention.key_length"),
    ("v_head_dim", "attention.value_length"),
];

/// The shape of the model in a file or in the parts that it was split into, and the bytes of its tensors, if all of
/// their types are known.
pub(in crate::checkpoint) fn read_shape(path: &Path) -> Result<(ModelShape, Option<u64>), CheckpointError> {
    let headers = parts::read(path)?;
    let Headers { path, gguf, tensors } = &headers;
    let sizes = Sizes {
        architecture: gguf.string("general.architecture").unwrap_or_default(),
        keys: Keys { path, gguf },
    };
    let object = configuration(&sizes, tensors)?;
    let fields = Fields::new(path, &object);
    let shape = shape(path, &fields, &fields).map_err(|error| sizes.renamed(error))?;
    let shapes = Shapes { vocab_size: Some(shape.vocabulary), has_head: !shape.is_head_tied };
    // Stored divisors of the rotary frequencies take no memory worth counting.
    let config =
        config::check_architecture(path, gguf).and_then(|()| config::parse(path, gguf, &shapes, None));
    let bytes = tensors
        .iter()
        .try_fold(0_u64, |sum, tensor| Some(sum.saturating_add(types::bytes(tensor.kind, &tensor.shape)?)));
    Ok((with_config(shape, config.ok()), bytes))
}

/// Sizes of one architecture. One that is there and no number is an error, not an absence.
struct Sizes<'a> {
    architecture: &'a str,
    keys: Keys<'a>,
}

impl Sizes<'_> {
    fn get(&self, key: &str) -> Result<Option<usize>, CheckpointError> {
        self.keys.uniform_size(&format!("{}.{key}", self.architecture))
    }

    /// An error of the configuration under the name that the file has for its key.
    fn renamed(&self, error: CheckpointError) -> CheckpointError {
        let CheckpointError::Key { path, key, problem } = error else { return error };
        let stored = match key.as_str() {
            "num_hidden_layers" => Some("block_count"),
            "vocab_size" => Some("vocab_size"),
            "qk_nope_head_dim" => Some("attention.key_length"),
            key => SIZES.iter().find(|(name, _)| *name == key).map(|(_, stored)| *stored),
        };
        let key = stored.map_or(key, |stored| format!("{}.{stored}", self.architecture));
        CheckpointError::Key { path, key, problem }
    }

    /// The class of the architecture's models.
    fn class(&self) -> Result<&'static str, CheckpointError> {
        let known = ARCHITECTURES.iter().find(|(name, _)| *name == self.architecture);
        let Some((_, class)) = known else {
            return Err(CheckpointError::Unsupported {
                path: self.keys.path.to_owned(),
                needed: format!(
                    "the architecture `{}`",
                    self.architecture.chars().take(80).collect::<String>()
                ),
                supported: SUPPORTED.to_owned(),
            });
        };
        if *class != "LlamaForCausalLM" {
            return Ok(class);
        }
        // One name serves three families here.
        let has = |size: Option<usize>| size.is_some_and(|size| size > 0);
        Ok(if has(self.get("expert_count")?) {
            "MixtralForCausalLM"
        } else if has(self.get("attention.sliding_window")?) {
            "MistralForCausalLM"
        } else {
            class
        })
    }
}

/// What `config.json` would say.
fn configuration(sizes: &Sizes<'_>, tensors: &[TensorEntry]) -> Result<Map<String, Value>, CheckpointError> {
    let class = sizes.class()?;
    let tensor = |name: &str| tensors.iter().find(|tensor| tensor.name == name);
    let mut object = Map::new();
    object.insert("architectures".to_owned(), json!([class]));
    for (name, key) in SIZES {
        if let Some(size) = sizes.get(key)? {
            object.insert(name.to_owned(), json!(size));
        }
    }
    // Layers that draft the tokens after the next are counted, and are no part of the decoder.
    if let Some(layers) = sizes.get("block_count")? {
        let layers = layers.saturating_sub(sizes.get("nextn_predict_layers")?.unwrap_or(0));
        object.insert("num_hidden_layers".to_owned(), json!(layers));
    }
    if class == "DeepseekV3ForCausalLM" {
        latent_widths(&mut object, sizes)?;
    }
    let rows = tensor("token_embd.weight").and_then(|tensor| tensor.shape.first().copied());
    let tokens = || sizes.keys.gguf.strings("tokenizer.ggml.tokens").map(<[String]>::len);
    if let Some(vocabulary) = rows.or(sizes.get("vocab_size")?).or_else(tokens) {
        object.insert("vocab_size".to_owned(), json!(vocabulary));
    }
    object.insert("tie_word_embeddings".to_owned(), json!(tensor("output.weight").is_none()));
    object.insert("attention_bias".to_owned(), json!(tensor("blk.0.attn_q.bias").is_some()));
    object.insert("use_qk_norm".to_owned(), json!(tensor("blk.0.attn_q_norm.weight").is_some()));
    stored(&mut object, tensors);
    Ok(object)
}

/// Widths of a head's keys and values, which newer files give beside those of what is remembered.
fn latent_widths(object: &mut Map<String, Value>, sizes: &Sizes<'_>) -> Result<(), CheckpointError> {
    let keys = sizes.get("attention.key_length_mla")?.or(sizes.get("attention.key_length")?);
    if let (Some(keys), Some(rotary)) = (keys, sizes.get("rope.dimension_count")?) {
        object.insert("qk_nope_head_dim".to_owned(), json!(keys.saturating_sub(rotary)));
    }
    if let Some(values) = sizes.get("attention.value_length_mla")? {
        object.insert("v_head_dim".to_owned(), json!(values));
    }
    Ok(())
}

/// How most of the elements are stored, in the words of `config.json`; nothing where a planner has no word for it.
fn stored(object: &mut Map<String, Value>, tensors: &[TensorEntry]) {
    let elements = |tensor: &TensorEntry| {
        tensor.shape.iter().fold(1_u64, |product, size| product.saturating_mul(*size as u64))
    };
    let sum = |is_one: &dyn Fn(u32) -> bool| -> u64 {
        let those = tensors.iter().filter(|tensor| is_one(tensor.kind));
        those.map(elements).fold(0, u64::saturating_add)
    };
    let half = sum(&|_| true) / 2;
    if sum(&|kind| types::encoding(kind) == Ok(Encoding::F32)) > half {
        object.insert("torch_dtype".to_owned(), json!("float32"));
    } else if sum(&|kind| types::encoding(kind) == Ok(Encoding::Bf16)) > half {
        object.insert("torch_dtype".to_owned(), json!("bfloat16"));
    } else if sum(&|kind| types::encoding(kind).is_err_and(|name| name == "MXFP4")) > half {
        object.insert("quantization_config".to_owned(), json!({"quant_method": "mxfp4"}));
    }
}

#[cfg(test)]
mod tests;
