//! A tiny Llama checkpoint with random weights and a byte-level tokenizer, written where a test wants it.
//!
//! Small enough to load in milliseconds, shaped so that three ranks get unequal work: 6 query heads over 3 KV heads,
//! 3 MLP units of 64 columns, 5 vocabulary units of 64 rows.

mod faults;

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use serde_json::{Map, Value, json};

pub(crate) use self::faults::{Faults, REBUILD_FAILURE, Rebuild};
use crate::GenerateOptions;

/// Entries of the embedding: 256 bytes, the special tokens, padding.
pub(crate) const VOCAB_SIZE: usize = 320;
/// End of turn, the model's end-of-sequence token.
pub(crate) const IM_END: u32 = 257;
/// Longest context of the checkpoint: long enough that a whole generation lasts while a test looks at it.
pub(crate) const CONTEXT: usize = 4096;

const HIDDEN: usize = 96;
const HEADS: usize = 6;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 16;
const INTERMEDIATE: usize = 192;
const LAYERS: usize = 2;

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// So many tokens, always the same.
pub(crate) fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens: Some(max_tokens),
        temperature: Some(0.0),
        ignore_eos: true,
        ..GenerateOptions::default()
    }
}

/// Waits for what is to happen within `limit`.
pub(crate) async fn until_within(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < end, "{what} did not happen within {limit:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Writes the checkpoint into `folder`.
pub(crate) fn write_checkpoint(folder: &Path) {
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": true,
        "bos_token_id": 256,
        "eos_token_id": IM_END,
        "torch_dtype": "float32",
    });
    write_json(&folder.join("config.json"), &config);
    write_json(&folder.join("tokenizer.json"), &tokenizer());
    let tokenizer_config = json!({
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    });
    write_json(&folder.join("tokenizer_config.json"), &tokenizer_config);
    fs::write(folder.join("model.safetensors"), weights()).expect("the test folder is writable");
}

fn write_json(path: &Path, value: &Value) {
    fs::write(path, serde_json::to_vec(value).expect("a value serialises"))
        .expect("the test folder is writable");
}

/// GPT-2's byte-level alphabet without merges: token n is byte n.
fn tokenizer() -> Value {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut shifted = 256;
    let mut vocab = Map::new();
    for byte in 0..256_u32 {
        let code = if printable(byte) {
            byte
        } else {
            shifted += 1;
            shifted - 1
        };
        let character = char::from_u32(code).expect("the alphabet has no surrogates");
        vocab.insert(character.to_string(), json!(byte));
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(256, "<|im_start|>"), special(IM_END, "<|im_end|>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                  "merges": []},
    })
}

/// A safetensors file: header length, header, data.
fn weights() -> Vec<u8> {
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![VOCAB_SIZE, HIDDEN]),
        ("model.norm.weight".into(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        let mut push = |name: &str, shape: &[usize]| {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        push("input_layernorm", &[HIDDEN]);
        push("post_attention_layernorm", &[HIDDEN]);
        push("self_attn.q_proj", &[HEADS * HEAD_DIM, HIDDEN]);
        push("self_attn.k_proj", &[KV_HEADS * HEAD_DIM, HIDDEN]);
        push("self_attn.v_proj", &[KV_HEADS * HEAD_DIM, HIDDEN]);
        push("self_attn.o_proj", &[HIDDEN, HEADS * HEAD_DIM]);
        push("mlp.gate_proj", &[INTERMEDIATE, HIDDEN]);
        push("mlp.up_proj", &[INTERMEDIATE, HIDDEN]);
        push("mlp.down_proj", &[HIDDEN, INTERMEDIATE]);
    }
    let mut header = Map::new();
    let mut data = Vec::new();
    let mut state = 1_u32;
    for (name, shape) in tensors {
        let start = data.len();
        for _ in 0..shape.iter().product() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Norms are near one, matrices small and of both signs.
            let noise = (state >> 8) as f32 / (1 << 24) as f32 - 0.5;
            let value = if shape.len() == 1 { 1.0 + 0.1 * noise } else { 0.4 * noise };
            data.extend_from_slice(&value.to_le_bytes());
        }
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]}));
    }
    let header = serde_json::to_vec(&header).expect("a header serialises");
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(&header);
    file.extend_from_slice(&data);
    file
}
