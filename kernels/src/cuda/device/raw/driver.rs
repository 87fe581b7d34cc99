//! The driver's library: found, complete and started, before anything else is asked of it.

use std::{
    ffi::{CStr, OsStr},
    fs,
    path::{Path, PathBuf},
};

use cudarc::driver::sys;

use super::{SUCCESS, check, name_of};
use crate::cuda::{
    device::{CudaError, LibraryFacts},
    dynamic::{self, Library, Scope},
    search::{self, DRIVER, Place},
    settings::Settings,
};

/// All functions that are called, without those that newer drivers have only.
const FUNCTIONS: &[&CStr] = &[
    c"cuInit",
    c"cuDriverGetVersion",
    c"cuGetErrorName",
    c"cuDeviceGetCount",
    c"cuDeviceGet",
    c"cuDeviceGetName",
    c"cuDeviceGetUuid_v2",
    c"cuDeviceTotalMem_v2",
    c"cuDeviceGetAttribute",
    c"cuDeviceGetPCIBusId",
    c"cuDeviceCanAccessPeer",
    c"cuDeviceGetP2PAttribute",
    c"cuDevicePrimaryCtxRetain",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuCtxSetCurrent",
    c"cuCtxEnablePeerAccess",
    c"cuMemGetInfo_v2",
    c"cuMemAlloc_v2",
    c"cuMemFree_v2",
    c"cuMemHostAlloc",
    c"cuMemFreeHost",
    c"cuMemHostGetDevicePointer_v2",
    c"cuMemGetAllocationGranularity",
    c"cuMemCreate",
    c"cuMemRelease",
    c"cuMemAddressReserve",
    c"cuMemAddressFree",
    c"cuMemMap",
    c"cuMemUnmap",
    c"cuMemSetAccess",
    c"cuMemExportToShareableHandle",
    c"cuMemImportFromShareableHandle",
    c"cuMemcpyHtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyDtoDAsync_v2",
    c"cuMemsetD8Async",
    c"cuStreamCreate",
    c"cuStreamDestroy_v2",
    c"cuStreamQuery",
    c"cuStreamWaitEvent",
    c"cuStreamBeginCapture_v2",
    c"cuStreamEndCapture",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventRecord",
    c"cuEventQuery",
    c"cuModuleLoadData",
    c"cuModuleUnload",
    c"cuModuleGetFunction",
    c"cuFuncSetAttribute",
    c"cuLaunchKernel",
    c"cuGraphGetNodes",
    c"cuGraphInstantiateWithFlags",
    c"cuGraphUpload",
    c"cuGraphLaunch",
    c"cuGraphExecDestroy",
    c"cuGraphDestroy",
];

/// CUDA 12.0, as `cuDriverGetVersion` writes it.
const VERSION_MIN: i32 = 12_000;

/// `CUDA_ERROR_STUB_LIBRARY`.
const STUB_LIBRARY: u32 = 34;
/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: u32 = 100;

/// Finds, checks and starts the driver. The first one that a process starts is the one it keeps.
pub(in crate::cuda::device) fn start(settings: &Settings) -> Result<LibraryFacts, CudaError> {
    let (library, file) = load(settings, Path::new("/"))?;
    if let Some(missing) = FUNCTIONS.iter().find(|name| library.address(name).is_none()) {
        let reason = format!("it has no {}", missing.to_string_lossy());
        return Err(CudaError::DriverTooOld { file, reason });
    }
    // The library stays loaded, so that its name now leads to it; cudarc looks for it by name.
    // SAFETY: opens libraries of the driver's names and nothing else.
    if !unsafe { sys::is_culib_present() } {
        let looked = format!("\n  {}: loaded, and not found by its name libcuda.so.1 then", file.display());
        return Err(CudaError::NoDriver { looked });
    }
    // SAFETY: cudarc has its library, which has the function; zero is the only number it takes.
    let code = unsafe { sys::cuInit(0) };
    match code as u32 {
        SUCCESS => {}
        STUB_LIBRARY => {
            let stub =
                "the loader finds a linkers' stub called libcuda.so; take its folder off LD_LIBRARY_PATH";
            let looked = format!("\n  {}: {stub}", file.display());
            return Err(CudaError::NoDriver { looked });
        }
        NO_DEVICE => {
            let reason = "the driver finds none; CUDA_VISIBLE_DEVICES may hide it, a container may lack it";
            return Err(CudaError::NoDevice { wanted: "at all".to_owned(), reason: reason.to_owned() });
        }
        code_number => {
            return Err(CudaError::Call {
                device: format!("the driver {}", file.display()),
                doing: format!("be started{}", kernel_module_hint()),
                function: "cuInit",
                name: name_of(code),
                code: code_number,
            });
        }
    }
    let mut version = 0;
    // SAFETY: room for the number.
    let code = unsafe { sys::cuDriverGetVersion(&mut version) };
    check("the driver", "tell its version", "cuDriverGetVersion", code)?;
    let (major, minor) = (version / 1000, version % 1000 / 10);
    if version < VERSION_MIN {
        let reason = format!("it is for CUDA {major}.{minor}");
        return Err(CudaError::DriverTooOld { file, reason });
    }
    Ok(LibraryFacts { name: "libcuda", file, version: format!("CUDA {major}.{minor}") })
}

/// Whether the driver tells kernels' parameters, as those for CUDA 12.4 and later do. One is started.
pub(super) fn tells_parameters() -> bool {
    // SAFETY: cudarc has its library; the symbol is looked up, not used.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(b"cuFuncGetParamInfo\0") }.is_ok()
}

/// Whether the driver tells the time between events by the function that cudarc calls, as those for CUDA 12.8 and later
/// do. One is started.
pub(super) fn tells_times() -> bool {
    // SAFETY: as above.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(b"cuEventElapsedTime_v2\0") }.is_ok()
}

/// The library, and its file.
fn load(settings: &Settings, root: &Path) -> Result<(Library, PathBuf), CudaError> {
    let mut looked = String::new();
    for place in search::places(&DRIVER, settings, root) {
        let opened = match &place {
            Place::Loader => Library::open(OsStr::new(DRIVER.names[0]), Scope::Global)
                .map_err(|reason| format!("the loader's path: {reason}")),
            Place::File(file) => open(file),
            Place::Folder(folder) => open(&folder.join(DRIVER.names[0])),
        };
        match opened {
            Ok(library) => {
                let file = library.file_of(c"cuInit").unwrap_or_else(|| PathBuf::from(DRIVER.names[0]));
                return Ok((library, file));
            }
            Err(reason) => looked += &format!("\n  {reason}"),
        }
    }
    Err(CudaError::NoDriver { looked })
}

fn open(file: &Path) -> Result<Library, String> {
    let file = dynamic::absolute(file);
    if !file.exists() {
        return Err(format!("{}: not there", file.display()));
    }
    Library::open(file.as_os_str(), Scope::Global).map_err(|reason| format!("{}: {reason}", file.display()))
}

/// The kernel's half of the driver, where it can be told: after an update the two may differ until the next start.
fn kernel_module_hint() -> String {
    match fs::read_to_string("/sys/module/nvidia/version") {
        Ok(version) => format!(" with the kernel module {}", version.trim()),
        Err(_) => String::new(),
    }
}
