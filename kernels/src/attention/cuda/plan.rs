//! What a step's launches read besides tensors, made and checked on the host once for all layers.

mod frame;

use std::{num::NonZeroUsize, ops::Range};

pub use frame::Frame;

use super::{
    super::{AttentionShape, PagedSpan, check_spans},
    Class,
};
use crate::{KernelError, kv_append::PageShape};

/// Which keys' sums stand alone until they are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunks {
    /// Decodes: as many chunks as keep all multiprocessors busy, so that their number, and with it the last bits of a
    /// row, depends on the batch. Prefills: one.
    Fill {
        /// Of the device.
        multiprocessors: u32,
    },
    /// So many keys, a multiple of [`CHUNK_UNIT`], in decodes and prefills alike: a row's bits depend neither on its
    /// batch nor on how its prompt was cut, nor on whether it was decoded or filled in again.
    Fixed(NonZeroUsize),
}

/// Chunks end on multiples of so many keys: whole tiles of every kernel.
pub const CHUNK_UNIT: usize = 64;

/// Longest chunk that is chosen: kernels add it to a context in 32 bits.
const CHUNK_MAX: usize = 1 << 30;

/// Blocks of a decode kernel that fit on a multiprocessor at once, as its launch bounds in `decode.cu` promise.
fn blocks_per_multiprocessor(pages: PageShape) -> usize {
    if pages.padded_dim() > 128 { 2 } else { 3 }
}

/// Query heads that a decode block takes: the rows of one matrix tile.
pub(super) const DECODE_ROWS: usize = 16;

/// Sequences in one launch, as many as a grid's third dimension takes.
const SEQUENCES_MAX: usize = 65_535;

/// One step's sequences as the kernels read them.
///
/// [`numbers`](Plan::numbers) are copied to the device before the launches:
///
/// | part | numbers |
/// |---|---|
/// | spans of decodes, then of prefills | 4 each: first row, rows, context, start of its block table |
/// | first partial of each decode | 1 each, in `chunks · query heads` of the workspace; padded to an even count |
/// | tiles of prefills, the longest first | 2 each: span, tile within it |
/// | groups | KV heads + 1: the first query head of each |
/// | block tables | as they came |
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) pages: PageShape,
    pub(super) page_count: usize,
    pub(super) kv_of_query: Vec<usize>,
    pub(super) rows: usize,
    numbers: Vec<u32>,
    /// Numbers that the device has room for: of a framed plan more than there are.
    numbers_room: usize,
    pub(super) decodes: usize,
    /// Decodes whose partial sums are in the workspace at the same time.
    pub(super) passes: Vec<Range<usize>>,
    pub(super) prefill_tiles: usize,
    pub(super) first_partials_at: usize,
    pub(super) tiles_at: usize,
    pub(super) groups_at: usize,
    pub(super) tables_at: usize,
    /// Tiles of decode rows that the largest group takes.
    pub(super) row_tiles: usize,
    /// Keys of a chunk of a decode, and how many chunks the longest has.
    pub(super) decode_chunk: usize,
    pub(super) decode_chunks: usize,
    /// Keys of a chunk of a prefill, where one has several.
    pub(super) prefill_chunk: Option<usize>,
    /// Of the largest pass.
    pub(super) partials: usize,
}

impl Plan {
    /// Plans attention of `rows` rows over the first `page_count` pages. `shape` may be of any layer: its window and
    /// scale are not read.
    pub fn new(
        shape: &AttentionShape,
        chunks: Chunks,
        spans: &[PagedSpan],
        rows: usize,
        tables: &[u32],
        page_count: usize,
    ) -> Result<Plan, KernelError> {
        Plan::within(usize::MAX, shape, chunks, spans, rows, tables, page_count)
    }

