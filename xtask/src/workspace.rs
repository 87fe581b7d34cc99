//! Where things are, and how cargo is called.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process;

/// The workspace this binary was built from.
pub(crate) struct Workspace {
    root: PathBuf,
}

impl Workspace {
    /// Cargo names the manifest folder at run time; a binary started by hand falls back to where it was built.
    pub(crate) fn find() -> Result<Self> {
        let manifest = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&manifest).parent().context("xtask has no parent folder")?;
        let root = root.canonicalize().with_context(|| format!("no workspace at {}", root.display()))?;
        Ok(Self { root })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Downloaded models. Always under the root, whatever the target folder is: tests look for them there.
    pub(crate) fn models(&self) -> PathBuf {
        self.root.join("target/models")
    }

    /// A command that runs in the root.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        command
    }

    /// The cargo that runs this xtask.
    pub(crate) fn cargo(&self) -> Command {
        self.command(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
    }

    /// `cargo metadata` of the members alone.
    pub(crate) fn metadata(&self) -> Result<Value> {
        let mut command = self.cargo();
        command.args(["metadata", "--no-deps", "--format-version", "1"]);
        let output = process::output(&mut command)?;
        serde_json::from_slice(&output).context("cargo metadata printed no JSON")
    }

    /// Where cargo puts its outputs.
    pub(crate) fn target_directory(&self) -> Result<PathBuf> {
        let metadata = self.metadata()?;
        let path =
            metadata["target_directory"].as_str().context("cargo metadata names no target_directory")?;
        Ok(PathBuf::from(path))
    }
}
