//! Launches on a device: at once, or recorded.
#![allow(unsafe_code)]

use std::ops::RangeInclusive;

use super::{CudaDevice, raw::Stream};
use crate::{
    KernelError,
    cuda::{Launch, Launcher, Product, StreamHandle},
};

/// A device that records what is launched.
pub(super) struct Recorder<'a> {
    pub(super) device: &'a CudaDevice,
    pub(super) stream: &'a Stream,
}

impl Launcher for CudaDevice {
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), KernelError> {
        // SAFETY: the caller's word.
        unsafe { self.launch_on(&self.compute, launch) }
    }

    fn multiprocessors(&self) -> u32 {
        self.facts.multiprocessors
    }

    fn multiply(&self, product: &Product<'_>) -> Result<bool, KernelError> {
        self.multiply_on(&self.compute, product)
    }

    fn stream(&self) -> Option<StreamHandle<'_>> {
        Some(self.compute.handle())
    }

    fn rehearse(&self, product: &Product<'_>, rows: RangeInclusive<usize>) -> Result<(), KernelError> {
        product.check()?;
        match &self.matrices {
            Ok(matrices) => Ok(matrices.rehearse(&self.compute, product, rows)?),
            Err(_) => Ok(()),
        }
    }
}

impl Launcher for Recorder<'_> {
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), KernelError> {
        // SAFETY: the caller's word.
        unsafe { self.device.launch_on(self.stream, launch) }
    }

    fn multiprocessors(&self) -> u32 {
        self.device.facts.multiprocessors
    }

    fn multiply(&self, product: &Product<'_>) -> Result<bool, KernelError> {
        self.device.multiply_on(self.stream, product)
    }

    fn stream(&self) -> Option<StreamHandle<'_>> {
        Some(self.stream.handle())
    }
}

impl CudaDevice {
    /// # Safety
    /// As for [`Launcher::launch`].
    unsafe fn launch_on(&self, stream: &Stream, launch: &Launch<'_>) -> Result<(), KernelError> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        let ready = self.kernels.get(&self.context, launch.kernel)?;
        ready.check(launch).map_err(|reason| self.misuse(reason))?;
        // SAFETY: the caller's word; the kernel is this device's of that name.
        unsafe { stream.launch(&ready.kernel, launch)? };
        Ok(())
    }

    fn multiply_on(&self, stream: &Stream, product: &Product<'_>) -> Result<bool, KernelError> {
        product.check()?;
        match &self.matrices {
            Ok(matrices) => Ok(matrices.multiply(stream, product)?),
            Err(_) => Ok(false),
        }
    }
}
