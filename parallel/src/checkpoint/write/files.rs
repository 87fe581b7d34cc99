//! Small files of a model's folder. Each outlasts a power failure once it is written, as the weights do.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::Path,
};

use crate::checkpoint::CheckpointError;

use super::WriteError;

/// Bytes that are copied at a time.
const COPY_BYTES: usize = 64 << 10;

/// Writes a file that must not be there yet.
pub fn write_file(path: &Path, contents: &[u8]) -> Result<(), WriteError> {
    let write = || -> io::Result<()> {
        let mut file = File::create_new(path)?;
        file.write_all(contents)?;
        file.sync_all()
    };
    write().map_err(|source| WriteError::io(path, contents.len() as u64, source))
}

/// Copies a regular file, whatever its size; where there is none, it does nothing. What cannot be looked at or read
/// is an error that names `from`, what cannot be written one that names `to`.
pub fn copy_if_present(from: &Path, to: &Path) -> Result<(), WriteError> {
    let read = |source| CheckpointError::Io { action: "read", path: from.to_owned(), source };
    let bytes = match fs::metadata(from) {
        Ok(metadata) if metadata.is_file() => metadata.len(),
        Ok(_) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(read(error).into()),
    };
    let mut source = File::open(from).map_err(read)?;
    let write = |source| WriteError::io(to, bytes, source);
    let mut file = File::create_new(to).map_err(write)?;
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        let count = match source.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(read(error).into()),
        };
        file.write_all(&buffer[..count]).map_err(write)?;
    }
    file.sync_all().map_err(write)
}
