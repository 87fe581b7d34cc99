//! Launches recorded once and replayed.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUstreamCaptureMode};

use super::{Context, Stream};
use crate::cuda::device::CudaError;

/// A stream that records what is enqueued instead of doing it, until [`Capture::end`], or until this is dropped.
pub(in crate::cuda::device) struct Capture<'a> {
    stream: &'a Stream,
    ended: bool,
}

/// What was recorded, ready to be replayed.
pub(in crate::cuda::device) struct Executable {
    context: Arc<Context>,
    handle: sys::CUgraphExec,
    nodes: usize,
}

/// What was recorded.
struct Recorded<'a> {
    context: &'a Context,
    handle: sys::CUgraph,
}

// SAFETY: an executable graph may be launched and destroyed from any thread; the driver orders its launches.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

impl<'a> Capture<'a> {
    pub(in crate::cuda::device) fn begin(stream: &'a Stream) -> Result<Capture<'a>, CudaError> {
        // Other threads may go on allocating and loading; this one may not.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.context.call("cuStreamBeginCapture", "record a graph", || {
            // SAFETY: a stream of this context.
            unsafe { sys::cuStreamBeginCapture_v2(stream.handle, mode) }
        })?;
        Ok(Capture { stream, ended: false })
    }

    pub(in crate::cuda::device) fn end(mut self, launches: &Stream) -> Result<Executable, CudaError> {
        let context = &self.stream.context;
        let mut recorded = Recorded { context, handle: std::ptr::null_mut() };
        context.call("cuStreamEndCapture", "record a graph", || {
            // SAFETY: a capturing stream, and room for the handle.
            unsafe { sys::cuStreamEndCapture(self.stream.handle, &mut recorded.handle) }
        })?;
        self.ended = true;
        let mut nodes = 0;
        context.call("cuGraphGetNodes", "count a graph's launches", || {
            // SAFETY: a graph; without room for nodes only their number is written.
            unsafe { sys::cuGraphGetNodes(recorded.handle, std::ptr::null_mut(), &mut nodes) }
        })?;
        let mut handle = std::ptr::null_mut();
        context.call("cuGraphInstantiate", "make a graph ready", || {
            // SAFETY: a graph, and room for the handle.
            unsafe { sys::cuGraphInstantiateWithFlags(&mut handle, recorded.handle, 0) }
        })?;
        let executable = Executable { context: context.clone(), handle, nodes };
        context.call("cuGraphUpload", "make a graph ready", || {
            // SAFETY: an executable graph and a stream of its context. Takes the graph's memory now, not at its first
            // replay, with which it is in order.
            unsafe { sys::cuGraphUpload(handle, launches.handle) }
        })?;
        Ok(executable)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let context = &self.stream.context;
        let mut recorded = Recorded { context, handle: std::ptr::null_mut() };
        context.release("cuStreamEndCapture", || {
            // SAFETY: a capturing stream, and room for the handle, which is null after an error.
            unsafe { sys::cuStreamEndCapture(self.stream.handle, &mut recorded.handle) }
        });
    }
}

impl Drop for Recorded<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: a graph that nobody else knows.
            self.context.release("cuGraphDestroy", || unsafe { sys::cuGraphDestroy(self.handle) });
        }
    }
}

impl Executable {
    /// Launches in it.
    pub(in crate::cuda::device) fn nodes(&self) -> usize {
        self.nodes
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: made by `end`, not used after this. Its owner has waited for its launches.
        self.context.release("cuGraphExecDestroy", || unsafe { sys::cuGraphExecDestroy(self.handle) });
    }
}

impl Stream {
    /// Enqueues what a graph recorded.
    ///
    /// # Safety
    /// As for each launch that it recorded; a graph of this stream's context.
    pub(in crate::cuda::device) unsafe fn launch_graph(&self, graph: &Executable) -> Result<(), CudaError> {
        self.context.call("cuGraphLaunch", "replay a graph", || {
            // SAFETY: the caller's word.
            unsafe { sys::cuGraphLaunch(graph.handle, self.handle) }
        })
    }
}
