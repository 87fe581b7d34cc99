//! The real executor: a model's rank, its KV pages, and the sequences that the plans speak of.

use std::collections::BTreeMap;

use consort_kernels::sampling::{SamplingParams, TokenHistory};
use consort_parallel::{
    batch::{Batch, BatchSpan},
    collective::Collective,
    ids::{BlockId, Rank},
    kv::KvStore,
    model::{Draw, Model, PromptToken, RowOutcome, RowRequest, STEP_LIMIT},
};

use super::{Rejoined, ShardExecutor};
use crate::{
    error::ShardError,
    ids::{Epoch, SequenceId, Step},
    plan::{
        CachedTokens, GroupImage, NewSequence, Output, Sampled, SequenceImage, Span, SpanOutput, StepPlan,
        StepResult, Tokens,
    },
};

/// Executes plans with a [`Model`]. Every rank computes the same tokens; rank 0 reports them. Knows nothing of the
/// device: whether its memory is the host's is the model's and the pages' concern.
pub struct ModelExecutor {
    model: Box<dyn Model>,
    kv: KvStore,
    comm: Box<dyn Collective>,
    /// Whether the model has met its peers in this epoch.
    joined: bool,
    fence: StepFence,
    sequences: BTreeMap<SequenceId, SequenceState>,
    batch: Batch,
    wanted: Vec<WantedRow>,
    /// Why this epoch was cut short, in a step or before the first. Until the next epoch no plan can be carried out.
    aborted: Option<String>,
}

/// What a shard knows of a sequence.
struct SequenceState {
    sampling: SamplingParams,
    history: TokenHistory,
    logprobs: Option<u32>,
    /// One page per layer group for each block of tokens, block after block.
    table: Vec<Option<BlockId>>,
    len: usize,
    last_sampled: Option<u32>,
}

/// What one output row is for.
#[derive(Clone, Copy, Debug)]
struct WantedRow {
    sequence: SequenceId,
    prompt: Option<PromptToken>,
    /// Position of the token to draw after the row.
    draw_at: Option<u64>,
}

/// Admits plans of one epoch, one step after another.
struct StepFence {
    /// Unknown until the first plan, which must be step 0.
    epoch: Option<Epoch>,
    next: Step,
}

impl StepFence {
    fn admit(&mut self, plan: &StepPlan) -> Result<(), ShardError> {
        let expected = *self.epoch.get_or_insert(plan.epoch);
        if plan.epoch != expected {
            return Err(ShardError::WrongEpoch { got: plan.epoch, expected });
        }
        if plan.step != self.next {
            return Err(ShardError::WrongStep { got: plan.step, expected: self.next });
        }
        self.next = plan.step.next();
        Ok(())
    }
}

impl ModelExecutor {
    /// An executor without sequences, which has not joined its group yet. Its epoch is that of the first plan.
    pub fn new(model: Box<dyn Model>, kv: KvStore, comm: Box<dyn Collective>) -> Self {
        let groups = kv.layout().groups;
        Self {
            model,
            kv,
            comm,
            joined: false,
            fence: StepFence { epoch: None, next: Step(0) },
            sequences: BTreeMap::new(),
            batch: Batch::new(groups),
            wanted: Vec::new(),
            aborted: None,
        }
    }

    /// Takes the place of an executor that has carried out everything up to `image`: its pages are this one's, and what
    /// it knew of sequences is learnt anew.
    pub fn learn(&mut self, image: &GroupImage) {
        self.fence = StepFence { epoch: Some(image.epoch), next: image.next_step };
        self.aborted = None;
        self.sequences.clear();
        for SequenceImage { new, cached, last_sampled } in &image.sequences {
            let mut state = SequenceState::new(new);
            state.take_over(cached);
            state.last_sampled = *last_sampled;
            self.sequences.insert(new.sequence, state);
        }
    }

