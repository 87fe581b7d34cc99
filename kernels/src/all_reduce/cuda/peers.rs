//! What a rank knows of its group: addresses, numbers, and how a wait ends.

use crate::KernelError;

/// Ranks in a group at most: `PEERS_MAX` of the kernel.
pub const PEERS_MAX: usize = 16;

/// Blocks of a launch at most: `BLOCKS_MAX` of the kernel.
pub const BLOCKS_MAX: u32 = 64;

/// Words (`u32`) of a rank's area: the kernel's `Area`. On the device, zero before the group's first launch, written by
/// all ranks.
pub const AREA_WORDS: usize = BLOCKS_MAX as usize * (PEERS_MAX + 1) + STOP_WORDS;

/// The last words of an area, which only its own rank writes: how it stopped.
pub const STOP_WORDS: usize = 4;

/// Polls until a peer is taken to be lost, unless told otherwise. A poll reads the device's own memory, in about half a
/// microsecond: half a minute, longer than it takes a peer to load its kernels.
pub const POLLS_MAX: u32 = 60_000_000;

/// When a rank's buffer may be written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// As soon as the launch has ended: the launch waits until all peers have read.
    AtOnce,
    /// When one more launch of the group has ended on this rank (a call without elements launches nothing). Saves the
    /// wait; for callers that take two buffers in turn.
    AfterNext,
}

/// The kernel's `Peers`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawPeers {
    buffers: [u64; PEERS_MAX],
    areas: [u64; PEERS_MAX],
    abort: u64,
    rank: u32,
    count: u32,
    polls_max: u32,
    last_barrier: u32,
}

/// A group as one of its ranks sees it.
#[derive(Clone, Copy, Debug)]
pub struct Peers {
    raw: RawPeers,
    capacity: usize,
    blocks: u32,
}

/// Where a rank's memory is, as this device addresses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddresses {
    /// Its buffer, f32, 16-byte aligned.
    pub buffer: u64,
    /// Its area, [`AREA_WORDS`] of `u32`.
    pub area: u64,
}

impl Peers {
    /// The group of `peers`, rank order, whose buffers hold `capacity` elements each, as `rank` sees it.
    ///
    /// `abort` is the address of a `u32` that the host can write: other than zero ends every wait of this rank.
    /// `multiprocessors` is the smallest number that a device of the group has: all ranks launch as many blocks.
    ///
    /// # Safety
    /// The addresses are as said, and stay so until the last launch with them has ended on every rank. All ranks launch
    /// the same operations with the same shapes in the same order, one at a time on each device. Nobody writes to a
    /// buffer before [`Reuse`] allows it.
    pub unsafe fn new(
        rank: usize,
        peers: &[PeerAddresses],
        capacity: usize,
        abort: u64,
        multiprocessors: u32,
    ) -> Result<Peers, KernelError> {
        let refused = |reason: String| Err(KernelError::Unsupported { operation: "all_reduce", reason });
        if peers.is_empty() || peers.len() > PEERS_MAX {
            return refused(format!("{} ranks in a group of peers, which has 1 to {PEERS_MAX}", peers.len()));
        }
        KernelError::check_index("all_reduce", "rank", rank, peers.len())?;
        if let Some(at) = peers.iter().position(|peer| peer.buffer % 16 != 0 || peer.area % 4 != 0) {
            return refused(format!("the buffer or area of rank {at} is not aligned, to 16 and 4 bytes"));
        }
        if abort == 0 || !abort.is_multiple_of(4) {
            return refused(format!("an abort word at {abort:#x}, where no u32 can be"));
        }
        if capacity > u32::MAX as usize {
            return refused(format!("buffers of {capacity} elements, more than {}", u32::MAX));
        }
        if multiprocessors == 0 {
            return refused("a group whose devices have no multiprocessors".to_owned());
        }
        let mut raw = RawPeers {
            buffers: [0; PEERS_MAX],
            areas: [0; PEERS_MAX],
            abort,
            rank: rank as u32,
            count: peers.len() as u32,
            polls_max: POLLS_MAX,
            last_barrier: 1,
        };
        for (at, peer) in peers.iter().enumerate() {
            raw.buffers[at] = peer.buffer;
            raw.areas[at] = peer.area;
        }
        Ok(Peers { raw, capacity, blocks: multiprocessors.min(BLOCKS_MAX) })
    }

    /// With another limit than [`POLLS_MAX`].
    pub fn with_polls_max(mut self, polls_max: u32) -> Peers {
        self.raw.polls_max = polls_max;
        self
    }

    /// With another promise than [`Reuse::AtOnce`]. All ranks give the same.
    pub fn with_reuse(mut self, reuse: Reuse) -> Peers {
        self.raw.last_barrier = u32::from(reuse == Reuse::AtOnce);
        self
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.raw.rank as usize
    }

    /// Ranks.
    pub fn count(&self) -> usize {
        self.raw.count as usize
    }

    /// Elements that each buffer holds.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Blocks that may meet those of other ranks.
    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The bytes of the kernel's parameter.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let RawPeers { buffers, areas, abort, rank, count, polls_max, last_barrier } = self.raw;
        let addresses = buffers.into_iter().chain(areas).chain([abort]).flat_map(u64::to_ne_bytes);
        let numbers = [rank, count, polls_max, last_barrier].into_iter().flat_map(u32::to_ne_bytes);
        addresses.chain(numbers).collect()
    }
}

// No padding: the bytes are those of the fields.
const _: () = assert!(size_of::<RawPeers>() == (2 * PEERS_MAX + 1) * 8 + 4 * 4);

/// Why a rank stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its abort word was set.
    Aborted,
    /// A peer did not come within the limit of polls.
    PeerLate,
}

/// How a rank stopped. Until the areas of all ranks are zeroed, its later launches leave at once. They are zeroed while
/// no rank has a launch under way or enqueued: one that writes its number into a zeroed area would count as arrived for
/// as many barriers. What the group computed counts only if none of its ranks has stopped: a rank that has not may have
/// read what a stopped one no longer kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// The reason.
    pub why: Why,
    /// The block that stopped first.
    pub block: u32,
    /// The barrier at which it waited.
    pub barrier: u32,
    /// The rank for which it waited.
    pub peer: u32,
}

impl Stopped {
    /// What an area (copied from the device when no launch of the rank is under way) says: `None` when the rank has not
    /// stopped. Panics when it is not an area's length.
    pub fn read(area: &[u32]) -> Option<Stopped> {
        assert_eq!(area.len(), AREA_WORDS, "an area");
        Stopped::of_words(*area.last_chunk().expect("an area ends with these words"))
    }

    /// The same of an area's last words alone, which may be copied as soon as the rank's own launches have ended.
    pub fn of_words([why, block, barrier, peer]: [u32; STOP_WORDS]) -> Option<Stopped> {
        let why = match why {
            0 => return None,
            1 => Why::Aborted,
            _ => Why::PeerLate,
        };
        Some(Stopped { why, block, barrier, peer })
    }
}
