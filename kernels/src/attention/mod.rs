//! Causal attention of new tokens over paged keys and values: prefill chunks and decodes in one call.
//!
//! | argument | shape |
//! |---|---|
//! | `queries` | heads within `[rows, stride]`, f32, rounded to `T` on the way in |
//! | `cache.pages` | one layer's pages (layout in [`crate::kv_append`]), this step's keys and values included |
//! | `cache.spans` | rows of each sequence with its context length and its part of `cache.tables` |
//! | `out` | `[rows, query heads · head_dim]`, `T`, in panels (see [`crate::linear::Rows`]) |
//!
//! Query head `j` reads KV head `kv_of_query[j]`. The row at position `p` sees keys `0..=p`, with a sliding window of
//! `w` the last `w` of them: keys `k` with `p - w < k <= p`.
//!
//! **Same bits in any company.** Keys are taken in chunks of 256 aligned to absolute positions. A chunk's scores are
//! sums as in [`crate::linear`]; its maximum `m`, weights `p = 2^(s - m)`, their sum `l` and output `o = Σ round(p)·v`
//! (sums like those of scores, but over blocks of 16 keys) stand alone, and chunks are merged left to right. Weights
//! that are rounded to BF16 are within 3e-6 of that power before, and at least 2^-50. So a row's result does not depend
//! on how its prompt was cut, which rows share its batch, or how many threads work. Slots that a row does not see never
//! reach its result, not even as a product with zero: neither what a former owner of a page left there, nor an infinity
//! in a later row or before the window. Pages of which a span's rows see no key are not read: any may stand in their
//! place in the table. A row that sees a score of NaN or plus infinity is NaN.

mod cpu;
pub mod cuda;
mod lanes;
mod reference;
mod state;
#[cfg(test)]
mod tests;
mod tiles;

use std::{num::NonZeroUsize, ops::Range};

pub use reference::attention as attention_reference;

use crate::{
    KernelError,
    buffer::View,
    device::Device,
    kv_append::PageShape,
    linear::{Kernels, RowsMut},
    rope::Heads,
};

/// Keys whose scores are exponentiated against one maximum. The more, the less often states are merged: that, and not
/// the products, was most of a prefill's attention at 32.
const CHUNK: usize = 256;
/// Keys whose weighted values are summed in one pair of chains: as many as the smallest page holds.
const BLOCK_KEYS: usize = 16;

/// One sequence's rows in a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagedSpan {
    /// Its rows of `queries`, at consecutive positions that end with `context_len - 1`.
    pub rows: Range<usize>,
    /// Keys the last row sees.
    pub context_len: usize,
    /// Its block table within `tables`.
    pub table: Range<usize>,
}

/// What the rows of a call read.
#[derive(Clone, Copy, Debug)]
pub struct PagedCache<'a, T> {
    /// One layer's pages, from its first to its last.
    pub pages: View<'a, T>,
    /// Block tables of all spans.
    pub tables: &'a [u32],
    /// Rows, contexts and tables of the sequences; rows cover the call in order.
    pub spans: &'a [PagedSpan],
}

/// What does not change from step to step.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionShape {
    /// Layout of the pages.
    pub pages: PageShape,
    /// For each query head of this rank, the KV head it reads; ascending.
    pub kv_of_query: Vec<usize>,
    /// Factor of the scores before the softmax.
    pub scale: f32,
    /// Keys that a row sees, its own included; all before it where there is no window.
    pub window: Option<NonZeroUsize>,
}

/// Attends; see the module.
pub fn attention<T: Kernels>(
    device: &Device,
    queries: View<'_, f32>,
    heads: Heads,
    shape: &AttentionShape,
    cache: PagedCache<'_, T>,
    out: RowsMut<'_, T>,
) -> Result<(), KernelError> {
    let PagedCache { pages, tables, spans } = cache;
    let rows = heads.rows("attention", queries.len())?;
    KernelError::check_len("attention", "query heads", heads.count, shape.kv_of_query.len())?;
    KernelError::check_len("attention", "query head", heads.dim, shape.pages.head_dim())?;
    KernelError::check_len("attention", "rows of out", out.rows(), rows)?;
    KernelError::check_len("attention", "columns of out", out.inputs(), heads.count * heads.dim)?;
    for &kv in &shape.kv_of_query {
        KernelError::check_index("attention", "KV head", kv, shape.pages.kv_heads())?;
    }
    check_spans(shape, spans, rows, tables, pages.len())?;
    let cpu = device.require_cpu("attention")?;
    let call = cpu::Call { queries: queries.host(), heads, shape, pages: pages.host(), tables, spans };
    cpu::attention(cpu, &call, out);
    Ok(())
}

fn check_spans(
    shape: &AttentionShape,
    spans: &[PagedSpan],
    rows: usize,
    tables: &[u32],
    elements: usize,
) -> Result<(), KernelError> {
    let count = shape.pages.pages_in(elements);
    let mut next = 0;
    for span in spans {
        KernelError::check_len("attention", "first row of a span", span.rows.start, next)?;
        KernelError::check_index("attention", "first row of a span", span.rows.start, span.rows.end + 1)?;
        KernelError::check_index("attention", "start of a table", span.table.start, span.table.end + 1)?;
        next = span.rows.end;
        KernelError::check_index("attention", "row of a span", span.rows.len(), span.context_len + 1)?;
        KernelError::check_index("attention", "block table entry", span.table.end, tables.len() + 1)?;
        let needed = span.context_len.div_ceil(shape.pages.block_size());
        KernelError::check_index("attention", "key block", needed, span.table.len() + 1)?;
        for &page in &tables[span.table.clone()][..needed] {
            KernelError::check_index("attention", "page", page as usize, count)?;
        }
    }
    KernelError::check_len("attention", "spans", next, rows)
}
