//! Cubins on disk, so that a text is compiled once on a machine.
//!
//! One file for each key, a hash of everything that the cubin depends on. A file appears whole, by renaming, and
//! carries a hash of its own content: a damaged one is noticed and made anew. The folder is bounded: beyond
//! [`ENTRIES_MAX`] files the oldest go. A cache that cannot be written costs time, never a result.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process,
    time::SystemTime,
};

use rustix::fs::Access;
use sha2::{Digest, Sha256};

use crate::cuda::nvrtc::Compiled;

/// Files kept: some twenty versions of all texts for two architectures, of some 50 KiB each.
const ENTRIES_MAX: usize = 512;
/// Files left when there were more, so that not every new one removes one.
const ENTRIES_KEPT: usize = 384;
/// Entries that are counted: more than the bound leaves, whatever else lies there.
const ENTRIES_SEEN_MAX: usize = 4096;
/// Threads of one process that may write one cubin at once.
const TEMPORARY_FILES_MAX: usize = 64;
/// No cubin of ours comes near it; a longer file is damage.
const FILE_BYTES_MAX: u64 = 256 << 20;

const MAGIC: &[u8; 16] = b"consort cubin 1\n";
const HASH_BYTES: usize = 32;
/// Magic, length of the cubin, length of the log, SHA-256 of cubin and log.
const HEAD_BYTES: usize = MAGIC.len() + 8 + 8 + HASH_BYTES;

/// What is known of the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheFacts {
    /// Its folder, which the first cubin makes.
    pub folder: PathBuf,
    /// Cubins in it.
    pub cubins: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Why nothing can be kept there, if so.
    pub refusal: Option<String>,
}

/// A folder of cubins.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    folder: PathBuf,
}

impl Cache {
    pub(super) fn new(folder: PathBuf) -> Cache {
        Cache { folder }
    }

    fn file(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.cubin"))
    }

    /// What was kept under `key`. Damage is reported, and as good as nothing.
    pub(super) fn get(&self, key: &str) -> Option<Compiled> {
        let path = self.file(key);
        match read(&path) {
            Ok(found) => Some(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "unusable cubin in the cache; it is compiled anew");
                None
            }
        }
    }

    /// Keeps `compiled` under `key`, if the folder can be written.
    pub(super) fn put(&self, key: &str, compiled: &Compiled) {
        if let Err(error) = self.write(key, compiled) {
            tracing::warn!(
                folder = %self.folder.display(), %error,
                "cannot keep a compiled kernel, which will be compiled again next time; see CONSORT_CACHE_DIR"
            );
        }
    }

    /// Looks at the folder, and changes nothing.
    pub(super) fn facts(&self) -> CacheFacts {
        let (mut cubins, mut bytes) = (0, 0);
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten().take(ENTRIES_SEEN_MAX) {
            let is_cubin = entry.path().extension().is_some_and(|extension| extension == "cubin");
            if let Some(metadata) = entry.metadata().ok().filter(|metadata| is_cubin && metadata.is_file()) {
                (cubins, bytes) = (cubins + 1, bytes + metadata.len());
            }
        }
        let refusal = refusal(&self.folder).map(|error| error.to_string());
        CacheFacts { folder: self.folder.clone(), cubins, bytes, refusal }
    }

    fn write(&self, key: &str, compiled: &Compiled) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let (mut file, temporary) = self.temporary_file(key)?;
        let renamed = file.write_all(&encode(compiled)).and_then(|()| fs::rename(&temporary, self.file(key)));
        if renamed.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        renamed?;
        self.prune()
    }

    /// A new file beside the final one, so that the rename is atomic. Others may write the same key meanwhile.
    fn temporary_file(&self, key: &str) -> io::Result<(File, PathBuf)> {
        let mut failure = io::Error::other("no attempt");
        for attempt in 0..TEMPORARY_FILES_MAX {
            let path = self.folder.join(format!(".{key}.{}.{attempt}", process::id()));
            match File::create_new(&path) {
                Ok(file) => return Ok((file, path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => failure = error,
                Err(error) => return Err(error),
            }
        }
        Err(failure)
    }

    /// Removes the oldest files beyond the bound, and what killed processes left half-written.
    fn prune(&self) -> io::Result<()> {
        let mut files: Vec<(SystemTime, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let is_ours = path.extension().is_some_and(|extension| extension == "cubin")
                || path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
            // Gone meanwhile: another process prunes too.
            let Ok(modified) = path.metadata().and_then(|metadata| metadata.modified()) else { continue };
            if is_ours {
                files.push((modified, path));
            }
        }
        if files.len() > ENTRIES_MAX {
            files.sort();
            for (_, path) in &files[..files.len() - ENTRIES_KEPT] {
                let _ = fs::remove_file(path);
            }
        }
        Ok(())
    }
}

/// Why no file could be made in a folder, as far as that can be told without making one: it, or the folder that it
/// would have to be made in, may not be written.
fn refusal(folder: &Path) -> Option<io::Error> {
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf());
    for place in folder.ancestors() {
        match fs::metadata(place) {
            Ok(metadata) if !metadata.is_dir() => return Some(io::Error::from(io::ErrorKind::NotADirectory)),
            Ok(_) => {
                return rustix::fs::access(place, Access::WRITE_OK | Access::EXEC_OK).err().map(Into::into);
            }
            // Below a file is no folder either; the ancestor that is one says so.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
            Err(error) => return Some(error),
        }
    }
    Some(io::Error::from(io::ErrorKind::NotFound))
}

fn encode(compiled: &Compiled) -> Vec<u8> {
    let log = compiled.log.as_bytes();
    let mut file = Vec::with_capacity(HEAD_BYTES + compiled.cubin.len() + log.len());
    file.extend_from_slice(MAGIC);
    file.extend_from_slice(&(compiled.cubin.len() as u64).to_le_bytes());
    file.extend_from_slice(&(log.len() as u64).to_le_bytes());
    file.extend_from_slice(&Sha256::new().chain_update(&compiled.cubin).chain_update(log).finalize());
    file.extend_from_slice(&compiled.cubin);
    file.extend_from_slice(log);
    file
}

fn read(path: &Path) -> io::Result<Compiled> {
    // Whatever else has the name, a pipe say, would be waited for.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > FILE_BYTES_MAX {
        return Err(io::Error::other("not a file, or too large"));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    decode(&bytes).ok_or_else(|| io::Error::other("damaged"))
}

/// The content of a file, if it is whole.
fn decode(file: &[u8]) -> Option<Compiled> {
    let rest = file.strip_prefix(MAGIC)?;
    let (cubin_bytes, rest) = rest.split_first_chunk()?;
    let (log_bytes, rest) = rest.split_first_chunk()?;
    let (hash, body) = rest.split_first_chunk::<HASH_BYTES>()?;
    let cubin_bytes = usize::try_from(u64::from_le_bytes(*cubin_bytes)).ok()?;
    let log_bytes = usize::try_from(u64::from_le_bytes(*log_bytes)).ok()?;
    if cubin_bytes.checked_add(log_bytes)? != body.len() || Sha256::digest(body).as_slice() != hash {
        return None;
    }
    let (cubin, log) = body.split_at(cubin_bytes);
    Some(Compiled { cubin: cubin.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
}

#[cfg(test)]
mod tests;
