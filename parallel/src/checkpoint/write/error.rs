//! Why a checkpoint could not be written.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

use crate::checkpoint::CheckpointError;

/// Why a checkpoint could not be written. Whatever was written so far is to be thrown away.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// What is to be written could not be read.
    #[error(transparent)]
    Read(#[from] CheckpointError),
    /// The operating system refused.
    #[error("cannot write {path}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The disk is full.
    #[error(
        "no space left for {path}: {needed} bytes are to be written in all; free some or choose another disk"
    )]
    NoSpace {
        /// Which file.
        path: PathBuf,
        /// Bytes of everything that is to be written along with it.
        needed: u64,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The configuration has no spelling that `transformers` would read.
    #[error("{path} has {what}, for which `config.json` has no spelling")]
    NoSpelling {
        /// The checkpoint.
        path: PathBuf,
        /// What cannot be said.
        what: String,
    },
    /// The header of a safetensors file could not be made.
    #[error("cannot describe the tensors of a safetensors file")]
    Header(#[source] safetensors::SafeTensorError),
    /// A JSON file could not be made.
    #[error("cannot make JSON")]
    Json(#[source] serde_json::Error),
    /// The caller's progress function asked for the end.
    #[error("interrupted before everything was written")]
    Interrupted,
}

impl WriteError {
    /// The error of a file; `needed` is what is to be written in all.
    pub(super) fn io(path: &Path, needed: u64, source: std::io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => WriteError::NoSpace { path, needed, source },
            _ => WriteError::Io { path, source },
        }
    }
}
