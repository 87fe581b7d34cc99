//! Why a checkpoint cannot be used.

use std::{ops::Range, path::PathBuf};

/// Why a checkpoint cannot be opened or read. Messages name the file, the key or tensor, and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("cannot {action} {path}")]
    Io {
        /// What was being done: "open", "map", ...
        action: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// There is no checkpoint at this path.
    #[error("{path} is not a checkpoint: {problem}")]
    NotACheckpoint {
        /// What was asked for.
        path: PathBuf,
        /// What is missing or wrong, and what to pass instead.
        problem: String,
    },
    /// A folder has the configuration of a model that could be run, and no weights.
    #[error("{path} is not a checkpoint: it has neither model.safetensors nor model.safetensors.index.json")]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// A JSON file does not parse.
    #[error("{path} is not valid JSON")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// The header of a safetensors file contradicts itself.
    #[error("{path} is not a readable safetensors file: its header is malformed")]
    SafetensorsHeader {
        /// The file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// A binary file breaks its format: it is truncated, damaged, or of another kind.
    #[error("{path} is damaged or incomplete at byte {offset}: {problem}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where reading stopped.
        offset: usize,
        /// What was wrong there.
        problem: String,
    },
    /// A key of the configuration or metadata is missing or has an impossible value.
    #[error("{path}: key `{key}` {problem}")]
    Key {
        /// The file.
        path: PathBuf,
        /// Full name of the key.
        key: String,
        /// "is missing", "must be ..., but is ...".
        problem: String,
    },
    /// The sizes that the configuration gives do not fit together.
    #[error("{path}: {problem}")]
    Inconsistent {
        /// The file.
        path: PathBuf,
        /// Which sizes, and why.
        problem: String,
    },
    /// The checkpoint is sound, but needs something that is not built.
    #[error("{path} needs {needed}, which is not supported; supported: {supported}")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What it asks for.
        needed: String,
        /// What could be had instead.
        supported: String,
    },
    /// A tensor is not in the checkpoint.
    #[error("{path} has no tensor `{name}` ({}it has {count} others)", before(.stored_name))]
    MissingTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The name that was looked up.
        name: String,
        /// What the format of the file calls it, where that is something else.
        stored_name: Option<Box<str>>,
        /// How many tensors there are.
        count: usize,
    },
    /// A tensor does not have the shape that the configuration implies.
    #[error("{path}: tensor `{name}`{} is {found:?}, but the configuration implies {expected:?}", beside(.stored_name))]
    Shape {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        name: Box<str>,
        /// Its name in the file, where that is another.
        stored_name: Option<Box<str>>,
        /// Its shape in the file.
        found: Box<[usize]>,
        /// Its shape by the configuration.
        expected: Box<[usize]>,
    },
    /// A tensor is stored in a type that cannot be read.
    #[error("{path}: tensor `{name}`{} is stored as {found}; readable types are {supported}", beside(.stored_name))]
    Encoding {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        name: Box<str>,
        /// Its name in the file, where that is another.
        stored_name: Option<Box<str>>,
        /// How it is stored.
        found: Box<str>,
        /// What can be read.
        supported: &'static str,
    },
    /// A caller asked for rows or columns that a tensor does not have, or with a buffer of another size.
    #[error(
        "tensor `{name}` has {shape:?}: rows {rows:?} and columns {cols:?} cannot be read into {out_len} values"
    )]
    Slice {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The rows asked for.
        rows: Range<usize>,
        /// The columns asked for.
        cols: Range<usize>,
        /// Length of the caller's buffer.
        out_len: usize,
    },
}

/// A GGUF file's own name, at the start of a remark.
fn before(stored_name: &Option<Box<str>>) -> String {
    stored_name.as_ref().map_or_else(String::new, |name| format!("`{name}` in GGUF; "))
}

/// A GGUF file's own name, as a remark behind the other.
fn beside(stored_name: &Option<Box<str>>) -> String {
    stored_name.as_ref().map_or_else(String::new, |name| format!(" (`{name}` in GGUF)"))
}
