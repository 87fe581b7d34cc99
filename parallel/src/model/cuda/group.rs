//! A rank among others: where their memory is, and how a wait for one that does not come ends.
#![allow(unsafe_code)]

use std::{sync::Arc, time::Duration};

use consort_kernels::{
    KernelError,
    all_reduce::cuda::{AREA_WORDS, PeerAddresses, Peers, Stopped, Why},
    cuda::device::{CudaDevice, DeviceBuffer, HostWords},
};

use super::{super::ModelError, buffers::Buffers};
use crate::{collective::Collective, ids::Rank};

/// Longest wait for what is left of an earlier epoch.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

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
}

impl Group {
    /// Meets the other ranks.
    pub(super) fn join(
        device: &Arc<CudaDevice>,
        buffers: &mut Buffers,
        comm: &mut dyn Collective,
    ) -> Result<Group, ModelError> {
        device.synchronize("end the work of an earlier epoch", SETTLE_LIMIT).map_err(KernelError::from)?;
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
        let word = abort.clone();
        comm.on_abort(Box::new(move || word.set(0, 1)));
        Ok(Group { peers, _abort: abort })
    }

    /// Tells why what the device computed since the last call does not count, if it does not.
    pub(super) fn check(
        &self,
        device: &CudaDevice,
        area: &DeviceBuffer<u32>,
        comm: &mut dyn Collective,
        limit: Duration,
    ) -> Result<(), ModelError> {
        let mut words = vec![0; AREA_WORDS];
        device.download(area.all(), &mut words, limit)?;
        match Stopped::read(&words) {
            // Whatever happened to the group since, this rank's work was done.
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

fn refusal(reason: String) -> ModelError {
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
