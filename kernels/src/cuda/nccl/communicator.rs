//! One rank among others.
#![allow(unsafe_code)]

use std::{
    ffi::c_int,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use half::bf16;

use super::{
    NcclError, UniqueId,
    library::{Answer, Failed, Handle, Kind, Nccl, Operation},
    sys::{BFLOAT16, DataType, FLOAT32},
};
use crate::{
    KernelError,
    cuda::{
        DeviceSlice, DeviceSliceMut, Launcher, StreamHandle,
        device::{CudaDevice, CudaError, pause},
    },
};

/// Longest wait until NCCL has enqueued an operation. The first of a kind connects the ranks, for which all must have
/// asked for it.
const ENQUEUE_LIMIT: Duration = Duration::from_secs(60);

/// Elements that NCCL adds.
pub trait NcclElement: sealed::Sealed {}

mod sealed {
    use super::DataType;

    pub trait Sealed {
        const DATA_TYPE: DataType;
    }
}

impl NcclElement for f32 {}
impl sealed::Sealed for f32 {
    const DATA_TYPE: DataType = FLOAT32;
}
impl NcclElement for bf16 {}
impl sealed::Sealed for bf16 {
    const DATA_TYPE: DataType = BFLOAT16;
}

/// A rank's communicator. Its operations go to the stream of a [`Launcher`], in order with what is launched there, and
/// may be recorded in a graph: each replay then is an operation. A first operation of each kind outside of a graph has
/// NCCL connect the ranks and take its memory beforehand.
///
/// Any thread may [abort](NcclCommunicator::abort) it, which ends waits here and operations on the device. What those
/// have left in memory is not specified.
pub struct NcclCommunicator {
    library: Arc<Nccl>,
    device: Arc<CudaDevice>,
    rank: usize,
    ranks: usize,
    life: Mutex<Life>,
    enqueue_limit: Duration,
}

/// Its present state.
enum Life {
    /// Being made: the ranks have not met yet.
    Joining(Handle),
    Ready(Handle),
    /// Given back to NCCL, and why.
    Ended(String),
}

/// Operations that NCCL is asked for at once.
pub struct Grouped<'a> {
    communicator: &'a NcclCommunicator,
    stream: StreamHandle<'a>,
    handle: Handle,
}

impl NcclCommunicator {
    /// Begins to make a communicator of `ranks` that have the same id. Returns at once;
    /// [`wait_until_ready`](NcclCommunicator::wait_until_ready) is to follow.
    pub fn begin(
        library: &Arc<Nccl>,
        device: &Arc<CudaDevice>,
        id: &UniqueId,
        rank: usize,
        ranks: usize,
    ) -> Result<Arc<NcclCommunicator>, NcclError> {
        let (Ok(ranks_number), Ok(rank_number), true) =
            (c_int::try_from(ranks), c_int::try_from(rank), rank < ranks)
        else {
            let reason = "there is no such rank".to_owned();
            return Err(NcclError::Misuse { rank, ranks, reason });
        };
        device.make_current()?;
        let begun = library.init(ranks_number, id, rank_number);
        let (handle, answer) = begun.map_err(|failed| {
            let doing = "begin to meet the others".to_owned();
            library.error(failed, None, (rank, ranks), &label(device), doing)
        })?;
        let life = if answer == Answer::Done { Life::Ready(handle) } else { Life::Joining(handle) };
        Ok(Arc::new(NcclCommunicator {
            library: library.clone(),
            device: device.clone(),
            rank,
            ranks,
            life: Mutex::new(life),
            enqueue_limit: ENQUEUE_LIMIT,
        }))
    }

