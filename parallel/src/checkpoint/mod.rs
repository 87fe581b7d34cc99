//! Checkpoints on disk: memory-mapped, read by slices, turned into `f32` rows on demand.
//!
//! Two formats answer to the same names and row order, those of Hugging Face's `transformers`: a folder with
//! `config.json` and safetensors (one file or an index), and a GGUF file. Opening parses headers and checks
//! that every tensor the configuration implies is there with its shape; it reads no weights. Afterwards any
//! number of ranks read their own slices at once, and nothing is ever written.
//!
//! Files are untrusted: every length, count and offset in them is checked against the file's size before it is
//! used, and bad input is an error that names the file and the tensor or key.

mod config_check;
mod encoding;
mod error;
mod folder;
mod gguf;
mod header;
mod hf_config;
mod index;
mod json;
mod mapped;
mod required;
mod rope_scaling;
mod shape;
mod surplus;
mod tensor;
#[cfg(test)]
mod tests;
pub mod write;

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    config::{GenerationDefaults, ModelConfig},
    plan::WeightFormat,
};

pub use encoding::Encoding;
pub use error::CheckpointError;
pub use gguf::Gguf;
pub use shape::read_shape;
pub use tensor::TensorInfo;

use mapped::MappedFile;
use tensor::StoredTensor;

/// An opened checkpoint: headers parsed, tensors mapped, nothing copied. Cheap to share between ranks.
pub struct Checkpoint {
    path: PathBuf,
    files: Vec<MappedFile>,
    /// Tensors that can be read, by their Hugging Face names.
    tensors: BTreeMap<String, StoredTensor>,
    /// Tensors that are there in a type that cannot be read: name -> type.
    unreadable: BTreeMap<String, String>,
    /// Tensors of a GGUF file that have no Hugging Face name, by their own.
    nameless: Vec<String>,
    config: ModelConfig,
    generation_defaults: GenerationDefaults,
    gguf: Option<Gguf>,
}

impl Checkpoint {
    /// Opens a folder with `config.json` and safetensors, or a GGUF file.
    pub fn open(path: &Path) -> Result<Arc<Checkpoint>, CheckpointError> {
        let metadata = std::fs::metadata(path).map_err(|source| CheckpointError::Io {
            action: "open",
            path: path.to_owned(),
            source,
        })?;
        let checkpoint = if metadata.is_dir() { folder::open(path)? } else { gguf::open(path)? };
        required::check(&checkpoint)?;
        surplus::check(&checkpoint)?;
        Ok(Arc::new(checkpoint))
    }

    /// The folder or file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sizes and constants of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Sampling defaults that the checkpoint asks for.
    pub fn generation_defaults(&self) -> &GenerationDefaults {
        &self.generation_defaults
    }

    /// Metadata of a GGUF file, which holds the tokenizer; a folder has files for that.
    pub fn gguf(&self) -> Option<&Gguf> {
        self.gguf.as_ref()
    }

    /// Whether there is such a tensor. `lm_head.weight` is absent where the head is tied to the embedding.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.unreadable.contains_key(name)
    }

    /// Names of all tensors that can be read, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Shape and storage of a tensor.
    pub fn tensor(&self, name: &str) -> Result<TensorInfo, CheckpointError> {
        self.stored(name).map(|tensor| tensor.info.clone())
    }

    /// Elements in all tensors that can be read.
    pub fn parameter_count(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.info.shape.iter().product::<usize>() as u64).sum()
    }

    /// Bytes that these tensors take on disk.
    pub fn stored_bytes(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.info.stored_bytes).sum()
    }

    /// How most of their elements are held, where a planner has a word for it: nothing of float16 and of types with
    /// fewer bits, which bfloat16 does not hold without a loss.
    pub fn stored_format(&self) -> Option<WeightFormat> {
        let elements = |tensor: &StoredTensor| tensor.info.shape.iter().product::<usize>() as u64;
        let of = |encoding: Encoding| -> u64 {
            self.tensors.values().filter(|tensor| tensor.info.encoding == encoding).map(elements).sum()
        };
        let half = self.parameter_count() / 2;
        let known = [(Encoding::F32, WeightFormat::Float32), (Encoding::Bf16, WeightFormat::BFloat16)];
        known.into_iter().find(|(encoding, _)| of(*encoding) > half).map(|(_, format)| format)
    }

    /// Reads `rows` x `cols` of a matrix into `out`, row by row, as `f32`. A vector counts as one row; of a
    /// tensor with more dimensions, all but the last are rows. Touches only the pages of these rows.
    pub fn read_rows(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let tensor = self.stored(name)?;
        if !tensor.has(&rows, &cols, out.len()) {
            return Err(CheckpointError::Slice {
                name: name.to_owned(),
                shape: tensor.info.shape.clone(),
                rows,
                cols,
                out_len: out.len(),
            });
        }
        tensor.read(self.files[tensor.file].bytes(), rows, cols, out);
        Ok(())
    }

    /// Takes a tensor's pages out of this process's resident set, once its slices have been converted. Others
    /// may still be reading it: they fault the pages in again from the system's cache.
    pub fn release_pages(&self, name: &str) {
        self.release_rows(name, 0..usize::MAX);
    }

    /// Like [`Checkpoint::release_pages`], for some rows of a large tensor.
    pub fn release_rows(&self, name: &str, rows: Range<usize>) {
        if let Some(tensor) = self.tensors.get(name) {
            self.files[tensor.file].release(tensor.byte_range(rows));
        }
    }

    fn stored(&self, name: &str) -> Result<&StoredTensor, CheckpointError> {
        self.tensors.get(name).ok_or_else(|| match self.unreadable.get(name) {
            Some(found) => CheckpointError::Encoding {
                path: self.path.clone(),
                name: name.into(),
                stored_name: self.stored_name(name),
                found: found.clone().into(),
                supported: Encoding::SUPPORTED,
            },
            None => CheckpointError::MissingTensor {
                path: self.path.clone(),
                name: name.to_owned(),
                stored_name: self.stored_name(name),
                count: self.tensors.len() + self.unreadable.len(),
            },
        })
    }

    /// What the file calls a tensor, where that is not its Hugging Face name.
    fn stored_name(&self, name: &str) -> Option<Box<str>> {
        self.gguf.as_ref().and_then(|_| gguf::stored_name(name)).map(String::into_boxed_str)
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("path", &self.path)
            .field("files", &self.files.len())
            .field("tensors", &self.tensors.len())
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
