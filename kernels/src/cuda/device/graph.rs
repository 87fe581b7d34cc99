//! Launches recorded once and replayed.
#![allow(unsafe_code)]

use std::{
    fmt,
    sync::{Arc, TryLockError},
};

use super::{
    CudaDevice, CudaError,
    arena::ArenaMemory,
    launcher::Recorder,
    lock,
    raw::{Capture, Executable},
};
use crate::{KernelError, cuda::Launcher};

/// Launches of one device, ready to be replayed in order by one call. Replays read and write the memory that was given
/// when it was recorded: the graph keeps all of the device's arenas of that moment.
pub struct Graph {
    executable: Executable,
    device: Arc<CudaDevice>,
    _arenas: Vec<Arc<ArenaMemory>>,
}

impl CudaDevice {
    /// Records what `record` launches, which is not run meanwhile. Loads all kernels first, since none can be loaded
    /// while launches are recorded. `record` shall only launch: it must not wait for the device, nor copy, nor
    /// allocate on it. Memory of peers that launches use must stay until the graph is dropped.
    pub fn capture(
        self: &Arc<Self>,
        record: impl FnOnce(&dyn Launcher) -> Result<(), KernelError>,
    ) -> Result<Graph, KernelError> {
        self.load_all()?;
        let stream = match self.recording.try_lock() {
            Ok(stream) => stream,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(self.misuse("a graph is being recorded already; one at a time").into());
            }
        };
        let capture = Capture::begin(&stream)?;
        record(&Recorder { device: self, stream: &stream })?;
        let executable = capture.end(&self.compute)?;
        let mut arenas = lock(&self.arenas);
        arenas.retain(|arena| arena.strong_count() > 0);
        let kept = arenas.iter().filter_map(std::sync::Weak::upgrade).collect();
        Ok(Graph { executable, device: self.clone(), _arenas: kept })
    }

    /// Enqueues all launches of a graph of this device.
    pub fn launch_graph(&self, graph: &Graph) -> Result<(), CudaError> {
        if !std::ptr::eq(self, Arc::as_ptr(&graph.device)) {
            let other = graph.device.facts.ordinal;
            return Err(
                self.misuse(format!("a graph of cuda:{other}, opened elsewhere, cannot be replayed here"))
            );
        }
        // SAFETY: recorded on this device; the graph keeps what its launches use.
        unsafe { self.compute.launch_graph(&graph.executable) }
    }
}

impl Graph {
    /// Launches in it.
    pub fn launches(&self) -> usize {
        self.executable.nodes()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.device.settle();
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("launches", &self.launches()).field("device", &self.device).finish()
    }
}
