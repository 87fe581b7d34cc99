//! Weights to a device: several threads fill chunks of page-locked memory, the copy stream moves them.
#![allow(unsafe_code)]

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    CudaDevice, CudaError, lock,
    raw::{Event, HostMemory},
    wait,
};
use crate::{KernelError, buffer::Plain, cuda::DeviceSliceMut};

/// Longest wait for a chunk's copy.
const CHUNK_LIMIT: Duration = Duration::from_secs(60);

/// Moves large amounts of host data to one device. Each of its threads has two chunks: one is filled while the other is
/// copied.
pub struct Uploader {
    /// Those of each thread.
    chunks: Vec<[Chunk; 2]>,
    chunk_bytes: usize,
    device: Arc<CudaDevice>,
}

/// Rows to fill and where they go.
pub struct Upload<'a, E> {
    address: u64,
    rows: usize,
    row_bytes: usize,
    fill: Box<Fill<'a, E>>,
}

type Fill<'a, E> = dyn Fn(Range<usize>, &mut [u8]) -> Result<(), E> + Send + Sync + 'a;

/// How far an [`Uploader`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes whose copies are enqueued.
    pub done_bytes: u64,
    /// Bytes of all uploads.
    pub total_bytes: u64,
}

/// Why an upload ended early.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum UploadError<E> {
    /// Rows could not be filled.
    #[error("{0}")]
    Fill(E),
    /// The device does not take them.
    #[error(transparent)]
    Device(#[from] KernelError),
}

struct Chunk {
    memory: HostMemory,
    copied: Event,
}

/// Rows of one upload that fit in a chunk.
struct Piece {
    upload: usize,
    rows: Range<usize>,
}

impl<'a, E> Upload<'a, E> {
    /// Rows of `stride` elements. `fill(rows, elements)` writes the elements of the given rows, from any thread, in any
    /// order; they are zero before.
    pub fn new<T: Plain>(
        to: DeviceSliceMut<'a, T>,
        stride: usize,
        fill: impl Fn(Range<usize>, &mut [T]) -> Result<(), E> + Send + Sync + 'a,
    ) -> Result<Upload<'a, E>, KernelError> {
        let rows = to.len().checked_div(stride).unwrap_or(0);
        KernelError::check_len("upload", "to", to.len(), rows * stride)?;
        let fill = move |rows: Range<usize>, bytes: &mut [u8]| {
            let elements = bytes.len() / size_of::<T>();
            debug_assert!(bytes.as_ptr().cast::<T>().is_aligned());
            // SAFETY: chunks start on a page; they are initialised, and any bytes are a value of Plain types.
            let elements =
                unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<T>(), elements) };
            fill(rows, elements)
        };
        let row_bytes = stride * size_of::<T>();
        Ok(Upload { address: to.address(), rows, row_bytes, fill: Box::new(fill) })
    }

    fn bytes(&self) -> u64 {
        (self.rows * self.row_bytes) as u64
    }
}

impl Uploader {
    /// With `threads` threads (at least one), and chunks of `chunk_bytes` (at least a page): twice as many are
    /// page-locked.
    pub fn new(device: &Arc<CudaDevice>, threads: usize, chunk_bytes: usize) -> Result<Uploader, CudaError> {
        let chunk_bytes = chunk_bytes.max(4096);
        let chunk = || -> Result<Chunk, CudaError> {
            let doing = "allocate page-locked memory to load weights";
            let memory = HostMemory::new(&device.context, chunk_bytes, doing)?;
            Ok(Chunk { memory, copied: Event::new(&device.context)? })
        };
        let chunks =
            (0..threads.max(1)).map(|_| Ok([chunk()?, chunk()?])).collect::<Result<_, CudaError>>()?;
        Ok(Uploader { chunks, chunk_bytes, device: device.clone() })
    }

