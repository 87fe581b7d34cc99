//! The folder of prebuilt cubins: what `cargo xtask cubins` writes and what the crate's build script embeds.
//!
//! The build script includes this file by path, so it depends on nothing else of the crate. `manifest.txt` names every
//! text with a digest of it, the prelude and the compiler's options, and every cubin with its SHA-256: cubins of other
//! texts than the present ones never get into a build.

use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

/// Options of every compilation besides the architecture. `-v` is what makes the log tell of registers.
pub const OPTIONS: &[&str] = &["--std=c++17", "--ptxas-options=-v"];

/// The manifest's name in the folder.
pub const FILE_NAME: &str = "manifest.txt";

/// First line: the format.
const HEAD: &str = "consort cubins 1";
/// The prelude, below `src`.
const PRELUDE: &str = "cuda/prelude.cuh";
/// A manifest or text beyond this is not one.
const TEXT_BYTES_MAX: u64 = 16 << 20;

/// One prebuilt cubin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name of its text.
    pub source: String,
    /// Name of its architecture.
    pub arch: String,
    /// The file in the folder.
    pub file: String,
    /// SHA-256 of its bytes, in hexadecimal digits.
    pub sha256: String,
}

/// Texts and cubins of a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// What compiled them, for readers.
    pub compiler: String,
    /// Name and digest of every text.
    pub texts: Vec<(String, String)>,
    /// Every cubin.
    pub entries: Vec<Entry>,
}

/// Why a folder's cubins cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// A file cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// The manifest is not one.
    #[error("{}:{line}: {reason}", path.display())]
    Line {
        /// The manifest.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        reason: &'static str,
    },
    /// There are no cubins, or they belong to other texts.
    #[error("{what}; run `CONSORT_CUBINS_DIR= cargo xtask cubins` again")]
    Stale {
        /// What differs.
        what: String,
    },
}

/// Digest of all that a text's cubins depend on, besides the compiler and the architecture: `parts` are the prelude,
/// the headers of its folder, the text.
pub fn digest<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hasher = Sha256::new();
    for part in OPTIONS.iter().copied().chain(parts) {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hexadecimal(&hasher.finalize())
}

/// SHA-256 in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A CUDA text as it lies in its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// Path below `src`.
    pub name: String,
    /// What it says.
    pub text: String,
    /// Name and content of every header (`.cuh`) beside it, in order of names.
    pub headers: Vec<(String, String)>,
}

/// Every CUDA text (`.cu`) below a crate's `src`, in order of names.
pub fn texts(src: &Path) -> Result<Vec<Text>, ManifestError> {
    let folder_of = |name: &str| name.rsplit_once('/').map_or(String::new(), |(folder, _)| folder.to_owned());
    let headers = files(src, "cuh")?;
    let texts = files(src, "cu")?.into_iter().map(|(name, text)| {
        let beside = headers.iter().filter(|(header, _)| folder_of(header) == folder_of(&name));
        Text { headers: beside.cloned().collect(), name, text }
    });
    Ok(texts.collect())
}

