//! The shape of a model that this version plans and does not load, from its `config.json` or the header of a GGUF file,
//! and the bytes of its tensors from the headers beside it.

use std::{collections::BTreeSet, num::NonZeroUsize, path::Path};

use serde_json::Value;

use super::{
    CheckpointError, MappedFile, config_check, folder, gguf, header, hf_config, index,
    json::{self, Fields},
};
use crate::{
    config::ModelConfig,
    plan::{
        ModelShape, WeightFormat,
        shape::{Attention, Experts, GroupedAttention, LatentAttention},
    },
};

/// Largest size that is believed, of any kind.
const SIZE_MAX: usize = 1 << 26;
pub(super) const SUPPORTED: &str =
    "Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3Moe, GptOss, DeepseekV3 and Glm4Moe";

/// What tells the families apart where their files are silent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    GptOss,
    DeepseekV3,
    Glm4Moe,
}

/// The shape of the model in a folder or a GGUF file, and the bytes of its tensors where there are any.
pub fn read_shape(path: &Path) -> Result<(ModelShape, Option<u64>), CheckpointError> {
    if !path.is_dir() {
        return gguf::read_shape(path);
    }
    let config_path = path.join(folder::CONFIG_FILE);
    let object = json::read_object(&config_path)?;
    let outer = Fields::new(&config_path, &object);
    // Models of text and pictures describe their text here.
    let inner = outer.child("text_config")?;
    let fields = inner.as_ref().unwrap_or(&outer);
    let shape = shape(&config_path, fields, &outer)?;
    // As `shape` takes it: where the file is silent, there is a head.
    let config = hf_config::parse(&config_path, &object, true, &[]).ok();
    Ok((with_config(shape, config), tensor_bytes(path)?))
}

/// A shape with the configuration that the engine plans its buffers from, if there is one that says the same.
pub(super) fn with_config(shape: ModelShape, config: Option<ModelConfig>) -> ModelShape {
    let Some(config) = config else { return shape };
    let runs = ModelShape { name: shape.name.clone(), stored: shape.stored, ..ModelShape::from(&config) };
    if (ModelShape { config: None, ..runs.clone() }) == shape { runs } else { shape }
}

fn family(path: &Path, fields: &Fields<'_>, outer: &Fields<'_>) -> Result<Family, CheckpointError> {
    let class = |fields: &Fields<'_>| -> Option<String> {
        Some(fields.get("architectures")?.as_array()?.first()?.as_str()?.to_owned())
    };
    let class = class(fields).or_else(|| class(outer)).unwrap_or_default();
    Ok(match class.as_str() {
        "LlamaForCausalLM" => Family::Llama,
        "MistralForCausalLM" => Family::Mistral,
        "MixtralForCausalLM" => Family::Mixtral,
        "Qwen2ForCausalLM" => Family::Qwen2,
        "Qwen3ForCausalLM" => Family::Qwen3,
        "Qwen3MoeForCausalLM" => Family::Qwen3Moe,
        "GptOssForCausalLM" => Family::GptOss,
        "DeepseekV3ForCausalLM" => Family::DeepseekV3,
        "Glm4MoeForCausalLM" => Family::Glm4Moe,
        other => {
            return Err(CheckpointError::Unsupported {
                path: path.to_owned(),
                needed: format!("the architecture `{}`", other.chars().take(80).collect::<String>()),
                supported: SUPPORTED.to_owned(),
            });
        }
    })
}

/// The shape that a configuration gives; `outer` is what it may be a part of.
pub(super) fn shape(
    path: &Path,
    fields: &Fields<'_>,
    outer: &Fields<'_>,
) -> Result<ModelShape, CheckpointError> {
    let family = family(path, fields, outer)?;
    let layers = size(fields, "num_hidden_layers")?;
    let dense_columns = match family {
        Family::Qwen3Moe | Family::GptOss | Family::Mixtral => 0,
        _ => size(fields, "intermediate_size")?,
    };
    let experts = experts(family, fields)?;
    let dense_layers = match (experts.is_some(), family) {
        (false, _) => layers,
        (true, Family::DeepseekV3 | Family::Glm4Moe) => {
            optional(fields, "first_k_dense_replace")?.unwrap_or(0).min(layers)
        }
        (true, _) => 0,
    };
    // A class that ties by default writes so.
    let is_head_tied = fields.boolean("tie_word_embeddings")?.unwrap_or(false);
    Ok(ModelShape {
        name: String::new(),
        hidden: size(fields, "hidden_size")?,
        vocabulary: size(fields, "vocab_size")?,
        is_head_tied,
        context_max: size(fields, "max_position_embeddings")?,
        attention: attention(path, family, fields)?,
        windows: windows(path, family, fields, layers)?,
        dense_layers,
        dense_columns,
        // A format of experts means nothing where there are none.
        stored: stored(fields, outer)?.filter(|format| *format != WeightFormat::Mxfp4 || experts.is_some()),
        experts,
        config: None,
    })
}

