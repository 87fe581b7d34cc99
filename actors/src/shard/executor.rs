//! The real executor: a model's rank, its KV pages, and the sequences that the plans speak of.

use std::collections::BTreeMap;

use consort_kernels::sampling::{SamplingParams, TokenHistory, log_probabilities, sample};
use consort_parallel::{
    batch::{Batch, BatchSpan},
    collective::Collective,
    ids::{BlockId, Rank},
    kv::KvStore,
    model::Model,
};

use super::{Rejoined, ShardExecutor};
use crate::{
    error::ShardError,
    ids::{Epoch, SequenceId, Step},
    plan::{NewSequence, Output, Sampled, Span, SpanOutput, StepPlan, StepResult, TokenLogprobs, Tokens},
};

/// Executes plans with a [`Model`]. Every rank computes the same tokens; rank 0 reports them.
pub struct ModelExecutor {
    model: Box<dyn Model>,
    kv: KvStore,
    comm: Box<dyn Collective>,
    fence: StepFence,
    sequences: BTreeMap<SequenceId, SequenceState>,
    batch: Batch,
    wanted: Vec<WantedRow>,
    /// One row of logits as they came, for log-probabilities.
    raw: Vec<f32>,
    /// Why a step of this epoch was cut short. Until the next epoch no plan can be carried out.
    aborted: Option<String>,
}

/// What a shard knows of a sequence.
struct SequenceState {
    sampling: SamplingParams,
    history: TokenHistory,
    logprobs: Option<u32>,
    table: Vec<BlockId>,
    len: usize,
    last_sampled: Option<u32>,
}

/// What one row of logits is for.
#[derive(Clone, Copy, Debug)]
struct WantedRow {
    sequence: SequenceId,
    /// The prompt token that follows the row, and how many alternatives to report with it.
    prompt: Option<(u32, u32)>,
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
    /// An executor without sequences. Its epoch is that of the first plan.
    pub fn new(model: Box<dyn Model>, kv: KvStore, comm: Box<dyn Collective>) -> Self {
        Self {
            model,
            kv,
            comm,
            fence: StepFence { epoch: None, next: Step(0) },
            sequences: BTreeMap::new(),
            batch: Batch::default(),
            wanted: Vec::new(),
            raw: Vec::new(),
            aborted: None,
        }
    }

    /// Lays the plan's spans end to end into `self.batch`, and notes what each output row is for.
    fn assemble(&mut self, plan: &StepPlan) -> Result<(), ShardError> {
        let Batch { tokens, positions, spans, blocks, output_rows } = &mut self.batch;
        tokens.clear();
        positions.clear();
        spans.clear();
        blocks.clear();
        output_rows.clear();
        self.wanted.clear();
        for span in &plan.run {
            let refuse = |what: String| ShardError::Plan { step: plan.step, what };
            let unknown = || refuse(format!("{} was never begun", span.sequence));
            let state = self.sequences.get_mut(&span.sequence).ok_or_else(unknown)?;
            let first_row = self.batch.tokens.len();
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
            state.table.extend_from_slice(&span.new_blocks);
            check_span(span, state, rows.len(), &self.kv).map_err(refuse)?;
            self.batch.positions.extend((start..state.len).map(|position| position as u32));
            let table_start = self.batch.blocks.len();
            self.batch.blocks.extend_from_slice(&state.table);
            let table = table_start..self.batch.blocks.len();
            want_rows(span, rows.clone(), state.len as u64, &mut self.batch, &mut self.wanted);
            self.batch.spans.push(BatchSpan { rows, context_len: state.len, table });
        }
        Ok(())
    }

