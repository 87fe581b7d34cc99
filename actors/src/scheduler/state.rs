//! The pure scheduler: admit, cancel, absorb. Planning is in `planning`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{
    pool::{Admission, BlockPool},
    sequence::{PlannedSpan, Sequence},
};
use crate::{
    config::{CacheSpec, Limits, SchedulerConfig},
    ids::{Epoch, SequenceId, Step},
    plan::{SpanOutput, StepResult},
    request::{FinishReason, GenerationError, GenerationEvent, Request, SubmitError},
};

/// Something that happened to a sequence, to be told to whoever reads its stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Whose.
    pub sequence: SequenceId,
    /// What.
    pub event: GenerationEvent,
}

/// A result that does not belong to the oldest step in flight: the group and the scheduler disagree, and the
/// group's life must end.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum AbsorbError {
    /// The result is from another life of the group.
    #[error("a result of {got} arrived in {expected}")]
    Epoch {
        /// The result's.
        got: Epoch,
        /// The scheduler's.
        expected: Epoch,
    },
    /// The result is not that of the oldest step in flight.
    #[error("the result of {got} arrived where {expected:?} was due")]
    Order {
        /// The result's.
        got: Step,
        /// Oldest in flight, if any.
        expected: Option<Step>,
    },
    /// The result does not answer its plan.
    #[error("the result of {step} does not answer its plan: {what}")]
    Content {
        /// Which.
        step: Step,
        /// What is wrong.
        what: String,
    },
}

/// Totals since the scheduler began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerCounters {
    /// Steps absorbed.
    pub steps: u64,
    /// Times a sequence lost its blocks.
    pub preemptions: u64,
    /// Prompt tokens of sequences that started.
    pub prompt_tokens: u64,
    /// Tokens emitted.
    pub generated_tokens: u64,
}

/// A planned step that is not absorbed yet.
#[derive(Clone, Debug)]
pub(super) struct StepInFlight {
    pub(super) step: Step,
    pub(super) spans: Vec<PlannedSpan>,
}

/// Continuous batching over one block pool. A plain value: no clock, no channel, no tensor.
///
/// `plan` decides a step, `absorb` takes its result; up to [`super::STEPS_IN_FLIGHT_MAX`] steps may be planned and
/// not absorbed. A sequence that turns out to have ended in an earlier step has its surplus token discarded.
///
/// **Blocks are taken on demand and nobody waits for another in a circle.** Sequences have one order, their arrival:
/// the waiting are admitted in it, from the head only, and the victim of a preemption is always the newest that runs.
/// So whatever runs is older than whatever waits, and the oldest sequence of all runs, is the last to be preempted,
/// and fits the pool alone (checked when it was submitted): it ends, and the next one is the oldest.
///
/// **Nobody is preempted more than [`super::PREEMPTIONS_MAX`] times.** Admission leaves free blocks for what runs (see
/// `admission`); after that many preemptions it leaves all that the newcomer and the older ones may ever take.
/// Sequences admitted later are newer and give way first, so nothing ever asks for this one's blocks again.
#[derive(Clone, Debug)]
pub struct Scheduler {
    pub(super) config: SchedulerConfig,
    pub(super) cache: CacheSpec,
    pub(super) limits: Limits,
    pub(super) pool: BlockPool,
    pub(super) sequences: BTreeMap<SequenceId, Sequence>,
    /// Not running, in order of arrival; a preempted sequence takes its old place.
    pub(super) waiting: BTreeSet<SequenceId>,
    /// Holding blocks, in order of arrival.
    pub(super) running: BTreeSet<SequenceId>,
    /// Of `waiting`, those that never ran: the bounded part.
    pub(super) unstarted: usize,
    pub(super) in_flight: VecDeque<StepInFlight>,
    /// To be named in the next plan's `end`.
    pub(super) ending: BTreeSet<SequenceId>,
    pub(super) epoch: Epoch,
    pub(super) next_step: Step,
    pub(super) counters: SchedulerCounters,
}

