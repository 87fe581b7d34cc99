//! A rank among others: where their memory is, and how a wait for one that does not come ends.
#![allow(unsafe_code)]

use std::{sync::Arc, time::Duration};

use consort_kernels::{
    KernelError,
    all_reduce::cuda::{AREA_WORDS, PeerAddresses, Peers, STOP_WORDS, Stopped, Why},
    cuda::{
        DeviceSlice,
        device::{CudaDevice, CudaError, DeviceBuffer, HostWords},
    },
};

use super::{super::ModelError, buffers::Buffers};
use crate::{
    collective::{AbortHandle, Collective, SharedWork, WorkUnderWay},
    ids::Rank,
};

/// Longest wait for what is left of an earlier epoch.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
/// The same for a device that was late already.
const LATE_SETTLE_LIMIT: Duration = Duration::from_secs(2);

/// What a rank tells the others when they meet.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Introduction {
    /// Addresses mean the same only within one process.
    process: u32,
    ordinal: u32,
    multiprocessors: u32,
    capacity: u64,
    buffer: u64,
    area: u64,
}

const INTRODUCTION_BYTES: usize = 36;

/// The present life of the group; nothing of an earlier one.
pub(super) struct Group {
    pub(super) peers: Peers,
    /// Kernels of this rank leave their waits when it is set.
    _abort: Arc<HostWords>,
    abort_handle: AbortHandle,
    work: SharedWork,
    /// While the device may touch the others' memory.
    under_way: Option<WorkUnderWay>,
}

impl Group {
    /// Meets the other ranks; the device has nothing left to do.
    pub(super) fn join(
        device: &Arc<CudaDevice>,
        buffers: &mut Buffers,
        comm: &mut dyn Collective,
    ) -> Result<Group, ModelError> {
        // Nobody writes to an area any more once all ranks have come here, and to none before all are zeroed.
        comm.barrier()?;
        device.zero(buffers.area.all_mut())?;
        device.synchronize("zero what ranks meet in", SETTLE_LIMIT).map_err(KernelError::from)?;
        let abort = Arc::new(HostWords::new(device, 1).map_err(KernelError::from)?);
        let mine = Introduction {
            process: std::process::id(),
            ordinal: device.facts().ordinal,
            multiprocessors: device.facts().multiprocessors,
            capacity: buffers.exchange.len() as u64,
            buffer: buffers.exchange.address(),
            area: buffers.area.address(),
        };
        let met = comm.exchange(&mine.to_bytes())?;
        let met = met.iter().map(|bytes| Introduction::of_bytes(bytes)).collect::<Option<Vec<_>>>();
        let met = met.ok_or_else(|| refusal("a rank introduced itself with something else".to_owned()))?;
        for peer in &met {
            if peer.process != mine.process {
                let (process, ours) = (peer.process, mine.process);
                return Err(refusal(format!(
                    "a rank in process {process} cannot share memory with one in process {ours}"
                )));
            }
            device.reach(peer.ordinal).map_err(KernelError::from)?;
        }
        let addresses: Vec<PeerAddresses> =
            met.iter().map(|peer| PeerAddresses { buffer: peer.buffer, area: peer.area }).collect();
        let capacity = met.iter().map(|peer| peer.capacity).min().unwrap_or(0);
        let multiprocessors = met.iter().map(|peer| peer.multiprocessors).min().unwrap_or(0);
        let rank = comm.rank().index();
        // SAFETY: all ranks are in this process, each rank's buffers live until its model is dropped, which waits for
        // the device; a rank that ends aborts the group first, and kernels that wait for it leave. Every rank launches
        // the same operations in the same order, since all get the same steps.
        let peers =
            unsafe { Peers::new(rank, &addresses, capacity as usize, abort.address(0), multiprocessors)? };
        // The group may keep the notice for longer than the device lives.
        let word = Arc::downgrade(&abort);
        comm.on_abort(Box::new(move || {
            if let Some(word) = word.upgrade() {
                word.set(0, 1);
            }
        }));
        Ok(Group {
            peers,
            _abort: abort,
            abort_handle: comm.abort_handle(),
            work: comm.shared_work(),
            under_way: None,
        })
    }

    /// Before work is enqueued that touches the others' memory.
    pub(super) fn begin(&mut self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        if self.under_way.is_none() {
            self.under_way = self.work.begin();
        }
        if self.under_way.is_some() {
            return Ok(());
        }
        // The group is aborted, and says why.
        comm.barrier()?;
        Err(refusal("a group that takes no more work".to_owned()))
    }

    /// When all that was enqueued has ended.
    pub(super) fn end(&mut self) {
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

    /// Before this rank's memory is given back: nobody shall touch it any more. False if somebody may.
    pub(super) fn leave(mut self, device: &CudaDevice) -> bool {
        self.abort_handle.abort("a rank gives its device's memory back");
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
        self.work.close_and_wait(SETTLE_LIMIT)
    }

    /// Before a rank that lives on uses its memory in another epoch: nobody shall touch it from this one any more. Its
    /// own device has ended its work. False if somebody may.
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
        match Stopped::of_words(words) {
            // Whatever happened to the group since, this rank's work was done. Where a peer has stopped, what it left
            // may be wrong: a step counts only if every rank gives its result, and that one gives none.
            None => return Ok(()),
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

impl Introduction {
    fn to_bytes(self) -> Vec<u8> {
        let Introduction { process, ordinal, multiprocessors, capacity, buffer, area } = self;
        let short = [process, ordinal, multiprocessors].into_iter().flat_map(u32::to_le_bytes);
        short.chain([capacity, buffer, area].into_iter().flat_map(u64::to_le_bytes)).collect()
    }

    fn of_bytes(bytes: &[u8]) -> Option<Introduction> {
        let bytes: &[u8; INTRODUCTION_BYTES] = bytes.try_into().ok()?;
        let short = |at: usize| bytes[at..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let long = |at: usize| bytes[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        Some(Introduction {
            process: short(0)?,
            ordinal: short(4)?,
            multiprocessors: short(8)?,
            capacity: long(12)?,
            buffer: long(20)?,
            area: long(28)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_understand_each_others_introductions_and_nothing_else() {
        let introduction = Introduction {
            process: 7,
            ordinal: 2,
            multiprocessors: 132,
            capacity: 1 << 40,
            buffer: 0x7f00_0000_1000,
            area: u64::MAX,
        };
        let bytes = introduction.to_bytes();
        assert_eq!(Introduction::of_bytes(&bytes), Some(introduction));
        assert_eq!(Introduction::of_bytes(&bytes[1..]), None);
        assert_eq!(Introduction::of_bytes(&[&bytes[..], &[0]].concat()), None);
    }
}
