//! Words of the host that kernels watch.
#![allow(unsafe_code)]

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use super::{CudaDevice, CudaError, raw::HostMemory};

/// Words in page-locked memory that the host writes from any thread while kernels watch them, and the other way round:
/// abort words.
pub struct HostWords {
    memory: HostMemory,
    count: usize,
    device: Arc<CudaDevice>,
}

impl HostWords {
    /// `count` zeros, at least one.
    pub fn new(device: &Arc<CudaDevice>, count: usize) -> Result<HostWords, CudaError> {
        let count = count.max(1);
        let bytes = count.checked_mul(4).ok_or_else(|| device.misuse(format!("{count} words")))?;
        let memory = HostMemory::new(&device.context, bytes, "allocate words for the host and kernels")?;
        Ok(HostWords { memory, count, device: device.clone() })
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Where kernels find a word. Panics when there is no such word, as slices do.
    pub fn address(&self, index: usize) -> u64 {
        self.check(index);
        self.memory.address() + 4 * index as u64
    }

    /// Writes a word; kernels see it soon.
    pub fn set(&self, index: usize, value: u32) {
        self.word(index).store(value, Ordering::Release);
    }

    /// Reads a word as kernels or the host last wrote it.
    pub fn get(&self, index: usize) -> u32 {
        self.word(index).load(Ordering::Acquire)
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        self.check(index);
        // SAFETY: one of `count` aligned words, which nobody uses but through atomic operations, and which live as
        // long as `self`.
        unsafe { AtomicU32::from_ptr(self.memory.pointer().as_ptr().cast::<u32>().add(index)) }
    }

    fn check(&self, index: usize) {
        assert!(index < self.count, "word {index} of {}", self.count);
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        self.device.settle();
    }
}

impl fmt::Debug for HostWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostWords").field("count", &self.count).finish_non_exhaustive()
    }
}