impl Scheduler {
    /// A scheduler with nothing to do.
    pub fn new(config: SchedulerConfig, cache: CacheSpec, vocab_size: usize, epoch: Epoch) -> Self {
        Self {
            config,
            cache,
            limits: Limits { vocab_size, max_model_len: config.max_model_len, cache },
            pool: BlockPool::new(cache.num_blocks),
            sequences: BTreeMap::new(),
            waiting: BTreeSet::new(),
            running: BTreeSet::new(),
            unstarted: 0,
            in_flight: VecDeque::new(),
            ending: BTreeSet::new(),
            epoch,
            next_step: Step(0),
            counters: SchedulerCounters::default(),
        }
    }

    /// Puts a request at the end of the queue. `sequence` is greater than any before: numbers are the order of arrival.
    pub fn submit(&mut self, sequence: SequenceId, request: Request) -> Result<(), SubmitError> {
        self.limits.check(&request)?;
        let limit = self.config.max_waiting_requests;
        if self.unstarted >= limit {
            return Err(SubmitError::Overloaded { waiting: self.unstarted, limit });
        }
        let state = Sequence::new(sequence, request, self.config.max_model_len, &self.cache);
        let before = self.sequences.insert(sequence, state);
        assert!(before.is_none(), "{sequence} was submitted twice");
        self.waiting.insert(sequence);
        self.unstarted += 1;
        Ok(())
    }

    /// Ends a sequence wherever it stands. Returns whether it existed.
    pub fn cancel(&mut self, sequence: SequenceId) -> bool {
        self.remove(sequence).is_some()
    }

    /// Takes the result of the oldest step in flight.
    pub fn absorb(&mut self, result: StepResult) -> Result<Vec<Event>, AbsorbError> {
        if result.epoch != self.epoch {
            return Err(AbsorbError::Epoch { got: result.epoch, expected: self.epoch });
        }
        let expected = self.in_flight.front().map(|oldest| oldest.step);
        let oldest = match self.in_flight.pop_front() {
            Some(oldest) if oldest.step == result.step => oldest,
            other => {
                self.in_flight.extend(other);
                return Err(AbsorbError::Order { got: result.step, expected });
            }
        };
        self.check_content(&oldest, &result)?;
        self.counters.steps += 1;
        self.pool.absorbed(oldest.step);
        let mut events = Vec::new();
        let mut outputs = result.outputs.into_iter();
        for span in &oldest.spans {
            let output = if expects_output(span) { outputs.next() } else { None };
            self.absorb_span(span, output, &mut events);
        }
        Ok(events)
    }

    /// Begins a new life of the group: nothing is in flight, no block is written, and every sequence that ran waits
    /// at its old place to be replayed from its journal.
    pub fn restart(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.next_step = Step(0);
        self.in_flight.clear();
        self.ending.clear();
        self.pool = BlockPool::new(self.cache.num_blocks);
        for sequence in std::mem::take(&mut self.running) {
            if let Some(state) = self.sequences.get_mut(&sequence) {
                state.end_life();
            }
            self.waiting.insert(sequence);
        }
    }

    /// Totals since the beginning.
    pub fn counters(&self) -> SchedulerCounters {
        self.counters
    }

    /// Sequences that hold blocks.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that wait, preempted ones included.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Blocks that are not free: owned or quarantined.
    pub fn used_blocks(&self) -> usize {
        self.pool.total() - self.pool.free()
    }

    /// Steps planned and not absorbed.
    pub fn steps_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether no sequence is left.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    /// The life of the group that plans are made for.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Prompt and emitted tokens of a sequence.
    pub fn journal(&self, sequence: SequenceId) -> Option<&[u32]> {
        self.sequences.get(&sequence).map(|state| state.tokens.as_slice())
    }

