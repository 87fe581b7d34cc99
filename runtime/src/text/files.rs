//! Reading the small files beside a checkpoint's weights.

use std::{fs::File, io, io::Read, path::Path};

use serde_json::Value;

use super::error::TextError;

/// Larger than any published tokenizer.json (the largest are about 35 MB), small enough to refuse a wrong
/// file.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Reads a whole file; `None` when there is none.
pub(super) fn read_if_present(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    let fail = |source| TextError::Read { path: path.to_path_buf(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(fail(error)),
    };
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        let reason = format!("larger than {FILE_BYTES_MAX} bytes, which no such file is");
        return Err(fail(io::Error::new(io::ErrorKind::FileTooLarge, reason)));
    }
    Ok(Some(bytes))
}

/// Reads a JSON file; `None` when there is none.
pub(super) fn read_json_if_present(path: &Path) -> Result<Option<Value>, TextError> {
    let Some(bytes) = read_if_present(path)? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|source| TextError::Malformed {
        path: path.to_path_buf(),
        what: "JSON file",
        source: source.into(),
    })
}
