//! Why a model could not be converted.

use std::{io, path::PathBuf};

use consort_parallel::checkpoint::{CheckpointError, write::WriteError};

use crate::text::TextError;

/// Why a model could not be converted. Nothing was written under the output's name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The input could not be opened.
    #[error("cannot open the model at {}", .path.display())]
    Open {
        /// Where it was looked for.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: CheckpointError,
    },
    /// The input's tokenizer cannot be written.
    #[error("cannot convert the model's tokenizer")]
    Tokenizer(#[from] TextError),
    /// Weights or configuration could not be written.
    #[error(transparent)]
    Weights(#[from] WriteError),
    /// Something stands where the output is to be.
    #[error(
        "{} exists already and is not empty: choose another folder, or replace it with --overwrite",
        .path.display()
    )]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// Something stands where the output is to be, and it is no model, so it is not replaced even when asked.
    #[error("{} {problem}, so it will not be overwritten: choose another folder", .path.display())]
    NotReplaceable {
        /// The output.
        path: PathBuf,
        /// What it is.
        problem: &'static str,
    },
    /// Replacing the output would delete the input.
    #[error(
        "the input {} lies in the output {}, which would be deleted: choose another output",
        .input.display(),
        .output.display()
    )]
    InputInOutput {
        /// The input.
        input: PathBuf,
        /// The output.
        output: PathBuf,
    },
    /// The output's path names no folder that could be made.
    #[error("{} is not a name for a folder", .path.display())]
    NoName {
        /// The path as given.
        path: PathBuf,
    },
    /// A folder could not be made.
    #[error("cannot create the folder {}", .path.display())]
    Create {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file of the input could not be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A small file could not be written.
    #[error("cannot write {}", .path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A small file could not be copied.
    #[error("cannot copy {} to {}", .from.display(), .to.display())]
    Copy {
        /// Which.
        from: PathBuf,
        /// Where to.
        to: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The finished folder could not be put in its place.
    #[error("cannot move {} to {}", .from.display(), .to.display())]
    Rename {
        /// What.
        from: PathBuf,
        /// Where to.
        to: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl ConvertError {
    /// Whether the caller's progress function ended the work.
    pub fn is_interrupted(&self) -> bool {
        matches!(self, ConvertError::Weights(WriteError::Interrupted))
    }
}
