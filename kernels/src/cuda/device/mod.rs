//! CUDA devices: contexts, streams, memory, copies, graphs and libraries.
//!
//! | part | what it is |
//! |---|---|
//! | [`CudaDevice`] | one device: a stream that computes, one that copies, its kernels; a [`Launcher`] |
//! | [`ArenaPlan`], [`Arena`], [`DeviceBuffer`] | all memory of a shard from one allocation, sized by computation |
//! | [`ArenaPlan::allocate_shared`], [`PeerMemory`] | an arena that ranks in other processes map |
//! | [`HostWords`] | words of the host that kernels watch |
//! | [`Landing`] | words on their way to the host, for which nobody need wait |
//! | [`Uploader`] | weights to the device, by several threads |
//! | [`PageOffload`] | pages of the KV cache to page-locked memory and back, beside the work that computes |
//! | [`Graph`] | launches recorded once and replayed |
//! | [`devices`], [`links`], [`libraries`], [`Selector`] | what there is on a machine, and which device a user means |
//!
//! The driver and cuBLASLt are looked for when they are needed, and nothing is linked: on a machine without CUDA,
//! [`CudaDevice::open`] says what is missing. Every wait has a limit. After an error that ends a context all calls
//! return [`CudaError::Lost`]; dropping what is left then neither panics nor waits.
//!
//! Absent on purpose: allocation after loading (arenas are filled once), streams beside the two, tracking of which
//! buffer is in use by which stream: work on the compute stream is in order, and [`Uploader`] and [`PageOffload`] order
//! the two streams.
#![deny(unsafe_code)]

mod arena;
mod error;
mod facts;
mod graph;
mod kernels;
mod landing;
mod launcher;
mod matrix;
mod measure;
mod offload;
mod open;
mod raw;
mod selector;
mod shared;
mod staging;
mod transfer;
mod uploader;
mod wait;
mod words;

pub use super::nccl::facts as nccl;
pub use arena::{Arena, ArenaPlan, DeviceBuffer, Reservation};
pub use error::CudaError;
pub use facts::{
    DeviceFacts, LibraryFacts, LinkFacts, ManagementFacts, devices, free_bytes, libraries, links, management,
};
pub use graph::Graph;
pub use landing::Landing;
pub use offload::PageOffload;
pub use selector::{Selector, SelectorError, Uuid};
pub use shared::{PeerMemory, SHARED_GRANULARITY};
pub use uploader::{Progress, Upload, UploadError, Uploader};
pub use words::HostWords;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

pub(in crate::cuda) use self::wait::pause;
use self::{
    arena::ArenaMemory,
    kernels::Kernels,
    matrix::MatrixLibrary,
    raw::{Context, Stream},
    staging::Staging,
};
#[cfg(doc)]
use super::Launcher;

/// Longest wait for a device's work when something that the work may use is dropped.
const DROP_LIMIT: Duration = Duration::from_secs(30);
/// The same for a device whose work did not end in time before.
const SUSPECT_DROP_LIMIT: Duration = Duration::from_millis(100);

/// One device of this machine, opened by this process.
///
/// Operations go to its compute stream; [`CudaDevice::capture`] records on a stream of its own. All methods may be
/// called from any thread; the order of work is that of the calls.
pub struct CudaDevice {
    facts: DeviceFacts,
    compute: Stream,
    copy: Stream,
    recording: Mutex<Stream>,
    kernels: Kernels,
    uploads: Mutex<Staging>,
    downloads: Mutex<Staging>,
    /// Or why there is none.
    matrices: Result<MatrixLibrary, String>,
    /// What graphs keep.
    arenas: Mutex<Vec<Weak<ArenaMemory>>>,
    context: Arc<Context>,
}

impl CudaDevice {
    /// What is known of it.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Free and total bytes of its memory, of all processes.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.context.memory()
    }

    /// The library that multiplies many rows, or why there is none and our own kernels do it.
    pub fn matrix_library(&self) -> Result<&LibraryFacts, &str> {
        self.matrices.as_ref().map(MatrixLibrary::facts).map_err(String::as_str)
    }

    /// Loads all kernels now, compiling what is not built in or cached, instead of each at its first launch.
    pub fn load_all(&self) -> Result<(), CudaError> {
        self.kernels.load_all(&self.context)
    }

    /// Waits until all work enqueued so far, copies included, is done. `doing` completes "the device did not ...".
    pub fn synchronize(&self, doing: &str, limit: Duration) -> Result<(), CudaError> {
        wait::until(&self.context, doing, limit, || {
            Ok(self.compute.is_idle(doing)? && self.copy.is_idle(doing)?)
        })?;
        self.context.acquit();
        Ok(())
    }

    /// Whether its work had not ended in time when somebody last waited.
    pub fn is_late(&self) -> bool {
        self.context.is_suspect()
    }

    /// Gives up all of this device's memory: somebody may use it for ever. `doing` is what was waited for in vain. From
    /// now on dropping what lies in it gives nothing back and waits for nothing.
    pub fn abandon(&self, doing: &str) {
        self.context.abandon(doing);
    }

    /// Waits until nothing that is about to be given back is in use; gives the device up where that takes too long.
    fn settle(&self) {
        if self.context.is_abandoned() || self.context.check_lost().is_err() {
            return;
        }
        let doing = "finish before its memory is given back";
        let limit = if self.context.is_suspect() { SUSPECT_DROP_LIMIT } else { DROP_LIMIT };
        let waited = self.synchronize(doing, limit);
        if let Err(CudaError::Timeout { .. }) = waited {
            self.context.abandon(doing);
        }
    }

    /// Has the driver's calls of this thread go to this device, for libraries that call it by themselves.
    pub(in crate::cuda) fn make_current(&self) -> Result<(), CudaError> {
        self.context.make_current("be used by a library")
    }

    fn misuse(&self, reason: impl Into<String>) -> CudaError {
        CudaError::Misuse { device: self.context.label().to_owned(), reason: reason.into() }
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        self.settle();
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice").field("facts", &self.facts).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
