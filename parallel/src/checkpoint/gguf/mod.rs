//! GGUF: one little-endian file with metadata (sizes, tokenizer, chat template) and tensors.
//!
//! Tensors are renamed to Hugging Face's names, and the query and key rows of Llama files, which GGUF stores
//! interleaved for rotation of neighbours, are handed out in Hugging Face's order. Called by
//! [`Checkpoint::open`](super::Checkpoint::open) for anything that is not a folder.

mod config;
mod layout;
mod names;
mod parse;
mod parts;
mod shape;
#[cfg(test)]
mod tests;
mod types;

use std::{collections::BTreeMap, path::Path};

use super::{Checkpoint, CheckpointError, Encoding, MappedFile, StoredTensor};

pub(super) use names::stored_name;
use parse::{Header, TensorEntry, Value};
pub(super) use shape::read_shape;

/// Metadata of a GGUF file. A getter answers nothing both for a key that is absent and for one of another type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gguf {
    metadata: BTreeMap<String, Value>,
}

impl Gguf {
    /// The token id that means "there is none", as llama.cpp writes it.
    pub const NO_TOKEN: u32 = u32::MAX;

    /// Whether the key is there, whatever its type.
    pub fn contains(&self, key: &str) -> bool {
        self.metadata.contains_key(key)
    }

    /// All keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.metadata.keys().map(String::as_str)
    }

    /// A string.
    pub fn string(&self, key: &str) -> Option<&str> {
        match self.metadata.get(key)? {
            Value::String(value) => Some(value),
            _ => None,
        }
    }

    /// An integer of any width that fits.
    pub fn u32(&self, key: &str) -> Option<u32> {
        self.unsigned(key)?.try_into().ok()
    }

    /// A floating-point number.
    pub fn f32(&self, key: &str) -> Option<f32> {
        match self.metadata.get(key)? {
            Value::Float(value) => Some(*value as f32),
            _ => None,
        }
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.metadata.get(key)? {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Option<&[String]> {
        match self.metadata.get(key)? {
            Value::Strings(values) => Some(values),
            _ => None,
        }
    }

    /// An array of integers of any width that all fit.
    pub fn i32s(&self, key: &str) -> Option<&[i32]> {
        match self.metadata.get(key)? {
            Value::I32s(values) => Some(values),
            _ => None,
        }
    }

    /// An array of single-precision numbers.
    pub fn f32s(&self, key: &str) -> Option<&[f32]> {
        match self.metadata.get(key)? {
            Value::F32s(values) => Some(values),
            _ => None,
        }
    }

    /// Whether prompts begin with the begin-of-sequence token. Where the file is silent, sentencepiece vocabularies and
    /// those that split text as Llama 3 does want it, and other byte-level ones do not, as llama.cpp decides it.
    pub fn adds_bos(&self) -> bool {
        self.bool("tokenizer.ggml.add_bos_token").unwrap_or_else(|| {
            let split = self.string("tokenizer.ggml.pre");
            self.string("tokenizer.ggml.model") == Some("llama")
                || matches!(split, Some("llama3" | "llama-v3" | "llama-bpe" | "falcon3"))
        })
    }

    fn unsigned(&self, key: &str) -> Option<u64> {
        match self.metadata.get(key)? {
            Value::Unsigned(value) => Some(*value),
            Value::Signed(value) => (*value).try_into().ok(),
            _ => None,
        }
    }
}

/// Opens a GGUF file. Which tensors it must hold is checked by the caller.
pub(super) fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let file = MappedFile::open(path)?;
    if !file.bytes().starts_with(parse::MAGIC) {
        let problem = "it is neither a GGUF file nor a folder with config.json and safetensors".to_owned();
        return Err(CheckpointError::NotACheckpoint { path: path.to_owned(), problem });
    }
    let Header { metadata, tensors, data_start, alignment } =
        parse::parse(file.bytes()).map_err(|fault| CheckpointError::Malformed {
            path: path.to_owned(),
            offset: fault.offset,
            problem: fault.problem,
        })?;
    let gguf = Gguf { metadata };
    // Before its data are looked at: what is of another kind is planned from a header alone.
    config::check_kind(path, &gguf)?;
    layout::check(&tensors, data_start, alignment, file.bytes().len()).map_err(|problem| {
        CheckpointError::Malformed { path: path.to_owned(), offset: data_start, problem }
    })?;
    let mut contents = Contents::locate(path, tensors, data_start, file.bytes().len())?;
    let factors = contents.rope_factors(path, file.bytes())?;
    let config = config::parse(path, &gguf, &contents.shapes(), factors)?;
    let generation_defaults = config::generation_defaults(&gguf);
    contents.pair_rotated_rows(path, config.head_dim)?;
    // The header has been copied; keep its pages out of the resident set.
    file.release(0..data_start);
    Ok(Checkpoint {
        path: path.to_owned(),
        files: vec![file],
        tensors: contents.tensors,
        unreadable: contents.unreadable,
        nameless: contents.nameless,
        config,
        generation_defaults,
        gguf: Some(gguf),
    })
}