    /// Lays the plan's spans end to end into `self.batch`, and notes what each output row is for.
    fn assemble(&mut self, plan: &StepPlan) -> Result<(), ShardError> {
        let Batch { tokens, positions, spans, tables, output_rows } = &mut self.batch;
        tokens.clear();
        positions.clear();
        spans.clear();
        tables.iter_mut().for_each(Vec::clear);
        output_rows.clear();
        self.wanted.clear();
        for span in &plan.run {
            let refuse = |what: String| ShardError::Plan { step: plan.step, what };
            let unknown = || refuse(format!("{} was never begun", span.sequence));
            let state = self.sequences.get_mut(&span.sequence).ok_or_else(unknown)?;
            let first_row = self.batch.tokens.len();
            state.take_over(&span.cached);
            let start = state.len;
            match &span.tokens {
                Tokens::Given(given) => self.batch.tokens.extend_from_slice(given),
                Tokens::LastSampled => self.batch.tokens.push(
                    state
                        .last_sampled
                        .ok_or_else(|| refuse(format!("{} has drawn no token yet", span.sequence)))?,
                ),
            }
            let rows = first_row..self.batch.tokens.len();
            state.last_sampled = None;
            state.history.extend(&self.batch.tokens[rows.clone()]);
            state.len += rows.len();
            state.table.extend(span.new_blocks.iter().copied().map(Some));
            check_span(span, state, rows.len(), &self.kv).map_err(refuse)?;
            self.batch.positions.extend((start..state.len).map(|position| position as u32));
            let table = append_tables(&mut self.batch.tables, &state.table);
            want_rows(span, rows.clone(), state.len as u64, &mut self.batch, &mut self.wanted);
            self.batch.spans.push(BatchSpan { rows, context_len: state.len, table });
        }
        Ok(())
    }

    /// Has the model draw, remembers the tokens, and reports on rank 0.
    fn draw(&mut self, step: Step, result: &mut StepResult) -> Result<(), ShardError> {
        let reports = self.comm.rank() == Rank(0);
        let requests: Vec<_> = self.wanted.iter().map(|row| row.request(&self.sequences)).collect();
        let outcomes = self.model.outcomes(&requests, reports, self.comm.as_mut());
        let outcomes = outcomes.map_err(|source| ShardError::model(step, source))?;
        assert_eq!(outcomes.len(), self.wanted.len(), "a model answers every output row");
        let mut digest = Digest::new();
        for (wanted, RowOutcome { prompt, drawn }) in self.wanted.iter().zip(outcomes) {
            if reports && let Some(prompt) = prompt {
                output_of(result, wanted.sequence).prompt_logprobs.push(prompt);
            }
            let Some(drawn) = drawn else { continue };
            let Some(state) = self.sequences.get_mut(&wanted.sequence) else { continue };
            // A sequence without a token ends when this step is absorbed; a step planned ahead needs any id.
            let token = drawn.token.unwrap_or(0);
            state.last_sampled = Some(token);
            digest.token(wanted.sequence, token);
            if reports {
                let output = output_of(result, wanted.sequence);
                output.broken |= drawn.token.is_none();
                output.sampled.push(Sampled { token, logprobs: drawn.logprobs });
            }
        }
        result.digest = digest.value();
        Ok(())
    }
}

impl ModelExecutor {
    fn carry_out(&mut self, plan: &StepPlan) -> Result<StepResult, ShardError> {
        self.fence.admit(plan)?;
        for new in &plan.begin {
            self.sequences.insert(new.sequence, SequenceState::new(new));
        }
        if !plan.copies.is_empty() {
            let copies: Vec<_> = plan.copies.iter().map(|copy| (copy.from, copy.to)).collect();
            let copied = self.kv.copy_blocks(&copies);
            copied.map_err(|source| ShardError::model(plan.step, source.into()))?;
        }
        let moves = self.kv.transfer(plan.step.0, &plan.saves, &plan.loads);
        moves.map_err(|source| ShardError::model(plan.step, source.into()))?;
        let mut result = StepResult {
            epoch: plan.epoch,
            step: plan.step,
            outputs: Vec::new(),
            transferred: None,
            digest: 0,
        };
        self.assemble(plan)?;
        if !self.batch.tokens.is_empty() {
            let forward = self.model.forward(&self.batch, &mut self.kv, self.comm.as_mut());
            forward.map_err(|source| ShardError::model(plan.step, source))?;
            self.draw(plan.step, &mut result)?;
        }
        for sequence in &plan.end {
            self.sequences.remove(sequence);
        }
        result.transferred = self.transferred(plan)?;
        Ok(result)
    }

