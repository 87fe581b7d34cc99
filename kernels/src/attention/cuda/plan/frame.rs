//! Plans whose launches are the same from step to step, so that a captured graph can be replayed with other numbers.

use super::{
    AttentionShape, CHUNK_UNIT, Chunks, DECODE_ROWS, PagedSpan, Plan, blocks_per_multiprocessor, check_heads,
    check_spans, decode_chunk, floats_of_partial, group_bounds, partials_of,
};
use crate::KernelError;

/// What the launches of a framed plan depend on: room for any decodes that fit.
///
/// Lengths grow in powers of two, so that few frames serve a long conversation; a frame that is too large costs blocks
/// that leave at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Frame {
    /// Sequences at most.
    pub sequences: usize,
    /// Keys of a chunk.
    pub chunk: usize,
    /// Chunks of a sequence at most.
    pub chunks: usize,
    /// Partial sums of all sequences at most.
    pub partials: usize,
    /// Length of all block tables together at most.
    pub table_len: usize,
}

impl Frame {
    /// The frame for decodes of `contexts` among up to `sequences`, whose tables have up to `table_len` entries.
    /// There is room for contexts of `keys_max` keys together, where their partial sums are as many as their chunks.
    pub fn around(
        shape: &AttentionShape,
        chunks: Chunks,
        contexts: impl Iterator<Item = usize> + Clone,
        sequences: usize,
        keys_max: usize,
        table_len: usize,
    ) -> Result<Frame, KernelError> {
        check_heads(shape)?;
        let blocks = blocks_of_a_chunk(shape);
        let chunk = decode_chunk(chunks, shape.pages, contexts.clone().sum(), blocks)?;
        let chunk = match chunks {
            Chunks::Fixed(_) => chunk,
            Chunks::Fill { .. } => CHUNK_UNIT * (chunk / CHUNK_UNIT).next_power_of_two(),
        };
        let longest = contexts.max().unwrap_or(0);
        let whole = match chunks {
            Chunks::Fixed(_) => keys_max / chunk,
            // A chunk is at least an equal share of all keys for each block that fits.
            Chunks::Fill { multiprocessors } => {
                let resident = multiprocessors as usize * blocks_per_multiprocessor(shape.pages);
                resident.checked_div(blocks).unwrap_or(0).max(1)
            }
        };
        Ok(Frame {
            sequences,
            chunk,
            chunks: longest.div_ceil(chunk).max(1).next_power_of_two(),
            partials: whole + sequences,
            table_len,
        })
    }

    /// Floats of workspace that any plan of this frame over `shape` needs.
    pub fn workspace_floats(&self, shape: &AttentionShape) -> usize {
        self.partials.saturating_mul(floats_of_partial(shape))
    }

    /// Whether decodes of these contexts fit, which the frame was made [around](Frame::around): all do unless they have
    /// more keys together than it was made for.
    pub fn has_room_for(&self, contexts: impl Iterator<Item = usize>) -> bool {
        contexts.map(|context| partials_of(context, self.chunk)).sum::<usize>() <= self.partials
    }

    /// Numbers on the device of any plan of this frame over `shape`.
    pub fn numbers_room(&self, shape: &AttentionShape) -> usize {
        let spans = 4 * self.sequences;
        spans + self.sequences.next_multiple_of(2) + shape.pages.kv_heads() + 1 + self.table_len
    }
}

/// Blocks that a sequence's chunk takes.
fn blocks_of_a_chunk(shape: &AttentionShape) -> usize {
    let groups = group_bounds(shape);
    let largest = groups.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
    shape.pages.kv_heads() * largest.div_ceil(DECODE_ROWS)
}

impl Plan {
    /// Plans decodes alone, row `i` that of span `i`, so that the launches depend on `frame`, `shape` and `page_count`
    /// and on nothing else. Rows beyond the spans are left alone.
    pub fn framed(
        shape: &AttentionShape,
        frame: Frame,
        spans: &[PagedSpan],
        tables: &[u32],
        page_count: usize,
    ) -> Result<Plan, KernelError> {
        check_heads(shape)?;
        let elements = page_count.saturating_mul(shape.pages.page_elements());
        check_spans(shape, spans, spans.len(), tables, elements)?;
        frame.check(spans, tables)?;
        let mut plan = Plan {
            pages: shape.pages,
            page_count,
            kv_of_query: shape.kv_of_query.clone(),
            rows: frame.sequences,
            numbers: Vec::new(),
            numbers_room: frame.numbers_room(shape),
            decodes: frame.sequences,
            passes: Vec::new(),
            prefill_tiles: 0,
            first_partials_at: 0,
            tiles_at: 0,
            groups_at: 0,
            tables_at: 0,
            row_tiles: blocks_of_a_chunk(shape).checked_div(shape.pages.kv_heads()).unwrap_or(0),
            decode_chunk: frame.chunk,
            decode_chunks: frame.chunks,
            prefill_chunk: None,
            partials: 0,
        };
        let nothing = |row: usize| PagedSpan { rows: row..row + 1, context_len: 0, table: 0..0 };
        let all: Vec<PagedSpan> =
            spans.iter().cloned().chain((spans.len()..frame.sequences).map(nothing)).collect();
        plan.push_spans(all.iter())?;
        plan.push_first_partials(&all.iter().collect::<Vec<_>>(), usize::MAX)?;
        KernelError::check_index("attention", "partial sums of a frame", plan.partials, frame.partials + 1)?;
        plan.partials = frame.partials;
        plan.tiles_at = plan.numbers.len();
        plan.groups_at = plan.numbers.len();
        plan.push(group_bounds(shape))?;
        plan.tables_at = plan.numbers.len();
        plan.numbers.extend_from_slice(tables);
        Ok(plan)
    }
}

impl Frame {
    fn check(&self, spans: &[PagedSpan], tables: &[u32]) -> Result<(), KernelError> {
        let in_order = spans.iter().enumerate().all(|(at, span)| span.rows == (at..at + 1));
        if !in_order || self.chunk == 0 || !self.chunk.is_multiple_of(CHUNK_UNIT) {
            let reason = "a frame takes decodes alone, row by row, in chunks of whole tiles".to_owned();
            return Err(KernelError::Unsupported { operation: "attention", reason });
        }
        KernelError::check_index("attention", "sequences of a frame", spans.len(), self.sequences + 1)?;
        KernelError::check_index("attention", "block tables of a frame", tables.len(), self.table_len + 1)?;
        let longest = spans.iter().map(|span| span.context_len.div_ceil(self.chunk)).max().unwrap_or(0);
        KernelError::check_index("attention", "chunks of a frame", longest, self.chunks + 1)
    }
}