    fn absorb_span(&mut self, span: &PlannedSpan, output: Option<SpanOutput>, events: &mut Vec<Event>) {
        let sequence = span.sequence;
        let Some(state) = self.sequences.get_mut(&sequence).filter(|state| state.life == span.life) else {
            return; // Ended, or preempted since: its next life draws the same token again.
        };
        let mut finish = None;
        if let Some(mut output) = output {
            let reported =
                state.prompt_logprobs_next.saturating_sub(span.start + 1).min(output.prompt_logprobs.len());
            output.prompt_logprobs.drain(..reported);
            if !output.prompt_logprobs.is_empty() {
                state.prompt_logprobs_next += output.prompt_logprobs.len();
                events
                    .push(Event { sequence, event: GenerationEvent::PromptLogprobs(output.prompt_logprobs) });
            }
            if output.broken {
                let error = GenerationError::NotFinite { position: state.tokens.len() };
                self.remove(sequence);
                events.push(Event { sequence, event: GenerationEvent::Failed(error) });
                return;
            }
            if let Some(sampled) = output.sampled.pop() {
                let token = sampled.token;
                state.draws_ahead -= 1;
                state.tokens.push(token);
                self.counters.generated_tokens += 1;
                events.push(Event { sequence, event: GenerationEvent::Token(sampled) });
                if state.stop_token_ids.contains(&token) {
                    finish = Some(FinishReason::Stop { token });
                } else if state.tokens.len() >= state.token_limit {
                    finish = Some(FinishReason::Length);
                }
            }
        }
        if state.ends_with_prompt() && span.end == state.prompt_len {
            finish = Some(FinishReason::Length);
        }
        if let Some(reason) = finish {
            self.remove(sequence);
            events.push(Event { sequence, event: GenerationEvent::Finished(reason) });
        }
    }

    fn check_content(&self, step: &StepInFlight, result: &StepResult) -> Result<(), AbsorbError> {
        let content = |what: String| AbsorbError::Content { step: step.step, what };
        let expected: Vec<&PlannedSpan> = step.spans.iter().filter(|span| expects_output(span)).collect();
        if expected.len() != result.outputs.len() {
            return Err(content(format!("{} outputs, {} expected", result.outputs.len(), expected.len())));
        }
        for (span, output) in expected.into_iter().zip(&result.outputs) {
            if span.sequence != output.sequence {
                return Err(content(format!("{} where {} was due", output.sequence, span.sequence)));
            }
            let (drawn, reported) = (output.sampled.len(), output.prompt_logprobs.len());
            if drawn != usize::from(span.draws()) || reported != span.prompt_logprobs() {
                return Err(content(format!(
                    "{} brought {drawn} tokens and {reported} prompt log-probabilities, {} and {} expected",
                    span.sequence,
                    usize::from(span.draws()),
                    span.prompt_logprobs()
                )));
            }
            if let Some(sampled) = output.sampled.iter().find(|s| s.token as usize >= self.limits.vocab_size)
            {
                return Err(content(format!("{} drew unknown token {}", span.sequence, sampled.token)));
            }
        }
        Ok(())
    }

    /// Takes a sequence out, wherever it stands; its blocks are quarantined until no step can touch them.
    fn remove(&mut self, sequence: SequenceId) -> Option<Sequence> {
        let mut state = self.sequences.remove(&sequence)?;
        if self.waiting.remove(&sequence) {
            self.unstarted -= usize::from(!state.started);
        }
        if self.running.remove(&sequence) {
            self.ending.insert(sequence);
        }
        self.release(&mut state);
        Some(state)
    }

    /// Takes a running sequence's blocks and puts it back to its place in the queue.
    pub(super) fn preempt(&mut self, sequence: SequenceId) {
        let Some(mut state) = self.sequences.remove(&sequence) else { return };
        self.running.remove(&sequence);
        self.ending.insert(sequence);
        self.release(&mut state);
        state.preemptions += 1;
        self.counters.preemptions += 1;
        self.waiting.insert(sequence);
        self.sequences.insert(sequence, state);
    }

    fn release(&mut self, state: &mut Sequence) {
        let oldest = self.in_flight.front().map(|oldest| oldest.step);
        let until = state.last_step.filter(|last| oldest.is_some_and(|oldest| *last >= oldest));
        let blocks = state.end_life();
        self.pool.release(blocks, until);
    }

