//! Shared by the tests of CUDA's parts.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{arch::Arch, nvrtc::Nvrtc, settings::Settings};
use crate::testing::Folder;

/// The real compiler, if this machine has it: what `cargo xtask cubins` installed, else the first one found. Says so
/// where there is none.
pub(super) fn nvrtc_settings() -> Option<Settings> {
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/venv-cubins");
    let mut settings = Settings::of_process();
    if settings.library.is_none() {
        settings.environments.insert(0, installed);
    }
    settings.cache = None;
    match Nvrtc::open(&settings, Arch::CHECKED[2]) {
        Ok(_) => Some(settings),
        Err(error) => {
            println!("skipped, since there is no NVRTC here; `cargo xtask cubins` installs it. {error}");
            None
        }
    }
}

/// A shared library compiled from C, called `libnvrtc.so.12`.
pub(super) fn shared_library(folder: &Folder, c_text: &str) -> PathBuf {
    let (text, library) = (folder.path().join("library.c"), folder.path().join("libnvrtc.so.12"));
    fs::write(&text, c_text).unwrap();
    let status = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&text).status();
    assert!(status.expect("cc is installed, since Rust links with it").success());
    library
}