    /// The step up to which all transfers are done, for which the plan may have to wait.
    fn transferred(&mut self, plan: &StepPlan) -> Result<Option<Step>, ShardError> {
        let pending = match plan.await_transfers {
            true => self.kv.finish_transfers(STEP_LIMIT).map(|()| None),
            false => self.kv.pending_transfer(),
        };
        let pending = pending.map_err(|source| ShardError::model(plan.step, source.into()))?;
        Ok(pending.map_or(Some(plan.step), |oldest| oldest.checked_sub(1).map(Step)))
    }

    /// Does `work` of this epoch, unless the epoch was cut short: then, and if `work` is aborted, this rank is sound
    /// and waits for the next.
    fn in_epoch<R>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<R, ShardError>,
    ) -> Result<R, ShardError> {
        if let Some(reason) = &self.aborted {
            return Err(ShardError::Aborted { reason: reason.clone() });
        }
        let result = work(self);
        if let Err(ShardError::Aborted { reason }) = &result {
            self.aborted = Some(reason.clone());
        }
        result
    }

    fn meet_peers(&mut self) -> Result<(), ShardError> {
        if !self.joined {
            self.model.join(self.comm.as_mut()).map_err(ShardError::join)?;
            self.joined = true;
        }
        Ok(())
    }
}

impl ShardExecutor for ModelExecutor {
    fn join(&mut self) -> Result<(), ShardError> {
        self.in_epoch(Self::meet_peers)
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepResult, ShardError> {
        // A plan made ahead may follow an aborted step: it misses that step's tokens, which is nobody's mistake.
        self.in_epoch(|executor| {
            // Whoever drives an executor without a group's protocol joins with the first step.
            executor.meet_peers()?;
            executor.carry_out(plan)
        })
    }

    fn weight_bytes(&self) -> u64 {
        self.model.weight_bytes()
    }

    fn kv_bytes(&self) -> u64 {
        self.kv.bytes()
    }

    fn rejoin(&mut self, epoch: Epoch, comm: Box<dyn Collective>) -> Result<Rejoined, ShardError> {
        // The new epoch knows nothing of the old one's transfers, and gives their pages away.
        self.kv.finish_transfers(STEP_LIMIT).map_err(ShardError::load)?;
        self.comm = comm;
        self.joined = false;
        self.fence = StepFence { epoch: Some(epoch), next: Step(0) };
        self.sequences.clear();
        self.aborted = None;
        Ok(Rejoined::Kept)
    }
}

impl WantedRow {
    fn request<'a>(&self, sequences: &'a BTreeMap<SequenceId, SequenceState>) -> RowRequest<'a> {
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
    fn new(new: &NewSequence) -> Self {
        Self {
            history: TokenHistory::new(new.prompt_len, &new.sampling.adjustments),
            sampling: new.sampling.clone(),
            logprobs: new.logprobs,
            table: Vec::new(),
            len: 0,
            last_sampled: None,
        }
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

/// The output of `sequence`, whose rows are consecutive.
fn output_of(result: &mut StepResult, sequence: SequenceId) -> &mut SpanOutput {
    if result.outputs.last().is_none_or(|last| last.sequence != sequence) {
        result.outputs.push(SpanOutput {
            sequence,
            sampled: Vec::new(),
            prompt_logprobs: Vec::new(),
            broken: false,
        });
    }
    result.outputs.last_mut().expect("an output of this sequence was just made sure of")
}

/// FNV-1a over the drawn tokens: cheap, and different ranks need only notice that they differ.
struct Digest(u64);

impl Digest {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn token(&mut self, sequence: SequenceId, token: u32) {
        for byte in sequence.0.to_le_bytes().into_iter().chain(token.to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn value(&self) -> u64 {
        self.0
    }
}
