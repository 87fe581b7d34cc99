//! What stands where an output is to be, and whether it may be put there.

#[cfg(test)]
mod tests;

use std::{
    fs,
    io::{self, Read},
    path::Path,
};

use serde_json::{Map, Value};

use super::{ConvertError, TEXT_FILES};

/// What a folder must hold to be taken for a model that may be replaced: this, naming a kind of model,
const CONFIG_FILE: &str = "config.json";
/// with one of these keys,
const KIND_KEYS: [&str; 2] = ["architectures", "model_type"];
/// and one of these files.
const WEIGHT_FILES: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// Most bytes of a `config.json` that is looked at, as when a model is opened.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// What an output takes the place of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Nothing, or an empty folder.
    Nothing,
    /// A model, which may be replaced.
    Model,
}

/// Whether an output may be put here: where nothing is, over an empty folder, and over a model when asked.
pub(super) fn may_stand_at(path: &Path, overwrite: bool) -> Result<Standing, ConvertError> {
    let refuse = |problem: String| Err(ConvertError::NotReplaceable { path: path.to_owned(), problem });
    let read = |source| ConvertError::Read { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Standing::Nothing),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => return Err(below_file(path)),
        Err(source) => return Err(read(source)),
        Ok(metadata) if !metadata.is_dir() => return refuse("is not a folder".to_owned()),
        Ok(_) => {}
    }
    if is_mount_point(path).map_err(read)? {
        return Err(ConvertError::MountPoint { path: path.to_owned() });
    }
    if fs::read_dir(path).map_err(read)?.next().is_none() {
        return Ok(Standing::Nothing);
    }
    if !overwrite {
        return Err(ConvertError::Exists { path: path.to_owned() });
    }
    match problem_of_model(path).map_err(read)? {
        None => Ok(Standing::Model),
        Some(problem) => refuse(problem),
    }
}

/// Why a folder is not taken for a model. A slip of the hand must not delete somebody's home, nor a repository or a
/// tool's settings that happen to have a `config.json`.
fn problem_of_model(folder: &Path) -> io::Result<Option<String>> {
    if !folder.join(CONFIG_FILE).is_file() {
        return Ok(Some("is not a model (it has no config.json)".to_owned()));
    }
    if !names_a_model(&folder.join(CONFIG_FILE))? {
        let problem = "is not a model (its config.json has neither architectures nor model_type)";
        return Ok(Some(problem.to_owned()));
    }
    if !WEIGHT_FILES.iter().any(|name| folder.join(name).is_file()) {
        return Ok(Some("is not a model (it has neither model.safetensors nor its index)".to_owned()));
    }
    for entry in fs::read_dir(folder)? {
        // Of a link, this tells what the link is; only the link would be deleted.
        let (entry, name) = entry.map(|entry| (entry.file_type(), entry.file_name()))?;
        if entry?.is_dir() {
            return Ok(Some("has folders of its own, which a converted model has not".to_owned()));
        }
        if !name.to_str().is_some_and(belongs_to_a_model) {
            let name = name.to_string_lossy();
            return Ok(Some(format!("holds {name:?}, which no conversion writes and which would be lost")));
        }
    }
    Ok(None)
}

/// Whether a file is one of a published model's: what a conversion writes, and what stands beside it in the hub.
fn belongs_to_a_model(name: &str) -> bool {
    let weights = name.starts_with("model") && name.ends_with(".safetensors");
    let prose = name == "README.md" || name.starts_with("LICENSE") || name == ".gitattributes";
    weights
        || prose
        || WEIGHT_FILES.contains(&name)
        || TEXT_FILES.contains(&name)
        || [CONFIG_FILE, "generation_config.json"].contains(&name)
}

fn names_a_model(config: &Path) -> io::Result<bool> {
    let mut text = Vec::new();
    fs::File::open(config)?.take(CONFIG_BYTES_MAX).read_to_end(&mut text)?;
    let object: Option<Map<String, Value>> = serde_json::from_slice(&text).ok();
    Ok(object.is_some_and(|object| KIND_KEYS.iter().any(|key| object.contains_key(*key))))
}

/// The error of a path that leads through a file.
fn below_file(path: &Path) -> ConvertError {
    let is_file = |path: &&Path| fs::metadata(path).is_ok_and(|metadata| !metadata.is_dir());
    let file = path.ancestors().find(is_file).unwrap_or(path);
    ConvertError::BelowFile { output: path.to_owned(), file: file.to_owned() }
}

/// Whether another file system begins here, or another view of the same one: such a folder cannot be renamed.
#[cfg(target_os = "linux")]
fn is_mount_point(path: &Path) -> io::Result<bool> {
    use rustix::{
        fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx},
        io::Errno,
    };
    match statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty()) {
        Ok(found) if found.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) => {
            Ok(found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
        }
        // Older systems do not tell; sandboxes may forbid the question.
        Ok(_) | Err(Errno::NOSYS | Errno::PERM) => is_on_another_device(path),
        Err(error) => Err(error.into()),
    }
}

#[cfg(all(unix, not(target_os = "linux")))]
fn is_mount_point(path: &Path) -> io::Result<bool> {
    is_on_another_device(path)
}

#[cfg(unix)]
fn is_on_another_device(path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let Some(parent) = path.parent() else { return Ok(true) };
    Ok(fs::symlink_metadata(path)?.dev() != fs::metadata(parent)?.dev())
}

#[cfg(not(unix))]
fn is_mount_point(_: &Path) -> io::Result<bool> {
    Ok(false)
}
