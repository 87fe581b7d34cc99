//! What of a GPU's memory is not the model's: named, with reasons.
//!
//! They count where nobody has looked at the card. A card that was looked at says itself what is free, with its driver
//! and its context taken off.

const MIB: u64 = 1 << 20;

/// What the driver keeps of the memory that it reports: `nvidia-smi -q` shows 551 MiB of an H100's 81,559 as reserved,
/// 770 of an A100's 81,920.
pub const DRIVER_BYTES: u64 = 768 * MIB;
/// A process's context: page tables, the stack of every thread that can run, printf's queue. Some 300 to 500 MiB on
/// cards with more than a hundred multiprocessors.
pub const CONTEXT_BYTES: u64 = 512 * MIB;
/// Kernels and their libraries' code, loaded when first used, and recorded graphs.
pub const LIBRARIES_BYTES: u64 = 256 * MIB;
/// Buffers of a communicator in a group of several ranks: rings and trees over NVLink or PCIe.
pub const NCCL_BYTES: u64 = 512 * MIB;

/// What is set aside on one card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reserves {
    /// See [`DRIVER_BYTES`].
    pub driver_bytes: u64,
    /// See [`CONTEXT_BYTES`].
    pub context_bytes: u64,
    /// See [`LIBRARIES_BYTES`].
    pub libraries_bytes: u64,
    /// See [`NCCL_BYTES`].
    pub nccl_bytes: u64,
}

impl Reserves {
    /// Those of a card that nobody has looked at, in a group of so many ranks.
    pub fn assumed(ranks: usize) -> Reserves {
        Reserves {
            driver_bytes: DRIVER_BYTES,
            context_bytes: CONTEXT_BYTES,
            libraries_bytes: LIBRARIES_BYTES,
            nccl_bytes: if ranks > 1 { NCCL_BYTES } else { 0 },
        }
    }

    /// All of them.
    pub fn total_bytes(&self) -> u64 {
        self.driver_bytes + self.context_bytes + self.libraries_bytes + self.nccl_bytes
    }
}
