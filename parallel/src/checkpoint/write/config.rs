//! `config.json` and `generation_config.json`, in the spelling that `transformers` 4 and 5 both read:
//! `rope_theta` beside `rope_scaling`, and `torch_dtype`.

use std::{num::NonZeroUsize, path::Path};

use consort_kernels::DType;
use serde_json::{Map, Value, json};

use crate::{
    checkpoint::{Checkpoint, Gguf, json::read_object},
    config::{Architecture, GenerationDefaults, ModelConfig, RopeConfig, RopeScaling},
};

use super::{WriteError, copy_if_present, llama3, write_json};

const CONFIG_FILE: &str = "config.json";
const GENERATION_FILE: &str = "generation_config.json";

/// Writes `config.json` and `generation_config.json` of a model whose weights are stored as `dtype`. A folder's own
/// files are kept but for the type and for what they leave to be guessed; for a GGUF file they are made anew.
pub fn write_config(checkpoint: &Checkpoint, folder: &Path, dtype: DType) -> Result<(), WriteError> {
    let (config, generation) = match checkpoint.gguf() {
        Some(gguf) => {
            let tokens = Tokens::of(checkpoint.config(), gguf);
            let generation = generation(checkpoint.generation_defaults(), &tokens);
            (config(checkpoint, &tokens, dtype)?, Some(generation))
        }
        None => (adapted(checkpoint, dtype)?, None),
    };
    write_json(&folder.join(CONFIG_FILE), &Value::Object(config))?;
    match generation {
        Some(generation) => write_json(&folder.join(GENERATION_FILE), &Value::Object(generation)),
        None => copy_if_present(&checkpoint.path().join(GENERATION_FILE), &folder.join(GENERATION_FILE)),
    }
}

/// Special tokens of a GGUF file. Unlike [`ModelConfig::bos_token_id`], the first token is named whether or not it
/// is put before prompts: `transformers` asks the tokenizer about that.
struct Tokens {
    bos: Option<u32>,
    eos: Vec<u32>,
    padding: Option<u32>,
}

impl Tokens {
    fn of(config: &ModelConfig, gguf: &Gguf) -> Self {
        // An embedding with a padding index outside the vocabulary cannot be built.
        let token = |key| gguf.u32(key).filter(|id| (*id as usize) < config.vocab_size);
        Self {
            bos: token("tokenizer.ggml.bos_token_id").or(config.bos_token_id),
            eos: config.eos_token_ids.clone(),
            padding: token("tokenizer.ggml.padding_token_id"),
        }
    }

    fn add_to(&self, object: &mut Map<String, Value>) {
        let eos = match self.eos[..] {
            [] => Value::Null,
            [one] => json!(one),
            _ => json!(self.eos),
        };
        object.insert("bos_token_id".to_owned(), json!(self.bos));
        object.insert("eos_token_id".to_owned(), eos);
        object.insert("pad_token_id".to_owned(), json!(self.padding));
    }
}