/// Name and content of every file with an extension below a crate's `src`, in order of names.
fn files(src: &Path, extension: &str) -> Result<Vec<(String, String)>, ManifestError> {
    let (mut pending, mut found) = (vec![src.to_path_buf()], Vec::new());
    while let Some(folder) = pending.pop() {
        let failed = |error| ManifestError::File { path: folder.clone(), error };
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.is_dir() {
                pending.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                let relative = path.strip_prefix(src).unwrap_or(&path).to_string_lossy().replace('\\', "/");
                found.push((relative, read_text(&path)?));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Name and digest of every CUDA text below `src`.
pub fn digests(src: &Path) -> Result<Vec<(String, String)>, ManifestError> {
    let texts = texts(src)?;
    let prelude = if texts.is_empty() { String::new() } else { read_text(&src.join(PRELUDE))? };
    let digest_of = |text: &Text| {
        let headers = text.headers.iter().map(|(_, header)| header.as_str());
        digest(std::iter::once(prelude.as_str()).chain(headers).chain([text.text.as_str()]))
    };
    Ok(texts.iter().map(|text| (text.name.clone(), digest_of(text))).collect())
}

impl Manifest {
    /// Reads a folder's manifest.
    pub fn read(folder: &Path) -> Result<Manifest, ManifestError> {
        let path = folder.join(FILE_NAME);
        if !path.exists() {
            return Err(ManifestError::Stale { what: format!("{} does not exist", path.display()) });
        }
        let text = read_text(&path)?;
        let mut lines = text.lines().enumerate();
        let refused =
            |index: usize, reason| ManifestError::Line { path: path.clone(), line: index + 1, reason };
        if lines.next().map(|(_, line)| line) != Some(HEAD) {
            return Err(refused(0, "not a manifest of cubins that this version understands"));
        }
        let mut manifest = Manifest::default();
        for (index, line) in lines {
            let words: Vec<&str> = line.split(' ').collect();
            match words.as_slice() {
                ["compiler", rest @ ..] => manifest.compiler = rest.join(" "),
                ["text", name, digest] => manifest.texts.push((name.to_string(), digest.to_string())),
                ["cubin", source, arch, file, sha256] => {
                    // Nothing outside the folder is ever read.
                    if file.contains(['/', '\\']) || file.starts_with('.') {
                        return Err(refused(index, "a cubin's name is no plain file name"));
                    }
                    let [source, arch, file, sha256] =
                        [source, arch, file, sha256].map(|word| word.to_string());
                    manifest.entries.push(Entry { source, arch, file, sha256 });
                }
                _ => return Err(refused(index, "neither `compiler`, `text` nor `cubin`")),
            }
        }
        Ok(manifest)
    }

    /// Writes the manifest. Its cubins come first: until this is written the folder holds whatever it held before.
    pub fn write(&self, folder: &Path) -> Result<(), ManifestError> {
        let mut text = format!("{HEAD}\ncompiler {}\n", self.compiler);
        for (name, digest) in &self.texts {
            let _ = writeln!(text, "text {name} {digest}");
        }
        for Entry { source, arch, file, sha256 } in &self.entries {
            let _ = writeln!(text, "cubin {source} {arch} {file} {sha256}");
        }
        let path = folder.join(FILE_NAME);
        fs::write(&path, text).map_err(|error| ManifestError::File { path, error })
    }

    /// Holds the folder against the present texts: the same ones, each compiled for the same architectures, and every
    /// cubin's bytes as they were written.
    pub fn check(&self, folder: &Path, present: &[(String, String)]) -> Result<(), ManifestError> {
        let stale = |what: String| Err(ManifestError::Stale { what });
        let place = folder.display();
        if self.entries.is_empty() && !present.is_empty() {
            return stale(format!("the manifest in {place} names no cubin"));
        }
        for (name, digest) in present {
            match self.texts.iter().find(|(listed, _)| listed == name) {
                None => return stale(format!("{place} holds no cubins of {name}")),
                Some((_, listed)) if listed != digest => {
                    return stale(format!(
                        "the cubins of {name} in {place} were made from another text or prelude"
                    ));
                }
                Some(_) => {}
            }
            for Entry { arch, .. } in &self.entries {
                let has = |entry: &Entry| entry.source == *name && entry.arch == *arch;
                if !self.entries.iter().any(has) {
                    return stale(format!("{place} holds no cubin of {name} for {arch}"));
                }
            }
        }
        if let Some((gone, _)) =
            self.texts.iter().find(|(listed, _)| present.iter().all(|(name, _)| name != listed))
        {
            return stale(format!("{place} holds cubins of {gone}, which is gone"));
        }
        for Entry { file, sha256: wanted, .. } in &self.entries {
            let path = folder.join(file);
            let bytes = fs::read(&path).map_err(|error| ManifestError::File { path: path.clone(), error })?;
            if sha256(&bytes) != *wanted {
                return stale(format!("{} is not the file that the manifest describes", path.display()));
            }
        }
        Ok(())
    }

    /// The table that the crate includes: one element of a slice for each cubin. Nothing without a folder.
    pub fn table(&self, folder: &Path) -> String {
        let mut table = String::from("&[\n");
        for Entry { source, arch, file, .. } in &self.entries {
            let digest = self.texts.iter().find(|(name, _)| name == source).map_or("", |(_, digest)| digest);
            let path = folder.join(file);
            let bytes = format!("include_bytes!({:?})", path.to_string_lossy());
            let fields = format!("source: {source:?}, arch: {arch:?}, digest: {digest:?}, bytes: {bytes}");
            let _ = writeln!(table, "    Embedded {{ {fields} }},");
        }
        table.push(']');
        table
    }
}

fn read_text(path: &Path) -> Result<String, ManifestError> {
    let failed = |error| ManifestError::File { path: path.to_path_buf(), error };
    if fs::metadata(path).map_err(failed)?.len() > TEXT_BYTES_MAX {
        return Err(failed(io::Error::other("too large for a text")));
    }
    fs::read_to_string(path).map_err(failed)
}

#[cfg(test)]
mod tests;
