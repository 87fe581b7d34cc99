//! The shape of a model from a GGUF file's header, whether this version runs the model or not.
//!
//! The header's keys are put under the names that `config.json` has for them, and read as that would be.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{
    super::{
        CheckpointError, Encoding, MappedFile,
        json::Fields,
        shape::{SUPPORTED, shape},
    },
    Gguf,
    parse::{self, Header, TensorEntry},
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

/// The shape of the model in a file, and the bytes of its tensors.
pub(in crate::checkpoint) fn read_shape(path: &Path) -> Result<(ModelShape, Option<u64>), CheckpointError> {
    let file = MappedFile::open(path)?;
    if !file.bytes().starts_with(parse::MAGIC) {
        let problem = "it is neither a GGUF file nor a folder with config.json".to_owned();
        return Err(CheckpointError::NotACheckpoint { path: path.to_owned(), problem });
    }
    let Header { metadata, tensors, data_start, .. } = parse::parse(file.bytes()).map_err(|fault| {
        CheckpointError::Malformed { path: path.to_owned(), offset: fault.offset, problem: fault.problem }
    })?;
    let gguf = Gguf { metadata };
    super::config::check_whole(path, &gguf)?;
    let object = configuration(path, &gguf, &tensors)?;
    let fields = Fields::new(path, &object);
    let shape = shape(path, &fields, &fields)?;
    let bytes = (file.bytes().len() - data_start) as u64;
    file.release(0..data_start);
    Ok((shape, Some(bytes)))
}

/// What `config.json` would say.
fn configuration(
    path: &Path,
    gguf: &Gguf,
    tensors: &[TensorEntry],
) -> Result<Map<String, Value>, CheckpointError> {
    let architecture = gguf.string("general.architecture").unwrap_or_default();
    let size = |key: &str| gguf.unsigned(&format!("{architecture}.{key}"));
    let Some((_, class)) = ARCHITECTURES.iter().find(|(name, _)| *name == architecture) else {
        return Err(CheckpointError::Unsupported {
            path: path.to_owned(),
            needed: format!("the architecture `{}`", architecture.chars().take(80).collect::<String>()),
            supported: SUPPORTED.to_owned(),
        });
    };
    // One name serves three families here.
    let class =
        match (*class, size("expert_count").unwrap_or(0), size("attention.sliding_window").unwrap_or(0)) {
            ("LlamaForCausalLM", 1.., _) => "MixtralForCausalLM",
            ("LlamaForCausalLM", 0, 1..) => "MistralForCausalLM",
            (class, ..) => class,
        };
    let tensor = |name: &str| tensors.iter().find(|tensor| tensor.name == name);
    let mut object = Map::new();
    object.insert("architectures".to_owned(), json!([class]));
    for (name, key) in SIZES {
        if let Some(size) = size(key) {
            object.insert(name.to_owned(), json!(size));
        }
    }
    // Layers that draft the tokens after the next are counted, and are no part of the decoder.
    if let Some(layers) = size("block_count") {
        let layers = layers.saturating_sub(size("nextn_predict_layers").unwrap_or(0));
        object.insert("num_hidden_layers".to_owned(), json!(layers));
    }
    if class == "DeepseekV3ForCausalLM" {
        latent_widths(&mut object, size);
    }
    let rows = tensor("token_embd.weight").and_then(|tensor| tensor.shape.first().copied());
    let tokens = || gguf.strings("tokenizer.ggml.tokens").map(<[String]>::len);
    if let Some(vocabulary) = rows.or_else(tokens) {
        object.insert("vocab_size".to_owned(), json!(vocabulary));
    }
    object.insert("tie_word_embeddings".to_owned(), json!(tensor("output.weight").is_none()));
    object.insert("attention_bias".to_owned(), json!(tensor("blk.0.attn_q.bias").is_some()));
    object.insert("use_qk_norm".to_owned(), json!(tensor("blk.0.attn_q_norm.weight").is_some()));
    stored(&mut object, tensors);
    Ok(object)
}

/// Widths of a head's keys and values, which newer files give beside those of what is remembered.
fn latent_widths(object: &mut Map<String, Value>, size: impl Fn(&str) -> Option<u64>) {
    let keys = size("attention.key_length_mla").or_else(|| size("attention.key_length"));
    if let (Some(keys), Some(rotary)) = (keys, size("rope.dimension_count")) {
        object.insert("qk_nope_head_dim".to_owned(), json!(keys.saturating_sub(rotary)));
    }
    if let Some(values) = size("attention.value_length_mla") {
        object.insert("v_head_dim".to_owned(), json!(values));
    }
}

