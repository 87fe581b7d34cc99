//! The numbers of one step as the device reads them: one block, one copy.
//!
//! | part | numbers |
//! |---|---|
//! | tokens, positions, slots, output rows | `rows` each, from a multiple of four on |
//! | attention | as [`Plan::numbers`] has them |
//!
//! Rows that only fill up a graph have token 0 at position 0, no slot and no output.

use std::ops::Range;

use consort_kernels::attention::{
    PagedSpan,
    cuda::{Frame, Plan},
};

use super::{super::ModelError, shape::RankShape};
use crate::batch::Batch;

/// What stands for no slot and no row.
const NONE: u32 = u32::MAX;

/// One step: what is launched, and the numbers that it reads.
pub(super) struct StepNumbers {
    /// Rows that launches compute.
    pub(super) rows: usize,
    /// Rows of normalised output.
    pub(super) kept: usize,
    pub(super) plan: Plan,
    /// The graph's frame, where the step is decoded by one.
    pub(super) frame: Option<Frame>,
    words: Vec<u32>,
}

impl StepNumbers {
    /// Lays out `batch`, which was checked; pages are those of the first `page_count` blocks.
    pub(super) fn new(
        batch: &Batch,
        shape: &RankShape,
        page_count: usize,
    ) -> Result<StepNumbers, ModelError> {
        let spans: Vec<PagedSpan> = batch
            .spans
            .iter()
            .map(|span| PagedSpan {
                rows: span.rows.clone(),
                context_len: span.context_len,
                table: span.table.clone(),
            })
            .collect();
        let tables: Vec<u32> = batch.blocks.iter().map(|block| block.0).collect();
        check_bounds(&spans, &tables, shape)?;
        let decodes = spans.iter().all(|span| span.rows.len() == 1);
        let contexts = spans.iter().map(|span| span.context_len);
        let frame = if decodes { shape.frame(contexts)? } else { None };
        let attention = &shape.attention;
        let rows = batch.tokens.len();
        let (rows, kept, plan) = match frame {
            Some(frame) => {
                let plan = Plan::framed(attention, frame, &spans, &tables, page_count)?;
                (frame.sequences, frame.sequences, plan)
            }
            None => {
                let plan = Plan::new(attention, shape.ways.chunks, &spans, rows, &tables, page_count)?;
                (rows, batch.output_rows.len(), plan)
            }
        };
        let mut numbers = StepNumbers { rows, kept, plan, frame, words: Vec::new() };
        numbers.lay_out(batch, &spans, &tables, attention.pages.block_size())?;
        Ok(numbers)
    }

    fn lay_out(
        &mut self,
        batch: &Batch,
        spans: &[PagedSpan],
        tables: &[u32],
        block_size: usize,
    ) -> Result<(), ModelError> {
        let room = self.rows.next_multiple_of(4);
        self.words.extend(&batch.tokens);
        self.words.resize(room, 0);
        self.words.extend(&batch.positions);
        self.words.resize(2 * room, 0);
        for span in spans {
            let table = &tables[span.table.clone()];
            for row in span.rows.clone() {
                let position = batch.positions[row] as usize;
                let slot = table[position / block_size] as usize * block_size + position % block_size;
                if slot >= NONE as usize {
                    return Err(ModelError::Batch(format!("slot {slot} of the KV pool is beyond 32 bits")));
                }
                self.words.push(slot as u32);
            }
        }
        self.words.resize(3 * room, NONE);
        self.words.extend(batch.output_rows.iter().map(|&row| row as u32));
        self.words.resize(4 * room, NONE);
        self.words.extend(self.plan.numbers());
        Ok(())
    }

    /// What is copied to the beginning of the device's block.
    pub(super) fn words(&self) -> &[u32] {
        &self.words
    }

    pub(super) fn tokens(&self) -> Range<usize> {
        0..self.rows
    }

    pub(super) fn positions(&self) -> Range<usize> {
        self.part(1, self.rows)
    }

    pub(super) fn slots(&self) -> Range<usize> {
        self.part(2, self.rows)
    }

    pub(super) fn output_rows(&self) -> Range<usize> {
        self.part(3, self.kept)
    }

    pub(super) fn attention(&self) -> Range<usize> {
        self.part(4, self.plan.numbers_room())
    }

    fn part(&self, at: usize, len: usize) -> Range<usize> {
        let start = at * self.rows.next_multiple_of(4);
        start..start + len
    }
}

/// Refuses a step larger than the buffers were made for: a scheduler's mistake, not a request's.
fn check_bounds(spans: &[PagedSpan], tables: &[u32], shape: &RankShape) -> Result<(), ModelError> {
    let keys: usize = spans.iter().map(|span| span.context_len).sum();
    for (what, got, limit) in [
        ("sequences", spans.len(), shape.sequences_max),
        ("entries of block tables", tables.len(), shape.table_len_max),
        ("keys", keys, shape.keys_max),
    ] {
        if got > limit {
            return Err(ModelError::Batch(format!("{got} {what}; the model takes {limit} a step")));
        }
    }
    Ok(())
}
