//! How ranks learn where each other's memory is: by address within one process, by mapping it where each has its own.
#![allow(unsafe_code)]

use std::{os::fd::AsFd, sync::Arc, time::Duration};

use consort_kernels::{
    KernelError,
    all_reduce::cuda::{AREA_WORDS, PeerAddresses, Peers},
    cuda::device::{CudaDevice, PeerMemory, Uuid},
};

use super::{super::ModelError, arenas::Arenas, buffers::Buffers, group::refusal};
use crate::{collective::Collective, ids::Rank};

/// Longest wait for what is left of an earlier epoch.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

/// What a rank tells the others when they meet.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Introduction {
    /// Addresses mean the same only within one process.
    process: u32,
    multiprocessors: u32,
    /// Numbers of devices may differ between processes.
    device: [u8; 16],
    /// Elements of the buffer.
    capacity: u64,
    /// Bytes of the memory in which both are, for processes that map it; 0 where there is none.
    shared_bytes: u64,
    /// Where the buffer is, and the area: addresses, or places in the shared memory.
    buffer: u64,
    area: u64,
}

const INTRODUCTION_BYTES: usize = 56;

/// Memory of the others that this process maps, which must stay as long as kernels may use its addresses.
pub(super) struct Mapped {
    _memories: Vec<PeerMemory>,
}

/// Meets the other ranks; the device has nothing left to do. `abort` is the address of a word that ends this rank's
/// waits.
pub(super) fn meet(
    device: &Arc<CudaDevice>,
    buffers: &mut Buffers,
    arenas: &Arenas,
    abort: u64,
    comm: &mut dyn Collective,
) -> Result<(Peers, Mapped), ModelError> {
    // Nobody writes to an area any more once all ranks have come here, and to none before all are zeroed. The process
    // of a rank that was killed, and with it whatever its device still did, has ended before its successor is started,
    // without whom not all come here.
    comm.barrier()?;
    device.zero(buffers.area.all_mut())?;
    device.synchronize("zero what ranks meet in", SETTLE_LIMIT).map_err(KernelError::from)?;
    let mine = introduction(device, buffers, arenas);
    let met = comm.exchange(&mine.to_bytes())?;
    let met = met.iter().map(|bytes| Introduction::of_bytes(bytes)).collect::<Option<Vec<_>>>();
    let met = met.ok_or_else(|| refusal("a rank introduced itself with something else".to_owned()))?;
    check(&met, &mine)?;
    let own = PeerAddresses { buffer: buffers.exchange.address(), area: buffers.area.address() };
    let (addresses, memories) = if mine.shared_bytes > 0 {
        map(device, arenas, &met, own, comm)?
    } else {
        for peer in &met {
            device.reach(Uuid(peer.device)).map_err(KernelError::from)?;
        }
        let address = |peer: &Introduction| PeerAddresses { buffer: peer.buffer, area: peer.area };
        (met.iter().map(address).collect(), Vec::new())
    };
    let capacity = met.iter().map(|peer| peer.capacity).min().unwrap_or(0);
    let multiprocessors = met.iter().map(|peer| peer.multiprocessors).min().unwrap_or(0);
    let rank = comm.rank().index();
    // SAFETY: the addresses are of every rank's buffers, which hold `capacity` elements at least. Within one process
    // they live until the rank's model is dropped, which waits for the device; a rank that ends aborts the group first,
    // and kernels that wait for it leave. Of other processes they are mapped here, in memory that is there until
    // `memories` are dropped, whatever becomes of the process that made it; the group drops them when its device's work
    // has ended. What a process that was killed has left there is only ever a wrong number: a step counts if all ranks
    // give its result. Every rank launches the same operations in the same order, since all get the same steps.
    let peers = unsafe { Peers::new(rank, &addresses, capacity as usize, abort, multiprocessors)? };
    Ok((peers, Mapped { _memories: memories }))
}

fn introduction(device: &CudaDevice, buffers: &Buffers, arenas: &Arenas) -> Introduction {
    // Within the shared memory addresses become places.
    let (shared_bytes, start) = arenas.shared().map_or((0, 0), |shared| (shared.bytes(), shared.address()));
    Introduction {
        process: std::process::id(),
        multiprocessors: device.facts().multiprocessors,
        device: device.facts().uuid.0,
        capacity: buffers.exchange.len() as u64,
        shared_bytes,
        buffer: buffers.exchange.address() - start,
        area: buffers.area.address() - start,
    }
}

/// Whether ranks that introduced themselves so can meet.
fn check(met: &[Introduction], mine: &Introduction) -> Result<(), ModelError> {
    for (rank, peer) in (0..).map(Rank).zip(met) {
        if (peer.shared_bytes > 0) != (mine.shared_bytes > 0) {
            let reason = "ranks that share memory between processes cannot meet ranks that do not";
            return Err(refusal(format!("{reason}: {rank} was loaded in another way")));
        }
        if peer.shared_bytes == 0 && peer.process != mine.process {
            let (process, ours) = (peer.process, mine.process);
            return Err(refusal(format!(
                "a rank in process {process} cannot share memory with one in process {ours}"
            )));
        }
        let ends =
            |start: u64, elements: u64| elements.checked_mul(4).and_then(|bytes| start.checked_add(bytes));
        let is_within = |end: Option<u64>| end.is_some_and(|end| end <= peer.shared_bytes);
        let (buffer, area) = (ends(peer.buffer, peer.capacity), ends(peer.area, AREA_WORDS as u64));
        if peer.shared_bytes > 0 && !(is_within(buffer) && is_within(area)) {
            return Err(refusal(format!("{rank} introduced itself with places beyond its memory")));
        }
    }
    Ok(())
}

