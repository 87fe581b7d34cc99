//! A rank among others: where their memory is, what it sums with, and how a wait for one that does not come ends.

use std::{sync::Arc, time::Duration};

use consort_kernels::{
    KernelError,
    all_reduce::cuda::{AREA_WORDS, STOP_WORDS, Stopped, Why},
    cuda::{
        DeviceSlice,
        device::{CudaDevice, CudaError, DeviceBuffer, HostWords},
    },
};

use super::{
    super::ModelError,
    arenas::Arenas,
    buffers::Buffers,
    meeting::{self, Mapped, Met},
    sums::{Meeting, Sums, Wishes},
};
use crate::{
    collective::{AbortHandle, Collective, SharedWork, WorkUnderWay},
    ids::Rank,
};

/// Longest wait for what is left of an earlier epoch.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
/// The same for a device that was late already.
const LATE_SETTLE_LIMIT: Duration = Duration::from_secs(2);

/// The present life of the group; nothing of an earlier one.
pub(super) struct Group {
    pub(super) sums: Arc<Sums>,
    /// Memory of other processes at whose addresses the peers are.
    _mapped: Mapped,
    /// Kernels of this rank leave their waits when it is set.
    abort: Arc<HostWords>,
    abort_handle: AbortHandle,
    work: SharedWork,
    /// While the device may touch the others' memory.
    under_way: Option<WorkUnderWay>,
}

impl Group {
    /// Meets the other ranks; the device has nothing left to do. `limit` is for the others, and for the device's first
    /// sums.
    pub(super) fn join(
        device: &Arc<CudaDevice>,
        buffers: &mut Buffers,
        arenas: &Arenas,
        (wishes, limit): (Wishes, Duration),
        comm: &mut dyn Collective,
    ) -> Result<Group, ModelError> {
        let abort = Arc::new(HostWords::new(device, 1).map_err(KernelError::from)?);
        let met = meeting::meet(device, buffers, arenas, (wishes, abort.address(0)), comm)?;
        let Met { peers, mapped, agreement } = met;
        // The group may keep the notice for longer than the device lives.
        let word = Arc::downgrade(&abort);
        let leave = move || {
            if let Some(word) = word.upgrade() {
                word.set(0, 1);
            }
        };
        comm.on_abort(Box::new(leave.clone()));
        let meeting = Meeting { device, buffers, comm: &mut *comm, leave: Box::new(leave), limit };
        let sums = Arc::new(Sums::join(agreement, peers, meeting)?);
        Ok(Group {
            sums,
            _mapped: mapped,
            abort,
            abort_handle: comm.abort_handle(),
            work: comm.shared_work(),
            under_way: None,
        })
    }

    /// Before work is enqueued that touches the others' memory.
    pub(super) fn begin(&mut self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        if self.under_way.is_some() {
            return Ok(());
        }
        self.under_way = self.work.begin();
        if self.under_way.is_some() {
            self.sums.begins();
            return Ok(());
        }
        // The group is aborted, and says why.
        comm.barrier()?;
        Err(refusal("a group that takes no more work".to_owned()))
    }

    /// When a step has ended, and another one that was enqueued behind it goes on.
    pub(super) fn goes_on(&self) {
        self.sums.begins();
    }

    /// When all that was enqueued has ended.
    pub(super) fn end(&mut self) {
        self.sums.ended();
        self.under_way = None;
    }

    /// Before the first launch of a step. What a driver does to make or destroy a graph may wait for peers' devices: so
    /// all ranks have done it before the device of any waits for the others'.
    ///
    /// That holds with a step under way, too: a rank that makes a graph for the next step has launched the one under
    /// way, and so has every other rank, or it would not have come through the meeting before it. So what the driver
    /// may wait for ends by itself. And no rank launches the next step before all have made their graphs for it.
    pub(super) fn meet(&self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        Ok(comm.barrier()?)
    }

    /// For a rank that could not join: nobody shall touch its memory, whose address the others may know.
    pub(super) fn give_up(device: &CudaDevice, comm: &mut dyn Collective) {
        comm.abort_handle().abort(&format!("{} could not join", comm.rank()));
        if !comm.shared_work().close_and_wait(SETTLE_LIMIT) {
            device.abandon("a peer's work in this rank's memory to end");
        }
    }

    /// This rank is done with this life of the group: its device waits for nobody any more. Notices of an abort end
    /// with the rank's place, which may be gone before they were given.
    pub(super) fn call_off(&self) {
        self.abort.set(0, 1);
        self.sums.call_off();
    }

    /// Before this rank's memory is given back: nobody shall touch it any more. False if somebody may. `forget` drops
    /// what was recorded with what the rank sums with.
    pub(super) fn leave(mut self, device: &CudaDevice, forget: impl FnOnce()) -> bool {
        self.abort_handle.abort("a rank gives its device's memory back");
        self.call_off();
        let limit = if device.is_late() { LATE_SETTLE_LIMIT } else { SETTLE_LIMIT };
        // One that is lost does nothing any more.
        if let Err(CudaError::Timeout { .. }) = device.synchronize("end its part of a group's work", limit) {
            // It may go on in the others' memory, which they keep for it.
            if let Some(work) = self.under_way.take() {
                work.strand();
            }
            return false;
        }
        self.end();
        forget();
        self.work.close_and_wait(SETTLE_LIMIT)
    }

    /// Before a rank that lives on uses its memory in another epoch: nobody shall touch it from this one any more. Its
    /// own device has ended its work, and nothing recorded is left. False if somebody may.
    pub(super) fn ends(mut self) -> bool {
        self.end();
        self.work.close_and_wait(SETTLE_LIMIT)
    }

    /// Waits for the device's work, and tells why what it computed since the last call does not count, if it does not.
    pub(super) fn check(
        &mut self,
        device: &CudaDevice,
        area: &DeviceBuffer<u32>,
        comm: &mut dyn Collective,
        limit: Duration,
    ) -> Result<(), ModelError> {
        let mut words = [0; STOP_WORDS];
        device.download(stop_words(area), &mut words, limit)?;
        self.end();
        self.judge(words, comm)
    }

    /// Tells from a rank's stop words, read when its work had ended, why that does not count, if it does not.
    pub(super) fn judge(
        &self,
        words: [u32; STOP_WORDS],
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        if let Some(failure) = self.sums.failure() {
            return Err(failure);
        }
        match Stopped::of_words(words) {
            // Whatever happened to the group since, this rank's kernels were done. Where a peer has stopped, what it
            // left may be wrong: a step counts only if every rank gives its result, and that one gives none.
            None => return self.sums.check(comm),
            Some(Stopped { why: Why::PeerLate, peer, .. }) => {
                let (rank, late) = (comm.rank(), Rank(peer as u16));
                comm.abort_handle().abort(&format!("{rank} waited in vain for {late} on its device"));
            }
            _ => {}
        }
        // The group is aborted, and says why.
        comm.barrier()?;
        Err(refusal("the device's work was stopped, and the group was not aborted".to_owned()))
    }
}

/// The words of an area that only its own rank writes; the others may be at work in the rest.
pub(super) fn stop_words(area: &DeviceBuffer<u32>) -> DeviceSlice<'_, u32> {
    area.slice(AREA_WORDS - STOP_WORDS..AREA_WORDS)
}

pub(super) fn refusal(reason: String) -> ModelError {
    KernelError::Unsupported { operation: "meeting of ranks", reason }.into()
}