/// How most of the elements are stored, in the words of `config.json`; nothing where a planner has no word for it.
fn stored(object: &mut Map<String, Value>, tensors: &[TensorEntry]) {
    let elements = |tensor: &&TensorEntry| {
        tensor.shape.iter().fold(1_u64, |product, size| product.saturating_mul(*size as u64))
    };
    let sum = |is_one: &dyn Fn(u32) -> bool| -> u64 {
        let those = tensors.iter().filter(|tensor| is_one(tensor.kind));
        those.map(|tensor| elements(&tensor)).fold(0, u64::saturating_add)
    };
    let half = sum(&|_| true) / 2;
    if sum(&|kind| types::encoding(kind) == Ok(Encoding::F32)) > half {
        object.insert("torch_dtype".to_owned(), json!("float32"));
    } else if sum(&|kind| types::encoding(kind).is_err_and(|name| name == "MXFP4")) > half {
        object.insert("quantization_config".to_owned(), json!({"quant_method": "mxfp4"}));
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        checkpoint::{read_shape, tests::build::GgufBuilder},
        plan::models,
    };

    /// A file with these sizes under `architecture`, and these tensors without their data.
    fn of(
        architecture: &str,
        sizes: &[(&str, u32)],
        tensors: &[(&str, &[usize], u32)],
    ) -> Result<(ModelShape, Option<u64>), CheckpointError> {
        let mut builder = GgufBuilder::llama();
        builder.metadata.clear();
        builder.tensors.clear();
        builder.string("general.architecture", architecture);
        sizes.iter().for_each(|(key, size)| builder.u32(&format!("{architecture}.{key}"), *size));
        tensors.iter().for_each(|(name, shape, kind)| builder.tensor(name, shape, *kind));
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("model.gguf");
        fs::write(&path, builder.bytes_with(64)).expect("written");
        read_shape(&path)
    }

    const QWEN: [(&str, u32); 8] = [
        ("embedding_length", 4096),
        ("block_count", 36),
        ("feed_forward_length", 12_288),
        ("attention.head_count", 32),
        ("attention.head_count_kv", 8),
        ("attention.key_length", 128),
        ("attention.value_length", 128),
        ("context_length", 40_960),
    ];

    #[test]
    fn a_header_gives_the_shape_of_the_table() {
        let embedding: (&str, &[usize], u32) = ("token_embd.weight", &[151_936, 4096], 12);
        let (qwen, bytes) =
            of("qwen3", &QWEN, &[embedding, ("output.weight", &[151_936, 4096], 14)]).expect("a shape");
        assert_eq!(
            ModelShape { name: "Qwen3-8B".to_owned(), ..qwen },
            models::find("Qwen3-8B").expect("known")
        );
        assert_eq!(bytes, Some(64));
        let sizes = [
            ("embedding_length", 2880),
            ("block_count", 36),
            ("feed_forward_length", 2880),
            ("expert_feed_forward_length", 2880),
            ("attention.head_count", 64),
            ("attention.head_count_kv", 8),
            ("attention.key_length", 64),
            ("attention.value_length", 64),
            ("attention.sliding_window", 128),
            ("context_length", 131_072),
            ("expert_count", 128),
            ("expert_used_count", 4),
        ];
        let tensors: [(&str, &[usize], u32); 3] = [
            ("token_embd.weight", &[201_088, 2880], 8),
            ("output.weight", &[201_088, 2880], 8),
            ("blk.0.ffn_gate_exps.weight", &[1280, 2880, 2880], 39),
        ];
        let (gpt_oss, _) = of("gpt-oss", &sizes, &tensors).expect("a shape");
        let named = models::find("gpt-oss-120b").expect("known");
        assert_eq!(ModelShape { name: named.name.clone(), ..gpt_oss }, named);
    }

    #[test]
    fn latent_attention_has_the_widths_of_heads_and_not_of_what_is_remembered() {
        let sizes = [
            ("embedding_length", 7168),
            ("block_count", 61),
            ("feed_forward_length", 18_432),
            ("expert_feed_forward_length", 2048),
            ("attention.head_count", 64),
            ("attention.head_count_kv", 1),
            ("attention.key_length", 576),
            ("attention.value_length", 512),
            ("attention.key_length_mla", 192),
            ("attention.value_length_mla", 128),
            ("attention.q_lora_rank", 1536),
            ("attention.kv_lora_rank", 512),
            ("rope.dimension_count", 64),
            ("context_length", 131_072),
            ("expert_count", 384),
            ("expert_used_count", 8),
            ("expert_shared_count", 1),
            ("leading_dense_block_count", 1),
        ];
        let embedding: (&str, &[usize], u32) = ("token_embd.weight", &[163_840, 7168], 12);
        let (kimi, _) =
            of("deepseek2", &sizes, &[embedding, ("output.weight", &[163_840, 7168], 14)]).expect("known");
        let named = models::find("Kimi-K2").expect("known");
        assert_eq!(ModelShape { name: named.name.clone(), stored: named.stored, ..kimi }, named);
    }

    #[test]
    fn what_a_planner_does_not_know_is_refused_by_name() {
        let refused = |architecture: &str, sizes: &[(&str, u32)]| {
            of(architecture, sizes, &[]).expect_err("refused").to_string()
        };
        assert!(refused("phi3", &QWEN).contains("the architecture `phi3`"));
        assert!(refused("qwen3", &QWEN).contains("vocab_size"));
        assert!(refused("qwen3", &QWEN[1..]).contains("hidden_size"));
    }
}