/// Gives this rank's memory to the others and maps theirs: the addresses of all, and what is to be held for them.
fn map(
    device: &Arc<CudaDevice>,
    arenas: &Arenas,
    met: &[Introduction],
    own: PeerAddresses,
    comm: &mut dyn Collective,
) -> Result<(Vec<PeerAddresses>, Vec<PeerMemory>), ModelError> {
    let shared = arenas.shared().ok_or_else(|| refusal("a rank has no memory to share".to_owned()))?;
    let mine = shared.export().map_err(KernelError::from)?;
    let theirs = comm.exchange_descriptors(&[mine.as_fd()])?;
    let (mut addresses, mut memories) = (Vec::with_capacity(met.len()), Vec::with_capacity(met.len()));
    for ((rank, peer), descriptors) in (0..).map(Rank).zip(met).zip(&theirs) {
        if rank == comm.rank() {
            addresses.push(own);
            continue;
        }
        let [descriptor] = &descriptors[..] else {
            let count = descriptors.len();
            return Err(refusal(format!("{rank} gave {count} descriptors for its one piece of memory")));
        };
        device.check_reaches(Uuid(peer.device)).map_err(KernelError::from)?;
        let memory = PeerMemory::map(device, descriptor.as_fd(), peer.shared_bytes, &rank.to_string());
        let memory = memory.map_err(KernelError::from)?;
        let start = memory.address();
        addresses.push(PeerAddresses { buffer: start + peer.buffer, area: start + peer.area });
        memories.push(memory);
    }
    Ok((addresses, memories))
}

impl Introduction {
    fn to_bytes(self) -> Vec<u8> {
        let Introduction { process, multiprocessors, device, capacity, shared_bytes, buffer, area } = self;
        let short = [process, multiprocessors].into_iter().flat_map(u32::to_le_bytes);
        let long = [capacity, shared_bytes, buffer, area].into_iter().flat_map(u64::to_le_bytes);
        short.chain(device).chain(long).collect()
    }

    fn of_bytes(bytes: &[u8]) -> Option<Introduction> {
        let bytes: &[u8; INTRODUCTION_BYTES] = bytes.try_into().ok()?;
        let short = |at: usize| bytes[at..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let long = |at: usize| bytes[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        Some(Introduction {
            process: short(0)?,
            multiprocessors: short(4)?,
            device: *bytes[8..].first_chunk()?,
            capacity: long(24)?,
            shared_bytes: long(32)?,
            buffer: long(40)?,
            area: long(48)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introduction() -> Introduction {
        Introduction {
            process: 7,
            multiprocessors: 132,
            device: [3; 16],
            capacity: 1 << 10,
            shared_bytes: 2 << 20,
            buffer: 256,
            area: 1 << 20,
        }
    }

    #[test]
    fn ranks_understand_each_others_introductions_and_nothing_else() {
        let introduction = Introduction { area: u64::MAX, ..introduction() };
        let bytes = introduction.to_bytes();
        assert_eq!(Introduction::of_bytes(&bytes), Some(introduction));
        assert_eq!(Introduction::of_bytes(&bytes[1..]), None);
        assert_eq!(Introduction::of_bytes(&[&bytes[..], &[0]].concat()), None);
    }

    #[test]
    fn ranks_that_cannot_meet_are_refused_by_name() {
        let refused = |mine: Introduction, peer: Introduction| {
            check(&[mine, peer], &mine).map_err(|error| error.to_string()).err().unwrap_or_default()
        };
        let shared = introduction();
        let alone = Introduction { shared_bytes: 0, ..shared };
        assert_eq!(refused(shared, Introduction { process: 8, device: [4; 16], ..shared }), "");
        assert_eq!(refused(alone, Introduction { buffer: u64::MAX, ..alone }), "", "addresses are anything");
        for (mine, peer) in [(shared, alone), (alone, shared)] {
            assert!(refused(mine, peer).contains("rank 1 was loaded in another way"));
        }
        let elsewhere = refused(alone, Introduction { process: 8, ..alone });
        assert!(elsewhere.contains("in process 8 cannot share memory with one in process 7"), "{elsewhere}");
        for peer in [
            Introduction { capacity: u64::MAX, ..shared },
            Introduction { capacity: (2 << 18) + 1, ..shared },
            Introduction { buffer: u64::MAX, ..shared },
            Introduction { area: (2 << 20) - 4, ..shared },
        ] {
            assert!(
                refused(shared, peer).contains("rank 1 introduced itself with places beyond"),
                "{peer:?}"
            );
        }
    }
}
