//! Pages of a device kept in the host's memory: the copy stream moves them while the compute stream goes on.
#![allow(unsafe_code)]

use std::{collections::VecDeque, ptr::NonNull, sync::Arc, time::Duration};

use super::{
    CudaDevice, CudaError,
    raw::{Event, HostMemory},
    wait,
};
use crate::{KernelError, cuda::DeviceSliceMut, element::bf16};

const OPERATION: &str = "page offload";
const DOING: &str = "move pages between device and host";

/// Page-locked memory for copies of pages. On the device a page is in parts, `[parts][pages][part]`; here it is in one
/// piece.
pub struct PageOffload {
    memory: HostMemory,
    pages: usize,
    parts: usize,
    part_bytes: usize,
    /// Batches whose copies may not be done, oldest first.
    pending: VecDeque<(u64, Event)>,
    /// Events to record again.
    idle: Vec<Event>,
    device: Arc<CudaDevice>,
}

impl PageOffload {
    /// Room for `pages` pages of `parts` parts of `part_bytes` bytes.
    pub fn new(
        device: &Arc<CudaDevice>,
        pages: usize,
        parts: usize,
        part_bytes: usize,
    ) -> Result<PageOffload, KernelError> {
        let bytes = pages.checked_mul(parts).and_then(|count| count.checked_mul(part_bytes));
        let bytes = bytes.filter(|&bytes| bytes > 0).ok_or_else(|| KernelError::Unsupported {
            operation: OPERATION,
            reason: format!("{pages} pages of {parts} x {part_bytes} bytes"),
        })?;
        let doing = "allocate page-locked memory for pages of the KV cache";
        let memory = HostMemory::new(&device.context, bytes, doing)?;
        let device = device.clone();
        Ok(PageOffload {
            memory,
            pages,
            parts,
            part_bytes,
            pending: VecDeque::new(),
            idle: Vec::new(),
            device,
        })
    }

    /// Enqueues copies `(page of the pool, page here)` and back, after all work that was enqueued so far: a step whose
    /// result was nothing may still write what is saved, or read what is loaded over. Later work of the compute stream
    /// waits for nothing: its pages are others until the batch is done, and that is the caller's to see to. `batch` is
    /// greater than any before. Where it fails, copies may be under way.
    pub fn transfer(
        &mut self,
        batch: u64,
        saves: &[(usize, usize)],
        loads: &[(usize, usize)],
        pool: DeviceSliceMut<'_, bf16>,
    ) -> Result<(), KernelError> {
        let page_bytes = self.parts * self.part_bytes;
        let blocks = pool.len() * size_of::<bf16>() / page_bytes;
        KernelError::check_len(OPERATION, "pool", pool.len() * size_of::<bf16>(), blocks * page_bytes)?;
        let back = loads.iter().map(|&(from, to)| (to, from));
        for (page, host) in saves.iter().copied().chain(back) {
            KernelError::check_index(OPERATION, "page", page, blocks)?;
            KernelError::check_index(OPERATION, "host page", host, self.pages)?;
        }
        let event = match self.idle.pop() {
            Some(event) => event,
            None => Event::new(&self.device.context)?,
        };
        let (compute, copy) = (&self.device.compute, &self.device.copy);
        event.record(compute, DOING)?;
        copy.wait_for(&event, DOING)?;
        let enqueued = self.enqueue(saves, loads, pool.address(), blocks);
        // Also after a failure: what was enqueued must be waited for.
        let recorded = event.record(copy, DOING);
        self.pending.push_back((batch, event));
        enqueued.and(recorded)?;
        Ok(())
    }

    /// Copies checked pages.
    fn enqueue(
        &self,
        saves: &[(usize, usize)],
        loads: &[(usize, usize)],
        pool: u64,
        blocks: usize,
    ) -> Result<(), CudaError> {
        let copy = &self.device.copy;
        let address = |part: usize, page: usize| pool + ((part * blocks + page) * self.part_bytes) as u64;
        for part in 0..self.parts {
            for &(from, to) in saves {
                // SAFETY: both within their pools; this object keeps the host's memory until the copy is done, and the
                // caller keeps both pages from others until then.
                unsafe {
                    copy.copy_to_host(self.part(part, to), address(part, from), self.part_bytes, DOING)?
                };
            }
            for &(from, to) in loads {
                // SAFETY: as above.
                unsafe {
                    copy.copy_to_device(address(part, to), self.part(part, from), self.part_bytes, DOING)?
                };
            }
        }
        Ok(())
    }

    /// Where a part of a page is here.
    fn part(&self, part: usize, page: usize) -> NonNull<u8> {
        // SAFETY: within the memory: pages were checked, and so many parts there are.
        unsafe { self.memory.pointer().add((page * self.parts + part) * self.part_bytes) }
    }

    /// The oldest batch that is not done. Waits for nothing.
    pub fn pending(&mut self) -> Result<Option<u64>, KernelError> {
        while let Some((batch, event)) = self.pending.front() {
            if !event.is_done(DOING)? {
                return Ok(Some(*batch));
            }
            self.retire();
        }
        Ok(None)
    }

    /// Waits for all batches, no longer than `limit` each.
    pub fn finish(&mut self, limit: Duration) -> Result<(), KernelError> {
        while let Some((_, event)) = self.pending.front() {
            wait::until(&self.device.context, DOING, limit, || event.is_done(DOING))?;
            self.retire();
        }
        Ok(())
    }

    fn retire(&mut self) {
        self.idle.extend(self.pending.pop_front().map(|(_, event)| event));
    }
}

impl Drop for PageOffload {
    fn drop(&mut self) {
        self.device.settle();
    }
}
