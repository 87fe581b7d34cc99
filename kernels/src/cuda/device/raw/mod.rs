//! The driver's and cuBLASLt's functions, each called in one place, with owners that give back what they own.
//!
//! cudarc finds the functions, and panics where a library or a function is missing; [`driver`] and [`matrix`] look
//! first. Nothing here panics, and no owner reports an error when it is dropped, other than to the log.
#![allow(unsafe_code)]

mod context;
pub(super) mod driver;
pub(super) mod facts;
mod graph;
pub(super) mod matrix;
mod memory;
mod module;
pub(super) mod nvml;
mod shared;
mod stream;

pub(super) use context::Context;
pub(super) use graph::{Capture, Executable};
pub(super) use memory::{DeviceMemory, HostMemory};
pub(super) use module::{Kernel, Module};
pub(super) use shared::SharedMemory;
pub(super) use stream::{Event, Stream};

use std::ffi::{CStr, c_char};

use cudarc::driver::sys::{self, CUresult};

use super::CudaError;

/// `CUDA_SUCCESS`.
const SUCCESS: u32 = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: u32 = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: u32 = 500;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: u32 = 600;

/// Whether CUDA's documentation says of an error that all further work of the process will return it, too.
fn ends_the_context(code: u32) -> bool {
    // ECC, NVLink and containment; illegal address, launch timeout; context destroyed, assert; stack, instruction,
    // alignment, address space, program counter, launch failed; tensor memory leak; MPS client gone; external device.
    matches!(code, 4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 911 | 999)
}

/// The driver's name of an error.
fn name_of(code: CUresult) -> String {
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: any number may be asked about; `name` has room for the pointer.
    let found = unsafe { sys::cuGetErrorName(code, &mut name) } as u32 == SUCCESS && !name.is_null();
    if !found {
        return "an error without a name".to_owned();
    }
    // SAFETY: a constant C string of the driver's.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// `Ok` where a call that needs no context did what it should.
fn check(device: &str, doing: &str, function: &'static str, code: CUresult) -> Result<(), CudaError> {
    if code as u32 == SUCCESS {
        return Ok(());
    }
    Err(CudaError::Call {
        device: device.to_owned(),
        doing: doing.to_owned(),
        function,
        name: name_of(code),
        code: code as u32,
    })
}