/// Tensors of the file, by Hugging Face's names where they have one.
#[derive(Default)]
struct Contents {
    tensors: BTreeMap<String, StoredTensor>,
    unreadable: BTreeMap<String, String>,
    /// Tensors without such a name, by their own.
    nameless: Vec<String>,
    /// Divisors of the rotary frequencies, which Hugging Face's checkpoints do not store.
    rope_freqs: Option<StoredTensor>,
}

/// What the configuration wants to know of the tensors.
struct Shapes {
    /// Rows of the embedding.
    vocab_size: Option<usize>,
    /// Whether there is a head of its own.
    has_head: bool,
}

impl Contents {
    fn locate(
        path: &Path,
        entries: Vec<TensorEntry>,
        data_start: usize,
        file_len: usize,
    ) -> Result<Self, CheckpointError> {
        let mut contents = Self::default();
        for TensorEntry { name, shape, kind, offset } in entries {
            let hf_name = names::to_hugging_face(&name);
            let is_rope_freqs = name == names::ROPE_FREQS;
            let Some(hf_name) = hf_name.or_else(|| is_rope_freqs.then(|| name.clone())) else {
                contents.nameless.push(name);
                continue;
            };
            let encoding = match types::encoding(kind) {
                Ok(encoding) => encoding,
                Err(found) => {
                    contents.unreadable.insert(hf_name, found);
                    continue;
                }
            };
            let malformed = |problem: String| CheckpointError::Malformed {
                path: path.to_owned(),
                offset: data_start,
                problem: format!("tensor `{name}`: {problem}"),
            };
            let start = usize::try_from(offset)
                .ok()
                .and_then(|offset| data_start.checked_add(offset))
                .ok_or_else(|| malformed(format!("its offset {offset} overflows")))?;
            let tensor = StoredTensor::new(0, file_len, start, shape, encoding).map_err(malformed)?;
            if is_rope_freqs {
                contents.rope_freqs = Some(tensor);
            } else {
                contents.tensors.insert(hf_name, tensor);
            }
        }
        Ok(contents)
    }

    /// The stored divisors of the rotary frequencies, where there are any.
    fn rope_factors(&self, path: &Path, file: &[u8]) -> Result<Option<Vec<f32>>, CheckpointError> {
        if let Some(found) = self.unreadable.get(names::ROPE_FREQS) {
            return Err(CheckpointError::Encoding {
                path: path.to_owned(),
                name: names::ROPE_FREQS.into(),
                stored_name: None,
                found: found.clone().into(),
                supported: Encoding::SUPPORTED,
            });
        }
        let Some(tensor) = &self.rope_freqs else { return Ok(None) };
        let [length] = tensor.info.shape[..] else {
            return Err(CheckpointError::Inconsistent {
                path: path.to_owned(),
                problem: format!("`{}` must be a vector, but is {:?}", names::ROPE_FREQS, tensor.info.shape),
            });
        };
        // Bounded by the file's size: StoredTensor has proved that this one row is there.
        let mut factors = vec![0.0; length];
        tensor.read(file, 0..1, 0..length, &mut factors);
        Ok(Some(factors))
    }

    fn shapes(&self) -> Shapes {
        let embedding = self.tensors.get(names::EMBEDDING);
        Shapes {
            vocab_size: embedding.map(|tensor| tensor.info.rows()),
            has_head: self.tensors.contains_key(names::HEAD) || self.unreadable.contains_key(names::HEAD),
        }
    }

    fn pair_rotated_rows(&mut self, path: &Path, head_dim: usize) -> Result<(), CheckpointError> {
        for (name, tensor) in &mut self.tensors {
            if names::is_rotated(name) {
                tensor.pair_rows(head_dim).map_err(|problem| CheckpointError::Inconsistent {
                    path: path.to_owned(),
                    problem: match names::stored_name(name) {
                        Some(stored) => format!("tensor `{name}` (`{stored}` in GGUF): {problem}"),
                        None => format!("tensor `{name}`: {problem}"),
                    },
                })?;
            }
        }
        Ok(())
    }
}