    /// Waits until all ranks have met. After `limit` the error names those of whom `missing` says, as far as the
    /// control plane knows, that they have not come; the communicator is to be aborted then, as after any other error.
    /// While operations are under way it is aborted before their memory is given back, which waits for them.
    pub fn wait_until_ready(
        &self,
        limit: Duration,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Result<(), NcclError> {
        let late = |seconds| NcclError::JoinTimeout {
            rank: self.rank,
            ranks: self.ranks,
            device: label(&self.device),
            seconds,
            missing: missing(),
            begun: false,
        };
        self.settle(limit, "meet the others", late)?;
        let mut life = self.life();
        if let Life::Joining(handle) = *life {
            *life = Life::Ready(handle);
        }
        Ok(())
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of its group.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The error that it has had since, if NCCL noticed one: of a peer, of a network, of an operation on the device.
    pub fn check(&self) -> Result<(), NcclError> {
        self.state("go on").map(drop)
    }

    /// Does what puts recorded operations into a stream, if the communicator has not ended; it does not end meanwhile.
    /// A graph that recorded its operations is replayed in here: after its end they would use what it had.
    pub fn while_it_lasts<T>(
        &self,
        enqueue: impl FnOnce() -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        let life = self.life();
        self.handle_of(&life)?;
        enqueue()
    }

    /// Ends it, and with it what it does on the device, for a reason that later calls repeat. From any thread, at any
    /// time; the first reason stays.
    pub fn abort(&self, reason: &str) {
        let mut life = self.life();
        let (Life::Joining(handle) | Life::Ready(handle)) = *life else { return };
        *life = Life::Ended(reason.to_owned());
        drop(life);
        // Without the lock: NCCL waits here for what it does on the device.
        self.give_back(handle);
    }

    /// Ends it in order, when all ranks do so and nothing of it is enqueued any more; aborts it where that takes longer
    /// than `limit` or fails. Graphs that recorded its operations are gone.
    pub fn finish(&self, limit: Duration) -> Result<(), NcclError> {
        let doing = "leave the group in order";
        let finished = self.try_finish(limit, doing);
        if let Err(error) = &finished {
            self.abort(&error.to_string());
        }
        finished
    }

    fn try_finish(&self, limit: Duration, doing: &str) -> Result<(), NcclError> {
        self.call(doing, |library, handle| library.finalize(handle))?;
        self.settle(limit, doing, |seconds| self.late(doing, seconds))?;
        let mut life = self.life();
        let handle = self.handle_of(&life)?;
        *life = Life::Ended("it has ended in order".to_owned());
        drop(life);
        let destroyed = self.library.destroy(handle);
        destroyed.map(drop).map_err(|failed| self.error(failed, None, doing))
    }

    /// Sums `from` of all ranks, element by element, into `to` of each.
    ///
    /// # Safety
    /// The memory is of this rank's device and stays until the work is done, or the graph is gone that recorded it. All
    /// ranks ask for the same operations on as many elements in the same order. A graph that recorded it is not
    /// replayed after the communicator has ended.
    pub unsafe fn all_reduce<T: NcclElement>(
        &self,
        launcher: &dyn Launcher,
        from: DeviceSlice<'_, T>,
        to: DeviceSliceMut<'_, T>,
    ) -> Result<(), KernelError> {
        // SAFETY: the caller's word.
        self.alone(launcher, |grouped| unsafe { grouped.all_reduce(from, to) })
    }

    /// Puts `from` of all ranks, which are equally long, one after another into `to` of each.
    ///
    /// # Safety
    /// As for [`NcclCommunicator::all_reduce`].
    pub unsafe fn all_gather<T: NcclElement>(
        &self,
        launcher: &dyn Launcher,
        from: DeviceSlice<'_, T>,
        to: DeviceSliceMut<'_, T>,
    ) -> Result<(), KernelError> {
        // SAFETY: the caller's word.
        self.alone(launcher, |grouped| unsafe { grouped.all_gather(from, to) })
    }

    /// Copies `from` of rank `root` into `to` of each. The others' `from` is not read, and is as long.
    ///
    /// # Safety
    /// As for [`NcclCommunicator::all_reduce`].
    pub unsafe fn broadcast<T: NcclElement>(
        &self,
        launcher: &dyn Launcher,
        root: usize,
        from: DeviceSlice<'_, T>,
        to: DeviceSliceMut<'_, T>,
    ) -> Result<(), KernelError> {
        // SAFETY: the caller's word.
        self.alone(launcher, |grouped| unsafe { grouped.broadcast(root, from, to) })
    }

    /// Asks for all operations of `body`, which does nothing else, at once; NCCL may do them together then. Broadcasts
    /// of every rank are a gather of parts that are not equally long.
    pub fn grouped(
        &self,
        launcher: &dyn Launcher,
        body: impl FnOnce(&mut Grouped<'_>) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        const DOING: &str = "enqueue several operations at once";
        let library = &self.library;
        self.ask(launcher, |grouped| {
            let refused = |failed| self.error(failed, Some(grouped.handle), DOING);
            library.group_start().map_err(refused)?;
            let asked = body(grouped);
            // In any case, or this thread would never ask for anything any more.
            let ended = library.group_end();
            asked?;
            ended.map_err(|failed| self.error(failed, Some(grouped.handle), DOING))?;
            Ok(())
        })?;
        self.enqueued(DOING)
    }

    /// One operation, without a group around it.
    fn alone(
        &self,
        launcher: &dyn Launcher,
        body: impl FnOnce(&mut Grouped<'_>) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        self.ask(launcher, body)?;
        self.enqueued("enqueue an operation")
    }

    /// Asks NCCL for something, which nobody else does meanwhile.
    fn ask(
        &self,
        launcher: &dyn Launcher,
        body: impl FnOnce(&mut Grouped<'_>) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let Some(stream) = launcher.stream() else {
            return Err(self.misuse("kernels are launched on no stream that NCCL could use"));
        };
        let (ordinal, ours) = (stream.ordinal(), self.device.facts().ordinal);
        if ordinal != ours {
            return Err(
                self.misuse(format!("its communicator is of cuda:{ours}, the stream of cuda:{ordinal}"))
            );
        }
        self.device.make_current()?;
        let life = self.life();
        let handle = self.handle_of(&life)?;
        if let Life::Joining(_) = *life {
            return Err(self.misuse("the ranks have not met yet: wait_until_ready comes first"));
        }
        body(&mut Grouped { communicator: self, stream, handle })
    }

    /// Waits until what was asked for is in its stream: what is launched there next comes after it.
    fn enqueued(&self, doing: &str) -> Result<(), KernelError> {
        Ok(self.settle(self.enqueue_limit, doing, |seconds| self.late(doing, seconds))?)
    }

    /// Asks NCCL until nothing is in progress any more, or until `limit` has passed.
    fn settle(
        &self,
        limit: Duration,
        doing: &str,
        late: impl FnOnce(u64) -> NcclError,
    ) -> Result<(), NcclError> {
        let started = Instant::now();
        while self.state(doing)? == Answer::InProgress {
            let waited = started.elapsed();
            if waited >= limit {
                return Err(late(limit.as_millis().div_ceil(1000) as u64));
            }
            pause(waited, limit - waited);
        }
        Ok(())
    }

    fn late(&self, doing: &str, seconds: u64) -> NcclError {
        let device = label(&self.device);
        NcclError::Timeout { rank: self.rank, ranks: self.ranks, device, doing: doing.to_owned(), seconds }
    }

    fn state(&self, doing: &str) -> Result<Answer, NcclError> {
        self.call(doing, |library, handle| library.state(handle))
    }

    /// Calls NCCL, which nobody else does meanwhile.
    fn call(
        &self,
        doing: &str,
        call: impl FnOnce(&Nccl, Handle) -> Result<Answer, Failed>,
    ) -> Result<Answer, NcclError> {
        let life = self.life();
        let handle = self.handle_of(&life)?;
        call(&self.library, handle).map_err(|failed| self.error(failed, Some(handle), doing))
    }

    /// NCCL keeps its words for an error no longer than the communicator.
    fn error(&self, failed: Failed, handle: Option<Handle>, doing: &str) -> NcclError {
        let place = (self.rank, self.ranks);
        self.library.error(failed, handle, place, &label(&self.device), doing.to_owned())
    }

    fn handle_of(&self, life: &Life) -> Result<Handle, NcclError> {
        match life {
            Life::Joining(handle) | Life::Ready(handle) => Ok(*handle),
            Life::Ended(reason) => {
                Err(NcclError::Ended { rank: self.rank, ranks: self.ranks, reason: reason.clone() })
            }
        }
    }

    fn misuse(&self, reason: impl Into<String>) -> KernelError {
        NcclError::Misuse { rank: self.rank, ranks: self.ranks, reason: reason.into() }.into()
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has NCCL end it, whatever state it is in.
    fn give_back(&self, handle: Handle) {
        let (rank, device) = (self.rank, label(&self.device));
        // A lost device has no current context; NCCL frees what is left on the host.
        match self.device.make_current() {
            Ok(()) | Err(CudaError::Lost { .. }) => {}
            Err(error) => tracing::warn!(rank, device, %error, "NCCL ends without its device"),
        }
        if let Err(failed) = self.library.abort(handle) {
            let Failed { function, code } = failed;
            tracing::warn!(rank, device, function, code, "NCCL could not end a communicator");
        }
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        let life = std::mem::replace(&mut *self.life(), Life::Ended("it was dropped".to_owned()));
        if let Life::Joining(handle) | Life::Ready(handle) = life {
            self.give_back(handle);
        }
    }
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NcclCommunicator { rank, ranks, device, .. } = self;
        f.debug_struct("NcclCommunicator")
            .field("rank", rank)
            .field("ranks", ranks)
            .field("device", &label(device))
            .finish_non_exhaustive()
    }
}

impl Grouped<'_> {
    /// As [`NcclCommunicator::all_reduce`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn all_reduce<T: NcclElement>(
        &mut self,
        from: DeviceSlice<'_, T>,
        mut to: DeviceSliceMut<'_, T>,
    ) -> Result<(), KernelError> {
        KernelError::check_len("ncclAllReduce", "to", to.len(), from.len())?;
        // SAFETY: lengths are checked; the rest is the caller's word.
        unsafe { self.operate(Kind::AllReduce, from, &mut to) }
    }

    /// As [`NcclCommunicator::all_gather`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn all_gather<T: NcclElement>(
        &mut self,
        from: DeviceSlice<'_, T>,
        mut to: DeviceSliceMut<'_, T>,
    ) -> Result<(), KernelError> {
        let all = from.len().saturating_mul(self.communicator.ranks);
        KernelError::check_len("ncclAllGather", "to", to.len(), all)?;
        // SAFETY: as above.
        unsafe { self.operate(Kind::AllGather, from, &mut to) }
    }

    /// As [`NcclCommunicator::broadcast`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn broadcast<T: NcclElement>(
        &mut self,
        root: usize,
        from: DeviceSlice<'_, T>,
        mut to: DeviceSliceMut<'_, T>,
    ) -> Result<(), KernelError> {
        KernelError::check_len("ncclBroadcast", "to", to.len(), from.len())?;
        KernelError::check_index("ncclBroadcast", "root", root, self.communicator.ranks)?;
        // SAFETY: as above.
        unsafe { self.operate(Kind::Broadcast { root }, from, &mut to) }
    }

    /// # Safety
    /// As for [`NcclCommunicator::all_reduce`]; `to` is as long as the operation needs.
    unsafe fn operate<T: NcclElement>(
        &mut self,
        kind: Kind,
        from: DeviceSlice<'_, T>,
        to: &mut DeviceSliceMut<'_, T>,
    ) -> Result<(), KernelError> {
        if from.is_empty() {
            return Ok(());
        }
        let operation = Operation {
            kind,
            from: from.address(),
            to: to.address(),
            count: from.len(),
            data_type: T::DATA_TYPE,
        };
        // SAFETY: the caller's word; the stream is of the communicator's device.
        let asked = unsafe { self.communicator.library.operate(self.handle, &operation, self.stream) };
        asked.map_err(|failed| {
            let doing = format!("enqueue {} elements", operation.count);
            self.communicator.error(failed, Some(self.handle), &doing)
        })?;
        Ok(())
    }
}

impl fmt::Debug for Grouped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grouped").field("communicator", self.communicator).finish_non_exhaustive()
    }
}

/// How messages call a device.
fn label(device: &CudaDevice) -> String {
    format!("cuda:{}", device.facts().ordinal)
}
