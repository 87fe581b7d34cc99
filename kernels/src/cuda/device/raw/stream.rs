//! Streams and events.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent_flags, CUstream_flags};

use super::{Context, driver};
use crate::cuda::{StreamHandle, device::CudaError};

/// Work in order, not in order with the default stream's.
pub(in crate::cuda::device) struct Stream {
    pub(super) context: Arc<Context>,
    pub(super) handle: sys::CUstream,
}

/// A point in a stream's work.
pub(in crate::cuda::device) struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: the driver's functions on streams may be called from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}
// SAFETY: likewise for events.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Stream {
    pub(in crate::cuda::device) fn new(context: &Arc<Context>) -> Result<Stream, CudaError> {
        let mut handle = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        context.call("cuStreamCreate", "make a stream", || {
            // SAFETY: room for the handle.
            unsafe { sys::cuStreamCreate(&mut handle, flags) }
        })?;
        Ok(Stream { context: context.clone(), handle })
    }

    /// The driver's name of it, for libraries that enqueue work by themselves.
    pub(in crate::cuda::device) fn handle(&self) -> StreamHandle<'_> {
        // SAFETY: a stream of the context's device, until it is dropped.
        unsafe { StreamHandle::new(self.handle.cast(), self.context.ordinal()) }
    }

    /// Whether all its work is done.
    pub(in crate::cuda::device) fn is_idle(&self, doing: &str) -> Result<bool, CudaError> {
        // SAFETY: a stream of this context.
        self.context.query("cuStreamQuery", doing, || unsafe { sys::cuStreamQuery(self.handle) })
    }

    /// What is enqueued from now on comes after the event's last recording.
    pub(in crate::cuda::device) fn wait_for(&self, event: &Event, doing: &str) -> Result<(), CudaError> {
        // SAFETY: a stream and an event of the same context.
        self.context.call("cuStreamWaitEvent", doing, || unsafe {
            sys::cuStreamWaitEvent(self.handle, event.handle, 0)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by `new`, not used after this; work that it still holds goes on.
        self.context.release("cuStreamDestroy", || unsafe { sys::cuStreamDestroy_v2(self.handle) });
    }
}

impl Event {
    pub(in crate::cuda::device) fn new(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with(context, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// One that knows when it happened.
    pub(in crate::cuda::device) fn timed(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with(context, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(context: &Arc<Context>, flags: CUevent_flags) -> Result<Event, CudaError> {
        let mut handle = std::ptr::null_mut();
        let flags = flags as u32;
        context.call("cuEventCreate", "make an event", || {
            // SAFETY: room for the handle.
            unsafe { sys::cuEventCreate(&mut handle, flags) }
        })?;
        Ok(Event { context: context.clone(), handle })
    }

    /// Stands for all work enqueued so far.
    pub(in crate::cuda::device) fn record(&self, stream: &Stream, doing: &str) -> Result<(), CudaError> {
        // SAFETY: an event and a stream of the same context.
        self.context
            .call("cuEventRecord", doing, || unsafe { sys::cuEventRecord(self.handle, stream.handle) })
    }

    /// Milliseconds from this one to a later one. Both are timed and done.
    pub(in crate::cuda::device) fn milliseconds_to(&self, end: &Event) -> Result<f32, CudaError> {
        if !driver::tells_times() {
            let reason = "this driver has no cuEventElapsedTime_v2, which those for CUDA 12.8 and later have";
            return Err(CudaError::Misuse {
                device: self.context.label().to_owned(),
                reason: reason.to_owned(),
            });
        }
        let mut milliseconds = 0.0;
        self.context.call("cuEventElapsedTime", "tell how long its work took", || {
            // SAFETY: room for the number; events of one context.
            unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, self.handle, end.handle) }
        })?;
        Ok(milliseconds)
    }

    /// Whether the work it stands for is done; true for one that was never recorded.
    pub(in crate::cuda::device) fn is_done(&self, doing: &str) -> Result<bool, CudaError> {
        // SAFETY: an event of this context.
        self.context.query("cuEventQuery", doing, || unsafe { sys::cuEventQuery(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new`, not used after this.
        self.context.release("cuEventDestroy", || unsafe { sys::cuEventDestroy_v2(self.handle) });
    }
}
