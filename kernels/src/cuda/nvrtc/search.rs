//! Where NVRTC may be.
//!
//! In this order: `CONSORT_CUDA_LIB_PATH` (if set, nothing else); the loader's path; `CUDA_HOME` and `CUDA_PATH`;
//! `/usr/local/cuda*`, the newest first, and `/opt/cuda`; Debian's folders; the folders into which the Python wheels
//! `nvidia-cuda-nvrtc-cu12` and `nvidia-cuda-nvrtc` put it: in the active environment, in those that the `python3`s of
//! `PATH` belong to, among the user's own packages and in Debian's. Python itself is never run, so an interpreter
//! behind a shim (pyenv's) is not followed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::cuda::settings::Settings;

/// File names that NVRTC goes by, the newest first. The loader knows it under the same names.
pub(super) const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Library folders of a toolkit.
const TOOLKIT_FOLDERS: [&str; 4] = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];

/// Toolkits' usual places besides `/usr/local/cuda*`: Arch's, and Debian's package.
const TOOLKITS: [&str; 2] = ["opt/cuda", "usr/lib/cuda"];

/// Folders of the system's libraries that a loader may not search.
const SYSTEM_FOLDERS: [&str; 3] = ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64"];

/// Folders below `site-packages`: the wheels of CUDA 12 and of CUDA 13.
const WHEEL_FOLDERS: [&str; 2] = ["nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib"];

/// Folders of wanted names that are taken from one folder: no machine has as many toolkits or Pythons.
const ENTRIES_MAX: usize = 1024;

/// A place to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The loader finds it by name.
    Loader,
    /// This file.
    File(PathBuf),
    /// A file of one of the usual names in this folder.
    Folder(PathBuf),
}

/// The places, in order. `root` is `/`; tests have one of their own.
pub(super) fn places(settings: &Settings, root: &Path) -> Vec<Place> {
    if let Some(path) = &settings.library {
        return vec![if path.is_dir() { Place::Folder(path.clone()) } else { Place::File(path.clone()) }];
    }
    let mut folders = Vec::new();
    let local = children(&root.join("usr/local"), |name| name.starts_with("cuda"));
    let usual = TOOLKITS.iter().map(|toolkit| root.join(toolkit));
    for toolkit in settings.toolkits.iter().cloned().chain(local).chain(usual) {
        folders.extend(TOOLKIT_FOLDERS.iter().map(|folder| toolkit.join(folder)));
    }
    folders.extend(SYSTEM_FOLDERS.iter().map(|folder| root.join(folder)));
    for packages in python_packages(settings, root) {
        folders.extend(WHEEL_FOLDERS.iter().map(|folder| packages.join(folder)));
    }
    let mut places = vec![Place::Loader];
    for folder in folders.into_iter().filter(|folder| folder.is_dir()) {
        let place = Place::Folder(folder);
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

/// Folders of Python packages.
fn python_packages(settings: &Settings, root: &Path) -> Vec<PathBuf> {
    let mut packages = Vec::new();
    for prefix in &settings.environments {
        packages.extend(packages_of(prefix));
    }
    for programs in &settings.programs {
        if programs.join("python3").is_file() {
            packages.extend(programs.parent().into_iter().flat_map(packages_of));
        }
    }
    packages.extend(settings.home.iter().flat_map(|home| packages_of(&home.join(".local"))));
    packages.extend(packages_of(&root.join("usr/local")));
    packages.push(root.join("usr/lib/python3/dist-packages"));
    packages
}

/// `lib/python3.11/site-packages` of an installation, and what Debian calls it.
fn packages_of(prefix: &Path) -> Vec<PathBuf> {
    let pythons = children(&prefix.join("lib"), |name| name.starts_with("python3"));
    pythons
        .iter()
        .flat_map(|python| ["site-packages", "dist-packages"].map(|packages| python.join(packages)))
        .collect()
}

/// Folders inside `folder` of the wanted names, `cuda-13.0` before `cuda-12.9` before `cuda-9.0`.
fn children(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<(Vec<u32>, PathBuf)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name().into_string().ok().filter(|name| wanted(name))?;
            // A name without a version is the link to the one that the administrator chose: it comes first.
            let version: Vec<u32> =
                name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect();
            let version = if version.is_empty() { vec![u32::MAX] } else { version };
            Some((version, entry.path()))
        })
        .take(ENTRIES_MAX)
        .collect();
    found.sort_by(|(a, left), (b, right)| b.cmp(a).then_with(|| left.cmp(right)));
    found.into_iter().map(|(_, path)| path).collect()
}

#[cfg(test)]
mod tests;
