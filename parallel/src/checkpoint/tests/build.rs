//! Checkpoints written by tests: the smallest Llama there is, all zeros, with any key or tensor changed.

use std::{collections::BTreeMap, path::Path};

use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Shapes of a Llama with hidden size 4, two heads over one key/value head, one layer and five tokens.
pub(in crate::checkpoint) const TENSORS: [(&str, &str, &[usize]); 11] = [
    ("token_embd.weight", "model.embed_tokens.weight", &[5, 4]),
    ("output_norm.weight", "model.norm.weight", &[4]),
    ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight", &[4]),
    ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", &[4, 4]),
    ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", &[2, 4]),
    ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", &[2, 4]),
    ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight", &[4, 4]),
    ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", &[4]),
    ("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight", &[6, 4]),
    ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", &[6, 4]),
    ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", &[4, 6]),
];

/// The `config.json` of that model, as transformers 4 writes it.
pub(in crate::checkpoint) fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 6, "vocab_size": 5,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": null,
        "tie_word_embeddings": true, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
    })
}

/// A tensor of zeros for [`write_safetensors`].
pub(in crate::checkpoint) struct Zeros {
    pub(in crate::checkpoint) dtype: Dtype,
    pub(in crate::checkpoint) shape: Vec<usize>,
}

/// The tensors of that model by Hugging Face's names.
pub(in crate::checkpoint) fn tensors() -> BTreeMap<String, Zeros> {
    let zeros = |shape: &[usize]| Zeros { dtype: Dtype::F32, shape: shape.to_vec() };
    TENSORS.iter().map(|(_, name, shape)| ((*name).to_owned(), zeros(shape))).collect()
}

/// Writes one safetensors file.
pub(in crate::checkpoint) fn write_safetensors(path: &Path, tensors: &BTreeMap<String, Zeros>) {
    let bytes = |zeros: &Zeros| vec![0_u8; zeros.shape.iter().product::<usize>() * zeros.dtype.bitsize() / 8];
    let data: Vec<Vec<u8>> = tensors.values().map(bytes).collect();
    let views = tensors.iter().zip(&data).map(|((name, zeros), data)| {
        (name, TensorView::new(zeros.dtype, zeros.shape.clone(), data).unwrap())
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Writes a whole folder.
pub(in crate::checkpoint) fn folder(config: &Value, tensors: &BTreeMap<String, Zeros>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    write_safetensors(&folder.path().join("model.safetensors"), tensors);
    folder
}

/// A GGUF file in the making: metadata values and tensor entries are raw bytes, so that they can be wrong.
#[derive(Clone)]
pub(in crate::checkpoint) struct GgufBuilder {
    pub(in crate::checkpoint) version: u32,
    /// Key, value type, value.
    pub(in crate::checkpoint) metadata: Vec<(Vec<u8>, u32, Vec<u8>)>,
    pub(in crate::checkpoint) tensors: Vec<GgufTensor>,
    /// Counts that the header claims, where they are lies.
    pub(in crate::checkpoint) claimed: Option<(u64, u64)>,
    /// Bytes of data that the tensors needed when they were added.
    data_bytes: u64,
}

/// A tensor entry; its data are zeros.
#[derive(Clone)]
pub(in crate::checkpoint) struct GgufTensor {
    pub(in crate::checkpoint) name: String,
    /// Innermost first, as in the file.
    pub(in crate::checkpoint) dims: Vec<u64>,
    pub(in crate::checkpoint) kind: u32,
    pub(in crate::checkpoint) offset: u64,
}

impl GgufBuilder {
    /// The smallest Llama.
    pub(in crate::checkpoint) fn llama() -> Self {
        let mut builder =
            Self { version: 3, metadata: Vec::new(), tensors: Vec::new(), claimed: None, data_bytes: 0 };
        builder.string("general.architecture", "llama");
        for (key, value) in [
            ("llama.embedding_length", 4),
            ("llama.block_count", 1),
            ("llama.attention.head_count", 2),
            ("llama.attention.head_count_kv", 1),
            ("llama.feed_forward_length", 6),
            ("llama.context_length", 64),
        ] {
            builder.u32(key, value);
        }
        builder.f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
        for (name, _, shape) in TENSORS {
            builder.tensor(name, shape, 0);
        }
        builder
    }

    /// Sets a key, in place of the value that it had.
    pub(in crate::checkpoint) fn set(&mut self, key: &str, kind: u32, value: Vec<u8>) {
        self.remove(key);
        self.metadata.push((key.as_bytes().to_vec(), kind, value));
    }

    pub(in crate::checkpoint) fn remove(&mut self, key: &str) {
        self.metadata.retain(|(existing, _, _)| existing != key.as_bytes());
    }

    pub(in crate::checkpoint) fn u32(&mut self, key: &str, value: u32) {
        self.set(key, 4, value.to_le_bytes().to_vec());
    }

    pub(in crate::checkpoint) fn f32(&mut self, key: &str, value: f32) {
        self.set(key, 6, value.to_le_bytes().to_vec());
    }

    pub(in crate::checkpoint) fn bool(&mut self, key: &str, value: bool) {
        self.set(key, 7, vec![u8::from(value)]);
    }

    pub(in crate::checkpoint) fn string(&mut self, key: &str, value: &str) {
        self.set(key, 8, string(value.as_bytes()));
    }

    pub(in crate::checkpoint) fn strings(&mut self, key: &str, values: &[&str]) {
        let mut array = array(8, values.len() as u64);
        values.iter().for_each(|value| array.extend(string(value.as_bytes())));
        self.set(key, 9, array);
    }

    /// Adds a tensor (shape outermost first) after those that are there; 4 bytes per element suffice for all
    /// types.
    pub(in crate::checkpoint) fn tensor(&mut self, name: &str, shape: &[usize], kind: u32) {
        let dims: Vec<u64> = shape.iter().rev().map(|dim| *dim as u64).collect();
        let offset = self.data_bytes;
        self.data_bytes = (offset + dims.iter().product::<u64>() * 4).next_multiple_of(32);
        self.tensors.push(GgufTensor { name: name.to_owned(), dims, kind, offset });
    }

    /// The tensor of that name, to be changed.
    pub(in crate::checkpoint) fn tensor_mut(&mut self, name: &str) -> &mut GgufTensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    /// Header, padding, and `data_bytes` of data.
    pub(in crate::checkpoint) fn bytes_with(&self, data_bytes: usize) -> Vec<u8> {
        let (tensor_count, metadata_count) =
            self.claimed.unwrap_or((self.tensors.len() as u64, self.metadata.len() as u64));
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(tensor_count.to_le_bytes());
        bytes.extend(metadata_count.to_le_bytes());
        for (key, kind, value) in &self.metadata {
            bytes.extend(string(key));
            bytes.extend(kind.to_le_bytes());
            bytes.extend(value);
        }
        for tensor in &self.tensors {
            bytes.extend(string(tensor.name.as_bytes()));
            bytes.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
            bytes.extend(tensor.kind.to_le_bytes());
            bytes.extend(tensor.offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32) + data_bytes, 0);
        bytes
    }

    /// The whole file.
    pub(in crate::checkpoint) fn bytes(&self) -> Vec<u8> {
        self.bytes_with(self.data_bytes as usize)
    }
}

/// A string as GGUF stores it.
pub(in crate::checkpoint) fn string(text: &[u8]) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    bytes
}

/// The start of an array value: element type and count.
pub(in crate::checkpoint) fn array(kind: u32, count: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(count.to_le_bytes());
    bytes
}
