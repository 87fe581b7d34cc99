//! What lies beside the program.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The folder that `cargo xtask device-check` wrote.
#[derive(Clone, Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// The one given, else the program's.
    pub(crate) fn find(given: Option<PathBuf>) -> Result<Folder> {
        let folder = match given {
            Some(folder) => folder,
            None => {
                let program = std::env::current_exe().context("this program does not know where it is")?;
                program.parent().context("this program lies in no folder")?.to_path_buf()
            }
        };
        if !folder.is_dir() {
            bail!("{} is not a folder; `cargo xtask device-check` makes one", folder.display());
        }
        Ok(Folder(folder))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// What kernels read and wrote on the emulator, a file a launch.
    pub(crate) fn recordings(&self) -> PathBuf {
        self.0.join("recordings")
    }

    /// The program that does in PyTorch what is measured here.
    pub(crate) fn peer(&self) -> PathBuf {
        self.0.join("peer/peer.py")
    }

    /// Checkpoints, a folder each.
    pub(crate) fn models(&self) -> PathBuf {
        self.0.join("models")
    }
}
