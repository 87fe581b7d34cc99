//! Pages in host memory: where CPU kernels read and write them.

use std::ops::Range;

use consort_kernels::{DType, KernelError, buffer::Buffer, device::Device, element::bf16, linear::Kernels};

use super::KvLayout;
use crate::ids::BlockId;

/// `[blocks][layers of a page][page]`, of the layout's type. The system gives memory in stretches of megabytes: a block
/// is one piece of such a stretch, so that a short sequence takes one and not one for each layer.
pub(crate) enum HostPages {
    F32(Buffer<f32>),
    Bf16(Buffer<bf16>),
}

/// Storage types of keys and values.
pub(crate) trait KvElement: Kernels {
    /// The pool, when it holds this type.
    fn of(pages: &mut HostPages) -> Option<&mut Buffer<Self>>;
}

impl KvElement for f32 {
    fn of(pages: &mut HostPages) -> Option<&mut Buffer<f32>> {
        match pages {
            HostPages::F32(buffer) => Some(buffer),
            HostPages::Bf16(_) => None,
        }
    }
}

impl KvElement for bf16 {
    fn of(pages: &mut HostPages) -> Option<&mut Buffer<bf16>> {
        match pages {
            HostPages::Bf16(buffer) => Some(buffer),
            HostPages::F32(_) => None,
        }
    }
}

/// One slot's part of the pool: from its first page to its last, with those of other slots between them.
pub(crate) struct KvLayer<'a, T> {
    pub(crate) buffer: &'a mut Buffer<T>,
    pub(crate) range: Range<usize>,
}

impl HostPages {
    pub(super) fn new(device: &Device, layout: &KvLayout, blocks: usize) -> Result<HostPages, KernelError> {
        let elements = layout
            .pages
            .page_elements()
            .checked_mul(layout.layers_per_page)
            .and_then(|elements| elements.checked_mul(blocks))
            .ok_or_else(|| KernelError::Unsupported {
                operation: "kv store",
                reason: format!("{blocks} blocks of {} bytes overflow", layout.block_bytes()),
            })?;
        Ok(match layout.dtype {
            DType::F32 => HostPages::F32(Buffer::zeros(device, elements, "the KV cache")?),
            DType::BF16 => HostPages::Bf16(Buffer::zeros(device, elements, "the KV cache")?),
        })
    }

    /// Copies blocks `(from, to)` of checked numbers from another pool.
    pub(super) fn copy_from(
        &mut self,
        source: &HostPages,
        pairs: impl Iterator<Item = (usize, usize)>,
        layout: &KvLayout,
    ) {
        let parts = pairs.map(|(from, to)| (layout.block_elements(from), layout.block_elements(to)));
        match (self, source) {
            (HostPages::F32(to), HostPages::F32(from)) => {
                copy_parts(from.as_slice(), to.as_mut_slice(), parts)
            }
            (HostPages::Bf16(to), HostPages::Bf16(from)) => {
                copy_parts(from.as_slice(), to.as_mut_slice(), parts);
            }
            _ => unreachable!("both pools are of the layout's type"),
        }
    }

    pub(super) fn slot_mut<T: KvElement>(
        &mut self,
        slot: usize,
        layout: &KvLayout,
    ) -> Result<KvLayer<'_, T>, KernelError> {
        let page = layout.pages.page_elements();
        let buffer = T::of(self).ok_or_else(|| KernelError::Unsupported {
            operation: "kv store",
            reason: format!("it holds {}, the model computes with {}", layout.dtype, T::DTYPE),
        })?;
        // Behind the last page of the slot are those of later slots.
        let end = buffer.len().saturating_sub((layout.layers_per_page - 1 - slot) * page);
        Ok(KvLayer { buffer, range: (slot * page).min(end)..end })
    }

    /// Copies blocks of checked numbers.
    pub(super) fn copy(&mut self, copies: &[(BlockId, BlockId)], layout: &KvLayout) {
        for &(from, to) in copies {
            let (from, to) = (layout.block_elements(from.index()), layout.block_elements(to.index()).start);
            match self {
                HostPages::F32(buffer) => buffer.as_mut_slice().copy_within(from, to),
                HostPages::Bf16(buffer) => buffer.as_mut_slice().copy_within(from, to),
            }
        }
    }
}

impl KvLayout {
    /// Where a block is in host memory.
    fn block_elements(&self, block: usize) -> Range<usize> {
        let elements = self.pages.page_elements() * self.layers_per_page;
        block * elements..(block + 1) * elements
    }
}

fn copy_parts<T: Copy>(from: &[T], to: &mut [T], parts: impl Iterator<Item = (Range<usize>, Range<usize>)>) {
    parts.for_each(|(source, target)| to[target].copy_from_slice(&from[source]));
}
