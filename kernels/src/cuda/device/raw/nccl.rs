//! NCCL: whether it is there, and its version.

use std::{
    ffi::c_int,
    path::{Path, PathBuf},
};

use crate::cuda::{
    device::LibraryFacts,
    search::{self, NCCL},
    settings::Settings,
};

/// As declared in `nccl.h`.
type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;

/// `ncclSuccess`.
const SUCCESS: c_int = 0;
/// From 2.9 on a version is major x 10,000 + minor x 100 + patch, before that major x 1,000 + ...
const WIDE_VERSION_MIN: c_int = 10_000;

/// Finds the library; else says what is wrong with each place.
pub(in crate::cuda::device) fn find(settings: &Settings) -> Result<LibraryFacts, String> {
    let library = search::load(&NCCL, settings, Path::new("/"))
        .map_err(|looked| format!("no usable NCCL. Looked at:{looked}"))?;
    let file = library.file_of(c"ncclGetVersion").unwrap_or_else(|| PathBuf::from(NCCL.names[0]));
    // SAFETY: the type is that of nccl.h.
    let get_version: Option<GetVersion> = unsafe { library.function(c"ncclGetVersion") };
    let Some(get_version) = get_version else { return Err("it has no ncclGetVersion".to_owned()) };
    let mut version = 0;
    // SAFETY: room for the number.
    if unsafe { get_version(&mut version) } != SUCCESS {
        return Err(format!("{} does not say its version", file.display()));
    }
    Ok(LibraryFacts { name: "libnccl", file, version: shown(version) })
}

fn shown(version: c_int) -> String {
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
        let missing = find(&settings).unwrap_err();
        assert!(missing.starts_with("no usable NCCL. Looked at:\n  /"), "{missing}");
        let install = |text: &str, name: &str| {
            let library = shared_library(&folder, text);
            std::fs::rename(library, folder.path().join(name)).unwrap();
        };
        install("int other(void) { return 0; }", "libnccl.so.2");
        assert_eq!(find(&settings).unwrap_err(), "it has no ncclGetVersion");
        // The loader knows a library that it has loaded by its file; a new one needs a new folder.
        let folder = Folder::new("nccl-whole");
        let settings = Settings { library: Some(folder.path().to_path_buf()), ..Settings::default() };
        let library = shared_library(&folder, "int ncclGetVersion(int *v) { *v = 22703; return 0; }");
        std::fs::rename(library, folder.path().join("libnccl.so.2")).unwrap();
        let found = find(&settings).unwrap();
        assert_eq!((found.file, found.version), (folder.path().join("libnccl.so.2"), "2.27.3".to_owned()));
    }
}
