//! Why a model could not be converted.

use std::{io, path::PathBuf};

use consort_parallel::checkpoint::{CheckpointError, write::WriteError};

use crate::text::TextError;

/// Why a model could not be converted. What stood under the output's name stands there still, but after
/// [`ConvertError::RollBack`].
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
    /// A file of the output could not be written, or one of the input not be read.
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
        problem: String,
    },
    /// Another file system begins at the output, so nothing can be put in its place.
    #[error("{} is a mount point and cannot be replaced as a whole: choose a folder in it", .path.display())]
    MountPoint {
        /// The output.
        path: PathBuf,
    },
    /// The output's path leads through a file.
    #[error(
        "cannot create {}: {} is a file and not a folder; choose another output",
        .output.display(),
        .file.display()
    )]
    BelowFile {
        /// The output.
        output: PathBuf,
        /// The file.
        file: PathBuf,
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
    /// What stands at the output could not be looked at.
    #[error("cannot read {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
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
    /// The conversion is done, but its folder could not take its place; it is kept.
    #[error(
        "the conversion is whole in {}, but could not take its place at {}: move it",
        .folder.display(),
        .output.display()
    )]
    Kept {
        /// Where the finished folder is.
        folder: PathBuf,
        /// Where it was to be.
        output: PathBuf,
        /// Why it could not be put there.
        #[source]
        source: Box<ConvertError>,
    },
    /// The finished folder could not be put in its place, nor the old model back into it.
    #[error(
        "cannot move {} to {}, nor put back the model that was there ({roll_back}): move it back from {}",
        .new.display(),
        .output.display(),
        .old.display()
    )]
    RollBack {
        /// Where nothing is now.
        output: PathBuf,
        /// Where the model is that was there.
        old: PathBuf,
        /// Where the finished folder is.
        new: PathBuf,
        /// Why the old model could not be put back.
        roll_back: io::Error,
        /// Why the finished folder could not be put there.
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
