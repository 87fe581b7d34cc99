//! One step's work as a model sees it: new tokens of several sequences, laid end to end.

use std::ops::Range;

use consort_kernels::attention::PagedSpan;

use crate::{
    ids::BlockId,
    model::{ModelError, row_of},
};

/// The new tokens of one step. Rows of all activations are in the order of `tokens`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// New tokens of every span, concatenated. In a step that is begun while another is under way, one that the other
    /// draws may stand here as [`drawn_by`](crate::model::drawn_by) its row.
    pub tokens: Vec<u32>,
    /// Absolute position of each token in its sequence; same length as `tokens`.
    pub positions: Vec<u32>,
    /// One entry per sequence that takes part.
    pub spans: Vec<BatchSpan>,
    /// For each of the model's [groups](crate::kv::KvGroups) the block tables of all spans, concatenated. A table
    /// covers positions `0..context_len`: in each group, block `i` of a sequence holds its tokens from
    /// `i · block_size` on.
    ///
    /// Sequences may share blocks, also those that one of them fills in this step. Blocks wholly behind the window of a
    /// group, as the span's first row sees it, are not read: any block of the pool may stand there, whoever it belongs
    /// to and whatever it holds.
    pub tables: Vec<Vec<BlockId>>,
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
    /// This sequence's block table within each of `Batch::tables`.
    pub table: Range<usize>,
}

/// What a model takes, and what there is to index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchLimits {
    pub(crate) max_tokens: usize,
    pub(crate) vocab_size: usize,
    pub(crate) groups: usize,
    pub(crate) block_size: usize,
    pub(crate) num_blocks: usize,
    /// Rows of a step under way whose tokens may be named.
    pub(crate) drawn: usize,
}

impl Batch {
    /// Nothing yet, for a model of so many groups of layers.
    pub fn new(groups: usize) -> Batch {
        Batch { tables: vec![Vec::new(); groups], ..Batch::default() }
    }

    /// The spans as attention takes them.
    pub(crate) fn paged_spans(&self) -> impl Iterator<Item = PagedSpan> + '_ {
        self.spans.iter().map(|BatchSpan { rows, context_len, table }| PagedSpan {
            rows: rows.clone(),
            context_len: *context_len,
            table: table.clone(),
        })
    }

    /// Where each row's keys and values go in the pages of a group whose block tables are `blocks`. The batch was
    /// checked.
    pub(crate) fn slots<'a>(
        &'a self,
        blocks: &'a [BlockId],
        block_size: usize,
    ) -> impl Iterator<Item = Result<u32, ModelError>> + 'a {
        self.spans.iter().flat_map(move |span| {
            let table = &blocks[span.table.clone()];
            self.positions[span.rows.clone()].iter().map(move |&position| {
                let position = position as usize;
                let slot = table[position / block_size].index() * block_size + position % block_size;
                // The largest number stands for no slot.
                match u32::try_from(slot) {
                    Ok(slot) if slot < u32::MAX => Ok(slot),
                    _ => Err(ModelError::Batch(format!("slot {slot} of the KV pool is beyond 32 bits"))),
                }
            })
        })
    }

    /// Checks everything that models index with, so that a scheduler's mistake is an error and never a wrong read.
    pub(crate) fn check(&self, limits: BatchLimits) -> Result<(), ModelError> {
        let BatchLimits { max_tokens, vocab_size, groups, block_size, num_blocks, drawn } = limits;
        let refuse = |reason: String| Err(ModelError::Batch(reason));
        let rows = self.tokens.len();
        if rows > max_tokens || self.positions.len() != rows {
            let positions = self.positions.len();
            return refuse(format!(
                "{rows} tokens with {positions} positions; the model takes {max_tokens} a step"
            ));
        }
        for &token in &self.tokens {
            match row_of(token) {
                Some(row) if row >= drawn => {
                    return refuse(format!("a token of row {row}, where {drawn} rows draw any"));
                }
                None if token as usize >= vocab_size => {
                    return refuse(format!("token {token} is outside the vocabulary of {vocab_size}"));
                }
                _ => {}
            }
        }
        if self.tables.len() != groups {
            return refuse(format!("block tables of {} groups for a model of {groups}", self.tables.len()));
        }
        let entries = self.tables.first().map_or(0, Vec::len);
        for (group, table) in self.tables.iter().enumerate() {
            if table.len() != entries {
                let len = table.len();
                return refuse(format!(
                    "the block tables of group {group} have {len} entries, others {entries}"
                ));
            }
            if let Some(block) = table.iter().find(|block| block.index() >= num_blocks) {
                let block = block.0;
                return refuse(format!("block {block} of group {group} is outside the pool of {num_blocks}"));
            }
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
            let covered = span.table.end.saturating_sub(span.table.start).saturating_mul(block_size);
            if span.table.end > entries || covered < span.context_len {
                return refuse(format!(
                    "block table {:?} of {entries} blocks does not cover {} tokens",
                    span.table, span.context_len
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
