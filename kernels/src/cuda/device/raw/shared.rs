//! Device memory whose bytes and whose addresses are had separately, so that other processes can map the bytes, too.
//!
//! The bytes live as long as any process maps them or holds a descriptor of them: the end of the process that made them
//! takes nothing away from the others.

use std::{
    ffi::{c_int, c_void},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::Arc,
};

use cudarc::driver::sys::{
    self, CUmemAccess_flags, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation,
    CUmemLocationType,
};

use super::{Context, memory::wanted};
use crate::cuda::device::CudaError;

/// `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: u32 = 801;

/// What a descriptor stands for.
const HANDLE_TYPE: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Bytes that several processes may map, as this device's kernels address them.
pub(in crate::cuda::device) struct SharedMemory {
    // Given back in this order.
    _mapping: Mapping,
    addresses: Addresses,
    physical: Physical,
}

/// The bytes: those of this device, or of a peer's.
struct Physical {
    context: Arc<Context>,
    handle: sys::CUmemGenericAllocationHandle,
}

/// Addresses for them.
struct Addresses {
    context: Arc<Context>,
    start: u64,
    bytes: usize,
}

/// That the bytes are at the addresses.
struct Mapping {
    context: Arc<Context>,
    start: u64,
    bytes: usize,
}

impl SharedMemory {
    /// At least `bytes` of them, more than none, on the context's device. What they hold means nothing.
    pub(in crate::cuda::device) fn new(
        context: &Arc<Context>,
        bytes: usize,
        doing: &str,
    ) -> Result<SharedMemory, CudaError> {
        if !context.device().shares_memory()? {
            let reason = "its driver gives no descriptors for memory".to_owned();
            return Err(CudaError::Unshared { device: context.label().to_owned(), reason });
        }
        let properties = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: HANDLE_TYPE,
            location: location(context),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let mut granularity = 0;
        let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        context.call("cuMemGetAllocationGranularity", doing, || {
            // SAFETY: room for the number; properties as the driver reads them.
            unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &properties, least) }
        })?;
        let whole = bytes.checked_next_multiple_of(granularity.max(1));
        let whole = whole.filter(|whole| isize::try_from(*whole).is_ok()).ok_or_else(|| {
            let reason = format!("{bytes} bytes of shared memory are more than there can be");
            CudaError::Misuse { device: context.label().to_owned(), reason }
        })?;
        let mut handle = 0;
        let made = context.call("cuMemCreate", doing, || {
            // SAFETY: room for the handle; properties as the driver reads them.
            unsafe { sys::cuMemCreate(&mut handle, whole, &properties, 0) }
        });
        made.map_err(|error| unshared(wanted(error, whole)))?;
        SharedMemory::map(Physical { context: context.clone(), handle }, whole, doing)
    }

    /// The `bytes` behind a descriptor that a peer has exported. The context's device can reach the peer's.
    pub(in crate::cuda::device) fn import(
        context: &Arc<Context>,
        descriptor: BorrowedFd<'_>,
        bytes: usize,
        doing: &str,
    ) -> Result<SharedMemory, CudaError> {
        let mut handle = 0;
        let file: *mut c_void = std::ptr::without_provenance_mut(descriptor.as_raw_fd() as usize);
        let imported = context.call("cuMemImportFromShareableHandle", doing, || {
            // SAFETY: room for the handle; a descriptor is passed as the number that it is, and stays the caller's.
            unsafe { sys::cuMemImportFromShareableHandle(&mut handle, file, HANDLE_TYPE) }
        });
        imported.map_err(unshared)?;
        SharedMemory::map(Physical { context: context.clone(), handle }, bytes, doing)
    }

    /// Gives bytes addresses, at which the context's device may read and write.
    fn map(physical: Physical, bytes: usize, doing: &str) -> Result<SharedMemory, CudaError> {
        let context = physical.context.clone();
        let mut start = 0;
        context.call("cuMemAddressReserve", doing, || {
            // SAFETY: room for the address; the driver chooses where.
            unsafe { sys::cuMemAddressReserve(&mut start, bytes, 0, 0, 0) }
        })?;
        let addresses = Addresses { context: context.clone(), start, bytes };
        context.call("cuMemMap", doing, || {
            // SAFETY: addresses that were just reserved, and bytes that are held. The driver refuses other lengths than
            // theirs.
            unsafe { sys::cuMemMap(start, bytes, 0, physical.handle, 0) }
        })?;
        let mapping = Mapping { context: context.clone(), start, bytes };
        let access = sys::CUmemAccessDesc {
            location: location(&context),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        context.call("cuMemSetAccess", doing, || {
            // SAFETY: all of what was just mapped; one description.
            unsafe { sys::cuMemSetAccess(start, bytes, &access, 1) }
        })?;
        Ok(SharedMemory { _mapping: mapping, addresses, physical })
    }

    /// A descriptor of the bytes, for other processes.
    pub(in crate::cuda::device) fn export(&self, doing: &str) -> Result<OwnedFd, CudaError> {
        let context = &self.physical.context;
        let mut file: c_int = -1;
        let exported = context.call("cuMemExportToShareableHandle", doing, || {
            // SAFETY: room for a descriptor, which is what such a handle is exported as; the bytes are held.
            unsafe {
                sys::cuMemExportToShareableHandle(
                    (&raw mut file).cast(),
                    self.physical.handle,
                    HANDLE_TYPE,
                    0,
                )
            }
        });
        exported.map_err(unshared)?;
        if file < 0 {
            let reason = format!("the driver exported memory as {file}, which is no descriptor");
            return Err(CudaError::Misuse { device: context.label().to_owned(), reason });
        }
        // SAFETY: the driver has just opened it for the caller, who owns it.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        if let Err(error) = rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC) {
            // Only programs that this process starts would hold it, too.
            tracing::debug!(%error, "a descriptor of device memory stays open in programs that are started");
        }
        Ok(file)
    }

    pub(in crate::cuda::device) fn address(&self) -> u64 {
        self.addresses.start
    }

    pub(in crate::cuda::device) fn bytes(&self) -> usize {
        self.addresses.bytes
    }
}

/// The context's own device.
fn location(context: &Context) -> CUmemLocation {
    let type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemLocation { type_, id: context.device().device }
}

/// A refusal of the kind of memory as what it is.
fn unshared(error: CudaError) -> CudaError {
    match error {
        CudaError::Call { device, function, code: NOT_SUPPORTED, name, .. } => {
            CudaError::Unshared { device, reason: format!("{function} says {name}") }
        }
        error => error,
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`. Its owner has seen to it that no work uses it, or that the device is abandoned.
        self.context.release("cuMemUnmap", || unsafe { sys::cuMemUnmap(self.start, self.bytes) });
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        // SAFETY: reserved by `map`; what was mapped there no longer is.
        self.context.release("cuMemAddressFree", || unsafe { sys::cuMemAddressFree(self.start, self.bytes) });
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: made or imported by this process, and not mapped any more.
        self.context.release("cuMemRelease", || unsafe { sys::cuMemRelease(self.handle) });
    }
}
