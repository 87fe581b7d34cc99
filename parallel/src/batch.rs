//! One step's work as a model sees it: new tokens of several sequences, laid end to end.

use std::ops::Range;

use crate::{ids::BlockId, model::ModelError};

/// The new tokens of one step. Rows of all activations are in the order of `tokens`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// New tokens of every span, concatenated.
    pub tokens: Vec<u32>,
    /// Absolute position of each token in its sequence; same length as `tokens`.
    pub positions: Vec<u32>,
    /// One entry per sequence that takes part.
    pub spans: Vec<BatchSpan>,
    /// Block tables of all spans, concatenated. A table covers positions `0..context_len`.
    pub blocks: Vec<BlockId>,
    /// Rows (indices into `tokens`) whose logits are wanted, ascending.
    pub output_rows: Vec<usize>,
}

/// The part of a [`Batch`] that belongs to one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSpan {
    /// Rows of this sequence in `tokens` (consecutive positions).
    pub rows: Range<usize>,
    /// Tokens in the sequence once these rows are appended: the last row's position + 1.
    pub context_len: usize,
    /// This sequence's block table within `Batch::blocks`.
    pub table: Range<usize>,
}

impl Batch {
    /// Checks everything that models index with, so that a scheduler's mistake is an error and never a wrong read.
    pub(crate) fn check(
        &self,
        max_tokens: usize,
        vocab_size: usize,
        block_size: usize,
        num_blocks: usize,
    ) -> Result<(), ModelError> {
        let refuse = |reason: String| Err(ModelError::Batch(reason));
        let rows = self.tokens.len();
        if rows > max_tokens || self.positions.len() != rows {
            let positions = self.positions.len();
            return refuse(format!(
                "{rows} tokens with {positions} positions; the model takes {max_tokens} a step"
            ));
        }
        if let Some(token) = self.tokens.iter().find(|token| **token as usize >= vocab_size) {
            return refuse(format!("token {token} is outside the vocabulary of {vocab_size}"));
        }
        if let Some(block) = self.blocks.iter().find(|block| block.index() >= num_blocks) {
            return refuse(format!("block {} is outside the pool of {num_blocks}", block.0));
        }
        let mut next = 0;
        for span in &self.spans {
            let (start, end) = (span.rows.start, span.rows.end);
            if start != next || end <= start || end > rows {
                return refuse(format!(
                    "rows {:?} of a span do not continue at row {next} of {rows}",
                    span.rows
                ));
            }
            next = end;
            let first = span.context_len.checked_sub(span.rows.len());
            let consecutive = first.is_some_and(|first| {
                self.positions[span.rows.clone()].iter().zip(first..).all(|(a, b)| *a as usize == b)
            });
            if !consecutive {
                return refuse(format!(
                    "positions of rows {:?} do not end at context {}",
                    span.rows, span.context_len
                ));
            }
            let covered = span.table.end.saturating_sub(span.table.start) * block_size;
            if span.table.end > self.blocks.len() || covered < span.context_len {
                return refuse(format!(
                    "block table {:?} of {} blocks does not cover {} tokens",
                    span.table,
                    self.blocks.len(),
                    span.context_len
                ));
            }
        }
        let ascending = self.output_rows.windows(2).all(|pair| pair[0] < pair[1]);
        if next != rows || !ascending || self.output_rows.last().is_some_and(|row| *row >= rows) {
            return refuse(format!("spans cover {next} of {rows} rows, outputs are {:?}", self.output_rows));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
