//! Storage of keys and values: one pool of equal-sized pages per rank, read through block tables.
//!
//! A [`BlockId`] names the same page in every layer and on every rank. Which block belongs to whom is the
//! scheduler's knowledge; here is only memory.

use consort_kernels::{
    DType, KernelError, buffer::Buffer, device::Device, element::bf16, kv_append::PageShape, linear::Kernels,
};

use crate::ids::BlockId;

#[cfg(test)]
mod tests;

/// Shape of one rank's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Pages of one layer.
    pub pages: PageShape,
    /// Layers.
    pub num_layers: usize,
    /// Storage type.
    pub dtype: DType,
}

impl KvLayout {
    /// Bytes of one block over all layers of this rank.
    pub fn block_bytes(&self) -> u64 {
        (self.pages.page_elements() * self.num_layers * self.dtype.bytes()) as u64
    }
}

/// One rank's pages.
pub struct KvStore {
    layout: KvLayout,
    blocks: usize,
    pages: Pages,
}

enum Pages {
    F32(Buffer<f32>),
    Bf16(Buffer<bf16>),
}

/// Storage types of keys and values.
pub trait KvElement: Kernels {
    /// The pool, when it holds this type.
    fn of(store: &mut KvStore) -> Option<&mut Buffer<Self>>;
}

impl KvElement for f32 {
    fn of(store: &mut KvStore) -> Option<&mut Buffer<f32>> {
        match &mut store.pages {
            Pages::F32(buffer) => Some(buffer),
            Pages::Bf16(_) => None,
        }
    }
}

impl KvElement for bf16 {
    fn of(store: &mut KvStore) -> Option<&mut Buffer<bf16>> {
        match &mut store.pages {
            Pages::Bf16(buffer) => Some(buffer),
            Pages::F32(_) => None,
        }
    }
}

impl KvStore {
    /// `blocks` zeroed blocks on `device`. Memory is taken from the system when a block is first written.
    pub fn new(device: &Device, layout: KvLayout, blocks: usize) -> Result<KvStore, KernelError> {
        let elements = layout
            .pages
            .page_elements()
            .checked_mul(layout.num_layers)
            .and_then(|elements| elements.checked_mul(blocks))
            .ok_or_else(|| KernelError::Unsupported {
                operation: "kv store",
                reason: format!("{blocks} blocks of {} bytes overflow", layout.block_bytes()),
            })?;
        let pages = match layout.dtype {
            DType::F32 => Pages::F32(Buffer::zeros(device, elements, "the KV cache")?),
            DType::BF16 => Pages::Bf16(Buffer::zeros(device, elements, "the KV cache")?),
        };
        Ok(KvStore { layout, blocks, pages })
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

    /// All pages of one layer. The pool must hold `T`.
    pub(crate) fn layer_mut<T: KvElement>(&mut self, layer: usize) -> Result<KvLayer<'_, T>, KernelError> {
        let held = self.layout.dtype;
        let elements = self.layout.pages.page_elements() * self.blocks;
        let buffer = T::of(self).ok_or_else(|| KernelError::Unsupported {
            operation: "kv store",
            reason: format!("it holds {held}, the model computes with {}", T::DTYPE),
        })?;
        Ok(KvLayer { buffer, range: layer * elements..(layer + 1) * elements })
    }

    /// Copies all layers of one block over another's.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), KernelError> {
        let in_pool = |block: BlockId| {
            if block.index() < self.blocks {
                return Ok(());
            }
            let (got, limit) = (block.index(), self.blocks);
            Err(KernelError::OutOfRange { operation: "copy_block", what: "block", got, limit })
        };
        in_pool(from)?;
        in_pool(to)?;
        let (elements, layers, blocks) =
            (self.layout.pages.page_elements(), self.layout.num_layers, self.blocks);
        match &mut self.pages {
            Pages::F32(buffer) => copy_in_layers(buffer.as_mut_slice(), elements, layers, blocks, from, to),
            Pages::Bf16(buffer) => copy_in_layers(buffer.as_mut_slice(), elements, layers, blocks, from, to),
        }
        Ok(())
    }
}

/// One layer's part of the pool.
pub(crate) struct KvLayer<'a, T> {
    pub(crate) buffer: &'a mut Buffer<T>,
    pub(crate) range: std::ops::Range<usize>,
}

fn copy_in_layers<T: Copy>(
    pool: &mut [T],
    page: usize,
    layers: usize,
    blocks: usize,
    from: BlockId,
    to: BlockId,
) {
    for layer in 0..layers {
        let (from, to) = ((layer * blocks + from.index()) * page, (layer * blocks + to.index()) * page);
        pool.copy_within(from..from + page, to);
    }
}
