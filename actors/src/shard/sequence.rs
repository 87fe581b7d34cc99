//! What a shard knows of sequences, and the rows that a plan makes of them.

use std::collections::BTreeMap;

use consort_kernels::sampling::{SamplingParams, TokenHistory};
use consort_parallel::{
    batch::{Batch, BatchSpan},
    ids::BlockId,
    kv::KvStore,
    model::{Draw, PromptToken, RowRequest, drawn_by},
};

use crate::{
    error::ShardError,
    ids::{SequenceId, Step},
    plan::{CachedTokens, NewSequence, Output, SequenceImage, Span, StepPlan, Tokens},
};

/// What a shard knows of a sequence.
pub(super) struct SequenceState {
    sampling: SamplingParams,
    history: TokenHistory,
    logprobs: Option<u32>,
    /// One page per layer group for each block of tokens, block after block.
    table: Vec<Option<BlockId>>,
    len: usize,
    pub(super) last: LastToken,
}

/// The token that a sequence drew last, and that its next row appends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LastToken {
    /// None was drawn since tokens were appended.
    Nothing,
    /// An output row of a step draws it, and the host does not know it yet.
    Drawn { step: Step, row: usize },
    /// This one.
    Known(u32),
}

/// What one output row is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct WantedRow {
    pub(super) sequence: SequenceId,
    pub(super) prompt: Option<PromptToken>,
    /// Position of the token to draw after the row.
    pub(super) draw_at: Option<u64>,
}

/// Lays the spans of `plan` end to end into `batch`, and notes in `wanted` what each output row is for. A token that
/// the host does not know stands there by its row.
pub(super) fn assemble(
    plan: &StepPlan,
    sequences: &mut BTreeMap<SequenceId, SequenceState>,
    kv: &KvStore,
    batch: &mut Batch,
    wanted: &mut Vec<WantedRow>,
) -> Result<(), ShardError> {
    let Batch { tokens, positions, spans, tables, output_rows } = batch;
    tokens.clear();
    positions.clear();
    spans.clear();
    tables.iter_mut().for_each(Vec::clear);
    output_rows.clear();
    wanted.clear();
    for span in &plan.run {
        let refuse = |what: String| ShardError::Plan { step: plan.step, what };
        let unknown = || refuse(format!("{} was never begun", span.sequence));
        let state = sequences.get_mut(&span.sequence).ok_or_else(unknown)?;
        let first_row = batch.tokens.len();
        state.take_over(&span.cached);
        let start = state.len;
        match (&span.tokens, state.last) {
            (Tokens::Given(given), _) => batch.tokens.extend_from_slice(given),
            (Tokens::LastSampled, LastToken::Known(token)) => batch.tokens.push(token),
            (Tokens::LastSampled, LastToken::Drawn { row, .. }) => batch.tokens.push(drawn_by(row)),
            (Tokens::LastSampled, LastToken::Nothing) => {
                return Err(refuse(format!("{} has drawn no token yet", span.sequence)));
            }
        }
        let rows = first_row..batch.tokens.len();
        state.last = LastToken::Nothing;
        // Where it matters which token it is, nobody comes here without knowing it.
        state.history.extend(&batch.tokens[rows.clone()]);
        state.len += rows.len();
        state.table.extend(span.new_blocks.iter().copied().map(Some));
        check_span(span, state, rows.len(), kv).map_err(refuse)?;
        batch.positions.extend((start..state.len).map(|position| position as u32));
        let table = append_tables(&mut batch.tables, &state.table);
        want_rows(span, rows.clone(), state.len as u64, batch, wanted);
        batch.spans.push(BatchSpan { rows, context_len: state.len, table });
    }
    Ok(())
}

