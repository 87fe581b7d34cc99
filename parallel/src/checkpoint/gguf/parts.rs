//! The header of a model that is planned: of its one file, or of all files that it was split into. What follows the
//! headers is not looked at, and need not be there.

use std::path::{Path, PathBuf};

use super::{
    super::{CheckpointError, MappedFile},
    Gguf,
    config::Keys,
    parse::{self, Header, TensorEntry},
};

/// Most parts: their names have five digits.
const PARTS_MAX: usize = 99_999;

/// What all parts say together.
pub(super) struct Headers {
    /// The file that has the metadata.
    pub(super) path: PathBuf,
    pub(super) gguf: Gguf,
    pub(super) tensors: Vec<TensorEntry>,
}

/// Reads a file, and where it is one of several parts all of them: sizes stand in the first.
pub(super) fn read(path: &Path) -> Result<Headers, CheckpointError> {
    let given = read_one(path)?;
    let Some((number, count)) = place(&given)? else { return Ok(given) };
    let of_part = names(path, number, count)?;
    let mut headers: Option<Headers> = None;
    for number in 1..=count {
        let file = of_part(number);
        if !file.exists() {
            let problem =
                format!("it is one of {count} parts, and part {number} is missing: {}", file.display());
            return Err(CheckpointError::NotACheckpoint { path: path.to_owned(), problem });
        }
        let part = read_one(&file)?;
        if place(&part)? != Some((number, count)) {
            let problem =
                format!("its name says that it is part {number} of {count}, and its header does not");
            return Err(CheckpointError::Inconsistent { path: file, problem });
        }
        match &mut headers {
            None => headers = Some(part),
            Some(first) => first.tensors.extend(part.tensors),
        }
    }
    Ok(headers.unwrap_or(given))
}

fn read_one(path: &Path) -> Result<Headers, CheckpointError> {
    let file = MappedFile::open(path)?;
    if !file.bytes().starts_with(parse::MAGIC) {
        let problem = "it is neither a GGUF file nor a folder with config.json".to_owned();
        return Err(CheckpointError::NotACheckpoint { path: path.to_owned(), problem });
    }
    let Header { metadata, tensors, data_start, .. } = parse::parse(file.bytes()).map_err(|fault| {
        CheckpointError::Malformed { path: path.to_owned(), offset: fault.offset, problem: fault.problem }
    })?;
    file.release(0..data_start);
    Ok(Headers { path: path.to_owned(), gguf: Gguf { metadata }, tensors })
}

/// Which part a file is, from 1, and of how many; nothing of a whole model.
fn place(headers: &Headers) -> Result<Option<(usize, usize)>, CheckpointError> {
    let keys = Keys { path: &headers.path, gguf: &headers.gguf };
    let Some(count) = keys.size("split.count")?.filter(|count| *count > 1) else { return Ok(None) };
    let number = keys.size("split.no")?.unwrap_or(0).saturating_add(1);
    if count > PARTS_MAX || number > count {
        return Err(CheckpointError::Inconsistent {
            path: headers.path.clone(),
            problem: format!("it says that it is part {number} of {count}"),
        });
    }
    Ok(Some((number, count)))
}

/// Names of all parts, as `llama-gguf-split` gives them.
fn names(path: &Path, number: usize, count: usize) -> Result<impl Fn(usize) -> PathBuf, CheckpointError> {
    let ending = |number: usize| format!("-{number:05}-of-{count:05}.gguf");
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(stem) = name.and_then(|name| name.strip_suffix(&ending(number))) else {
        let problem = format!(
            "it is part {number} of {count}, and the others cannot be found: its name does not end with {}",
            ending(number)
        );
        return Err(CheckpointError::NotACheckpoint { path: path.to_owned(), problem });
    };
    let stem = stem.to_owned();
    Ok(move |number| path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf")))
}
