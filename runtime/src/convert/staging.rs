//! A folder that appears under its name whole or not at all: filled beside it, renamed at the end.

use std::{
    ffi::OsString,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process,
};

use super::ConvertError;

/// What a folder must hold to be taken for a model that may be replaced.
const MODEL_MARK: &str = "config.json";

/// Where an output goes, once it is known that it may.
pub(super) struct Staging {
    output: PathBuf,
    parent: PathBuf,
    name: OsString,
}

impl Staging {
    /// Looks at what stands at `output`; creates nothing.
    pub(super) fn prepare(input: &Path, output: &Path, overwrite: bool) -> Result<Staging, ConvertError> {
        let named = || ConvertError::NoName { path: output.to_owned() };
        // A link is followed, so that the folder behind it is replaced and not the link.
        let resolved =
            fs::canonicalize(output).or_else(|_| std::path::absolute(output)).map_err(|_| named())?;
        let parent = resolved.parent().ok_or_else(named)?.to_owned();
        let name = resolved.file_name().ok_or_else(named)?.to_owned();
        may_stand_at(&resolved, overwrite)?;
        if let Ok(input) = fs::canonicalize(input)
            && input.starts_with(&resolved)
        {
            return Err(ConvertError::InputInOutput { input, output: resolved });
        }
        Ok(Staging { output: resolved, parent, name })
    }

    /// Makes the folder to fill, with any folders above it.
    pub(super) fn create(self) -> Result<Staged, ConvertError> {
        let create = |path: &Path, made: io::Result<()>| {
            made.map_err(|source| ConvertError::Create { path: path.to_owned(), source })
        };
        create(&self.parent, fs::create_dir_all(&self.parent))?;
        let folder = self.sibling("partial");
        create(&folder, fs::create_dir(&folder))?;
        Ok(Staged { place: self, folder: Some(folder) })
    }

    /// A name beside the output, of this process alone.
    fn sibling(&self, what: &str) -> PathBuf {
        let mut name = self.name.clone();
        name.push(format!(".{what}-{}", process::id()));
        self.parent.join(name)
    }
}

/// Whether an output may be put here: where nothing is, over an empty folder, and over a model when asked.
fn may_stand_at(path: &Path, overwrite: bool) -> Result<(), ConvertError> {
    let refuse = |problem| Err(ConvertError::NotReplaceable { path: path.to_owned(), problem });
    let read = |source| ConvertError::Read { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(read(source)),
        Ok(metadata) if !metadata.is_dir() => return refuse("is not a folder"),
        Ok(_) => {}
    }
    if fs::read_dir(path).map_err(read)?.next().is_none() {
        return Ok(());
    }
    if !overwrite {
        return Err(ConvertError::Exists { path: path.to_owned() });
    }
    // A slip of the hand must not delete somebody's home.
    if path.join(MODEL_MARK).is_file() { Ok(()) } else { refuse("is not a model (it has no config.json)") }
}

/// Writes a small file that will outlast a power failure once its folder is in place.
pub(super) fn write(path: &Path, contents: &str) -> io::Result<()> {
    let mut file = fs::File::create_new(path)?;
    file.write_all(contents.as_bytes())?;
    file.sync_all()
}

/// A folder that is being filled; removed when dropped before [`Staged::commit`].
pub(super) struct Staged {
    place: Staging,
    folder: Option<PathBuf>,
}

impl Staged {
    /// The folder to fill.
    pub(super) fn folder(&self) -> &Path {
        self.folder.as_deref().unwrap_or(&self.place.output)
    }

    /// Puts the folder in its place and tells where that is.
    pub(super) fn commit(mut self) -> Result<PathBuf, ConvertError> {
        let output = self.place.output.clone();
        let folder = self.folder().to_owned();
        let rename = |from: &Path, to: &Path| {
            let renamed = fs::rename(from, to);
            renamed.map_err(|source| ConvertError::Rename { from: from.into(), to: to.into(), source })
        };
        // Over an empty folder, or nothing, one rename does it. Only a model that is to be replaced steps aside.
        let replaced = self.place.sibling("replaced");
        let is_model = output.join(MODEL_MARK).is_file();
        if is_model {
            rename(&output, &replaced)?;
        }
        if let Err(error) = rename(&folder, &output) {
            if is_model {
                rename(&replaced, &output)?;
            }
            return Err(error);
        }
        self.folder = None;
        sync(&output);
        sync(&self.place.parent);
        if is_model && let Err(error) = fs::remove_dir_all(&replaced) {
            tracing::warn!(path = %replaced.display(), %error, "cannot delete the model that was replaced");
        }
        Ok(output)
    }
}

/// Makes a folder's names durable. Not every file system can; what is there is complete all the same.
fn sync(folder: &Path) {
    if let Err(error) = fs::File::open(folder).and_then(|folder| folder.sync_all()) {
        tracing::debug!(path = %folder.display(), %error, "cannot sync a folder");
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder
            && let Err(error) = fs::remove_dir_all(folder)
        {
            tracing::warn!(path = %folder.display(), %error, "cannot delete a partial conversion");
        }
    }
}