    /// Fills and copies all rows. Returns when everything is enqueued; what is enqueued on the compute stream then
    /// comes after it. `progress` is called by the threads. The first error ends it; what the memory holds then means
    /// nothing.
    pub fn run<E: Send>(
        &mut self,
        uploads: &[Upload<'_, E>],
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<(), UploadError<E>> {
        let pieces = pieces(uploads, self.chunk_bytes)?;
        // What the compute stream did to the memory before, such as zeroing it, comes first.
        let device = &*self.device;
        let before = self.event()?;
        before.record(&device.compute, "load weights").map_err(KernelError::from)?;
        device.copy.wait_for(&before, "load weights").map_err(KernelError::from)?;
        let shared = Shared {
            device,
            uploads,
            pieces: &pieces,
            next: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            failure: Mutex::new(None),
            done_bytes: AtomicU64::new(0),
            total_bytes: uploads.iter().map(Upload::bytes).sum(),
            progress,
        };
        thread::scope(|scope| {
            for chunks in &mut self.chunks {
                scope.spawn(|| shared.work(chunks));
            }
        });
        let failure = shared.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        // Also after a failure: the caller may give the memory back, in order with the compute stream.
        let after = self.event()?;
        let ordered = after
            .record(&self.device.copy, "load weights")
            .and_then(|()| self.device.compute.wait_for(&after, "load weights"));
        failure.map_or(Ok(()), Err)?;
        Ok(ordered.map_err(KernelError::from)?)
    }

    fn event(&self) -> Result<Event, KernelError> {
        Ok(Event::new(&self.device.context)?)
    }
}

impl Drop for Uploader {
    fn drop(&mut self) {
        self.device.settle();
    }
}

/// What the threads of one run share.
struct Shared<'a, E> {
    device: &'a CudaDevice,
    uploads: &'a [Upload<'a, E>],
    pieces: &'a [Piece],
    next: AtomicUsize,
    stopped: AtomicBool,
    failure: Mutex<Option<UploadError<E>>>,
    done_bytes: AtomicU64,
    total_bytes: u64,
    progress: &'a (dyn Fn(Progress) + Sync),
}

impl<E> Shared<'_, E> {
    /// Takes pieces, with each chunk in turn, until there are no more or something failed.
    fn work(&self, chunks: &mut [Chunk; 2]) {
        for turn in 0.. {
            let at = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = self.pieces.get(at).filter(|_| !self.stopped.load(Ordering::Relaxed)) else {
                return;
            };
            if let Err(error) = self.upload(piece, &mut chunks[turn % 2]) {
                self.stopped.store(true, Ordering::Relaxed);
                lock(&self.failure).get_or_insert(error);
                return;
            }
        }
    }

    fn upload(&self, piece: &Piece, chunk: &mut Chunk) -> Result<(), UploadError<E>> {
        let upload = &self.uploads[piece.upload];
        let bytes = piece.rows.len() * upload.row_bytes;
        let (device, doing) = (self.device, "take the weights");
        wait::until(&device.context, doing, CHUNK_LIMIT, || chunk.copied.is_done(doing))
            .map_err(KernelError::from)?;
        // SAFETY: pieces are cut to a chunk's length; its last copy is done, and only this thread uses it.
        let filled = unsafe { std::slice::from_raw_parts_mut(chunk.memory.pointer().as_ptr(), bytes) };
        filled.fill(0);
        (upload.fill)(piece.rows.clone(), filled).map_err(UploadError::Fill)?;
        let to = upload.address + (piece.rows.start * upload.row_bytes) as u64;
        // SAFETY: rows of an exclusive view, of which each piece is copied once; the chunk is kept until the event.
        let enqueued =
            unsafe { device.copy.copy_to_device(to, chunk.memory.pointer(), bytes, "upload weights") };
        enqueued
            .and_then(|()| chunk.copied.record(&device.copy, "upload weights"))
            .map_err(KernelError::from)?;
        let done_bytes = self.done_bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        (self.progress)(Progress { done_bytes, total_bytes: self.total_bytes });
        Ok(())
    }
}

/// All rows, cut so that each piece fits in a chunk.
fn pieces<E>(uploads: &[Upload<'_, E>], chunk_bytes: usize) -> Result<Vec<Piece>, KernelError> {
    let mut pieces = Vec::new();
    for (index, upload) in uploads.iter().enumerate() {
        if upload.row_bytes > chunk_bytes {
            let reason = format!("rows of {} bytes do not fit in chunks of {chunk_bytes}", upload.row_bytes);
            return Err(KernelError::Unsupported { operation: "upload", reason });
        }
        if upload.row_bytes == 0 {
            continue;
        }
        let rows_max = chunk_bytes / upload.row_bytes;
        let starts = (0..upload.rows).step_by(rows_max);
        pieces.extend(
            starts.map(|start| Piece { upload: index, rows: start..(start + rows_max).min(upload.rows) }),
        );
    }
    Ok(pieces)
}
