//! Page-locked memory of the host, which a device reads and writes while the host does something else.
#![allow(unsafe_code)]

use std::{
    fmt,
    marker::PhantomData,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use super::{
    CudaDevice, CudaError,
    raw::{Event, HostMemory},
    wait,
};
use crate::{
    KernelError,
    buffer::Plain,
    cuda::{DeviceSlice, DeviceSliceMut},
};

/// `len` elements of page-locked memory, for copies that the host does not wait for. Who wants to see or change them
/// waits until the copies are done.
pub struct Pinned<T> {
    memory: Option<HostMemory>,
    /// Recorded after each copy on the compute stream.
    copied: Event,
    copying: AtomicBool,
    len: usize,
    device: Arc<CudaDevice>,
    element: PhantomData<T>,
}

/// Words that the host writes from any thread while kernels watch them, and the other way round: abort words.
pub struct HostWords {
    memory: HostMemory,
    count: usize,
    device: Arc<CudaDevice>,
}

impl<T: Plain> Pinned<T> {
    /// `len` zeros; `what` completes "allocate" in an out-of-memory error.
    pub fn new(device: &Arc<CudaDevice>, len: usize, what: &str) -> Result<Pinned<T>, CudaError> {
        let bytes =
            len.checked_mul(size_of::<T>()).ok_or_else(|| device.misuse(format!("{len} elements")))?;
        let doing = format!("allocate {what}");
        let memory = if bytes == 0 { None } else { Some(HostMemory::new(&device.context, bytes, &doing)?) };
        Ok(Pinned {
            memory,
            copied: Event::new(&device.context)?,
            copying: AtomicBool::new(false),
            len,
            device: device.clone(),
            element: PhantomData,
        })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, once no copy uses them.
    pub fn read(&self, doing: &str, limit: Duration) -> Result<&[T], CudaError> {
        self.wait(doing, limit)?;
        let Some(memory) = &self.memory else { return Ok(&[]) };
        // SAFETY: as long as was allocated, initialised with zeros, and no copy writes to it: one that does is enqueued
        // through an exclusive borrow.
        Ok(unsafe { std::slice::from_raw_parts(memory.pointer().as_ptr().cast::<T>(), self.len) })
    }

    /// The elements, to write, once no copy uses them.
    pub fn write(&mut self, doing: &str, limit: Duration) -> Result<&mut [T], CudaError> {
        self.wait(doing, limit)?;
        let Some(memory) = &self.memory else { return Ok(&mut []) };
        // SAFETY: as above; no copy reads it either, and the borrow is exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(memory.pointer().as_ptr().cast::<T>(), self.len) })
    }

    /// Enqueues a copy of `range` to the device, on the compute stream.
    pub fn enqueue_upload(&self, range: Range<usize>, to: DeviceSliceMut<'_, T>) -> Result<(), KernelError> {
        self.check(&range, "to", to.len())?;
        let Some(memory) = &self.memory else { return Ok(()) };
        // SAFETY: within the memory.
        let from = unsafe { memory.pointer().add(range.start * size_of::<T>()) };
        let bytes = range.len() * size_of::<T>();
        self.copying.store(true, Ordering::Release);
        // SAFETY: as long as checked; kept, and not written by the host, until the event.
        unsafe { self.device.compute.copy_to_device(to.address(), from, bytes, "upload")? };
        Ok(self.copied.record(&self.device.compute, "mark the end of a copy")?)
    }

    /// Enqueues a copy from the device to `range`, on the compute stream.
    pub fn enqueue_download(
        &mut self,
        from: DeviceSlice<'_, T>,
        range: Range<usize>,
    ) -> Result<(), KernelError> {
        self.check(&range, "from", from.len())?;
        let Some(memory) = &self.memory else { return Ok(()) };
        // SAFETY: within the memory.
        let to = unsafe { memory.pointer().add(range.start * size_of::<T>()) };
        let bytes = range.len() * size_of::<T>();
        self.copying.store(true, Ordering::Release);
        // SAFETY: as long as checked; kept, and not read by the host, until the event.
        unsafe { self.device.compute.copy_to_host(to, from.address(), bytes, "download")? };
        Ok(self.copied.record(&self.device.compute, "mark the end of a copy")?)
    }

    fn check(&self, range: &Range<usize>, argument: &'static str, len: usize) -> Result<(), KernelError> {
        if range.start > range.end || range.end > self.len {
            let (what, got, limit) = ("end of a range", range.end.max(range.start), self.len + 1);
            return Err(KernelError::OutOfRange { operation: "page-locked copy", what, got, limit });
        }
        KernelError::check_len("page-locked copy", argument, len, range.len())
    }

    fn wait(&self, doing: &str, limit: Duration) -> Result<(), CudaError> {
        if self.copying.load(Ordering::Acquire) {
            wait::until(&self.device.context, doing, limit, || self.copied.is_done(doing))?;
            self.copying.store(false, Ordering::Release);
        }
        Ok(())
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        if *self.copying.get_mut() {
            self.device.settle();
        }
    }
}

impl<T> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("len", &self.len).finish_non_exhaustive()
    }
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
