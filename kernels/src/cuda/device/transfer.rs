//! Small copies, in order with the work of the compute stream.
#![allow(unsafe_code)]

use std::time::Duration;

use super::{CudaDevice, lock, staging::PART_BYTES_MAX};
use crate::{
    KernelError,
    buffer::Plain,
    cuda::{DeviceSlice, DeviceSliceMut},
};

/// Longest wait of an upload for earlier ones.
const UPLOAD_LIMIT: Duration = Duration::from_secs(60);

impl CudaDevice {
    /// Enqueues a copy to the device. `from` may change as soon as this returns.
    pub fn upload<T: Plain>(&self, from: &[T], to: DeviceSliceMut<'_, T>) -> Result<(), KernelError> {
        KernelError::check_len("upload", "to", to.len(), from.len())?;
        let mut staging = lock(&self.uploads);
        let mut at = to.address();
        for part in bytes_of(from).chunks(PART_BYTES_MAX) {
            // SAFETY: a part of `to`, an exclusive view.
            unsafe { staging.upload(&self.compute, part, at, UPLOAD_LIMIT)? };
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Copies from the device once all work enqueued before is done, which it waits for, part by part, no longer than
    /// `limit` each.
    pub fn download<T: Plain>(
        &self,
        from: DeviceSlice<'_, T>,
        to: &mut [T],
        limit: Duration,
    ) -> Result<(), KernelError> {
        KernelError::check_len("download", "to", to.len(), from.len())?;
        let mut staging = lock(&self.downloads);
        let mut at = from.address();
        for part in bytes_of_mut(to).chunks_mut(PART_BYTES_MAX) {
            // SAFETY: a part of `from`, a view to read.
            unsafe { staging.download(&self.compute, at, part, limit)? };
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Enqueues a copy within this device's memory.
    pub fn copy<T: Plain>(
        &self,
        from: DeviceSlice<'_, T>,
        to: DeviceSliceMut<'_, T>,
    ) -> Result<(), KernelError> {
        KernelError::check_len("copy", "to", to.len(), from.len())?;
        let bytes = to.len() * size_of::<T>();
        // SAFETY: a view to read, and an exclusive one, which are apart.
        unsafe { self.compute.copy_within(from.address(), to.address(), bytes, "copy on the device")? };
        Ok(())
    }

    /// Enqueues zeros.
    pub fn zero<T: Plain>(&self, to: DeviceSliceMut<'_, T>) -> Result<(), KernelError> {
        // SAFETY: an exclusive view.
        unsafe { self.compute.zero(to.address(), to.len() * size_of::<T>(), "zero memory")? };
        Ok(())
    }
}

/// The bytes of numbers.
pub(super) fn bytes_of<T: Plain>(elements: &[T]) -> &[u8] {
    // SAFETY: Plain types are numbers without padding.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// The same, to write.
pub(super) fn bytes_of_mut<T: Plain>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and any bytes are a value of them.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}
