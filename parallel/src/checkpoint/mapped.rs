//! Read-only memory maps of whole files: the one place of this crate's checkpoints that needs `unsafe`.
#![allow(unsafe_code)]

use std::{
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

use memmap2::Mmap;

use super::error::CheckpointError;

/// Bytes around a fault that the kernel maps along with it (Linux's `fault_around_bytes`), so that reading a tensor
/// maps a little of its neighbours too.
const FAULT_AROUND_BYTES: usize = 64 << 10;

/// A file mapped into memory. Its length is that of the moment it was opened.
pub(super) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps a regular, non-empty file. Reads nothing yet.
    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |action| move |source| CheckpointError::Io { action, path: path.to_owned(), source };
        // Asked before opening, because opening a FIFO would wait for its writer for ever.
        let metadata = std::fs::metadata(path).map_err(io("open"))?;
        if !metadata.is_file() || metadata.len() == 0 {
            let problem = if metadata.is_file() { "it is empty" } else { "it is not a regular file" };
            return Err(CheckpointError::NotACheckpoint {
                path: path.to_owned(),
                problem: problem.to_owned(),
            });
        }
        let file = File::open(path).map_err(io("open"))?;
        // SAFETY: the map is read-only and never handed out mutably. A file that another process rewrites in
        // place while it is mapped could change under a `&[u8]`; every value read from it is treated as
        // untrusted, each length is checked on a copy, and tensor bytes are only converted to floats, for
        // which every bit pattern is valid. Truncation in place would end the process with SIGBUS, as for
        // any program that maps its weights.
        let map = unsafe { Mmap::map(&file) }.map_err(io("map"))?;
        Ok(Self { path: path.to_owned(), map })
    }

    /// Where the file is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file. A page is read from disk when it is first touched.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Takes the pages of `range`, and what was mapped around them, out of this process's resident set. They stay
    /// in the system's page cache, and reading them again costs a minor fault, so this is only ever a hint: a
    /// refusal is ignored.
    pub(super) fn release(&self, range: Range<usize>) {
        let start = range.start - range.start % FAULT_AROUND_BYTES;
        let end = range.end.saturating_add(FAULT_AROUND_BYTES).min(self.map.len());
        if range.is_empty() || start >= end {
            return;
        }
        #[cfg(unix)]
        {
            // SAFETY: on a read-only map of a file MADV_DONTNEED drops page table entries and no data: other
            // threads that read these bytes meanwhile fault the same file contents in again. The range lies
            // within the map (memmap2 rounds its start down to a page of the same map).
            let advised = unsafe {
                self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start)
            };
            if let Err(error) = advised {
                tracing::debug!(path = %self.path.display(), %error, "cannot release pages of a checkpoint");
            }
        }
    }
}
