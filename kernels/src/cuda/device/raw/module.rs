//! Cubins on a device, and launches of their kernels.

use std::{
    ffi::{CString, c_int, c_void},
    sync::Arc,
};

use cudarc::driver::sys::{self, CUfunction_attribute};

use super::{Context, INVALID_VALUE, NOT_FOUND, Stream, driver};
use crate::cuda::{Launch, device::CudaError};

/// A cubin that a device has loaded.
pub(in crate::cuda::device) struct Module {
    context: Arc<Context>,
    handle: sys::CUmodule,
}

/// One kernel of a module.
pub(in crate::cuda::device) struct Kernel {
    handle: sys::CUfunction,
    /// What it belongs to; a kernel is loaded no longer than that.
    module: Arc<Module>,
}

// SAFETY: the driver's functions on modules and kernels may be called from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Module {
    /// Loads an image. Waits for the device's work, and ends a capture of this thread.
    pub(in crate::cuda::device) fn load(
        context: &Arc<Context>,
        image: &[u8],
        doing: &str,
    ) -> Result<Module, CudaError> {
        // Bytes that are no ELF file are read up to a NUL.
        let mut image = image.to_vec();
        image.push(0);
        let mut handle = std::ptr::null_mut();
        context.call("cuModuleLoadData", doing, || {
            // SAFETY: room for the handle; an image with a NUL after it, copied by the call.
            unsafe { sys::cuModuleLoadData(&mut handle, image.as_ptr().cast::<c_void>()) }
        })?;
        Ok(Module { context: context.clone(), handle })
    }

    /// The kernel called `name`, if the module has it, made ready for blocks with `shared_bytes` of dynamic shared
    /// memory.
    pub(in crate::cuda::device) fn kernel(
        self: &Arc<Module>,
        name: &str,
        shared_bytes: u32,
        doing: &str,
    ) -> Result<Option<Kernel>, CudaError> {
        /// What a block may have unasked.
        const SHARED_BYTES: u32 = 48 << 10;
        let Ok(c_name) = CString::new(name) else { return Ok(None) };
        let mut handle = std::ptr::null_mut();
        let found = self.context.call("cuModuleGetFunction", doing, || {
            // SAFETY: room for the handle, a loaded module, a C string.
            unsafe { sys::cuModuleGetFunction(&mut handle, self.handle, c_name.as_ptr()) }
        });
        match found {
            Err(CudaError::Call { code: NOT_FOUND, .. }) => return Ok(None),
            found => found?,
        }
        if shared_bytes > SHARED_BYTES {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            self.context.call("cuFuncSetAttribute", doing, || {
                // SAFETY: a kernel of a loaded module.
                unsafe { sys::cuFuncSetAttribute(handle, attribute, shared_bytes as c_int) }
            })?;
        }
        Ok(Some(Kernel { handle, module: self.clone() }))
    }
}

impl Kernel {
    /// Bytes of each parameter, where the driver tells.
    pub(in crate::cuda::device) fn parameters(&self, doing: &str) -> Result<Option<Vec<usize>>, CudaError> {
        if !driver::tells_parameters() {
            return Ok(None);
        }
        let mut parameters = Vec::new();
        loop {
            let (mut offset, mut bytes) = (0, 0);
            let told = self.module.context.call("cuFuncGetParamInfo", doing, || {
                // SAFETY: a kernel of a loaded module, and room for both numbers.
                unsafe { sys::cuFuncGetParamInfo(self.handle, parameters.len(), &mut offset, &mut bytes) }
            });
            match told {
                Ok(()) => parameters.push(bytes),
                // There are no more.
                Err(CudaError::Call { code: INVALID_VALUE, .. }) => return Ok(Some(parameters)),
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`; no kernel of it is left, since it would own a part of this.
        self.context.release("cuModuleUnload", || unsafe { sys::cuModuleUnload(self.handle) });
    }
}

impl Stream {
    /// Enqueues a launch.
    ///
    /// # Safety
    /// As for [`crate::cuda::Launcher::launch`]; `kernel` is the one that the launch names, on this stream's context.
    pub(in crate::cuda::device) unsafe fn launch(
        &self,
        kernel: &Kernel,
        launch: &Launch<'_>,
    ) -> Result<(), CudaError> {
        let mut pointers = launch.args.pointers();
        let [x, y, z] = launch.grid;
        let doing = format_args!("launch {}", launch.kernel);
        self.context.call("cuLaunchKernel", doing, || {
            // SAFETY: the caller's word; the parameters live during the call, which copies them.
            unsafe {
                sys::cuLaunchKernel(
                    kernel.handle,
                    x,
                    y,
                    z,
                    launch.threads,
                    1,
                    1,
                    launch.shared_bytes,
                    self.handle,
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
        })
    }
}