    /// Whether a waiting sequence can run: its known tokens fit, and what runs then can go on growing for a while.
    /// Without that margin a newcomer would take the last free blocks, be prefilled, and be the victim of the next
    /// sequence that crosses a block boundary. A sequence that would run alone always fits.
    pub(super) fn admission(&self, state: &Sequence) -> Admission {
        let needed = state.blocks_at_admission(&self.cache);
        let each = state.reserve_per_sequence();
        let running = self.running.iter().filter_map(|id| self.sequences.get(id));
        let rooms = running.map(|other| other.room(other.blocks.len())).chain([state.room(needed)]);
        let reserve: usize = rooms.map(|room| room.min(each)).sum();
        self.pool.admission(needed + reserve, state.blocks_max)
    }

    /// Panics when bookkeeping contradicts itself. Called after every event in simulations.
    pub fn check_invariants(&self) {
        assert!(self.in_flight.len() <= super::STEPS_IN_FLIGHT_MAX, "too many steps in flight");
        assert!(self.running.len() <= self.config.max_num_seqs, "too many running sequences");
        assert!(self.unstarted <= self.config.max_waiting_requests, "too many waiting requests");
        assert!(self.running.is_disjoint(&self.waiting), "a sequence both runs and waits");
        assert_eq!(self.running.len() + self.waiting.len(), self.sequences.len(), "a sequence has no place");
        let unstarted = self.sequences.values().filter(|state| !state.started).count();
        assert_eq!(self.unstarted, unstarted, "unstarted sequences are miscounted");
        if let (Some(newest), Some(oldest)) = (self.running.last(), self.waiting.first()) {
            assert!(newest < oldest, "{newest} runs before {oldest}, which came first");
        }
        let most = self.sequences.values().map(|state| state.preemptions).max();
        assert!(most <= Some(super::PREEMPTIONS_MAX), "a sequence was preempted {most:?} times");
        self.pool.check_invariants(self.sequences.values().flat_map(|state| state.blocks.iter().copied()));
        for state in self.sequences.values() {
            assert!(
                state.tokens.len() < state.token_limit.max(state.prompt_len + 1),
                "{} overran its limit",
                state.id
            );
            if self.running.contains(&state.id) {
                self.check_running(state);
            } else {
                assert!(self.waiting.contains(&state.id), "{} neither runs nor waits", state.id);
                assert!(
                    state.blocks.is_empty() && state.computed == 0,
                    "waiting {} holds something",
                    state.id
                );
            }
        }
        for step in &self.in_flight {
            let tokens: usize = step.spans.iter().map(|span| span.end - span.start).sum();
            assert!(tokens <= self.config.max_num_batched_tokens, "{} is over the token budget", step.step);
        }
    }

    fn check_running(&self, state: &Sequence) {
        let cover = self.cache.blocks_for(state.computed.max(state.prefill_target));
        assert_eq!(state.blocks.len(), cover, "the table of {} does not cover it exactly", state.id);
        assert!(cover <= state.blocks_max, "{} outgrew what it was admitted for", state.id);
        assert_eq!(
            state.blocks_sent,
            self.cache.blocks_for(state.computed),
            "{} sent other blocks",
            state.id
        );
        let in_flight = self.in_flight.iter().flat_map(|step| &step.spans);
        let draws =
            in_flight.filter(|span| span.sequence == state.id && span.life == state.life && span.draws());
        assert_eq!(state.draws_ahead, draws.count(), "{} lost count of its draws", state.id);
        assert!(state.planned_len() <= state.token_limit, "{} is planned beyond its limit", state.id);
        if !state.is_prefilling() && !state.ends_with_prompt() {
            assert_eq!(state.computed + 1, state.planned_len(), "{} decodes at a wrong position", state.id);
        }
    }
}

/// Whether the step's result has an entry for this span.
fn expects_output(span: &PlannedSpan) -> bool {
    span.draws() || span.prompt_logprobs() > 0
}