fn attention(path: &Path, family: Family, fields: &Fields<'_>) -> Result<Attention, CheckpointError> {
    let heads = size(fields, "num_attention_heads")?;
    if family == Family::DeepseekV3 {
        return Ok(Attention::Latent(LatentAttention {
            heads,
            query_rank: optional(fields, "q_lora_rank")?,
            latent: size(fields, "kv_lora_rank")?,
            rotary: size(fields, "qk_rope_head_dim")?,
            plain: size(fields, "qk_nope_head_dim")?,
            value: size(fields, "v_head_dim")?,
        }));
    }
    let kv_heads = optional(fields, "num_key_value_heads")?.unwrap_or(heads);
    let inconsistent = |problem: String| CheckpointError::Inconsistent { path: path.to_owned(), problem };
    if !heads.is_multiple_of(kv_heads) {
        return Err(inconsistent(format!(
            "{heads} attention heads are no multiple of {kv_heads} key/value heads"
        )));
    }
    let head_dim = match optional(fields, "head_dim")? {
        Some(head_dim) => head_dim,
        None => config_check::derived_head_dim(size(fields, "hidden_size")?, heads).map_err(inconsistent)?,
    };
    let has_bias = fields.boolean("attention_bias")?;
    Ok(Attention::Grouped(GroupedAttention {
        query_heads: heads,
        kv_heads,
        head_dim,
        has_qkv_bias: has_bias.unwrap_or(false) || matches!(family, Family::Qwen2 | Family::GptOss),
        has_output_bias: match family {
            Family::GptOss => true,
            Family::Llama => has_bias.unwrap_or(false),
            _ => false,
        },
        has_sinks: family == Family::GptOss,
        has_qk_norms: matches!(family, Family::Qwen3 | Family::Qwen3Moe)
            || fields.boolean("use_qk_norm")?.unwrap_or(false),
    }))
}

fn experts(family: Family, fields: &Fields<'_>) -> Result<Option<Experts>, CheckpointError> {
    let count = |keys: &[&str]| {
        let given = keys.iter().find(|key| fields.get(key).is_some()).unwrap_or(&keys[0]);
        size(fields, given)
    };
    let chosen = || count(&["num_experts_per_tok", "experts_per_token"]);
    let experts = match family {
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => return Ok(None),
        Family::Qwen3Moe => Experts {
            count: count(&["num_experts"])?,
            chosen: chosen()?,
            columns: size(fields, "moe_intermediate_size")?,
            ..Experts::default()
        },
        Family::Mixtral => Experts {
            count: count(&["num_local_experts"])?,
            chosen: chosen()?,
            columns: size(fields, "intermediate_size")?,
            ..Experts::default()
        },
        Family::GptOss => Experts {
            count: count(&["num_local_experts", "num_experts"])?,
            chosen: chosen()?,
            columns: size(fields, "intermediate_size")?,
            shared: 0,
            have_biases: true,
            has_router_bias: true,
        },
        Family::DeepseekV3 | Family::Glm4Moe => Experts {
            count: count(&["n_routed_experts"])?,
            chosen: chosen()?,
            columns: size(fields, "moe_intermediate_size")?,
            shared: optional(fields, "n_shared_experts")?.unwrap_or(0),
            have_biases: false,
            has_router_bias: true,
        },
    };
    if experts.chosen > experts.count {
        let problem = format!("is {}, but there are {} experts", experts.chosen, experts.count);
        return Err(fields.bad("num_experts_per_tok", problem));
    }
    Ok(Some(experts))
}

/// As `layer_types` says; else one window for all where the family has it.
fn windows(
    path: &Path,
    family: Family,
    fields: &Fields<'_>,
    layers: usize,
) -> Result<Vec<Option<NonZeroUsize>>, CheckpointError> {
    let window = fields.size("sliding_window")?.and_then(NonZeroUsize::new);
    let Some(kinds) = fields.get("layer_types").and_then(Value::as_array) else {
        let heeds_it = match family {
            Family::Mistral | Family::Mixtral => true,
            Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => {
                fields.boolean("use_sliding_window")?.unwrap_or(false)
            }
            _ => false,
        };
        // Without a list the family's own order counts.
        let mut windows = config_check::alike(path, layers, window.filter(|_| heeds_it))?;
        if family == Family::GptOss {
            windows.iter_mut().step_by(2).for_each(|layer| *layer = window);
        }
        return Ok(windows);
    };
    if kinds.len() != layers {
        return Err(fields.bad("layer_types", format!("has {} kinds for {layers} layers", kinds.len())));
    }
    let of_kind = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if window.is_some() => Ok(window),
        _ => {
            Err(fields.bad("layer_types", "must be of full_attention and, with a window, sliding_attention"))
        }
    };
    kinds.iter().map(of_kind).collect()
}

