//! Python environments under target/, made once for each list of requirements.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::{model, process, workspace::Workspace};

const PYTHON: &str = "python3";

/// An environment with everything installed.
pub(crate) struct Venv {
    folder: PathBuf,
}

/// The environment `target/NAME` with the pinned `requirements` (a file of the workspace), made anew when they change.
/// Concurrent runs wait for each other.
pub(crate) fn ensure(workspace: &Workspace, name: &str, requirements: &str) -> Result<Venv> {
    ensure_by(workspace, name, &[requirements], |venv| {
        let mut pip = workspace.command(venv.python());
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir"]);
        pip.args(["--progress-bar", "off", "--requirement", requirements]);
        process::run(&mut pip)
    })
}

/// The same, filled by `install` from all of `files`.
pub(crate) fn ensure_by(
    workspace: &Workspace,
    name: &str,
    files: &[&str],
    install: impl FnOnce(&Venv) -> Result<()>,
) -> Result<Venv> {
    let mut wanted = String::new();
    for file in files {
        let path = workspace.root().join(file);
        wanted += &fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    }
    let folder = workspace.root().join("target").join(name);
    let locks = workspace.root().join("target/.locks").join(name);
    fs::create_dir_all(&locks).with_context(|| format!("cannot create {}", locks.display()))?;
    let _lock = model::lock(&locks)?;
    let venv = Venv { folder };
    let installed = venv.folder.join("installed-requirements.txt");
    if fs::read_to_string(&installed).is_ok_and(|found| found == wanted) {
        return Ok(venv);
    }
    // `python3 -m venv` is there without it on Debian, and fails half-way.
    process::require_python_module(PYTHON, "venv", "python3-venv")?;
    if !process::succeeds(workspace.command(PYTHON).args(["-c", "import ensurepip"])) {
        bail!("{PYTHON} cannot make environments with pip in them (Debian: apt-get install python3-venv)");
    }
    process::run(workspace.command(PYTHON).args(["-m", "venv", "--clear"]).arg(&venv.folder))?;
    install(&venv)?;
    fs::write(&installed, wanted).with_context(|| format!("cannot write {}", installed.display()))?;
    Ok(venv)
}

impl Venv {
    /// Its interpreter.
    pub(crate) fn python(&self) -> PathBuf {
        self.folder.join("bin/python")
    }

    /// A program that a package brought.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    /// A file or folder that a package brought, by its path below `site-packages`.
    pub(crate) fn package_file(&self, path: &str) -> Result<PathBuf> {
        let found = pythons(&self.folder.join("lib"))?
            .into_iter()
            .map(|python| python.join("site-packages").join(path))
            .find(|path| path.exists());
        found.with_context(|| {
            format!("no {path} in {}; remove that folder, and it is made anew", self.folder.display())
        })
    }
}

/// `lib/python3.11` and its like.
fn pythons(lib: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(lib).with_context(|| format!("cannot list {}", lib.display()))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("python3") {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::{env, process};

    use super::*;

    #[test]
    fn a_package_s_file_is_found_whatever_python_s_version() {
        let folder = env::temp_dir().join(format!("consort-xtask-venv-{}", process::id()));
        let library = folder.join("lib/python3.99/site-packages/nvidia/cuda_nvrtc/lib");
        fs::create_dir_all(&library).unwrap();
        let venv = Venv { folder: folder.clone() };
        assert_eq!(venv.package_file("nvidia/cuda_nvrtc/lib").unwrap(), library);
        let error = venv.package_file("nvidia/other").expect_err("no such package").to_string();
        assert!(error.contains("no nvidia/other in ") && error.contains("remove that folder"), "{error}");
        fs::remove_dir_all(folder).unwrap();
    }
}