    /// The same in a workspace of so many floats: decodes whose partial sums do not all fit take turns, which does not
    /// show in their bits. What one of them needs must be there.
    pub fn within(
        workspace_floats: usize,
        shape: &AttentionShape,
        chunks: Chunks,
        spans: &[PagedSpan],
        rows: usize,
        tables: &[u32],
        page_count: usize,
    ) -> Result<Plan, KernelError> {
        let pages = shape.pages;
        check_heads(shape)?;
        check_spans(shape, spans, rows, tables, page_count.saturating_mul(pages.page_elements()))?;
        let (decodes, prefills): (Vec<&PagedSpan>, Vec<&PagedSpan>) =
            spans.iter().filter(|span| !span.rows.is_empty()).partition(|span| span.rows.len() == 1);
        KernelError::check_index("attention", "number of sequences", spans.len(), SEQUENCES_MAX + 1)?;
        let groups = group_bounds(shape);
        let largest_group = groups.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        let row_tiles = largest_group.div_ceil(DECODE_ROWS);
        let keys = decodes.iter().map(|span| span.context_len).sum();
        let decode_chunk = decode_chunk(chunks, pages, keys, pages.kv_heads() * row_tiles)?;
        let decode_chunks =
            decodes.iter().map(|span| span.context_len.div_ceil(decode_chunk)).max().unwrap_or(0);
        let prefill_chunk = match chunks {
            Chunks::Fixed(chunk) if prefills.iter().any(|span| span.context_len > chunk.get()) => {
                Some(chunk.get())
            }
            _ => None,
        };

        let partials_max = workspace_floats / floats_of_partial(shape).max(1);
        let mut plan = Plan {
            pages,
            page_count,
            kv_of_query: shape.kv_of_query.clone(),
            rows,
            numbers: Vec::new(),
            numbers_room: 0,
            decodes: decodes.len(),
            passes: Vec::new(),
            prefill_tiles: 0,
            first_partials_at: 0,
            tiles_at: 0,
            groups_at: 0,
            tables_at: 0,
            row_tiles,
            decode_chunk,
            decode_chunks,
            prefill_chunk,
            partials: 0,
        };
        plan.push_spans(decodes.iter().chain(&prefills).copied())?;
        plan.push_first_partials(&decodes, partials_max)?;
        plan.push_tiles(&prefills, largest_group)?;
        plan.groups_at = plan.numbers.len();
        plan.push(groups)?;
        plan.tables_at = plan.numbers.len();
        plan.numbers.extend_from_slice(tables);
        plan.numbers_room = plan.numbers.len();
        Ok(plan)
    }

    /// What the device needs of it.
    pub fn numbers(&self) -> &[u32] {
        &self.numbers
    }

    /// Length of the device's copy: that of [`numbers`](Plan::numbers), or of a [`Frame`]'s, of which they fill the
    /// beginning.
    pub fn numbers_room(&self) -> usize {
        self.numbers_room
    }

    /// Floats of workspace that its launches need.
    pub fn workspace_floats(&self) -> usize {
        self.partials * floats_of_partial_of(self.kv_of_query.len(), self.pages)
    }

    fn push(&mut self, numbers: impl IntoIterator<Item = usize>) -> Result<(), KernelError> {
        for number in numbers {
            let number = u32::try_from(number).map_err(|_| KernelError::OutOfRange {
                operation: "attention",
                what: "a number of the plan",
                got: number,
                limit: u32::MAX as usize + 1,
            })?;
            self.numbers.push(number);
        }
        Ok(())
    }

    fn push_spans<'a>(&mut self, spans: impl Iterator<Item = &'a PagedSpan>) -> Result<(), KernelError> {
        for span in spans {
            // Kernels add a chunk to a context.
            let context_max = (u32::MAX / 2) as usize;
            KernelError::check_index("attention", "context", span.context_len, context_max)?;
            self.push([span.rows.start, span.rows.len(), span.context_len, span.table.start])?;
        }
        Ok(())
    }

    fn push_first_partials(
        &mut self,
        decodes: &[&PagedSpan],
        partials_max: usize,
    ) -> Result<(), KernelError> {
        self.first_partials_at = self.numbers.len();
        let (mut first, mut partials) = (0, 0);
        for (at, span) in decodes.iter().enumerate() {
            let needed = partials_of(span.context_len, self.decode_chunk);
            if needed > partials_max {
                return Err(KernelError::OutOfRange {
                    operation: "attention",
                    what: "partial sums of a sequence",
                    got: needed,
                    limit: partials_max.saturating_add(1),
                });
            }
            if needed > partials_max - partials {
                self.passes.push(first..at);
                (first, partials) = (at, 0);
            }
            self.push([partials])?;
            partials += needed;
            self.partials = self.partials.max(partials);
        }
        if first < decodes.len() {
            self.passes.push(first..decodes.len());
        }
        self.push(std::iter::repeat_n(0, self.numbers.len() % 2))
    }

    fn push_tiles(&mut self, prefills: &[&PagedSpan], largest_group: usize) -> Result<(), KernelError> {
        self.tiles_at = self.numbers.len();
        let tile_rows = Class::of(self.pages).prefill_rows();
        // (keys that the tile's last row sees, span, tile)
        let mut tiles: Vec<(usize, usize, usize)> = Vec::new();
        for (at, span) in prefills.iter().enumerate() {
            let pairs = span.rows.len().saturating_mul(largest_group);
            KernelError::check_index(
                "attention",
                "rows and heads of a span",
                pairs,
                (u32::MAX / 2) as usize,
            )?;
            for tile in 0..pairs.div_ceil(tile_rows) {
                let last_token = (((tile + 1) * tile_rows).min(pairs) - 1) / largest_group;
                let keys = span.context_len - span.rows.len() + last_token + 1;
                tiles.push((keys, self.decodes + at, tile));
            }
        }
        // Blocks start in order: the long ones first leave the short ones to fill the end. A stable order.
        tiles.sort_by_key(|&(keys, _, _)| std::cmp::Reverse(keys));
        self.prefill_tiles = tiles.len();
        self.push(tiles.into_iter().flat_map(|(_, span, tile)| [span, tile]))
    }
}