/// A whole `config.json`.
fn config(checkpoint: &Checkpoint, tokens: &Tokens, dtype: DType) -> Result<Map<String, Value>, WriteError> {
    // Every field by name: one that is added must find its place here.
    let ModelConfig {
        architecture,
        hidden_size,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        intermediate_size,
        vocab_size,
        max_position_embeddings,
        rms_norm_eps,
        rope,
        layer_windows,
        tie_word_embeddings,
        eos_token_ids: _,
        bos_token_id: _,
    } = checkpoint.config();
    let (class, model_type) = match architecture {
        Architecture::Llama => ("LlamaForCausalLM", "llama"),
        Architecture::Mistral => ("MistralForCausalLM", "mistral"),
    };
    let mut object = Map::new();
    let mut set = |key: &str, value: Value| object.insert(key.to_owned(), value);
    set("architectures", json!([class]));
    set("model_type", json!(model_type));
    for (key, size) in [
        ("hidden_size", hidden_size),
        ("num_hidden_layers", num_layers),
        ("num_attention_heads", num_heads),
        ("num_key_value_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("intermediate_size", intermediate_size),
        ("vocab_size", vocab_size),
        ("max_position_embeddings", max_position_embeddings),
    ] {
        set(key, json!(size));
    }
    set("rms_norm_eps", number(*rms_norm_eps));
    set("rope_theta", number(rope.theta));
    set("rope_scaling", rope_scaling(checkpoint.path(), rope)?);
    set("hidden_act", json!("silu"));
    let window = one_window(checkpoint.path(), *architecture, layer_windows)?;
    match architecture {
        Architecture::Llama => {
            set("attention_bias", json!(false));
            set("mlp_bias", json!(false));
        }
        Architecture::Mistral => drop(set("sliding_window", json!(window))),
    }
    set("tie_word_embeddings", json!(tie_word_embeddings));
    set("torch_dtype", json!(dtype.to_string()));
    tokens.add_to(&mut object);
    Ok(object)
}

/// The window that all layers have, or have not: `transformers` gives neither family any other choice.
pub(super) fn one_window(
    path: &Path,
    architecture: Architecture,
    layer_windows: &[Option<NonZeroUsize>],
) -> Result<Option<NonZeroUsize>, WriteError> {
    let refuse = |what: &str| Err(WriteError::NoSpelling { path: path.to_owned(), what: what.to_owned() });
    let window = layer_windows.first().copied().flatten();
    match architecture {
        _ if layer_windows.iter().any(|other| *other != window) => {
            refuse("windows that differ from layer to layer")
        }
        Architecture::Llama if window.is_some() => refuse("a sliding window in layers of Llama"),
        Architecture::Llama | Architecture::Mistral => Ok(window),
    }
}

/// `rope_scaling`; null where frequencies are unchanged.
pub(super) fn rope_scaling(path: &Path, rope: &RopeConfig) -> Result<Value, WriteError> {
    match &rope.scaling {
        RopeScaling::None => Ok(Value::Null),
        RopeScaling::Linear { factor } => Ok(json!({ "rope_type": "linear", "factor": number(*factor) })),
        RopeScaling::Yarn { yarn, attention_factor } => Ok(json!({
            "rope_type": "yarn",
            "factor": number(yarn.factor),
            "original_max_position_embeddings": yarn.original_context,
            "beta_fast": number(yarn.beta_fast),
            "beta_slow": number(yarn.beta_slow),
            "truncate": yarn.truncate,
            "attention_factor": number(*attention_factor),
        })),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => Ok(json!({
            "rope_type": "llama3",
            "factor": number(*factor),
            "low_freq_factor": number(*low_freq_factor),
            "high_freq_factor": number(*high_freq_factor),
            "original_max_position_embeddings": original_context,
        })),
        RopeScaling::Factors(factors) => {
            let found = uniform(factors).or_else(|| llama3::recognise(factors, rope.theta));
            let scaling = found.ok_or_else(|| WriteError::NoSpelling {
                path: path.to_owned(),
                what:
                    "divisors of the rotary frequencies (`rope_freqs.weight`) that are not those of llama3's \
                       scaling"
                        .to_owned(),
            })?;
            rope_scaling(path, &RopeConfig { theta: rope.theta, scaling })
        }
    }
}

/// One divisor for all is linear scaling, whoever wrote it down one by one.
fn uniform(factors: &[f32]) -> Option<RopeScaling> {
    let (&factor, rest) = factors.split_first()?;
    (factor > 1.0 && rest.iter().all(|other| *other == factor)).then_some(RopeScaling::Linear { factor })
}

/// `generation_config.json`. `transformers` complains of sampling numbers beside anything but `do_sample: true`, and
/// will not save such a file again. So a temperature of 0 becomes `do_sample: false` alone, which this project reads
/// as that temperature; and where nothing is said of sampling, nothing is said of `do_sample`.
fn generation(defaults: &GenerationDefaults, tokens: &Tokens) -> Map<String, Value> {
    let GenerationDefaults { temperature, top_k, top_p, min_p, repetition_penalty } = defaults;
    let mut object = Map::new();
    tokens.add_to(&mut object);
    let mut set = |key: &str, value: Value| object.insert(key.to_owned(), value);
    if temperature.is_some_and(|temperature| temperature == 0.0) {
        set("do_sample", json!(false));
    } else {
        let top_k = top_k.map(|top_k| ("top_k", json!(top_k)));
        let numbers = [("temperature", *temperature), ("top_p", *top_p), ("min_p", *min_p)];
        let numbers = numbers.into_iter().filter_map(|(key, value)| Some((key, number(value?))));
        for (key, value) in numbers.chain(top_k) {
            set("do_sample", json!(true));
            set(key, value);
        }
    }
    // A penalty counts without sampling too.
    if let Some(penalty) = repetition_penalty {
        set("repetition_penalty", number(*penalty));
    }
    object
}

/// A folder's own `config.json` with another type, and with what it leaves to be guessed spelled out. Where a file is
/// silent about tying, this project looks whether there is a head and `transformers` does not; of Mistral's window,
/// both take the same, and a later release's default shall not change it.
fn adapted(checkpoint: &Checkpoint, dtype: DType) -> Result<Map<String, Value>, WriteError> {
    let mut object = read_object(&checkpoint.path().join(CONFIG_FILE))?;
    let name = json!(dtype.to_string());
    if let Some(existing) = object.get_mut("dtype") {
        *existing = name.clone();
    }
    object.insert("torch_dtype".to_owned(), name);
    object.insert("tie_word_embeddings".to_owned(), json!(checkpoint.config().tie_word_embeddings));
    if checkpoint.config().architecture == Architecture::Mistral {
        // Which layers have it, where not all do, the file says itself in `layer_types`.
        let window = checkpoint.config().layer_windows.iter().flatten().next();
        object.insert("sliding_window".to_owned(), json!(window));
    }
    Ok(object)
}

/// A single as the shortest decimal that names it: 1e-5 and not 9.999999747378752e-6.
pub(super) fn number(value: f32) -> Value {
    let shortest = value.to_string().parse::<f64>().ok();
    json!(shortest.filter(|shortest| *shortest as f32 == value).unwrap_or(f64::from(value)))
}
