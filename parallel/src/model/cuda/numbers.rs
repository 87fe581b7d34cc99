//! The numbers of one step as the device reads them: one block, a copy for each group of layers.
//!
//! | part | numbers |
//! |---|---|
//! | tokens, positions, output rows, slots in each group | `rows` each, from a multiple of four on |
//! | attention, of each group | as [`Plan::numbers`] has them, from a multiple of four on |
//!
//! Rows that only fill up a graph have token 0 at position 0, no slot and no output.

use std::ops::Range;

use consort_kernels::attention::{
    PagedSpan,
    cuda::{Frame, Plan},
};

use super::{super::ModelError, shape::RankShape};
use crate::{batch::Batch, ids::BlockId};

/// What stands for no slot and no row.
const NONE: u32 = u32::MAX;

/// Places of the parts that have as many numbers as there are rows.
const TOKENS: usize = 0;
const POSITIONS: usize = 1;
const OUTPUT_ROWS: usize = 2;
const SLOTS: usize = 3;

/// One step: what is launched, and the numbers that it reads.
pub(super) struct StepNumbers {
    /// Rows that launches compute.
    pub(super) rows: usize,
    /// Rows of normalised output.
    pub(super) kept: usize,
    /// Of each group of layers; they differ in their block tables.
    plans: Vec<Plan>,
    /// The graph's frame, where the step is decoded by one.
    pub(super) frame: Option<Frame>,
    /// All numbers up to the first plan's.
    words: Vec<u32>,
}

impl StepNumbers {
    /// Numbers that any step's take at most.
    pub(super) fn room(shape: &RankShape) -> usize {
        let (rows, attention) = (shape.rows_max.next_multiple_of(4), shape.attention_numbers());
        (SLOTS + shape.groups) * rows + shape.groups * attention.next_multiple_of(4)
    }

    /// Lays out `batch`, which was checked; pages are those of the first `page_count` blocks.
    pub(super) fn new(
        batch: &Batch,
        shape: &RankShape,
        page_count: usize,
    ) -> Result<StepNumbers, ModelError> {
        let spans: Vec<PagedSpan> = batch.paged_spans().collect();
        check_bounds(batch, &spans, shape)?;
        let decodes = spans.iter().all(|span| span.rows.len() == 1);
        let contexts = spans.iter().map(|span| span.context_len);
        let frame = if decodes { shape.frame(contexts)? } else { None };
        let (attention, tokens) = (&shape.attention, batch.tokens.len());
        let floats = shape.attention_floats()?;
        let plan = |blocks: &Vec<BlockId>| {
            let tables: Vec<u32> = blocks.iter().map(|block| block.0).collect();
            match frame {
                Some(frame) => Plan::framed(attention, frame, &spans, &tables, page_count),
                None => {
                    let chunks = shape.ways.chunks;
                    Plan::within(floats, attention, chunks, &spans, tokens, &tables, page_count)
                }
            }
        };
        let plans = batch.tables.iter().map(plan).collect::<Result<_, _>>()?;
        let (rows, kept) = match frame {
            Some(frame) => (frame.sequences, frame.sequences),
            None => (tokens, batch.output_rows.len()),
        };
        let mut numbers = StepNumbers { rows, kept, plans, frame, words: Vec::new() };
        numbers.lay_out(batch, attention.pages.block_size())?;
        Ok(numbers)
    }

    fn lay_out(&mut self, batch: &Batch, block_size: usize) -> Result<(), ModelError> {
        let room = self.rows.next_multiple_of(4);
        let mut parts = 0;
        let mut end_part = |words: &mut Vec<u32>, filling: u32| {
            parts += 1;
            words.resize(parts * room, filling);
        };
        self.words.extend(&batch.tokens);
        end_part(&mut self.words, 0);
        self.words.extend(&batch.positions);
        end_part(&mut self.words, 0);
        self.words.extend(batch.output_rows.iter().map(|&row| row as u32));
        end_part(&mut self.words, NONE);
        for blocks in &batch.tables {
            for slot in batch.slots(blocks, block_size) {
                self.words.push(slot?);
            }
            end_part(&mut self.words, NONE);
        }
        if let Some(first) = self.plans.first() {
            self.words.extend(first.numbers());
        }
        Ok(())
    }

    /// What is copied to the device's block, and where in it.
    pub(super) fn copies(&self) -> impl Iterator<Item = (usize, &[u32])> {
        let others = self.plans.iter().enumerate().skip(1);
        let others = others.map(|(group, plan)| (self.attention(group).start, plan.numbers()));
        [(0, &self.words[..])].into_iter().chain(others)
    }

    pub(super) fn tokens(&self) -> Range<usize> {
        self.part(TOKENS, self.rows)
    }

    pub(super) fn positions(&self) -> Range<usize> {
        self.part(POSITIONS, self.rows)
    }

    pub(super) fn output_rows(&self) -> Range<usize> {
        self.part(OUTPUT_ROWS, self.kept)
    }

    /// Of the rows in the pages of a group.
    pub(super) fn slots(&self, group: usize) -> Range<usize> {
        self.part(SLOTS + group, self.rows)
    }

    pub(super) fn plan(&self, group: usize) -> &Plan {
        &self.plans[group]
    }

    /// The numbers of a group's plan. Where there is a frame, they do not depend on the step.
    pub(super) fn attention(&self, group: usize) -> Range<usize> {
        let before = self.plans[..group].iter().map(|plan| plan.numbers_room().next_multiple_of(4));
        let start = self.part(SLOTS + self.plans.len(), 0).start + before.sum::<usize>();
        start..start + self.plans[group].numbers_room()
    }

    fn part(&self, at: usize, len: usize) -> Range<usize> {
        let start = at * self.rows.next_multiple_of(4);
        start..start + len
    }
}

/// Refuses a step larger than the buffers were made for: a scheduler's mistake, not a request's.
fn check_bounds(batch: &Batch, spans: &[PagedSpan], shape: &RankShape) -> Result<(), ModelError> {
    let entries = batch.tables.first().map_or(0, Vec::len);
    let longest = spans.iter().map(|span| span.context_len).max().unwrap_or(0);
    for (what, got, limit) in [
        ("sequences", spans.len(), shape.sequences_max),
        ("entries of block tables", entries, shape.table_len_max),
        ("tokens of a sequence", longest, shape.context_max),
    ] {
        if got > limit {
            return Err(ModelError::Batch(format!("{got} {what}; the model takes {limit} a step")));
        }
    }
    Ok(())
}
