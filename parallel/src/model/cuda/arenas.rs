//! The memory of a rank: one arena, and for ranks in processes of their own a second one, of what the others map.

use std::sync::Arc;

use consort_kernels::cuda::device::{Arena, ArenaPlan, CudaDevice, CudaError};

use crate::model::{AllReduce, LoadOptions};

/// What a rank needs, before anything is taken.
pub(super) struct Plans {
    /// What nobody else touches, and where no other process does, everything.
    pub(super) own: ArenaPlan,
    shared: Option<ArenaPlan>,
}

/// The memory that was taken for it.
pub(super) struct Arenas {
    pub(super) own: Arena,
    shared: Option<Arena>,
}

impl Plans {
    /// Nothing yet, of one of `ranks`.
    pub(super) fn new(ranks: usize, options: &LoadOptions) -> Plans {
        // NCCL has its own ways between processes.
        let is_shared = options.separate_processes && ranks > 1 && options.all_reduce != AllReduce::Nccl;
        Plans { own: ArenaPlan::new(), shared: is_shared.then(ArenaPlan::new) }
    }

    /// Where that is reserved which ranks touch of each other's memory.
    pub(super) fn met(&mut self) -> &mut ArenaPlan {
        self.shared.as_mut().unwrap_or(&mut self.own)
    }

    /// Bytes of all, as they are taken.
    pub(super) fn bytes(&self) -> u64 {
        self.own.bytes().saturating_add(self.shared.as_ref().map_or(0, ArenaPlan::shared_bytes))
    }

    /// Takes all of it.
    pub(super) fn allocate(self, device: &Arc<CudaDevice>) -> Result<Arenas, CudaError> {
        let shared = self.shared.map(|shared| shared.allocate_shared(device)).transpose()?;
        Ok(Arenas { own: self.own.allocate(device)?, shared })
    }
}

impl Arenas {
    /// What other ranks touch, and where no other process does, everything.
    pub(super) fn met(&self) -> &Arena {
        self.shared.as_ref().unwrap_or(&self.own)
    }

    /// What other processes map.
    pub(super) fn shared(&self) -> Option<&Arena> {
        self.shared.as_ref()
    }

    /// Bytes of all.
    pub(super) fn bytes(&self) -> u64 {
        self.own.bytes() + self.shared.as_ref().map_or(0, Arena::bytes)
    }
}
