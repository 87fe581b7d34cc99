//! Pages in host memory: where CPU kernels read and write them.

use std::ops::Range;

use consort_kernels::{DType, KernelError, buffer::Buffer, device::Device, element::bf16, linear::Kernels};

use super::KvLayout;
use crate::ids::BlockId;

/// `[layers of a page][blocks][page]`, of the layout's type.
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

/// One slot's part of the pool.
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

    /// Copies pages `(from, to)` of checked numbers from another pool. Pools have so many blocks.
    pub(super) fn copy_from(
        &mut self,
        blocks: usize,
        source: &HostPages,
        source_blocks: usize,
        pairs: impl Iterator<Item = (usize, usize)> + Clone,
        layout: &KvLayout,
    ) {
        let page = layout.pages.page_elements();
        let parts = (0..layout.layers_per_page).flat_map(|slot| {
            pairs.clone().map(move |(from, to)| {
                let (from, to) = ((slot * source_blocks + from) * page, (slot * blocks + to) * page);
                (from..from + page, to..to + page)
            })
        });
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
        blocks: usize,
    ) -> Result<KvLayer<'_, T>, KernelError> {
        let elements = layout.pages.page_elements() * blocks;
        let buffer = T::of(self).ok_or_else(|| KernelError::Unsupported {
            operation: "kv store",
            reason: format!("it holds {}, the model computes with {}", layout.dtype, T::DTYPE),
        })?;
        Ok(KvLayer { buffer, range: slot * elements..(slot + 1) * elements })
    }

    /// Copies pages of checked numbers, in every slot.
    pub(super) fn copy(&mut self, copies: &[(BlockId, BlockId)], layout: &KvLayout, blocks: usize) {
        let page = layout.pages.page_elements();
        for &(from, to) in copies {
            for slot in 0..layout.layers_per_page {
                let of = |block: BlockId| (slot * blocks + block.index()) * page;
                let (from, to) = (of(from)..of(from) + page, of(to));
                match self {
                    HostPages::F32(buffer) => buffer.as_mut_slice().copy_within(from, to),
                    HostPages::Bf16(buffer) => buffer.as_mut_slice().copy_within(from, to),
                }
            }
        }
    }
}

fn copy_parts<T: Copy>(from: &[T], to: &mut [T], parts: impl Iterator<Item = (Range<usize>, Range<usize>)>) {
    parts.for_each(|(source, target)| to[target].copy_from_slice(&from[source]));
}
