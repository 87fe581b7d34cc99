//! The pure scheduler: admit, cancel, absorb. Planning is in `planning`.

use std::collections::{BTreeMap, VecDeque};

use super::{
    bugs::{Bug, planted},
    pool::PagePool,
    sequence::{self, PlannedSpan, RunOrder, Sequence},
    slots::Slots,
    tiers::Tiers,
};
use crate::{
    config::{CacheSpec, Limits, SchedulerConfig},
    ids::{Epoch, SequenceId, Step},
    order::Place,
    plan::{GroupImage, SpanOutput, StepResult},
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
    /// Times a sequence lost its pages.
    pub preemptions: u64,
    /// Prompt tokens of sequences that started.
    pub prompt_tokens: u64,
    /// Tokens of prompts that were looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Those of them whose keys and values were there.
    pub prefix_cache_hits: u64,
    /// Rows planned: tokens whose keys and values were to be computed, replays included.
    pub computed_tokens: u64,
    /// Tokens emitted.
    pub generated_tokens: u64,
    /// Pages copied to the host's pool.
    pub host_saves: u64,
    /// Pages that came back.
    pub host_loads: u64,
    /// Tokens that need not be computed because of these.
    pub host_hits: u64,
}

/// A planned step that is not absorbed yet.
#[derive(Clone, Debug)]
pub(super) struct StepInFlight {
    pub(super) step: Step,
    pub(super) spans: Vec<PlannedSpan>,
}

/// One that runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub(super) order: RunOrder,
    pub(super) slot: usize,
}

/// Continuous batching over one pool of pages. A plain value: no clock, no channel, no tensor.
///
/// `plan` decides a step, `absorb` takes its result; up to [`super::STEPS_IN_FLIGHT_MAX`] steps may be planned and
/// not absorbed. A sequence that turns out to have ended in an earlier step has its surplus token discarded.
///
/// **Pages are taken on demand and nobody waits for another in a circle.** Sequences have one order of service, which
/// never changes (see `Place`): the waiting are admitted in it, from the head only, and who gives way is the last in
/// it. The first of those that run is never preempted and fits the pool alone (checked when it was submitted): it ends,
/// and the next one is the first. While the head of the queue waits nobody else is admitted, so what runs becomes fewer
/// until it fits. Newcomers with a better priority come before it only for a bounded time.
///
/// **Nobody is preempted more than [`super::PREEMPTIONS_MAX`] times.** Admission leaves pages for what runs (see
/// `admission`); whoever was preempted that often runs only once all that such sequences may ever take fits the pool
/// together. From then on it gives way to nobody, and others give way to it, whatever their priority.
#[derive(Clone, Debug)]
pub struct Scheduler {
    pub(super) config: SchedulerConfig,
    pub(super) cache: CacheSpec,
    /// Layer groups: pages that a block of tokens takes.
    pub(super) groups: usize,
    pub(super) limits: Limits,
    pub(super) pool: PagePool,
    pub(super) tiers: Tiers,
    pub(super) sequences: Slots,
    /// Not running, in order of service; a preempted sequence takes its old place.
    pub(super) waiting: BTreeMap<Place, usize>,
    /// Holding pages, in their order.
    pub(super) running: Vec<Running>,
    /// Of `waiting`, those that never ran: the bounded part.
    pub(super) unstarted: usize,
    pub(super) in_flight: VecDeque<StepInFlight>,
    /// To be named in the next plan's `end`.
    pub(super) ending: Vec<SequenceId>,
    pub(super) epoch: Epoch,
    pub(super) next_step: Step,
    /// Most plans in a row that left out a decode of one that runs.
    pub(super) missed_most: u8,
    /// The sequence that was last looked at closely before it was admitted, the state of the cache then, and the blocks
    /// of its longest prefix: they are asked for in every plan while it waits.
    pub(super) prefix_of_head: Option<(SequenceId, u64, usize)>,
    /// Lives begun so far.
    pub(super) lives: u64,
    pub(super) counters: SchedulerCounters,
}

impl Scheduler {
    /// A scheduler with nothing to do.
    pub fn new(config: SchedulerConfig, cache: CacheSpec, vocab_size: usize, epoch: Epoch) -> Self {
        Self {
            config,
            cache,
            groups: cache.groups.count(),
            limits: Limits { vocab_size, max_model_len: config.max_model_len, cache },
            pool: PagePool::new(cache.num_blocks, cache.block_size),
            tiers: Tiers::new(&cache),
            sequences: Slots::default(),
            waiting: BTreeMap::new(),
            running: Vec::new(),
            unstarted: 0,
            in_flight: VecDeque::new(),
            ending: Vec::new(),
            epoch,
            next_step: Step(0),
            missed_most: 0,
            prefix_of_head: None,
            lives: 0,
            counters: SchedulerCounters::default(),
        }
    }

