//! NVML, the library behind `nvidia-smi`: what the driver does not say of links and of itself.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    path::Path,
};

use crate::cuda::{
    device::Uuid,
    dynamic::Library,
    search::{self, MANAGEMENT},
    settings::Settings,
};

type Status = c_int;
type Device = *mut c_void;

/// `NVML_SUCCESS`.
const SUCCESS: Status = 0;
/// `NVML_P2P_CAPS_INDEX_NVLINK`.
const NVLINK: c_int = 2;
/// `NVML_P2P_STATUS_OK`.
const STATUS_OK: c_int = 0;
/// `NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE`.
const VERSION_BYTES: usize = 80;

/// NVML, started; it ends when this does. Its functions as declared in `nvml.h`.
pub(in crate::cuda::device) struct Nvml {
    shutdown: unsafe extern "C" fn() -> Status,
    driver_version: unsafe extern "C" fn(*mut c_char, c_uint) -> Status,
    device_by_uuid: unsafe extern "C" fn(*const c_char, *mut Device) -> Status,
    peer_status: unsafe extern "C" fn(Device, Device, c_int, *mut c_int) -> Status,
}

/// A device as NVML knows it, as long as that runs.
#[derive(Clone, Copy)]
pub(in crate::cuda::device) struct Watched<'a> {
    device: Device,
    _nvml: &'a Nvml,
}

impl Nvml {
    /// Finds and starts it; else says why that cannot be.
    pub(in crate::cuda::device) fn start(settings: &Settings) -> Result<Nvml, String> {
        let library = search::load(&MANAGEMENT, settings, Path::new("/"))
            .map_err(|looked| format!("no usable NVML. Looked at:{looked}"))?;
        // SAFETY (all of them): the types are those of nvml.h.
        let init: unsafe extern "C" fn() -> Status = unsafe { function(library, c"nvmlInit_v2") }?;
        // SAFETY: as above.
        let nvml = unsafe {
            Nvml {
                shutdown: function(library, c"nvmlShutdown")?,
                driver_version: function(library, c"nvmlSystemGetDriverVersion")?,
                device_by_uuid: function(library, c"nvmlDeviceGetHandleByUUID")?,
                peer_status: function(library, c"nvmlDeviceGetP2PStatus")?,
            }
        };
        // SAFETY: takes nothing. What is started is ended by `drop`, and what is not, here.
        match unsafe { init() } {
            SUCCESS => Ok(nvml),
            status => {
                std::mem::forget(nvml);
                Err(format!("nvmlInit_v2 fails with {status}"))
            }
        }
    }

    /// `570.86.15`.
    pub(in crate::cuda::device) fn driver_version(&self) -> Result<String, String> {
        let mut text = [0 as c_char; VERSION_BYTES];
        // SAFETY: room for as many bytes as said, and started.
        let status = unsafe { (self.driver_version)(text.as_mut_ptr(), VERSION_BYTES as c_uint) };
        if status != SUCCESS {
            return Err(format!("nvmlSystemGetDriverVersion fails with {status}"));
        }
        text[VERSION_BYTES - 1] = 0;
        // SAFETY: ends in a NUL.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// The whole card of this identity; `None` where there is none, as for a part of a card.
    pub(in crate::cuda::device) fn device(&self, uuid: Uuid) -> Option<Watched<'_>> {
        let name = CString::new(uuid.to_string()).ok()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: a C string, room for the handle, and started.
        let status = unsafe { (self.device_by_uuid)(name.as_ptr(), &mut device) };
        (status == SUCCESS).then_some(Watched { device, _nvml: self })
    }

    /// Whether NVLink connects two cards; `None` where it does not say.
    pub(in crate::cuda::device) fn has_nvlink(&self, one: Watched<'_>, other: Watched<'_>) -> Option<bool> {
        let mut connection = c_int::MAX;
        // SAFETY: handles of this library, which still runs, and room for the number.
        let status = unsafe { (self.peer_status)(one.device, other.device, NVLINK, &mut connection) };
        (status == SUCCESS).then_some(connection == STATUS_OK)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: started once for this value; handles borrow it.
        let status = unsafe { (self.shutdown)() };
        if status != SUCCESS {
            tracing::debug!(status, "NVML did not end well");
        }
    }
}

/// The function called `name`.
///
/// # Safety
/// `T` is a pointer to a function of that function's type.
unsafe fn function<T: Copy>(library: Library, name: &CStr) -> Result<T, String> {
    // SAFETY: the caller's word.
    unsafe { library.function(name) }.ok_or_else(|| format!("it has no {}", name.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::{device::management, testing::shared_library},
        testing::Folder,
    };

    /// Two cards, the last digits of whose identities are 1 and 2, with NVLink from the first to the second only. Ends
    /// the process where it is used before its start or ended twice.
    const IMPOSTOR: &str = r#"
    #include <stdlib.h>
    #include <string.h>
    static int running;
    static char cards[2];
    int nvmlInit_v2(void) { running++; return 0; }
    int nvmlShutdown(void) { if (running-- != 1) abort(); return 0; }
    int nvmlSystemGetDriverVersion(char *text, unsigned bytes) {
        if (!running || bytes < 10) abort();
        strcpy(text, "570.86.15");
        return 0;
    }
    int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
        if (!running || strncmp(uuid, "GPU-", 4)) abort();
        int last = uuid[strlen(uuid) - 1] - '1';
        if (last < 0 || last > 1) return 6;
        *device = cards + last;
        return 0;
    }
    int nvmlDeviceGetP2PStatus(void *one, void *other, int index, int *status) {
        if (!running || index != 2) abort();
        *status = one == cards && other == cards + 1 ? 0 : 1;
        return 0;
    }
    "#;

    fn settings(folder: &Folder) -> Settings {
        Settings { library: Some(folder.path().to_path_buf()), ..Settings::default() }
    }

    #[test]
    fn links_are_told_of_the_cards_that_it_knows() {
        let folder = Folder::new("nvml");
        let library = shared_library(&folder, IMPOSTOR);
        std::fs::rename(library, folder.path().join("libnvidia-ml.so.1")).unwrap();
        let uuids = [1, 2, 3].map(|last| Uuid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]));
        for _ in 0..2 {
            let told = management(&settings(&folder), &uuids).unwrap();
            assert_eq!(told.driver_version, "570.86.15");
            assert_eq!(Vec::from_iter(told.nvlinks), [((0, 1), true), ((1, 0), false)]);
        }
    }

    #[test]
    fn what_is_missing_is_told() {
        let folder = Folder::new("nvml-missing");
        let missing = management(&settings(&folder), &[]).unwrap_err();
        assert!(missing.contains("libnvidia-ml.so.1: not there"), "{missing}");
        let library = shared_library(&folder, "int nvmlInit_v2(void) { return 0; }");
        std::fs::rename(library, folder.path().join("libnvidia-ml.so.1")).unwrap();
        let hollow = management(&settings(&folder), &[]).unwrap_err();
        assert_eq!(hollow, "it has no nvmlShutdown");
    }
}
