//! Where NCCL is, and its version.
#![allow(unsafe_code)]

use std::{
    ffi::c_int,
    path::{Path, PathBuf},
};

use super::sys::{GetVersion, SUCCESS};
use crate::cuda::{
    device::LibraryFacts,
    dynamic::Library,
    search::{self, NCCL},
    settings::Settings,
};

/// From 2.9 on a version is major x 10,000 + minor x 100 + patch, before that major x 1,000 + ...
const WIDE_VERSION_MIN: c_int = 10_000;

/// A library that says its version.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) library: Library,
    pub(super) file: PathBuf,
    pub(super) version: c_int,
}

/// Why there is none.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Missing {
    /// One line for each place, each after a line's end, with what was wrong there.
    Nowhere(String),
    /// A file that is something else.
    Not(PathBuf),
    /// A file that does not say its version.
    Mute(PathBuf),
}

/// Finds the library. It is loaded from then on.
pub(super) fn find(settings: &Settings) -> Result<Found, Missing> {
    let library = search::load(&NCCL, settings, Path::new("/")).map_err(Missing::Nowhere)?;
    let file = library.file_of(c"ncclGetVersion").unwrap_or_else(|| PathBuf::from(NCCL.names[0]));
    // SAFETY: the type is that of nccl.h.
    let get_version: Option<GetVersion> = unsafe { library.function(c"ncclGetVersion") };
    let Some(get_version) = get_version else { return Err(Missing::Not(file)) };
    let mut version = 0;
    // SAFETY: room for the number.
    if unsafe { get_version(&mut version) } != SUCCESS {
        return Err(Missing::Mute(file));
    }
    Ok(Found { library, file, version })
}

/// NCCL's file and version, or what is wrong with each place. Nothing but its version is asked for.
pub fn facts(settings: &Settings) -> Result<LibraryFacts, String> {
    match find(settings) {
        Ok(Found { file, version, .. }) => {
            Ok(LibraryFacts { name: "libnccl", file, version: shown(version) })
        }
        Err(Missing::Nowhere(looked)) => Err(format!("no usable NCCL. Looked at:{looked}")),
        Err(Missing::Not(_)) => Err("it has no ncclGetVersion".to_owned()),
        Err(Missing::Mute(file)) => Err(format!("{} does not say its version", file.display())),
    }
}

/// A version as people write it.
pub(super) fn shown(version: c_int) -> String {
    let major_unit = if version < WIDE_VERSION_MIN { 1_000 } else { 10_000 };
    format!("{}.{}.{}", version / major_unit, version % major_unit / 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuda::testing::shared_library, testing::Folder};

    #[test]
    fn a_version_is_written_as_people_do_in_both_of_its_forms() {
        assert_eq!(shown(22_703), "2.27.3");
        assert_eq!(shown(20_900), "2.9.0");
        assert_eq!(shown(2_804), "2.8.4");
    }

    #[test]
    fn the_library_is_found_with_its_version_or_told_for_what_it_lacks() {
        let folder = Folder::new("nccl");
        let settings = Settings { library: Some(folder.path().to_path_buf()), ..Settings::default() };
        let missing = facts(&settings).unwrap_err();
        assert!(missing.starts_with("no usable NCCL. Looked at:\n  /"), "{missing}");
        let install = |text: &str, name: &str| {
            let library = shared_library(&folder, text);
            std::fs::rename(library, folder.path().join(name)).unwrap();
        };
        install("int other(void) { return 0; }", "libnccl.so.2");
        assert_eq!(facts(&settings).unwrap_err(), "it has no ncclGetVersion");
        // The loader knows a library that it has loaded by its file; a new one needs a new folder.
        let folder = Folder::new("nccl-whole");
        let settings = Settings { library: Some(folder.path().to_path_buf()), ..Settings::default() };
        let library = shared_library(&folder, "int ncclGetVersion(int *v) { *v = 22703; return 0; }");
        std::fs::rename(library, folder.path().join("libnccl.so.2")).unwrap();
        let found = facts(&settings).unwrap();
        assert_eq!((found.file, found.version), (folder.path().join("libnccl.so.2"), "2.27.3".to_owned()));
    }
}
