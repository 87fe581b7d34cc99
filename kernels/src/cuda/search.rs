//! Where NVIDIA's libraries may be.
//!
//! In this order: `CONSORT_CUDA_LIB_PATH` (if set, nothing else, unless it names the file of another library); the
//! loader's path; `CUDA_HOME` and `CUDA_PATH`; `/usr/local/cuda*`, the newest first, and `/opt/cuda`; the
//! distributions' folders; the folders into which the Python wheels of CUDA 12 and 13 put them: in the active
//! environment, in those that the `python3`s of `PATH` belong to, among the user's own packages and in Debian's.
//! Python itself is never run, so an interpreter behind a shim (pyenv's) is not followed. The driver's library comes
//! with the driver: toolkits and wheels do not have it.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

use super::{
    dynamic::{self, Library, Scope},
    settings::Settings,
};

/// A library to look for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// What a file of any of its names begins with.
    stem: &'static str,
    /// File names that it goes by, the newest first. The loader knows it under the same names.
    pub(super) names: &'static [&'static str],
    home: Home,
}

/// What a library is part of.
#[derive(Debug, PartialEq, Eq)]
enum Home {
    /// Toolkits, and Python's wheels: there in these folders below `site-packages`.
    Toolkit { wheel_folders: &'static [&'static str] },
    /// The driver.
    Driver,
}

/// The run-time compiler.
pub(super) const NVRTC: Wanted = Wanted {
    stem: "libnvrtc.so",
    names: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    home: Home::Toolkit { wheel_folders: &["nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib"] },
};

/// Matrix products.
pub(super) const CUBLAS_LT: Wanted = Wanted {
    stem: "libcublasLt.so",
    names: &["libcublasLt.so.13", "libcublasLt.so.12"],
    home: Home::Toolkit { wheel_folders: &["nvidia/cublas/lib", "nvidia/cu13/lib"] },
};

/// The driver.
pub(super) const DRIVER: Wanted = Wanted { stem: "libcuda.so", names: &["libcuda.so.1"], home: Home::Driver };

/// Collective operations. Its wheel has a folder of its own, and toolkits do not have it.
pub(super) const NCCL: Wanted = Wanted {
    stem: "libnccl.so",
    names: &["libnccl.so.2"],
    home: Home::Toolkit { wheel_folders: &["nvidia/nccl/lib"] },
};

/// What watches over cards; it comes with the driver.
pub(super) const MANAGEMENT: Wanted =
    Wanted { stem: "libnvidia-ml.so", names: &["libnvidia-ml.so.1"], home: Home::Driver };

/// Library folders of a toolkit.
const TOOLKIT_FOLDERS: [&str; 4] = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];

/// Toolkits' usual places besides `/usr/local/cuda*`: Arch's, and Debian's package.
const TOOLKITS: [&str; 2] = ["opt/cuda", "usr/lib/cuda"];

/// Folders of the system's libraries that a loader may not search.
const SYSTEM_FOLDERS: [&str; 3] = ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64"];

/// Where Windows puts its driver's library for Linux.
const WSL_FOLDER: &str = "usr/lib/wsl/lib";

/// Where container runtimes mount the driver's libraries: the loader may not look there.
const CONTAINER_FOLDERS: [&str; 2] = ["usr/local/nvidia/lib64", "usr/local/nvidia/lib"];

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
pub(super) fn places(wanted: &Wanted, settings: &Settings, root: &Path) -> Vec<Place> {
    if let Some(path) = settings.library.as_ref().filter(|path| !names_another(path, wanted)) {
        return vec![if path.is_dir() { Place::Folder(path.clone()) } else { Place::File(path.clone()) }];
    }
    let mut folders = Vec::new();
    if let Home::Toolkit { .. } = wanted.home {
        let local = children(&root.join("usr/local"), |name| name.starts_with("cuda"));
        let usual = TOOLKITS.iter().map(|toolkit| root.join(toolkit));
        for toolkit in settings.toolkits.iter().cloned().chain(local).chain(usual) {
            folders.extend(TOOLKIT_FOLDERS.iter().map(|folder| toolkit.join(folder)));
        }
    }
    folders.extend(SYSTEM_FOLDERS.iter().map(|folder| root.join(folder)));
    match wanted.home {
        Home::Driver => {
            folders.extend(CONTAINER_FOLDERS.iter().map(|folder| root.join(folder)));
            folders.push(root.join(WSL_FOLDER));
        }
        Home::Toolkit { wheel_folders } => {
            for packages in python_packages(settings, root) {
                folders.extend(wheel_folders.iter().map(|folder| packages.join(folder)));
            }
        }
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

/// Loads the first file of the newest name that there is; else one line for each place, each after a line's end, with
/// what is wrong there.
pub(super) fn load(wanted: &Wanted, settings: &Settings, root: &Path) -> Result<Library, String> {
    let mut looked = String::new();
    for place in places(wanted, settings, root) {
        let files: Vec<PathBuf> = match place {
            Place::Loader => {
                for name in wanted.names {
                    match Library::open(OsStr::new(name), Scope::Local) {
                        Ok(library) => return Ok(library),
                        Err(reason) => looked += &format!("\n  the loader's path: {reason}"),
                    }
                }
                continue;
            }
            Place::File(file) => vec![file],
            Place::Folder(folder) => wanted.names.iter().map(|name| folder.join(name)).collect(),
        };
        for file in files.iter().map(|file| dynamic::absolute(file)) {
            if !file.exists() {
                looked += &format!("\n  {}: not there", file.display());
                continue;
            }
            match Library::open(file.as_os_str(), Scope::Local) {
                Ok(library) => return Ok(library),
                Err(reason) => looked += &format!("\n  {}: {reason}", file.display()),
            }
        }
    }
    Err(looked)
}

/// Whether a path is the file of another library, such as a compiler that was chosen; this one is then looked for as
/// if nothing were configured.
fn names_another(path: &Path, wanted: &Wanted) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is = |wanted: &Wanted| name.starts_with(wanted.stem);
    !is(wanted) && [NVRTC, CUBLAS_LT, DRIVER, NCCL, MANAGEMENT].iter().any(is) && !path.is_dir()
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
