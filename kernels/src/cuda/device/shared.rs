//! Memory that ranks in other processes map.

use std::{
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use super::{
    Arena, ArenaPlan, CudaDevice, CudaError,
    arena::{ArenaMemory, Memory},
    raw::SharedMemory,
};

/// Shared memory is a multiple of so many bytes on every device known, for plans that are made without one.
pub const SHARED_GRANULARITY: u64 = 2 << 20;

/// What a peer's process shares of its device's memory, as this device's kernels address it. It stays as long as this
/// does, whatever becomes of the peer: the driver keeps bytes that somebody maps.
pub struct PeerMemory {
    memory: Arc<ArenaMemory>,
}

impl ArenaPlan {
    /// Bytes of all parts so far where they are shared.
    pub fn shared_bytes(&self) -> u64 {
        self.bytes().checked_next_multiple_of(SHARED_GRANULARITY).unwrap_or(u64::MAX)
    }

    /// [`ArenaPlan::allocate`] of memory that [`Arena::export`] gives to other processes. They and this process are to
    /// agree when each of them writes there; the views of parts know nothing of the others. Kernels of other devices of
    /// this process cannot use it by its address: they map it as those of other processes do.
    pub fn allocate_shared(self, device: &Arc<CudaDevice>) -> Result<Arena, CudaError> {
        self.allocate_by(device, |bytes, doing| {
            SharedMemory::new(&device.context, bytes, doing).map(Memory::Shared)
        })
    }
}

impl Arena {
    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.memory().address()
    }

    /// A descriptor by which other processes map it as [`PeerMemory`], closed in programs that this one starts. The
    /// memory lives as long as the descriptor does, too.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        match self.memory().memory() {
            Some(Memory::Shared(memory)) => memory.export("give a descriptor of what ranks share"),
            _ => Err(self.device().misuse("memory that was not allocated to be shared has no descriptor")),
        }
    }
}

impl PeerMemory {
    /// Maps the `bytes` behind a descriptor that a peer's process has exported, all of them, for kernels of `device`,
    /// which reaches the peer's ([`CudaDevice::check_reaches`]). `whose` completes "map the memory of ...".
    pub fn map(
        device: &Arc<CudaDevice>,
        descriptor: BorrowedFd<'_>,
        bytes: u64,
        whose: &str,
    ) -> Result<PeerMemory, CudaError> {
        let doing = format!("map the memory of {whose}");
        let wanted = usize::try_from(bytes).ok().filter(|wanted| *wanted > 0);
        let wanted =
            wanted.ok_or_else(|| device.misuse(format!("could not {doing}: it has {bytes} bytes")))?;
        let memory = SharedMemory::import(&device.context, descriptor, wanted, &doing)?;
        Ok(PeerMemory { memory: ArenaMemory::keep(Some(Memory::Shared(memory)), device) })
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
}

impl fmt::Debug for PeerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerMemory").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}
