//! A step on its way through an executor: begun, computed by the model now or beside the host, and told.
//!
//! With a step under way the next one is begun from what is known without its tokens. Where more must be known (a
//! penalty that depends on them, a step that the model takes in one go only), the one under way is waited for first,
//! and its result kept until somebody asks for it.

use std::time::Duration;

use consort_parallel::{
    ids::Rank,
    model::{RowOutcome, STEP_LIMIT, row_of},
};

use super::{
    executor::ModelExecutor,
    sequence::{LastToken, SequenceState, WantedRow, assemble},
};
use crate::{
    error::ShardError,
    ids::{SequenceId, Step},
    plan::{Sampled, SpanOutput, StepPlan, StepResult, Tokens},
};

/// How long the model is asked in one go to wait for a step. It knows itself when a step takes too long.
const PATIENCE: Duration = Duration::from_millis(100);

/// A step whose result was not told.
pub(super) struct BegunStep {
    step: Step,
    await_transfers: bool,
    /// With the outcomes of the step, but for transfers.
    result: StepResult,
    progress: Progress,
}

enum Progress {
    /// The model computes it. With what each output row is for.
    UnderWay(Vec<WantedRow>),
    /// It is computed. With the token of each output row that draws, and any for the others.
    Computed(Vec<u32>),
}

impl ModelExecutor {
    /// Carries out a step with no other under way.
    pub(super) fn carry_out(&mut self, plan: &StepPlan) -> Result<StepResult, ShardError> {
        if !self.begun.is_empty() {
            let what = "it is to be carried out alone, with others under way".to_owned();
            return Err(ShardError::Plan { step: plan.step, what });
        }
        self.begin_step(plan, false)?;
        loop {
            if let Some(result) = self.finish_step(PATIENCE)? {
                return Ok(result);
            }
        }
    }

    /// Begins a step behind those under way, beside the host where that is wanted and the model can.
    pub(super) fn begin_step(&mut self, plan: &StepPlan, overlaps: bool) -> Result<(), ShardError> {
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
        if self.must_know_tokens(plan) {
            self.settle()?;
        }
        assemble(plan, &mut self.sequences, &self.kv, &mut self.batch, &mut self.wanted)?;
        let mut begun = BegunStep {
            step: plan.step,
            await_transfers: plan.await_transfers,
            result: StepResult {
                epoch: plan.epoch,
                step: plan.step,
                outputs: Vec::new(),
                transferred: None,
                digest: 0,
            },
            progress: Progress::Computed(Vec::new()),
        };
        if !self.batch.tokens.is_empty() {
            self.compute(&mut begun, overlaps)?;
        }
        for sequence in &plan.end {
            self.sequences.remove(sequence);
        }
        self.begun.push_back(begun);
        Ok(())
    }

    /// Whether a draw of the plan depends on a token that a step under way draws.
    fn must_know_tokens(&self, plan: &StepPlan) -> bool {
        plan.run.iter().any(|span| {
            let state = self.sequences.get(&span.sequence);
            span.tokens == Tokens::LastSampled && state.is_some_and(SequenceState::awaits_its_token)
        })
    }

    /// Has the model compute the batch: beside the host where it can, else at once.
    fn compute(&mut self, begun: &mut BegunStep, overlaps: bool) -> Result<(), ShardError> {
        let step = begun.step;
        if overlaps && self.begin_beside(step)? {
            begun.progress = Progress::UnderWay(std::mem::take(&mut self.wanted));
        } else {
            self.settle()?;
            self.name_tokens();
            let (reports, comm) = (self.reports(), self.comm.as_mut());
            let forward = self.model.forward(&self.batch, &mut self.kv, comm);
            forward.map_err(|source| ShardError::model(step, source))?;
            let requests: Vec<_> = self.wanted.iter().map(|row| row.request(&self.sequences)).collect();
            let outcomes = self.model.outcomes(&requests, reports, comm);
            let outcomes = outcomes.map_err(|source| ShardError::model(step, source))?;
            begun.progress = Progress::UnderWay(std::mem::take(&mut self.wanted));
            self.expect_draws(begun);
            self.conclude(begun, outcomes);
            return Ok(());
        }
        self.expect_draws(begun);
        Ok(())
    }

    /// Begins the batch beside the host, if the model takes it.
    fn begin_beside(&mut self, step: Step) -> Result<bool, ShardError> {
        let requests: Vec<_> = self.wanted.iter().map(|row| row.request(&self.sequences)).collect();
        let Some(overlap) = self.model.overlap() else { return Ok(false) };
        if !overlap.takes(&requests) {
            return Ok(false);
        }
        let begun = overlap.begin(&self.batch, &requests, &mut self.kv, self.comm.as_mut());
        begun.map_err(|source| ShardError::model(step, source))?;
        Ok(true)
    }

