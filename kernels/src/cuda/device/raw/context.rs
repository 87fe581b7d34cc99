//! A device's primary context, and what every call on it has in common.

use std::{
    fmt::Display,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use cudarc::driver::sys::{self, CUresult};

use super::{NOT_READY, OUT_OF_MEMORY, SUCCESS, check, ends_the_context, facts::Handle, name_of};
use crate::cuda::device::CudaError;

/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;

/// The context that all code of a process shares on a device, kept as long as somebody owns something on it.
pub(in crate::cuda::device) struct Context {
    device: Handle,
    handle: sys::CUcontext,
    /// `cuda:0`.
    label: String,
    /// The error that ended it.
    lost: OnceLock<CudaError>,
    /// Its work did not end in time, the last time somebody waited.
    suspect: AtomicBool,
    /// Its work does not end: what it may still use is never given back.
    abandoned: AtomicBool,
}

// SAFETY: contexts may be used from any thread; each call makes it the thread's own first.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(in crate::cuda::device) fn retain(device: Handle) -> Result<Arc<Context>, CudaError> {
        let label = format!("cuda:{}", device.ordinal);
        let mut handle = std::ptr::null_mut();
        // SAFETY: room for the handle.
        let code = unsafe { sys::cuDevicePrimaryCtxRetain(&mut handle, device.device) };
        check(&label, "open the device", "cuDevicePrimaryCtxRetain", code)?;
        let (lost, suspect, abandoned) = (OnceLock::new(), AtomicBool::new(false), AtomicBool::new(false));
        Ok(Arc::new(Context { device, handle, label, lost, suspect, abandoned }))
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.device.ordinal
    }

    pub(super) fn device(&self) -> Handle {
        self.device
    }

    pub(in crate::cuda::device) fn label(&self) -> &str {
        &self.label
    }

    /// The error that ended it, if one did.
    pub(in crate::cuda::device) fn check_lost(&self) -> Result<(), CudaError> {
        self.lost.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Asks the driver whether the context was lost meanwhile.
    pub(super) fn check_alive(&self, doing: impl Display) -> Result<(), CudaError> {
        self.memory_for(doing).map(drop)
    }

    fn memory_for(&self, doing: impl Display) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: room for both numbers.
        self.call("cuMemGetInfo", doing, || unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Somebody waited for work that did not end in time.
    pub(in crate::cuda::device) fn suspect(&self) {
        self.suspect.store(true, Ordering::Relaxed);
    }

    /// All work ended.
    pub(in crate::cuda::device) fn acquit(&self) {
        self.suspect.store(false, Ordering::Relaxed);
    }

    pub(in crate::cuda::device) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    /// From now on nothing is given back: the device may use it for ever.
    pub(in crate::cuda::device) fn abandon(&self, doing: &str) {
        if !self.abandoned.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                device = self.label,
                doing,
                "the device's work does not end: its memory is not given back"
            );
        }
    }

    pub(in crate::cuda::device) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }

    /// Free and total bytes of the device's memory.
    pub(in crate::cuda::device) fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.memory_for("tell its free memory")
    }

    /// Lets kernels of this context use memory of `other`'s.
    pub(in crate::cuda::device) fn enable_peer(&self, other: &Context) -> Result<(), CudaError> {
        let doing = format_args!("reach the memory of {}", other.label);
        // SAFETY: both contexts are retained.
        let enabled = self
            .call("cuCtxEnablePeerAccess", doing, || unsafe { sys::cuCtxEnablePeerAccess(other.handle, 0) });
        match enabled {
            Err(CudaError::Call { code: PEER_ACCESS_ALREADY_ENABLED, .. }) => Ok(()),
            enabled => enabled,
        }
    }

    /// Whether kernels of this context may be given memory of another device.
    pub(in crate::cuda::device) fn reaches(&self, other: Handle) -> Result<bool, CudaError> {
        self.device.reaches(other)
    }

    /// Makes it current on the thread.
    pub(in crate::cuda::device) fn make_current(&self, doing: &str) -> Result<(), CudaError> {
        self.call("cuCtxSetCurrent", doing, || CUresult::CUDA_SUCCESS)
    }

    /// Calls a function with this context current on the thread.
    pub(super) fn call(
        &self,
        function: &'static str,
        doing: impl Display,
        call: impl FnOnce() -> CUresult,
    ) -> Result<(), CudaError> {
        self.check_lost()?;
        // SAFETY: the context is retained.
        let code = unsafe { sys::cuCtxSetCurrent(self.handle) };
        self.check("cuCtxSetCurrent", &doing, code)?;
        self.check(function, &doing, call())
    }

    /// The same for a function that tells whether something is done.
    pub(super) fn query(
        &self,
        function: &'static str,
        doing: impl Display,
        call: impl FnOnce() -> CUresult,
    ) -> Result<bool, CudaError> {
        let mut ready = true;
        self.call(function, doing, || match call() {
            code if code as u32 == NOT_READY => {
                ready = false;
                CUresult::CUDA_SUCCESS
            }
            code => code,
        })?;
        Ok(ready)
    }

    /// Gives something back, unless the device may use it for ever.
    pub(super) fn release(&self, function: &'static str, call: impl FnOnce() -> CUresult) {
        if self.is_abandoned() {
            return;
        }
        // SAFETY: the context is retained.
        let current = unsafe { sys::cuCtxSetCurrent(self.handle) };
        let code = if current as u32 == SUCCESS { call() } else { current };
        self.log(function, code);
    }

    fn check(&self, function: &'static str, doing: &dyn Display, code: CUresult) -> Result<(), CudaError> {
        match code as u32 {
            SUCCESS => Ok(()),
            OUT_OF_MEMORY => {
                let free = self.free_bytes();
                let (device, doing) = (self.label.clone(), doing.to_string());
                Err(CudaError::OutOfMemory { device, doing, wanted: None, free, parts: Vec::new() })
            }
            number if ends_the_context(number) => {
                let (device, doing, name) = (self.label.clone(), doing.to_string(), name_of(code));
                let error = CudaError::Lost { device, doing, function, name, code: number };
                Err(self.lost.get_or_init(|| error).clone())
            }
            _ => check(&self.label, &doing.to_string(), function, code),
        }
    }

    /// For an error that is being made: without asking for another.
    fn free_bytes(&self) -> Option<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: room for both numbers; the context is current.
        let code = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        (code as u32 == SUCCESS).then_some(free as u64)
    }

    /// What an owner does with an error when it is dropped.
    fn log(&self, function: &'static str, code: CUresult) {
        let number = code as u32;
        if number == SUCCESS {
            return;
        }
        let (device, name) = (&self.label, name_of(code));
        if self.lost.get().is_some() || ends_the_context(number) {
            tracing::debug!(device, function, name, code = number, "a lost device gives nothing back");
        } else {
            tracing::warn!(
                device,
                function,
                name,
                code = number,
                "could not give something back to a device"
            );
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.is_abandoned() {
            return;
        }
        // SAFETY: retained once by `retain`, and everything on it is gone, since it would own a part of this.
        let code = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device.device) };
        self.log("cuDevicePrimaryCtxRelease", code);
    }
}