impl WantedRow {
    pub(super) fn request<'a>(&self, sequences: &'a BTreeMap<SequenceId, SequenceState>) -> RowRequest<'a> {
        let draw = self.draw_at.zip(sequences.get(&self.sequence)).map(|(position, state)| Draw {
            sampling: &state.sampling,
            history: &state.history,
            position,
            logprobs: state.logprobs,
        });
        RowRequest { prompt: self.prompt, draw }
    }
}

impl SequenceState {
    pub(super) fn new(new: &NewSequence) -> Self {
        Self {
            history: TokenHistory::new(new.prompt_len, &new.sampling.adjustments),
            sampling: new.sampling.clone(),
            logprobs: new.logprobs,
            table: Vec::new(),
            len: 0,
            last: LastToken::Nothing,
        }
    }

    /// One in the middle of its life.
    pub(super) fn of_image(image: &SequenceImage) -> Self {
        let mut state = Self::new(&image.new);
        state.take_over(&image.cached);
        state.last = image.last_sampled.map_or(LastToken::Nothing, LastToken::Known);
        state
    }

    /// Whether its next draw depends on which token it drew last, and the host does not know it.
    pub(super) fn awaits_its_token(&self) -> bool {
        matches!(self.last, LastToken::Drawn { .. }) && self.history.counts_output()
    }

    /// Goes on behind tokens whose keys and values are there.
    fn take_over(&mut self, cached: &CachedTokens) {
        self.history.extend(&cached.tokens);
        self.len += cached.tokens.len();
        self.table.extend_from_slice(&cached.pages);
    }
}

/// Refuses a span that would make the model read or write outside its pages.
fn check_span(span: &Span, state: &SequenceState, rows: usize, kv: &KvStore) -> Result<(), String> {
    let block_size = kv.layout().pages.block_size();
    if rows == 0 {
        return Err(format!("{} has no tokens", span.sequence));
    }
    let pages = span.cached.pages.iter().flatten().chain(&span.new_blocks);
    if let Some(block) = pages.into_iter().find(|block| block.index() >= kv.num_blocks()) {
        return Err(format!("block {} does not exist; the pool has {}", block.0, kv.num_blocks()));
    }
    let groups = kv.layout().groups;
    if state.table.len() != state.len.div_ceil(block_size) * groups {
        return Err(format!(
            "{} has {} pages of {block_size} tokens for {} tokens in {groups} groups of layers",
            span.sequence,
            state.table.len(),
            state.len
        ));
    }
    Ok(())
}

/// Appends a sequence's tables, one for each group, to those of the batch. What stands for a page behind a window is
/// never read, and must only be a page.
fn append_tables(tables: &mut [Vec<BlockId>], pages: &[Option<BlockId>]) -> std::ops::Range<usize> {
    let groups = tables.len();
    let start = tables.first().map_or(0, Vec::len);
    for (group, table) in tables.iter_mut().enumerate() {
        table.extend(pages[group..].iter().step_by(groups).map(|page| page.unwrap_or(BlockId(0))));
    }
    start..start + pages.len() / groups
}

/// Notes the rows of `span` of which something is wanted. `len` is the sequence's length after the span.
fn want_rows(
    span: &Span,
    rows: std::ops::Range<usize>,
    len: u64,
    batch: &mut Batch,
    wanted: &mut Vec<WantedRow>,
) {
    let (prompt, sample) = match span.output {
        Output::Nothing => return,
        Output::Sample => (None, true),
        Output::PromptLogprobs { top, next, sample } => (Some((top, next)), sample),
    };
    for row in rows.clone() {
        let is_last = row + 1 == rows.end;
        let prompt = prompt.and_then(|(top, next)| {
            let follower = if is_last { next } else { Some(batch.tokens[row + 1]) };
            follower.map(|token| PromptToken { token, top })
        });
        let draw_at = (sample && is_last).then_some(len);
        if prompt.is_some() || draw_at.is_some() {
            batch.output_rows.push(row);
            wanted.push(WantedRow { sequence: span.sequence, prompt, draw_at });
        }
    }
}
