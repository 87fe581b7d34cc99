//! Storage of keys and values: one pool of equal-sized pages per rank, read through block tables.
//!
//! A [`BlockId`] names a page: some tokens' keys and values in all layers of one of the model's [groups](KvGroups), the
//! same page on every rank. Which page belongs to whom, and to which group, is the scheduler's knowledge; here is only
//! memory: `[pages][layers of a page][page of one layer]` in a host's, where a short sequence shall touch little of it,
//! `[layers of a page][pages][page of one layer]` in a device's. Callers see no address of it: pages may be a device's,
//! and then only kernels touch them.

mod cuda;
mod groups;
mod host;
mod offload;
#[cfg(test)]
mod tests;

use consort_kernels::{
    DType, KernelError, cuda::device::DeviceBuffer, device::Device, element::bf16, kv_append::PageShape,
    kv_copy::cuda::check_copies,
};

pub use self::groups::{KV_GROUPS_MAX, KvGroups, KvPlace};
pub(crate) use self::host::{KvElement, KvLayer};
use self::offload::OffloadPool;
use self::{cuda::DevicePages, host::HostPages};
use crate::ids::BlockId;

/// Shape of one rank's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Pages of one layer.
    pub pages: PageShape,
    /// Layers whose keys and values a page holds.
    pub layers_per_page: usize,
    /// Groups of layers: pages that a block of tokens takes, and block tables of a sequence.
    pub groups: usize,
    /// Storage type.
    pub dtype: DType,
}

impl KvLayout {
    /// The pages of one layer as they lie in host memory, from the layer's first.
    pub(crate) fn host_pages(&self) -> PageShape {
        self.pages.among(self.layers_per_page)
    }

    /// Bytes of one block on this rank, over all layers of its page.
    pub fn block_bytes(&self) -> u64 {
        (self.pages.page_elements() * self.layers_per_page * self.dtype.bytes()) as u64
    }
}

/// One rank's pages, in the memory of its device.
pub struct KvStore {
    layout: KvLayout,
    blocks: usize,
    /// Before the pages that it reads and writes, so that it ends before they do.
    offload: Option<OffloadPool>,
    pages: Pages,
}

/// Where the pages are.
enum Pages {
    Host(HostPages),
    Device(DevicePages),
}

impl KvStore {
    /// `blocks` zeroed blocks on `device`. On a CPU, memory is taken from the system when a block is first written.
    pub fn new(device: &Device, layout: KvLayout, blocks: usize) -> Result<KvStore, KernelError> {
        let pages = match device {
            Device::Cpu(_) => Pages::Host(HostPages::new(device, &layout, blocks)?),
            Device::Cuda(device) => Pages::Device(DevicePages::new(device, &layout, blocks)?),
            other => {
                let reason = format!("no pages can be had on {other:?}");
                return Err(KernelError::Unsupported { operation: "kv store", reason });
            }
        };
        Ok(KvStore { layout, blocks, offload: None, pages })
    }

    /// Shape of the pages.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Blocks in the pool.
    pub fn num_blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes of the pool.
    pub fn bytes(&self) -> u64 {
        self.layout.block_bytes() * self.blocks as u64
    }

    /// Copies whole blocks over others, each pair `(from, to)`. All pairs happen at once: a block that one
    /// of them writes may be in no other, and nothing is copied where one is refused.
    pub fn copy_blocks(&mut self, copies: &[(BlockId, BlockId)]) -> Result<(), KernelError> {
        let pairs: Vec<(u32, u32)> = copies.iter().map(|(from, to)| (from.0, to.0)).collect();
        check_copies(&pairs, self.blocks)?;
        match &mut self.pages {
            Pages::Host(pages) => pages.copy(copies, &self.layout),
            Pages::Device(pages) => pages.copy(copies, &self.layout)?,
        }
        Ok(())
    }

    /// One slot of all pages in host memory: one layer of each group. The pool must be there, and hold `T`.
    pub(crate) fn slot_mut<T: KvElement>(&mut self, slot: usize) -> Result<KvLayer<'_, T>, KernelError> {
        match &mut self.pages {
            Pages::Host(pages) => pages.slot_mut(slot, &self.layout),
            Pages::Device(_) => Err(elsewhere("a CUDA device", "the host")),
        }
    }

    /// All pages in device memory, slot after slot. The pool must be there.
    pub(crate) fn device_pages_mut(&mut self) -> Result<&mut DeviceBuffer<bf16>, KernelError> {
        match &mut self.pages {
            Pages::Device(pages) => Ok(pages.pool_mut()),
            Pages::Host(_) => Err(elsewhere("the host", "a CUDA device")),
        }
    }
}

fn elsewhere(pages: &str, model: &str) -> KernelError {
    let reason = format!("the pages are in {pages}'s memory, the model computes in that of {model}");
    KernelError::Unsupported { operation: "kv store", reason }
}
