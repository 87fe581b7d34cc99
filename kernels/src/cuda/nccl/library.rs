//! The library: checked, with its functions called in one place each.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fmt,
    path::{Path, PathBuf},
    ptr,
    sync::Arc,
};

use super::{
    NcclError,
    find::{Missing, find, shown},
    sys::{Comm, Config, DataType, Functions, ID_BYTES, IN_PROGRESS, RawId, SUCCESS, SUM, Status},
};
use crate::cuda::{StreamHandle, settings::Settings};

/// 2.19. Communicators that do not block came with 2.14, and graphs of several ranks before that; 2.19 is the oldest
/// that the wheels for CUDA 12 in use today bring, and older ones were never tried.
const VERSION_MIN: c_int = 21_900;

/// NCCL, loaded. It stays so for the life of the process: threads of its own may be in it.
pub struct Nccl {
    functions: Functions,
    file: PathBuf,
    version: c_int,
}

/// What the ranks of a communicator have in common: one of them makes it, all are told.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; ID_BYTES]);

/// A communicator of the library's. Whoever holds one may call with it until it is aborted or destroyed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle(pub(super) Comm);

// SAFETY: NCCL's functions on a communicator may be called from any thread, one at a time.
unsafe impl Send for Handle {}

/// A call that failed: the function, and the number of the error.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failed {
    pub(super) function: &'static str,
    pub(super) code: Status,
}

/// How a call of a communicator that does not block came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Done,
    InProgress,
}

/// A collective operation on memory of the device, all of it checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operation {
    pub(super) kind: Kind,
    pub(super) from: u64,
    pub(super) to: u64,
    /// Elements of each rank's part.
    pub(super) count: usize,
    pub(super) data_type: DataType,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce,
    AllGather,
    Broadcast { root: usize },
}

impl Kind {
    pub(super) fn function(self) -> &'static str {
        match self {
            Kind::AllReduce => "ncclAllReduce",
            Kind::AllGather => "ncclAllGather",
            Kind::Broadcast { .. } => "ncclBroadcast",
        }
    }
}

impl Nccl {
    /// Finds and checks it. Where there is none this says where it was looked for.
    pub fn open(settings: &Settings) -> Result<Arc<Nccl>, NcclError> {
        let unusable = |file: &Path, reason: String| NcclError::Unusable { file: file.to_owned(), reason };
        let found = find(settings).map_err(|missing| match missing {
            Missing::Nowhere(looked) => NcclError::NotFound { looked },
            Missing::Not(file) => unusable(&file, "it has no ncclGetVersion".to_owned()),
            Missing::Mute(file) => unusable(&file, "it does not say its version".to_owned()),
        })?;
        if found.version < VERSION_MIN {
            let reason = format!("it is version {}", shown(found.version));
            return Err(unusable(&found.file, reason));
        }
        // SAFETY: it has NCCL's name and says NCCL's version.
        let functions = unsafe { Functions::of(found.library) };
        let functions = functions
            .map_err(|missing| unusable(&found.file, format!("it has no {}", missing.to_string_lossy())))?;
        Ok(Arc::new(Nccl { functions, file: found.file, version: found.version }))
    }

    /// Its file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Its version, as people write it.
    pub fn version(&self) -> String {
        shown(self.version)
    }

