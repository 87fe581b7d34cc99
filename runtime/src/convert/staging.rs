//! A folder that appears under its name whole or not at all: filled beside it, put in its place at the end.
//!
//! It is filled as `new` within a working folder `OUTPUT.partial-N`. A model that is replaced changes places with it
//! in one step where the system can do that. Where it cannot, the old model first steps aside, to `old` within the
//! same working folder, and a process that is killed right then leaves nothing at the output.

#[cfg(test)]
mod tests;

use std::{
    ffi::OsString,
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use super::{
    ConvertError,
    place::{self, Standing},
};

/// Where an output goes, once it is known that it may.
pub(super) struct Staging {
    output: PathBuf,
    parent: PathBuf,
    name: OsString,
    overwrite: bool,
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
        place::may_stand_at(&resolved, overwrite)?;
        // A folder's files may be links that lead into the output.
        let inside = fs::read_dir(input).into_iter().flatten().flatten().map(|entry| entry.path());
        let files =
            std::iter::once(input.to_owned()).chain(inside).filter_map(|path| fs::canonicalize(path).ok());
        if let Some(input) = files.into_iter().find(|file| file.starts_with(&resolved)) {
            return Err(ConvertError::InputInOutput { input, output: resolved });
        }
        Ok(Staging { output: resolved, parent, name, overwrite })
    }

    /// Makes the folder to fill, with any folders above it.
    pub(super) fn create(self) -> Result<Staged, ConvertError> {
        let parents = Parents::create(&self.parent)?;
        let work = self.fresh_folder()?;
        let staged = Staged { place: self, folder: work.join("new"), work: Some(work), parents };
        match fs::create_dir(&staged.folder) {
            Ok(()) => Ok(staged),
            Err(source) => Err(ConvertError::Create { path: staged.folder.clone(), source }),
        }
    }

    /// A folder beside the output that nobody else has. A process id would not do for a name: in a container it is
    /// the same every time, and what a killed process left must not stand in the way of the next.
    fn fresh_folder(&self) -> Result<PathBuf, ConvertError> {
        for number in 1_u64.. {
            let mut name = self.name.clone();
            name.push(format!(".partial-{number}"));
            let path = self.parent.join(name);
            match fs::create_dir(&path) {
                Ok(()) => return Ok(path),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(source) => return Err(ConvertError::Create { path, source }),
            }
        }
        unreachable!("some number is free")
    }
}

/// Folders made above an output. Dropped before they are kept, those go that are still empty.
struct Parents(Vec<PathBuf>);

impl Parents {
    fn create(parent: &Path) -> Result<Self, ConvertError> {
        let is_missing = |path: &&Path| matches!(path.try_exists(), Ok(false));
        let missing: Vec<&Path> = parent.ancestors().take_while(is_missing).collect();
        let mut made = Self(Vec::new());
        for path in missing.into_iter().rev() {
            match fs::create_dir(path) {
                Ok(()) => made.0.push(path.to_owned()),
                // Someone else was faster.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(source) => return Err(ConvertError::Create { path: path.to_owned(), source }),
            }
        }
        Ok(made)
    }
}

impl Drop for Parents {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            if let Err(error) = fs::remove_dir(path) {
                tracing::debug!(path = %path.display(), %error, "a folder made for the output stays");
            }
        }
    }
}

/// A folder that is being filled; removed when dropped before [`Staged::commit`].
pub(super) struct Staged {
    place: Staging,
    folder: PathBuf,
    /// Holds `folder`, and goes with whatever it holds.
    work: Option<PathBuf>,
    // Dropped last: by then they may be empty.
    parents: Parents,
}

impl Staged {
    /// The folder to fill.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Puts the folder in its place and tells where that is.
    pub(super) fn commit(mut self) -> Result<PathBuf, ConvertError> {
        let output = self.place.output.clone();
        // Names become durable before the folder that holds them gets its own.
        sync(&self.folder);
        // Hours may have passed, and another conversion may have ended here.
        let moved = place::may_stand_at(&output, self.place.overwrite).and_then(|standing| match standing {
            Standing::Nothing => rename(&self.folder, &output),
            Standing::Model => exchange(&self.folder, &output),
        });
        if let Err(error) = moved {
            // What took hours is kept, and so is an old model that could not be put back.
            self.work = None;
            self.parents.0.clear();
            return Err(match error {
                ConvertError::RollBack { .. } => error,
                other => {
                    let (folder, source) = (self.folder.clone(), Box::new(other));
                    ConvertError::Kept { folder, output, source }
                }
            });
        }
        self.parents.0.clear();
        sync(&self.place.parent);
        Ok(output)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(work) = &self.work
            && let Err(error) = fs::remove_dir_all(work)
        {
            tracing::warn!(path = %work.display(), %error, "cannot delete what a conversion no longer needs");
        }
    }
}

/// Puts `new` where the model `output` is, which then is beside where `new` was.
fn exchange(new: &Path, output: &Path) -> Result<(), ConvertError> {
    #[cfg(target_os = "linux")]
    {
        use rustix::{
            fs::{CWD, RenameFlags, renameat_with},
            io::Errno,
        };
        match renameat_with(CWD, new, CWD, output, RenameFlags::EXCHANGE) {
            Ok(()) => return Ok(()),
            // Old systems, and file systems such as NFS, cannot.
            Err(Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP) => {}
            Err(error) => return Err(not_renamed(new, output)(error.into())),
        }
    }
    step_aside(new, output, &mut |from, to| fs::rename(from, to))
}

/// Like [`exchange`], in two steps.
fn step_aside(
    new: &Path,
    output: &Path,
    rename: &mut dyn FnMut(&Path, &Path) -> io::Result<()>,
) -> Result<(), ConvertError> {
    let old = new.with_file_name("old");
    rename(output, &old).map_err(not_renamed(output, &old))?;
    let Err(source) = rename(new, output) else { return Ok(()) };
    match rename(&old, output) {
        Ok(()) => Err(not_renamed(new, output)(source)),
        Err(roll_back) => Err(ConvertError::RollBack {
            output: output.to_owned(),
            old,
            new: new.to_owned(),
            roll_back,
            source,
        }),
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), ConvertError> {
    fs::rename(from, to).map_err(not_renamed(from, to))
}

fn not_renamed(from: &Path, to: &Path) -> impl FnOnce(io::Error) -> ConvertError {
    let (from, to) = (from.to_owned(), to.to_owned());
    |source| ConvertError::Rename { from, to, source }
}

/// Makes a folder's names durable. Not every file system can; what is there is complete all the same.
fn sync(folder: &Path) {
    if let Err(error) = fs::File::open(folder).and_then(|folder| folder.sync_all()) {
        tracing::debug!(path = %folder.display(), %error, "cannot sync a folder");
    }
}
