//! Memory of a device and page-locked memory of the host, and copies between them.

use std::{ffi::c_void, ptr::NonNull, sync::Arc};

use cudarc::driver::sys;

use super::{Context, Stream};
use crate::cuda::device::CudaError;

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: for all contexts, and for kernels.
const HOST_FLAGS: u32 = 0x01 | 0x02;

/// Device memory.
pub(in crate::cuda::device) struct DeviceMemory {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

/// Page-locked host memory that kernels can use, too.
pub(in crate::cuda::device) struct HostMemory {
    context: Arc<Context>,
    pointer: NonNull<u8>,
    address: u64,
    bytes: usize,
}

// SAFETY: plain memory; who may use it when is for its users to keep.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl DeviceMemory {
    /// `bytes` of them, more than none. What they hold means nothing.
    pub(in crate::cuda::device) fn new(
        context: &Arc<Context>,
        bytes: usize,
        doing: &str,
    ) -> Result<DeviceMemory, CudaError> {
        let mut address = 0;
        let made = context.call("cuMemAlloc", doing, || {
            // SAFETY: room for the address.
            unsafe { sys::cuMemAlloc_v2(&mut address, bytes) }
        });
        made.map_err(|error| wanted(error, bytes))?;
        Ok(DeviceMemory { context: context.clone(), address, bytes })
    }

    pub(in crate::cuda::device) fn address(&self) -> u64 {
        self.address
    }

    pub(in crate::cuda::device) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`. Its owner has seen to it that no work uses it, or that the device is abandoned.
        self.context.release("cuMemFree", || unsafe { sys::cuMemFree_v2(self.address) });
    }
}

impl HostMemory {
    /// `bytes` zeros, more than none.
    pub(in crate::cuda::device) fn new(
        context: &Arc<Context>,
        bytes: usize,
        doing: &str,
    ) -> Result<HostMemory, CudaError> {
        let mut pointer: *mut c_void = std::ptr::null_mut();
        let made = context.call("cuMemHostAlloc", doing, || {
            // SAFETY: room for the pointer.
            unsafe { sys::cuMemHostAlloc(&mut pointer, bytes, HOST_FLAGS) }
        });
        made.map_err(|error| match wanted(error, bytes) {
            // It is the host that lacks memory.
            CudaError::OutOfMemory { device, doing, wanted, parts, .. } => {
                CudaError::OutOfMemory { device, doing, wanted, free: None, parts }
            }
            error => error,
        })?;
        let Some(pointer) = NonNull::new(pointer.cast::<u8>()) else {
            let reason = format!("cuMemHostAlloc gave no memory for {bytes} bytes");
            return Err(CudaError::Misuse { device: context.label().to_owned(), reason });
        };
        let mut memory = HostMemory { context: context.clone(), pointer, address: 0, bytes };
        context.call("cuMemHostGetDevicePointer", doing, || {
            // SAFETY: room for the address; memory of this context, made for kernels.
            unsafe { sys::cuMemHostGetDevicePointer_v2(&mut memory.address, pointer.as_ptr().cast(), 0) }
        })?;
        // SAFETY: as many bytes as were allocated.
        unsafe { pointer.write_bytes(0, bytes) };
        Ok(memory)
    }

    pub(in crate::cuda::device) fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }

    /// The same memory as kernels address it.
    pub(in crate::cuda::device) fn address(&self) -> u64 {
        self.address
    }

    pub(in crate::cuda::device) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`. Its owner has seen to it that no work uses it, or that the device is abandoned.
        self.context.release("cuMemFreeHost", || unsafe { sys::cuMemFreeHost(self.pointer.as_ptr().cast()) });
    }
}

impl Stream {
    /// Enqueues a copy to device memory.
    ///
    /// # Safety
    /// Both are that long. The host's is page-locked, and nobody writes to it or gives it back until the copy is done;
    /// the device's is used by nobody but work in order with this.
    pub(in crate::cuda::device) unsafe fn copy_to_device(
        &self,
        to: u64,
        from: NonNull<u8>,
        bytes: usize,
        doing: &str,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's word.
        self.context.call("cuMemcpyHtoDAsync", doing, || unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), bytes, self.handle)
        })
    }

    /// Enqueues a copy from device memory.
    ///
    /// # Safety
    /// As for [`Stream::copy_to_device`], and nobody reads the host's memory until the copy is done.
    pub(in crate::cuda::device) unsafe fn copy_to_host(
        &self,
        to: NonNull<u8>,
        from: u64,
        bytes: usize,
        doing: &str,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's word.
        self.context.call("cuMemcpyDtoHAsync", doing, || unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_ptr().cast(), from, bytes, self.handle)
        })
    }

    /// Copies within the device's memory, in order with the stream's work.
    ///
    /// # Safety
    /// Both are there, `bytes` long and apart, until the work is done.
    pub(in crate::cuda::device) unsafe fn copy_within(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        doing: &str,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's word.
        self.context.call("cuMemcpyDtoDAsync", doing, || unsafe {
            sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.handle)
        })
    }

    /// Enqueues zeros.
    ///
    /// # Safety
    /// Device memory that long, used by nobody but work in order with this.
    pub(in crate::cuda::device) unsafe fn zero(
        &self,
        at: u64,
        bytes: usize,
        doing: &str,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's word.
        self.context
            .call("cuMemsetD8Async", doing, || unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.handle) })
    }
}

/// An out-of-memory error with the bytes asked for.
pub(super) fn wanted(error: CudaError, bytes: usize) -> CudaError {
    match error {
        CudaError::OutOfMemory { device, doing, free, parts, .. } => {
            CudaError::OutOfMemory { device, doing, wanted: Some(bytes as u64), free, parts }
        }
        error => error,
    }
}