    /// Makes the id of one communicator, for one rank to tell the others. NCCL opens a port for it on a network of this
    /// machine, at which the ranks meet.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = RawId { internal: [0; ID_BYTES] };
        // SAFETY: room for the id.
        let status = unsafe { (self.functions.get_unique_id)(&mut id) };
        match self.answer("ncclGetUniqueId", status) {
            Ok(_) => Ok(UniqueId(id.internal)),
            Err(Failed { code, .. }) => {
                let text = self.words(code, None);
                Err(NcclError::NoId { text, code })
            }
        }
    }

    /// Begins to make a communicator on the thread's current device.
    pub(super) fn init(&self, ranks: c_int, id: &UniqueId, rank: c_int) -> Result<(Handle, Answer), Failed> {
        let mut comm: Comm = ptr::null_mut();
        let mut config = Config::without_blocking();
        let id = RawId { internal: id.0 };
        // SAFETY: room for the handle; the configuration outlives the call, which copies it.
        let status = unsafe { (self.functions.init)(&mut comm, ranks, id, rank, &mut config) };
        let answer = self.answer("ncclCommInitRankConfig", status)?;
        Ok((Handle(comm), answer))
    }

    /// How the last thing asked of a communicator is, or the error that it has had since.
    pub(super) fn state(&self, comm: Handle) -> Result<Answer, Failed> {
        let mut state = SUCCESS;
        // SAFETY: a communicator that was not given back, and room for the number.
        let status = unsafe { (self.functions.async_error)(comm.0, &mut state) };
        self.answer("ncclCommGetAsyncError", status)?;
        self.answer("ncclCommGetAsyncError", state)
    }

    /// Ends the communicator and what it does on the device. `comm` is not used after this.
    pub(super) fn abort(&self, comm: Handle) -> Result<Answer, Failed> {
        // SAFETY: a communicator that was not given back.
        let status = unsafe { (self.functions.abort)(comm.0) };
        self.answer("ncclCommAbort", status)
    }

    /// Begins to end it in order.
    pub(super) fn finalize(&self, comm: Handle) -> Result<Answer, Failed> {
        // SAFETY: a communicator that was not given back.
        let status = unsafe { (self.functions.finalize)(comm.0) };
        self.answer("ncclCommFinalize", status)
    }

    /// Gives back one that has ended in order. `comm` is not used after this.
    pub(super) fn destroy(&self, comm: Handle) -> Result<Answer, Failed> {
        // SAFETY: a communicator that was not given back.
        let status = unsafe { (self.functions.destroy)(comm.0) };
        self.answer("ncclCommDestroy", status)
    }

    /// Asks for an operation.
    ///
    /// # Safety
    /// The memory is the communicator's device's, as large as the operation says, and stays until the work is done; all
    /// ranks ask for the same in the same order; the stream is of that device.
    pub(super) unsafe fn operate(
        &self,
        comm: Handle,
        operation: &Operation,
        stream: StreamHandle<'_>,
    ) -> Result<Answer, Failed> {
        let Operation { kind, from, to, count, data_type } = *operation;
        let (from, to, stream) = (from as *const c_void, to as *mut c_void, stream.as_ptr());
        let Functions { all_reduce, all_gather, broadcast, .. } = self.functions;
        // SAFETY: the caller's word.
        let status = unsafe {
            match kind {
                Kind::AllReduce => all_reduce(from, to, count, data_type, SUM, comm.0, stream),
                Kind::AllGather => all_gather(from, to, count, data_type, comm.0, stream),
                Kind::Broadcast { root } => {
                    broadcast(from, to, count, data_type, root as c_int, comm.0, stream)
                }
            }
        };
        self.answer(kind.function(), status)
    }

    /// What this thread asks for from now on is asked for at once, by [`Nccl::group_end`].
    pub(super) fn group_start(&self) -> Result<Answer, Failed> {
        // SAFETY: takes nothing.
        self.answer("ncclGroupStart", unsafe { (self.functions.group_start)() })
    }

    pub(super) fn group_end(&self) -> Result<Answer, Failed> {
        // SAFETY: takes nothing.
        self.answer("ncclGroupEnd", unsafe { (self.functions.group_end)() })
    }

    /// An error of a rank's, with NCCL's words for it.
    pub(super) fn error(
        &self,
        failed: Failed,
        comm: Option<Handle>,
        (rank, ranks): (usize, usize),
        device: &str,
        doing: String,
    ) -> NcclError {
        let Failed { function, code } = failed;
        let text = self.words(code, comm);
        let device = device.to_owned();
        NcclError::Call { rank, ranks, device, doing, function, text, code }
    }

    /// NCCL's name of an error, and what it tells in detail of the last one.
    fn words(&self, code: Status, comm: Option<Handle>) -> String {
        let comm = comm.map_or(ptr::null_mut(), |comm| comm.0);
        // SAFETY: takes any number.
        let name = unsafe { (self.functions.error_string)(code) };
        // SAFETY: a communicator that was not given back, or null, which it ignores.
        let detail = unsafe { (self.functions.last_error)(comm) };
        // SAFETY (both): null, or a text of NCCL's that lives until this thread's next call.
        let (name, detail) = unsafe { (text(name), text(detail)) };
        let name = name.unwrap_or_else(|| "an error without a name".to_owned());
        match detail {
            Some(detail) if !detail.is_empty() => format!("{name}: {detail}"),
            _ => name,
        }
    }

    fn answer(&self, function: &'static str, status: Status) -> Result<Answer, Failed> {
        match status {
            SUCCESS => Ok(Answer::Done),
            IN_PROGRESS => Ok(Answer::InProgress),
            code => Err(Failed { function, code }),
        }
    }
}

/// A C string on one line, if it is one.
///
/// # Safety
/// Null, or a C string that lives until this has returned.
unsafe fn text(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: by the caller's word.
    let text = unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned();
    Some(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl")
            .field("file", &self.file)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl UniqueId {
    /// Of a rank that was told it.
    pub fn of_bytes(bytes: [u8; ID_BYTES]) -> UniqueId {
        UniqueId(bytes)
    }

    /// To tell it.
    pub fn to_bytes(self) -> [u8; ID_BYTES] {
        self.0
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The rest is addresses and random numbers.
        f.debug_tuple("UniqueId").finish_non_exhaustive()
    }
}