    /// Takes the logits group by group, draws, and reports on rank 0.
    fn draw(&mut self, step: Step, result: &mut StepResult) -> Result<(), ShardError> {
        let reports = self.comm.rank() == Rank(0);
        let (vocab_size, group_rows) = (self.model.vocab_size(), self.model.logit_rows_max().max(1));
        let mut digest = Digest::new();
        for first in (0..self.wanted.len()).step_by(group_rows) {
            let rows = first..self.wanted.len().min(first + group_rows);
            let logits = self.model.logits(rows.clone(), self.comm.as_mut());
            let logits = logits.map_err(|source| ShardError::model(step, source))?;
            for (row, wanted) in logits.chunks_exact_mut(vocab_size).zip(&self.wanted[rows]) {
                if reports && let Some((token, top)) = wanted.prompt {
                    output_of(result, wanted.sequence).prompt_logprobs.push(token_logprobs(row, token, top));
                }
                let Some(position) = wanted.draw_at else { continue };
                let Some(state) = self.sequences.get_mut(&wanted.sequence) else { continue };
                let wants_logprobs = state.logprobs.filter(|_| reports);
                self.raw.clear();
                if wants_logprobs.is_some() {
                    self.raw.extend_from_slice(row); // The sampler writes in the row.
                }
                state.sampling.adjustments.apply(row, &state.history);
                let drawn = sample(row, &state.sampling, position);
                // A sequence without a token ends when this step is absorbed; a step planned ahead needs any id.
                let token = drawn.unwrap_or(0);
                state.last_sampled = Some(token);
                digest.token(wanted.sequence, token);
                if reports {
                    let logprobs = wants_logprobs.map(|top| token_logprobs(&self.raw, token, top));
                    let output = output_of(result, wanted.sequence);
                    output.broken |= drawn.is_none();
                    output.sampled.push(Sampled { token, logprobs });
                }
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
        for copy in &plan.copies {
            let copied = self.kv.copy_block(copy.from, copy.to);
            copied.map_err(|source| ShardError::model(plan.step, source.into()))?;
        }
        let mut result = StepResult { epoch: plan.epoch, step: plan.step, outputs: Vec::new(), digest: 0 };
        self.assemble(plan)?;
        if !self.batch.tokens.is_empty() {
            let forward = self.model.forward(&self.batch, &mut self.kv, self.comm.as_mut());
            forward.map_err(|source| ShardError::model(plan.step, source))?;
            self.draw(plan.step, &mut result)?;
        }
        for sequence in &plan.end {
            self.sequences.remove(sequence);
        }
        Ok(result)
    }
}

impl ShardExecutor for ModelExecutor {
    fn execute(&mut self, plan: &StepPlan) -> Result<StepResult, ShardError> {
        // A plan made ahead may follow an aborted step: it misses that step's tokens, which is nobody's mistake.
        if let Some(reason) = &self.aborted {
            return Err(ShardError::Aborted { reason: reason.clone() });
        }
        let result = self.carry_out(plan);
        if let Err(ShardError::Aborted { reason }) = &result {
            self.aborted = Some(reason.clone());
        }
        result
    }

    fn weight_bytes(&self) -> u64 {
        self.model.weight_bytes()
    }

    fn kv_bytes(&self) -> u64 {
        self.kv.bytes()
    }

    fn rejoin(&mut self, epoch: Epoch, comm: Box<dyn Collective>) -> Result<Rejoined, ShardError> {
        self.comm = comm;
        self.fence = StepFence { epoch: Some(epoch), next: Step(0) };
        self.sequences.clear();
        self.aborted = None;
        Ok(Rejoined::Kept)
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
}

/// Refuses a span that would make the model read or write outside its pages.
fn check_span(span: &Span, state: &SequenceState, rows: usize, kv: &KvStore) -> Result<(), String> {
    let block_size = kv.layout().pages.block_size();
    if rows == 0 {
        return Err(format!("{} has no tokens", span.sequence));
    }
    if let Some(block) = span.new_blocks.iter().find(|block| block.index() >= kv.num_blocks()) {
        return Err(format!("block {} does not exist; the pool has {}", block.0, kv.num_blocks()));
    }
    if state.table.len() != state.len.div_ceil(block_size) {
        return Err(format!(
            "{} has {} blocks of {block_size} for {} tokens",
            span.sequence,
            state.table.len(),
            state.len
        ));
    }
    Ok(())
}

/// Notes the rows of `span` whose logits are wanted. `len` is the sequence's length after the span.
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
            follower.map(|token| (token, top))
        });
        let draw_at = (sample && is_last).then_some(len);
        if prompt.is_some() || draw_at.is_some() {
            batch.output_rows.push(row);
            wanted.push(WantedRow { sequence: span.sequence, prompt, draw_at });
        }
    }
}

fn token_logprobs(logits: &[f32], token: u32, top: u32) -> TokenLogprobs {
    let (logprob, top) = log_probabilities(logits, token, top as usize);
    TokenLogprobs { token, logprob, top }
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
