//! Keys and values of new tokens written into their pages, and the layout of a page.
//!
//! Row `i` of `keys` and `values` (heads within wider rows, f32) goes to slot `slots[i] = page · block_size + offset`,
//! rounded to `T`. A page of one layer holds, per KV head, keys then values in the pairs that attention reads:
//! keys `[tokens / 16][dims / 2][16 tokens x 2 dims]`, values `[dims / 16][tokens / 2][16 dims x 2 tokens]`. Pages of
//! one layer follow each other, or lie among those of other layers (`[blocks][layers]`), so that a block is one stretch
//! of memory.

mod cpu;
mod reference;
#[cfg(test)]
mod tests;

pub use reference::kv_append as kv_append_reference;

use crate::{
    Element, KernelError,
    buffer::{Plain, View, ViewMut},
    device::Device,
    rope::Heads,
};

/// Shape of one layer's pages on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    block_size: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Pages from one of a layer to its next.
    layers: usize,
}

impl PageShape {
    /// Checks what the kernels ask of a page.
    pub fn new(block_size: usize, kv_heads: usize, head_dim: usize) -> Result<PageShape, KernelError> {
        let refuse = |reason: String| Err(KernelError::Unsupported { operation: "kv pages", reason });
        if block_size == 0 || !block_size.is_multiple_of(16) {
            return refuse(format!("block_size {block_size} is not a positive multiple of 16"));
        }
        if head_dim == 0 || head_dim > HEAD_DIM_MAX || !head_dim.is_multiple_of(2) {
            return refuse(format!("head_dim {head_dim} is not an even number up to {HEAD_DIM_MAX}"));
        }
        let elements = block_size
            .checked_mul(head_dim.next_multiple_of(16))
            .and_then(|half| half.checked_mul(2)?.checked_mul(kv_heads));
        if elements.is_none() {
            return refuse(format!("{block_size} tokens of {kv_heads} heads of {head_dim} overflow"));
        }
        Ok(PageShape { block_size, kv_heads, head_dim, layers: 1 })
    }

    /// The same pages of one layer where those of `layers` layers lie side by side, block after block: the next page of
    /// a layer is so many pages on.
    pub fn among(self, layers: usize) -> PageShape {
        PageShape { layers: layers.max(1), ..self }
    }

    /// Tokens of a page; a multiple of 16.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// KV heads of this rank.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Head width rounded up to whole vectors.
    pub(crate) fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(16)
    }

    /// Elements of keys (or of values) of one head in one page.
    pub(crate) fn half_elements(&self) -> usize {
        self.block_size * self.padded_dim()
    }

    /// Elements of one page of one layer.
    pub fn page_elements(&self) -> usize {
        2 * self.kv_heads * self.half_elements()
    }

    /// Where a page of the layer begins, counted from its first page's begin.
    pub(crate) fn page_start(&self, page: usize) -> usize {
        page * self.layers * self.page_elements()
    }

    /// Pages of the layer in `elements` that begin with its first page.
    pub(crate) fn pages_in(&self, elements: usize) -> usize {
        let page = self.page_elements();
        match elements.checked_sub(page) {
            Some(behind) if page > 0 => behind / (self.layers * page) + 1,
            _ => 0,
        }
    }

    /// Refuses pages that lie among those of other layers.
    pub(crate) fn require_dense(&self, operation: &'static str) -> Result<(), KernelError> {
        if self.layers == 1 {
            return Ok(());
        }
        let reason = "the pages of a layer have to follow each other".to_owned();
        Err(KernelError::Unsupported { operation, reason })
    }

    /// Offset in a head's keys of dimension `dim` of the token at `offset`.
    pub(crate) fn key_at<T: Element>(&self, offset: usize, dim: usize) -> usize {
        (offset / 16 * (self.padded_dim() / 2) + dim / 2) * 32 + T::pair_offset(offset % 16, dim % 2)
    }

    /// Offset in a head's values of dimension `dim` of the token at `offset`.
    pub(crate) fn value_at<T: Element>(&self, offset: usize, dim: usize) -> usize {
        (dim / 16 * (self.block_size / 2) + offset / 2) * 32 + T::pair_offset(dim % 16, offset % 2)
    }
}

/// Widest head that the attention kernels hold in their scratch.
pub const HEAD_DIM_MAX: usize = 256;

/// Writes new keys and values; see the module. `x` holds both: `keys` and `values` say in which columns.
pub fn kv_append<T: Element + Plain>(
    device: &Device,
    x: View<'_, f32>,
    keys: Heads,
    values: Heads,
    slots: &[u32],
    shape: PageShape,
    pages: ViewMut<'_, T>,
) -> Result<(), KernelError> {
    for heads in [keys, values] {
        KernelError::check_len("kv_append", "rows", heads.rows("kv_append", x.len())?, slots.len())?;
        KernelError::check_len("kv_append", "heads", heads.count, shape.kv_heads)?;
        KernelError::check_len("kv_append", "head", heads.dim, shape.head_dim)?;
    }
    let capacity = shape.pages_in(pages.len()) * shape.block_size;
    for &slot in slots {
        KernelError::check_index("kv_append", "slot", slot as usize, capacity)?;
    }
    let cpu = device.require_cpu("kv_append")?;
    cpu::kv_append(cpu, x.host(), [keys, values], slots, shape, pages.host_mut());
    Ok(())
}