/// How the weights are stored, where this planner has a word for it.
fn stored(fields: &Fields<'_>, outer: &Fields<'_>) -> Result<Option<WeightFormat>, CheckpointError> {
    const KEY: &str = "quantization_config";
    let quantization = fields.child(KEY)?.or(outer.child(KEY)?);
    let method = match &quantization {
        Some(quantization) => quantization.string("quant_method")?,
        None => None,
    };
    let of_outer = outer.string("torch_dtype")?.or(outer.string("dtype")?);
    let dtype = fields.string("torch_dtype")?.or(fields.string("dtype")?).or(of_outer);
    Ok(match (method, dtype) {
        (Some("mxfp4"), _) => Some(WeightFormat::Mxfp4),
        (Some("fp8"), _) => Some(WeightFormat::Fp8),
        (None, Some("float32")) => Some(WeightFormat::Float32),
        (None, Some("bfloat16")) => Some(WeightFormat::BFloat16),
        _ => None,
    })
}

fn size(fields: &Fields<'_>, key: &str) -> Result<usize, CheckpointError> {
    let size = fields.required_size(key)?;
    believed(fields, key, size)
}

/// A size, where there is one.
fn optional(fields: &Fields<'_>, key: &str) -> Result<Option<usize>, CheckpointError> {
    fields.size(key)?.filter(|size| *size > 0).map(|size| believed(fields, key, size)).transpose()
}

fn believed(fields: &Fields<'_>, key: &str, size: usize) -> Result<usize, CheckpointError> {
    match (1..=SIZE_MAX).contains(&size) {
        true => Ok(size),
        false => Err(fields.bad(key, format!("is {size}; it must be from 1 to {SIZE_MAX}"))),
    }
}

/// Bytes of all tensors of a folder, from the headers of its files; nothing where it has none.
fn tensor_bytes(path: &Path) -> Result<Option<u64>, CheckpointError> {
    let (single, several) = (path.join(folder::SINGLE_FILE), path.join(folder::INDEX_FILE));
    let files: BTreeSet<String> = if single.exists() {
        [folder::SINGLE_FILE.to_owned()].into()
    } else if several.exists() {
        index::read(&several)?.into_values().collect()
    } else {
        return Ok(None);
    };
    let mut bytes = 0u64;
    for file in files {
        let file = MappedFile::open(&path.join(file))?;
        // Tensors fill the data without a gap.
        let (data_start, _) = header::read(&file)?;
        bytes = bytes.saturating_add((file.bytes().len() - data_start) as u64);
    }
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::plan::models;

    fn of(config: &Value) -> Result<(ModelShape, Option<u64>), CheckpointError> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
        read_shape(folder.path())
    }

    fn gpt_oss() -> Value {
        json!({
            "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "num_local_experts": 128, "experts_per_token": 4, "attention_bias": true, "sliding_window": 128,
            "max_position_embeddings": 131_072, "vocab_size": 201_088, "tie_word_embeddings": false,
            "quantization_config": {"quant_method": "mxfp4"},
        })
    }

    #[test]
    fn a_configuration_gives_the_shape_of_the_table() {
        let qwen = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 12_288,
            "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
            "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "attention_bias": false, "sliding_window": null, "use_sliding_window": false,
            "max_position_embeddings": 40_960, "vocab_size": 151_936, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16",
        });
        let kimi = json!({
            "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18_432,
            "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64,
            "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 384, "num_experts_per_tok": 8,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 131_072,
            "vocab_size": 163_840, "tie_word_embeddings": false, "quantization_config": {"quant_method": "fp8"},
        });
        let air = json!({
            "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 10_944,
            "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96,
            "num_key_value_heads": 8, "head_dim": 128, "attention_bias": true, "use_qk_norm": false,
            "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "max_position_embeddings": 131_072, "vocab_size": 151_552, "tie_word_embeddings": false,
            "dtype": "bfloat16",
        });
        for (name, config) in
            [("gpt-oss-120b", gpt_oss()), ("Qwen3-235B-A22B", qwen), ("Kimi-K2", kimi), ("GLM-4.5-Air", air)]
        {
            let (shape, bytes) = of(&config).expect(name);
            assert_eq!(ModelShape { name: name.to_owned(), ..shape }, models::find(name).expect(name));
            assert_eq!(bytes, None, "a configuration alone");
        }
    }

    #[test]
    fn windows_stand_in_the_list_of_kinds_where_there_is_one() {
        let mut config = gpt_oss();
        config["num_hidden_layers"] = json!(2);
        config["layer_types"] = json!(["full_attention", "sliding_attention"]);
        let (shape, _) = of(&config).expect("a shape");
        assert_eq!(shape.windows, [None, NonZeroUsize::new(128)]);
        config["layer_types"] = json!(["full_attention"]);
        assert!(of(&config).expect_err("too short").to_string().contains("1 kinds for 2 layers"));
        config["layer_types"] = json!(["full_attention", "linear_attention"]);
        assert!(of(&config).is_err());
    }

    #[test]
    fn impossible_sizes_are_refused_by_name() {
        for (key, value) in [
            ("hidden_size", json!(0)),
            ("num_hidden_layers", json!(1_u64 << 40)),
            ("num_hidden_layers", json!(5000)),
            ("vocab_size", json!("many")),
            ("num_key_value_heads", json!(7)),
            ("experts_per_token", json!(129)),
            ("architectures", json!(["NobodysForCausalLM"])),
        ] {
            let mut config = gpt_oss();
            config[key] = value;
            assert!(of(&config).is_err(), "{key}");
        }
    }
}
