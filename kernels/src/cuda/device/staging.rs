//! A ring of page-locked memory through which small copies go.
#![allow(unsafe_code)]

use std::{collections::VecDeque, ptr::NonNull, sync::Arc, time::Duration};

use super::{
    CudaError,
    raw::{Context, Event, HostMemory, Stream},
    wait,
};

/// Bytes of the ring: a step's numbers many times over, or the logits of a few rows.
const RING_BYTES: usize = 4 << 20;
/// Bytes that one copy takes at most, so that the next can be prepared meanwhile.
pub(super) const PART_BYTES_MAX: usize = RING_BYTES / 4;
/// Where parts start: a cache line.
const ALIGNMENT: usize = 64;

/// Page-locked memory, taken in order and given back in order, when the copies are done.
pub(super) struct Staging {
    memory: HostMemory,
    context: Arc<Context>,
    /// First byte of the next part, and of the oldest one in use; both only grow, and count rounds, too.
    head: usize,
    tail: usize,
    in_use: VecDeque<InUse>,
    /// Events to record again.
    idle: Vec<Event>,
}

/// A part whose copy may not be done.
struct InUse {
    end: usize,
    copied: Event,
}

impl Staging {
    pub(super) fn new(context: &Arc<Context>) -> Result<Staging, CudaError> {
        let memory = HostMemory::new(context, RING_BYTES, "allocate page-locked memory for small copies")?;
        let context = context.clone();
        Ok(Staging { memory, context, head: 0, tail: 0, in_use: VecDeque::new(), idle: Vec::new() })
    }

    /// Enqueues a copy of at most [`PART_BYTES_MAX`] bytes to the device; waits where the ring is full.
    ///
    /// # Safety
    /// `to` is device memory that long, used by nobody but work in order with this.
    pub(super) unsafe fn upload(
        &mut self,
        stream: &Stream,
        from: &[u8],
        to: u64,
        limit: Duration,
    ) -> Result<(), CudaError> {
        let doing = "take earlier uploads";
        let (part, event) = self.take(from.len(), doing, limit)?;
        // SAFETY: the part is as long and no copy uses it.
        unsafe { part.as_ptr().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        // SAFETY: the part is kept until the event recorded after the copy; the rest is the caller's word.
        let copied = unsafe { stream.copy_to_device(to, part, from.len(), "upload") };
        copied.and_then(|()| self.keep(stream, event))
    }

    /// Copies at most [`PART_BYTES_MAX`] bytes from the device, after all work before; waits for it.
    ///
    /// # Safety
    /// `from` is device memory that long, written by nobody but work in order with this.
    pub(super) unsafe fn download(
        &mut self,
        stream: &Stream,
        from: u64,
        to: &mut [u8],
        limit: Duration,
    ) -> Result<(), CudaError> {
        let doing = "give the results of a step";
        let (part, event) = self.take(to.len(), doing, limit)?;
        // SAFETY: the part is kept until the event recorded after the copy; the rest is the caller's word.
        unsafe { stream.copy_to_host(part, from, to.len(), "download")? };
        self.keep(stream, event)?;
        let context = &self.context;
        let last = self.in_use.back().map(|part| &part.copied);
        wait::until(context, doing, limit, || last.map_or(Ok(true), |event| event.is_done(doing)))?;
        // SAFETY: the part is as long, and its copy is done.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(part.as_ptr(), to.len()) };
        Ok(())
    }

    /// The next `bytes`, and an event for the copy that uses them.
    fn take(
        &mut self,
        bytes: usize,
        doing: &str,
        limit: Duration,
    ) -> Result<(NonNull<u8>, Event), CudaError> {
        let end = self.end_of_next(bytes);
        while end - self.tail > RING_BYTES {
            let Some(oldest) = self.in_use.front() else { break };
            wait::until(&self.context, doing, limit, || oldest.copied.is_done(doing))?;
            self.release_oldest();
        }
        while self.in_use.front().map(|oldest| oldest.copied.is_done(doing)).transpose()? == Some(true) {
            self.release_oldest();
        }
        let event = match self.idle.pop() {
            Some(event) => event,
            None => Event::new(&self.context)?,
        };
        self.head = end;
        let offset = (end - bytes.next_multiple_of(ALIGNMENT)) % RING_BYTES;
        // SAFETY: the part lies within the ring.
        Ok((unsafe { self.memory.pointer().add(offset) }, event))
    }

    /// Where the next part of `bytes` ends: parts do not run over the ring's end.
    fn end_of_next(&self, bytes: usize) -> usize {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        debug_assert!(bytes <= PART_BYTES_MAX && self.memory.bytes() == RING_BYTES);
        let left = RING_BYTES - self.head % RING_BYTES;
        self.head + bytes + if left < bytes { left } else { 0 }
    }

    /// The part just taken is in use until the work enqueued so far is done.
    fn keep(&mut self, stream: &Stream, copied: Event) -> Result<(), CudaError> {
        let recorded = copied.record(stream, "mark the end of a copy");
        self.in_use.push_back(InUse { end: self.head, copied });
        recorded
    }

    fn release_oldest(&mut self) {
        if let Some(InUse { end, copied }) = self.in_use.pop_front() {
            self.tail = end;
            self.idle.push(copied);
        }
    }
}