    /// Puts a request into the queue that came at `now_ms`, which counts from any fixed moment. Numbers of sequences
    /// are unique and break ties; they need not come in order, because requests move between schedulers. `leader` is an
    /// earlier one with the same prompt and salt, another choice of the same request: this one shares what that one has
    /// of the prompt.
    pub fn submit(
        &mut self,
        now_ms: u64,
        sequence: SequenceId,
        request: Request,
        leader: Option<SequenceId>,
    ) -> Result<(), SubmitError> {
        self.limits.check(&request)?;
        let limit = self.config.max_waiting_requests;
        if self.unstarted >= limit {
            return Err(SubmitError::Overloaded { waiting: self.unstarted, limit });
        }
        let leads = |leader: &SequenceId| {
            let slot = self.sequences.find(*leader);
            slot.is_some_and(|slot| self.sequences[slot].has_prompt(&request.prompt))
        };
        let leader = leader.filter(leads);
        let place = sequence::place(now_ms, request.priority, self.config.priority_aging_ms, sequence);
        let mut state = Sequence::new(sequence, place, request, self.config.max_model_len, &self.cache);
        state.leader = leader;
        let slot = self.sequences.insert(state);
        self.waiting.insert(place, slot);
        self.unstarted += 1;
        Ok(())
    }

    /// Ends a sequence wherever it stands. Returns whether it existed.
    pub fn cancel(&mut self, sequence: SequenceId) -> bool {
        let slot = self.sequences.find(sequence);
        slot.map(|slot| self.remove(slot)).is_some()
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
        if let Some(until) = result.transferred {
            self.transfers_done(until);
        }
        let mut events = Vec::with_capacity(result.outputs.len());
        let mut outputs = result.outputs.into_iter();
        for span in &oldest.spans {
            let output = if expects_output(span) { outputs.next() } else { None };
            self.absorb_span(span, output, &mut events);
        }
        Ok(events)
    }

    /// Begins a new life of the group: nothing is in flight, no page is written, and every sequence that ran waits
    /// at its old place to be replayed from its journal.
    pub fn restart(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.next_step = Step(0);
        self.in_flight.clear();
        self.ending.clear();
        let pool = PagePool::new(self.cache.num_blocks, self.cache.block_size);
        if !planted(Bug::KeepsHostOfLostGroup) || self.tiers.is_moving() {
            self.tiers = Tiers::new(&self.cache);
        }
        self.prefix_of_head = None;
        let lost = std::mem::replace(&mut self.pool, pool);
        let mut lost = planted(Bug::KeepsNamesOfLostGroup).then_some(lost);
        for Running { slot, .. } in std::mem::take(&mut self.running) {
            let state = &mut self.sequences[slot];
            // Its pages are those of the pool that is gone.
            let pages = state.end_life();
            lost.iter_mut()
                .zip([pages])
                .for_each(|(lost, pages)| pages.for_each(|it| lost.release(it, None)));
            self.waiting.insert(state.place, slot);
        }
        let all: Vec<usize> = self.sequences.iter().map(|(slot, _)| slot).collect();
        for slot in all {
            let state = &mut self.sequences[slot];
            // What a first life found or left is gone, too.
            (state.cached_tokens, state.has_lived) = (0, false);
        }
        if let Some(mut lost) = lost {
            [Step(u64::MAX - 1), Step(0)].into_iter().for_each(|step| lost.absorbed(step));
            self.pool = lost;
        }
    }

    /// All that a shard which has the pages but knows no sequence must be told to carry out the next plan. `None` while
    /// steps are in flight: their tokens are not known yet.
    pub fn image(&self) -> Option<GroupImage> {
        self.in_flight.is_empty().then(|| GroupImage {
            epoch: self.epoch,
            next_step: self.next_step,
            sequences: self
                .running
                .iter()
                .map(|running| &self.sequences[running.slot])
                .filter(|state| state.announced)
                .map(|state| state.image(&self.cache))
                .collect(),
            // What has ended is not known to such a shard, and need not be forgotten.
            ended: self.ending.clone(),
        })
    }

    /// Totals since the beginning.
    pub fn counters(&self) -> SchedulerCounters {
        self.counters
    }

    /// Sequences that hold pages.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that wait, preempted ones included.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Pages that sequences hold, or that steps under way may touch.
    pub fn used_blocks(&self) -> usize {
        self.pool.total() - self.pool.available()
    }

    /// Pages that nobody holds and whose content may serve later requests.
    pub fn cached_blocks(&self) -> usize {
        self.pool.cached()
    }

    /// Pages of the host's pool that hold something.
    pub fn host_used_blocks(&self) -> usize {
        self.tiers.host.used()
    }

    /// Pages that are moved between device and host, and not reported yet.
    pub fn transfers_under_way(&self) -> usize {
        self.tiers.under_way()
    }

    /// Steps planned and not absorbed.
    pub fn steps_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether no sequence is left.
    pub fn is_idle(&self) -> bool {
        self.sequences.len() == 0
    }

    /// The life of the group that plans are made for.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Prompt and emitted tokens of a sequence.
    pub fn journal(&self, sequence: SequenceId) -> Option<&[u32]> {
        self.sequences.find(sequence).map(|slot| self.sequences[slot].tokens.as_slice())
    }