    /// Notes that sequences draw in a step that was begun.
    fn expect_draws(&mut self, begun: &BegunStep) {
        let Progress::UnderWay(wanted) = &begun.progress else { return };
        for (row, wanted) in wanted.iter().enumerate().filter(|(_, wanted)| wanted.draw_at.is_some()) {
            if let Some(state) = self.sequences.get_mut(&wanted.sequence) {
                state.last = LastToken::Drawn { step: begun.step, row };
            }
        }
    }

    /// Puts into the batch what the step before, which is computed, has drawn for it.
    fn name_tokens(&mut self) {
        let Some(BegunStep { progress: Progress::Computed(drawn), .. }) = self.begun.back() else { return };
        for token in &mut self.batch.tokens {
            if let Some(row) = row_of(*token) {
                *token = drawn[row];
            }
        }
    }

    /// Waits for what the model computes.
    fn settle(&mut self) -> Result<(), ShardError> {
        for at in 0..self.begun.len() {
            while !self.is_computed(at, PATIENCE)? {}
        }
        Ok(())
    }

    /// Whether a step is computed, all before it being so, or comes to be within `patience`.
    fn is_computed(&mut self, at: usize, patience: Duration) -> Result<bool, ShardError> {
        let begun = &self.begun[at];
        let (Progress::UnderWay(_), Some(overlap)) = (&begun.progress, self.model.overlap()) else {
            return Ok(true);
        };
        let outcomes = overlap.finish(patience, self.comm.as_mut());
        let outcomes = outcomes.map_err(|source| ShardError::model(begun.step, source))?;
        let Some(outcomes) = outcomes else { return Ok(false) };
        if let Some(mut begun) = self.begun.remove(at) {
            self.conclude(&mut begun, outcomes);
            self.begun.insert(at, begun);
        }
        Ok(true)
    }

    /// The result of the oldest step, once it is computed and the transfers are done that it waits for.
    pub(super) fn finish_step(&mut self, patience: Duration) -> Result<Option<StepResult>, ShardError> {
        if self.begun.is_empty() || !self.is_computed(0, patience)? {
            return Ok(None);
        }
        let Some(mut begun) = self.begun.pop_front() else { return Ok(None) };
        begun.result.transferred = self.transferred(begun.step, begun.await_transfers)?;
        Ok(Some(begun.result))
    }

    /// The step up to which all transfers are done, which may have to be waited for.
    fn transferred(&mut self, step: Step, await_transfers: bool) -> Result<Option<Step>, ShardError> {
        let pending = match await_transfers {
            true => self.kv.finish_transfers(STEP_LIMIT).map(|()| None),
            false => self.kv.pending_transfer(),
        };
        let pending = pending.map_err(|source| ShardError::model(step, source.into()))?;
        // Those of a step that was begun since are its own to tell of.
        Ok(pending.map_or(Some(step), |oldest| oldest.checked_sub(1).map(|done| Step(done).min(step))))
    }

    fn reports(&self) -> bool {
        self.comm.rank() == Rank(0)
    }

    /// Remembers the tokens of a step's rows, and reports them on rank 0. A sequence may have ended since, or begun
    /// anew: then its state is not the step's any more.
    fn conclude(&mut self, begun: &mut BegunStep, outcomes: Vec<RowOutcome>) {
        let Progress::UnderWay(wanted) = &begun.progress else { return };
        assert_eq!(outcomes.len(), wanted.len(), "a model answers every output row");
        let reports = self.reports();
        let (mut digest, mut tokens) = (Digest::new(), vec![0; wanted.len()]);
        for (row, (wanted, RowOutcome { prompt, drawn })) in wanted.iter().zip(outcomes).enumerate() {
            if reports && let Some(prompt) = prompt {
                output_of(&mut begun.result, wanted.sequence).prompt_logprobs.push(prompt);
            }
            let Some(drawn) = drawn else { continue };
            // A sequence without a token ends when this step is absorbed; a step planned ahead needs any id.
            let token = drawn.token.unwrap_or(0);
            tokens[row] = token;
            if let Some(state) = self.sequences.get_mut(&wanted.sequence)
                && state.last == (LastToken::Drawn { step: begun.step, row })
            {
                state.last = LastToken::Known(token);
            }
            digest.token(wanted.sequence, token);
            if reports {
                let output = output_of(&mut begun.result, wanted.sequence);
                output.broken |= drawn.token.is_none();
                output.sampled.push(Sampled { token, logprobs: drawn.logprobs });
            }
        }
        begun.result.digest = digest.value();
        begun.progress = Progress::Computed(tokens);
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
