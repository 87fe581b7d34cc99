//! A model, written as the folder that `transformers` loads with the same ids and logits: what `consort convert` does.
//!
//! ```no_run
//! use std::{ops::ControlFlow, path::Path};
//!
//! use consort::convert::{ConvertOptions, convert};
//!
//! let (from, to) = (Path::new("SmolLM2-135M-Instruct.Q4_1.gguf"), Path::new("smollm2-bf16"));
//! let mut progress = |written: u64, total: u64| {
//!     println!("{written} of {total} bytes");
//!     ControlFlow::Continue(())
//! };
//! let converted = convert(from, to, &ConvertOptions::default(), &mut progress)?;
//! println!("{} tensors", converted.weights.tensors);
//! # Ok::<(), consort::convert::ConvertError>(())
//! ```
//!
//! From a GGUF file, the configuration, the tokenizer and the chat template are made from its metadata. From a folder
//! of another type they are kept. The output appears whole or not at all: it is written beside its final place and
//! moved there at the end. Memory holds a few megabytes of weights at a time, however large the model is.

mod error;
mod place;
mod staging;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

pub use consort_kernels::DType;
use consort_parallel::checkpoint::{
    Checkpoint, Gguf,
    write::{self, WriteOptions, Written},
};
use serde_json::{Map, Value, json};

pub use self::error::ConvertError;
use self::staging::Staging;
use crate::text::{TextError, Tokenizer};

/// Files of a folder that belong to its text and are kept as they are, where they are there.
const TEXT_FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    TEMPLATE_FILE,
    "chat_template.json",
];
const TEMPLATE_FILE: &str = "chat_template.jinja";

/// Key of a GGUF file's chat template,
const TEMPLATE: &str = "tokenizer.chat_template";
/// and what keys of further ones begin with.
const NAMED_TEMPLATE: &str = "tokenizer.chat_template.";

/// Size of a weights file as `transformers` writes them, in bytes.
const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// How a model is converted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertOptions {
    /// Type of every tensor. BF16 rounds to nearest, ties to even, as loading in BF16 does.
    pub dtype: DType,
    /// Most bytes of tensors in one file; a larger tensor has a file of its own.
    pub max_shard_bytes: u64,
    /// Whether a model folder that stands where the output is to be is replaced.
    pub overwrite: bool,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self { dtype: DType::BF16, max_shard_bytes: MAX_SHARD_BYTES, overwrite: false }
    }
}

/// What a conversion wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// Where it is, as an absolute path.
    pub folder: PathBuf,
    /// Tensors and their files.
    pub weights: Written,
    /// Names of chat templates that a GGUF file has beside its default one, which is the one that is written.
    pub templates_left_out: Vec<String>,
}

/// Converts the GGUF file or folder `input` to the folder `output`.
///
/// `progress` is told bytes written and bytes in all; a break ends the work with [`ConvertError::is_interrupted`].
///
/// After an error nothing is left, neither under the output's name nor beside it nor above it, and what stood there
/// before stands there still. The exceptions are [`ConvertError::Kept`] and [`ConvertError::RollBack`], after all the
/// work was done: they say where everything is.
///
/// A process that is killed leaves its working folder, `OUTPUT.partial-N`, and folders that it made above. They do not
/// disturb a later run and may be deleted: `new` in it is the unfinished folder or, after the output was replaced, the
/// old model. Only where the system cannot exchange two folders in one step (Linux can, on most file systems) may
/// nothing be found at the output; then the model that was there is `old` in the working folder.
pub fn convert(
    input: &Path,
    output: &Path,
    options: &ConvertOptions,
    progress: &mut write::WriteProgress<'_>,
) -> Result<Converted, ConvertError> {
    let staging = Staging::prepare(input, output, options.overwrite)?;
    let checkpoint =
        Checkpoint::open(input).map_err(|source| ConvertError::Open { path: input.to_owned(), source })?;
    // What may be refused comes first, what takes long last.
    let text = match checkpoint.gguf() {
        Some(gguf) => text_of_gguf(&checkpoint, gguf)?,
        None => Vec::new(),
    };
    let staged = staging.create()?;
    write::write_config(&checkpoint, staged.folder(), options.dtype)?;
    for (name, contents) in &text {
        write::write_file(&staged.folder().join(name), contents.as_bytes())?;
    }
    if checkpoint.gguf().is_none() {
        for name in TEXT_FILES {
            write::copy_if_present(&input.join(name), &staged.folder().join(name))?;
        }
    }
    let weights = WriteOptions { dtype: options.dtype, max_shard_bytes: options.max_shard_bytes };
    let weights = write::write_weights(&checkpoint, staged.folder(), &weights, progress)?;
    let templates_left_out = checkpoint.gguf().map(named_templates).unwrap_or_default();
    Ok(Converted { folder: staged.commit()?, weights, templates_left_out })
}

/// Names and contents of the files that hold a GGUF file's tokenizer and chat template.
fn text_of_gguf(checkpoint: &Checkpoint, gguf: &Gguf) -> Result<Vec<(&'static str, String)>, TextError> {
    let tokenizer = Tokenizer::from_checkpoint(checkpoint)?;
    let settings = Value::Object(tokenizer_config(checkpoint, gguf, &tokenizer));
    let mut files =
        vec![("tokenizer.json", tokenizer.to_json()?), ("tokenizer_config.json", format!("{settings:#}\n"))];
    if let Some(template) = gguf.string(TEMPLATE) {
        files.push((TEMPLATE_FILE, template.to_owned()));
    }
    Ok(files)
}

/// The class that takes tokenizer.json as it stands, names of special tokens, and what would otherwise alter texts.
/// There is no `add_bos_token`: it makes `transformers` put its own rules in place of tokenizer.json's.
fn tokenizer_config(checkpoint: &Checkpoint, gguf: &Gguf, tokenizer: &Tokenizer) -> Map<String, Value> {
    let mut config = Map::new();
    let mut set = |key: &str, value: Value| config.insert(key.to_owned(), value);
    set("tokenizer_class", json!("PreTrainedTokenizerFast"));
    set("bos_token", json!(tokenizer.bos_token()));
    set("eos_token", json!(tokenizer.eos_token()));
    // `transformers` makes each of these special, which must not happen to a token of the text.
    for (key, id) in
        [("pad_token", "tokenizer.ggml.padding_token_id"), ("unk_token", "tokenizer.ggml.unknown_token_id")]
    {
        if let Some(id) = gguf.u32(id).filter(|id| tokenizer.is_special(*id)) {
            set(key, json!(tokenizer.piece(id)));
        }
    }
    set("model_max_length", json!(checkpoint.config().max_position_embeddings));
    set("clean_up_tokenization_spaces", json!(false));
    // Newer releases of `transformers` read it from its own file, older ones only here.
    if let Some(template) = gguf.string(TEMPLATE) {
        set("chat_template", json!(template));
    }
    config
}

/// Names of further chat templates, such as `tool_use`.
fn named_templates(gguf: &Gguf) -> Vec<String> {
    gguf.keys().filter_map(|key| key.strip_prefix(NAMED_TEMPLATE)).map(str::to_owned).collect()
}