/// Partial sums that a decode leaves in the workspace: none where one chunk holds its context.
fn partials_of(context: usize, chunk: usize) -> usize {
    Some(context.div_ceil(chunk)).filter(|chunks| *chunks > 1).unwrap_or(0)
}

/// Floats of a chunk's partial sums: values, a maximum and a sum of weights for each query head.
fn floats_of_partial(shape: &AttentionShape) -> usize {
    floats_of_partial_of(shape.kv_of_query.len(), shape.pages)
}

fn floats_of_partial_of(query_heads: usize, pages: PageShape) -> usize {
    query_heads * (pages.padded_dim() + 2)
}

/// Floats of workspace that no plan exceeds for up to `sequences` decodes over up to `keys` keys in all.
pub fn workspace_floats_max(
    shape: &AttentionShape,
    chunks: Chunks,
    sequences: usize,
    keys: usize,
) -> Result<usize, KernelError> {
    check_heads(shape)?;
    let groups = group_bounds(shape);
    let largest_group = groups.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
    let blocks = shape.pages.kv_heads() * largest_group.div_ceil(DECODE_ROWS);
    let whole = match chunks {
        Chunks::Fixed(chunk) => keys / chunk,
        Chunks::Fill { multiprocessors } => {
            let wanted = multiprocessors as usize * blocks_per_multiprocessor(shape.pages);
            (wanted.checked_div(blocks).unwrap_or(0)).min(keys / CHUNK_UNIT)
        }
    };
    Ok((whole + sequences).saturating_mul(floats_of_partial(shape)))
}

/// Query heads in the order of their KV heads, each of which is there.
fn check_heads(shape: &AttentionShape) -> Result<(), KernelError> {
    shape.pages.require_dense("attention")?;
    for &kv in &shape.kv_of_query {
        KernelError::check_index("attention", "KV head", kv, shape.pages.kv_heads())?;
    }
    if shape.kv_of_query.is_sorted() {
        return Ok(());
    }
    Err(KernelError::Unsupported {
        operation: "attention",
        reason: "query heads of one KV head are not side by side; their KV heads must ascend".to_owned(),
    })
}

/// The first query head of each KV head, and their number.
fn group_bounds(shape: &AttentionShape) -> Vec<usize> {
    (0..=shape.pages.kv_heads()).map(|head| shape.kv_of_query.partition_point(|&kv| kv < head)).collect()
}

/// Keys of a chunk, of `keys` in all. `blocks`: how many a sequence's chunk takes.
fn decode_chunk(chunks: Chunks, pages: PageShape, keys: usize, blocks: usize) -> Result<usize, KernelError> {
    match chunks {
        Chunks::Fixed(chunk)
            if chunk.get().is_multiple_of(CHUNK_UNIT) && chunk.get() < (u32::MAX / 2) as usize =>
        {
            Ok(chunk.get())
        }
        Chunks::Fixed(chunk) => Err(KernelError::Unsupported {
            operation: "attention",
            reason: format!("a chunk of {chunk} keys; it must be a multiple of {CHUNK_UNIT}"),
        }),
        Chunks::Fill { multiprocessors } => {
            // An equal share of all keys for each block that fits: a long sequence is cut more often than a short one.
            let resident = (multiprocessors as usize * blocks_per_multiprocessor(pages)).max(1);
            let share = (keys * blocks).div_ceil(resident);
            Ok(share.next_multiple_of(CHUNK_UNIT).clamp(CHUNK_UNIT, CHUNK_MAX))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_stays_within_32_bits_however_many_keys_sequences_share() {
        let pages = PageShape::new(16, 8, 64).unwrap();
        let fill = Chunks::Fill { multiprocessors: 1 };
        let contexts_max = SEQUENCES_MAX * (u32::MAX / 2) as usize;
        for (keys, expected) in
            [(0, 64), (1 << 20, (8usize << 20).div_ceil(3).next_multiple_of(64)), (contexts_max, CHUNK_MAX)]
        {
            assert_eq!(decode_chunk(fill, pages, keys, 8).unwrap(), expected, "{keys} keys");
        }
    }
}
