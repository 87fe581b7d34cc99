//! Which libraries are taken.

use super::*;
use crate::{cuda::testing::shared_library, testing::Folder};

/// Opens a library made of a C text.
fn opened(name: &str, text: &str) -> Result<Arc<Nccl>, NcclError> {
    let folder = Folder::new(name);
    let file = folder.path().join("libnccl.so.2");
    std::fs::rename(shared_library(&folder, text), &file).unwrap();
    Nccl::open(&Settings { library: Some(file), ..Settings::default() })
}

#[test]
fn a_library_that_is_not_there_too_old_or_not_whole_is_refused_by_name() {
    let nowhere = Settings { library: Some("/nowhere/libnccl.so.2".into()), ..Settings::default() };
    let missing = Nccl::open(&nowhere).unwrap_err().to_string();
    assert!(missing.contains("/nowhere/libnccl.so.2: not there"), "{missing}");
    assert!(missing.contains("pip install nvidia-nccl-cu12"), "{missing}");
    let old =
        opened("nccl-old", "int ncclGetVersion(int *v) { *v = 21805; return 0; }").unwrap_err().to_string();
    assert!(old.ends_with("cannot be used: it is version 2.18.5. Install NCCL 2.19 or newer"), "{old}");
    let part =
        opened("nccl-part", "int ncclGetVersion(int *v) { *v = 21900; return 0; }").unwrap_err().to_string();
    assert!(part.contains("it has no ncclGetUniqueId"), "{part}");
    let mute = opened("nccl-mute", "int ncclGetVersion(int *v) { return 3; }").unwrap_err().to_string();
    assert!(mute.contains("it does not say its version"), "{mute}");
}

#[test]
fn software_driver_an_id_that_cannot_be_made_tells_what_to_look_at() {
    let test = "software_driver_an_id_that_cannot_be_made_tells_what_to_look_at";
    let fault = [("CONSORT_SOFTWARE_DRIVER_FAULTS", "ncclGetUniqueId:1=2")];
    report_of(module_path!(), test, "1", &fault, |settings| {
        // The driver is what counts calls.
        let _device = open(settings, 0);
        let library = Nccl::open(settings).unwrap();
        assert!(library.version().starts_with("2."), "{library:?}");
        let error = library.unique_id().unwrap_err();
        assert!(matches!(error, NcclError::NoId { code: 2, .. }), "{error:?}");
        assert!(error.to_string().contains("NCCL_SOCKET_IFNAME"), "{error}");
        let id = library.unique_id().unwrap();
        assert_eq!(UniqueId::of_bytes(id.to_bytes()), id);
        assert_ne!(library.unique_id().unwrap(), id);
    });
}