    fn absorb_span(&mut self, span: &PlannedSpan, output: Option<SpanOutput>, events: &mut Vec<Event>) {
        let PlannedSpan { sequence, slot, .. } = *span;
        let is_any = planted(Bug::TakesEarlierLives);
        let is_same = |state: &&mut Sequence| state.life == span.life || is_any && state.id == sequence;
        let Some(state) = self.sequences.get_mut(slot).filter(is_same) else {
            return; // Ended, or preempted since: its next life draws the same token again.
        };
        let mut finish = None;
        let mut sampled = None;
        let event = |event| Event { sequence, event };
        if let Some(mut output) = output {
            let from = if planted(Bug::ReportsTwice) { 0 } else { state.prompt_logprobs_next };
            let reported = from.saturating_sub(span.start + 1).min(output.prompt_logprobs.len());
            output.prompt_logprobs.drain(..reported);
            if !output.prompt_logprobs.is_empty() {
                state.prompt_logprobs_next += output.prompt_logprobs.len();
                events.push(event(GenerationEvent::PromptLogprobs(output.prompt_logprobs)));
            }
            if output.broken {
                let error = GenerationError::NotFinite { position: state.tokens.len() };
                self.forget_contents(slot);
                self.remove(slot);
                events.push(event(GenerationEvent::Failed(error)));
                return;
            }
            sampled = output.sampled.pop();
        }
        // Also where nothing is drawn, and nothing comes back with the prompt's end.
        if !state.prefilled && span.end >= state.prompt_len {
            state.prefilled = true;
            let cached_tokens = state.cached_tokens;
            self.counters.prefix_cache_queries += state.prompt_len as u64;
            self.counters.prefix_cache_hits += cached_tokens as u64;
            events.push(event(GenerationEvent::Prefilled { cached_tokens }));
        }
        if let Some(sampled) = sampled {
            let token = sampled.token;
            state.draws_ahead -= 1;
            state.tokens.push(token);
            self.counters.generated_tokens += 1;
            events.push(event(GenerationEvent::Token(sampled)));
            if state.stop_token_ids.contains(&token) {
                finish = Some(FinishReason::Stop { token });
            } else if state.tokens.len() >= state.token_limit {
                finish = Some(FinishReason::Length);
            }
            if state.has_full_block(&self.cache) {
                state.extend_keys(&self.cache);
                self.name_blocks(slot);
            }
        }
        let state = &self.sequences[slot];
        if state.ends_with_prompt() && span.end == state.prompt_len {
            finish = Some(FinishReason::Length);
        }
        if let Some(reason) = finish {
            self.remove(slot);
            events.push(event(GenerationEvent::Finished(reason)));
        }
    }

    fn check_content(&self, step: &StepInFlight, result: &StepResult) -> Result<(), AbsorbError> {
        let content = |what: String| AbsorbError::Content { step: step.step, what };
        if let Some(until) = result.transferred.filter(|until| *until > step.step) {
            return Err(content(format!("transfers of {until}, which is still to come")));
        }
        let expected = step.spans.iter().filter(|span| expects_output(span)).count();
        if expected != result.outputs.len() {
            return Err(content(format!("{} outputs, {expected} expected", result.outputs.len())));
        }
        let expected = step.spans.iter().filter(|span| expects_output(span));
        for (span, output) in expected.zip(&result.outputs) {
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

    /// Takes a sequence out, wherever it stands; its pages are quarantined until no step can touch them.
    fn remove(&mut self, slot: usize) {
        let state = &self.sequences[slot];
        let (place, started) = (state.place, state.started);
        if self.waiting.remove(&place).is_some() {
            self.unstarted -= usize::from(!started);
        } else {
            let leaks = planted(Bug::LeaksWhenPromised) && self.sequences[slot].promised > 0;
            if leaks {
                self.sequences[slot].table.clear();
            }
            self.end_life(slot);
        }
        self.sequences.remove(slot);
    }

    /// Takes a running sequence's pages and puts it back to its place in the queue.
    pub(super) fn preempt(&mut self, slot: usize) {
        let has_run = self.sequences[slot].announced;
        self.end_life(slot);
        let state = &mut self.sequences[slot];
        state.has_lived |= has_run;
        if !state.has_lived {
            // What it was to share, or to load, it may not find again.
            state.cached_tokens = 0;
        }
        state.preemptions += u8::from(!planted(Bug::ForgetsPreemptions));
        self.counters.preemptions += 1;
        self.waiting.insert(state.place, slot);
    }

    fn end_life(&mut self, slot: usize) {
        self.forget_loads(slot);
        let state = &mut self.sequences[slot];
        let at = self.running.binary_search_by_key(&state.order(), |running| running.order);
        self.running.remove(at.expect("what does not wait runs, in its order"));
        if state.announced {
            self.ending.push(state.id);
        }
        let until = state.last_step;
        for page in state.end_life() {
            self.pool.release(page, until);
        }
    }

    pub(super) fn enter_running(&mut self, slot: usize) {
        let order = self.sequences[slot].order();
        let at = self.running.partition_point(|running| running.order < order);
        self.running.insert(at, Running { order, slot });
    }
}

/// Whether the step's result has an entry for this span.
fn expects_output(span: &PlannedSpan) -> bool {
    span.draws() || span.prompt_logprobs() > 0
}
