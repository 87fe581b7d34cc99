//! The host's pool of a store: copies of pages that the device may give up.
//!
//! Where pages are in host memory, the pool is more of the same, and a transfer is done when it is ordered: it costs
//! the time of copying the pages. On a CUDA device the pool is page-locked memory, and the copy stream moves pages
//! while the compute stream goes on.

use std::{collections::BTreeSet, time::Duration};

use consort_kernels::{KernelError, cuda::device::PageOffload, device::Device};

use super::{KvStore, Pages, host::HostPages};
use crate::ids::{BlockId, HostBlock};

const OPERATION: &str = "host pool of the KV store";

/// Pages beside those of the store.
pub(super) struct OffloadPool {
    blocks: usize,
    memory: Memory,
}

enum Memory {
    Host(HostPages),
    Device(PageOffload),
}

impl KvStore {
    /// The store with a pool of `blocks` pages in host memory beside its own, for [`KvStore::transfer`]. `device` is
    /// the store's. On a CPU, memory is taken from the system when a page is first written; for a CUDA device all of it
    /// is page-locked now.
    pub fn with_host_pool(mut self, device: &Device, blocks: usize) -> Result<KvStore, KernelError> {
        if blocks == 0 {
            return Ok(self);
        }
        let memory = match (&self.pages, device) {
            (Pages::Host(_), Device::Cpu(_)) => Memory::Host(HostPages::new(device, &self.layout, blocks)?),
            (Pages::Device(_), Device::Cuda(device)) => {
                let part_bytes = self.layout.pages.page_elements() * self.layout.dtype.bytes();
                let parts = self.layout.layers_per_page;
                Memory::Device(PageOffload::new(device, blocks, parts, part_bytes)?)
            }
            (_, other) => {
                let reason = format!("the pages are not in the memory of {other:?}");
                return Err(KernelError::Unsupported { operation: OPERATION, reason });
            }
        };
        self.offload = Some(OffloadPool { blocks, memory });
        Ok(self)
    }

    /// Pages of the host's pool.
    pub fn host_blocks(&self) -> usize {
        self.offload.as_ref().map_or(0, |offload| offload.blocks)
    }

    /// Begins to copy pages to the host's pool and from it, all at once, after everything that was ordered before.
    /// Until the batch is done nobody writes what it reads, nor touches what it writes; a page that one copy writes is
    /// in no other. `batch` is greater than that of any call before. Nothing is copied where a page is refused.
    pub fn transfer(
        &mut self,
        batch: u64,
        saves: &[(BlockId, HostBlock)],
        loads: &[(HostBlock, BlockId)],
    ) -> Result<(), KernelError> {
        if saves.is_empty() && loads.is_empty() {
            return Ok(());
        }
        check_transfers(saves, loads, self.blocks, self.host_blocks())?;
        let Some(OffloadPool { memory, .. }) = &mut self.offload else { return Ok(()) };
        match (memory, &mut self.pages) {
            (Memory::Host(host), Pages::Host(pages)) => {
                let out = saves.iter().map(|(from, to)| (from.index(), to.index()));
                host.copy_from(pages, out, &self.layout);
                let back = loads.iter().map(|(from, to)| (from.index(), to.index()));
                pages.copy_from(host, back, &self.layout);
                Ok(())
            }
            (Memory::Device(host), Pages::Device(pages)) => {
                let out: Vec<_> = saves.iter().map(|(from, to)| (from.index(), to.index())).collect();
                let back: Vec<_> = loads.iter().map(|(from, to)| (from.index(), to.index())).collect();
                host.transfer(batch, &out, &back, pages.pool_mut().all_mut())
            }
            _ => unreachable!("the host's pool was made for these pages"),
        }
    }

    /// The oldest batch that is not done. Waits for nothing.
    pub fn pending_transfer(&mut self) -> Result<Option<u64>, KernelError> {
        match &mut self.offload {
            Some(OffloadPool { memory: Memory::Device(host), .. }) => host.pending(),
            _ => Ok(None),
        }
    }

    /// Waits for every batch, no longer than `limit`.
    pub fn finish_transfers(&mut self, limit: Duration) -> Result<(), KernelError> {
        match &mut self.offload {
            Some(OffloadPool { memory: Memory::Device(host), .. }) => host.finish(limit),
            _ => Ok(()),
        }
    }
}

fn refused(reason: String) -> KernelError {
    KernelError::Unsupported { operation: OPERATION, reason }
}

/// Refuses pages that a pool lacks, and copies whose outcome would depend on their order.
fn check_transfers(
    saves: &[(BlockId, HostBlock)],
    loads: &[(HostBlock, BlockId)],
    blocks: usize,
    host_blocks: usize,
) -> Result<(), KernelError> {
    let (mut written, mut written_host) = (BTreeSet::new(), BTreeSet::new());
    let pages = saves.iter().map(|(from, to)| (from, to)).chain(loads.iter().map(|(from, to)| (to, from)));
    for (page, host) in pages {
        if page.index() >= blocks {
            return Err(refused(format!("page {} does not exist; there are {blocks}", page.0)));
        }
        if host.index() >= host_blocks {
            return Err(refused(format!("host page {} does not exist; there are {host_blocks}", host.0)));
        }
    }
    let twice = |what| refused(format!("{what} is written, and used by another copy of the same step"));
    for (_, to) in saves {
        if !written_host.insert(to) {
            return Err(twice(format!("host page {}", to.0)));
        }
    }
    for (from, to) in loads {
        if !written.insert(to) {
            return Err(twice(format!("page {}", to.0)));
        }
        if written_host.contains(from) {
            return Err(twice(format!("host page {}", from.0)));
        }
    }
    match saves.iter().find(|(from, _)| written.contains(from)) {
        Some((from, _)) => Err(twice(format!("page {}", from.0))),
        None => Ok(()),
    }
}
