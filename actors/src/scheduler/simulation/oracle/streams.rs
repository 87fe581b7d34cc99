//! One request's stream, held against what the model yields for it alone.

use consort_kernels::sampling::SamplingParams;

use super::{Due, Oracle, STEPS_AWAITED_MAX, STEPS_BETWEEN_MAX};
use crate::{
    ids::{SequenceId, Step},
    plan::{Sampled, TokenLogprobs},
    request::{FinishReason, GenerationError, GenerationEvent, Request},
    scheduler::{
        Event, Scheduler,
        simulation::{
            model::{EMPTY, draw, history_of, link, logprobs_of},
            shard::Hidden,
        },
    },
};

/// How a stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::scheduler) enum End {
    Finished(FinishReason),
    /// The model broke down when it was to draw the token at this position.
    Broken(usize),
    Cancelled,
}

/// What came out of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::scheduler) struct Outcome {
    pub(in crate::scheduler) prompt_logprobs: usize,
    pub(in crate::scheduler) sampled: Vec<Sampled>,
    /// Tokens of the prompt that were there already, once the prompt is computed.
    pub(in crate::scheduler) cached_tokens: Option<usize>,
    pub(in crate::scheduler) end: Option<End>,
}

/// When a token came.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    life: u64,
    step: Step,
    at_ns: u64,
}

/// A request, and what its stream has said.
#[derive(Debug)]
pub(in crate::scheduler::simulation) struct Stream {
    pub(in crate::scheduler::simulation) due: Due,
    pub(in crate::scheduler::simulation) outcome: Outcome,
    /// When its first token came.
    pub(in crate::scheduler::simulation) first_token_ns: Option<u64>,
    prompt_len: usize,
    /// The prompt, where something is said of each token of it.
    prompt: Vec<u32>,
    prompt_logprobs: Option<u32>,
    logprobs: Option<u32>,
    sampling: SamplingParams,
    stop_token_ids: Vec<u32>,
    max_tokens: usize,
    hidden: Hidden,
    /// Whether no step may be planned for it before its tokens have come.
    pub(super) awaits_tokens: bool,
    /// Whether any of its prompt may have been there before it came.
    may_share: bool,
    /// Of prompt and tokens so far.
    history: u64,
    /// Of the prompt tokens whose log-probabilities were reported, and the next.
    prompt_history: u64,
    must_end: Option<FinishReason>,
    last: Option<Arrived>,
    /// The life in which the result that is being absorbed was computed.
    life: u64,
    /// Times it was seen to give way.
    pub(super) preemptions: u8,
    /// The life that `missed` counts for.
    pub(super) missed_life: u64,
    /// Plans since its last decode was planned.
    pub(super) missed: u64,
    /// Rows of its prompt in plans, as long as it has not given way or lost its group.
    pub(super) rows: usize,
    /// Whether what it finds may be what it computed itself, before it gave way.
    pub(super) has_lived: bool,
}

impl Stream {
    pub(super) fn new(request: &Request, due: Due, hidden: Hidden, may_share: bool) -> Self {
        let is_told = request.prompt_logprobs.is_some();
        Self {
            due,
            outcome: Outcome::default(),
            first_token_ns: None,
            prompt_len: request.prompt.len(),
            prompt: if is_told { request.prompt.clone() } else { Vec::new() },
            prompt_logprobs: request.prompt_logprobs,
            logprobs: request.logprobs,
            sampling: request.sampling.clone(),
            stop_token_ids: request.stop_token_ids.clone(),
            max_tokens: request.max_tokens,
            hidden,
            awaits_tokens: request.awaits_tokens,
            may_share: may_share && !is_told,
            history: history_of(&request.prompt),
            prompt_history: link(EMPTY, request.prompt[0]),
            must_end: (request.max_tokens == 0).then_some(FinishReason::Length),
            last: None,
            life: 0,
            preemptions: 0,
            missed_life: 0,
            missed: 0,
            rows: 0,
            has_lived: false,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.outcome.end.is_none()
    }

    pub(super) fn cancel(&mut self) {
        self.outcome.end = Some(End::Cancelled);
    }

    pub(super) fn pause(&mut self) {
        (self.last, self.missed, self.rows, self.has_lived) = (None, 0, 0, false);
    }

    fn len(&self) -> usize {
        self.prompt_len + self.outcome.sampled.len()
    }

    fn breaks_here(&self) -> bool {
        self.hidden.breaks_after.is_some_and(|tokens| self.outcome.sampled.len() >= tokens)
    }

    fn report_prompt(&mut self, part: &[TokenLogprobs]) {
        let top = self.prompt_logprobs.expect("nobody asked for the prompt's log-probabilities");
        assert!(self.outcome.sampled.is_empty(), "prompt log-probabilities come before tokens");
        for entry in part {
            let at = self.outcome.prompt_logprobs + 1;
            let token = *self.prompt.get(at).expect("more prompt log-probabilities than prompt");
            assert_eq!(*entry, logprobs_of(self.prompt_history, token, top), "of prompt token {at}");
            self.prompt_history = link(self.prompt_history, token);
            self.outcome.prompt_logprobs += 1;
        }
    }

    fn prefilled(&mut self, cached_tokens: usize) {
        assert_eq!(self.outcome.cached_tokens, None, "the prompt was computed twice");
        assert!(self.outcome.sampled.is_empty(), "the prompt was computed after a token");
        assert!(cached_tokens < self.prompt_len, "the row that draws the first token was not computed");
        let found = self.prompt_len - self.rows.min(self.prompt_len);
        assert!(
            self.has_lived || cached_tokens == found,
            "{cached_tokens} tokens were there and not {found}"
        );
        assert!(self.may_share || cached_tokens == 0, "{cached_tokens} tokens were nobody's to share");
        self.outcome.cached_tokens = Some(cached_tokens);
    }

    fn token(&mut self, sampled: Sampled) {
        assert_eq!(self.must_end, None, "a token came after the last");
        assert!(!self.breaks_here(), "a token came where there is none");
        assert!(self.outcome.cached_tokens.is_some(), "a token came before the prompt was computed");
        let token = draw(self.history, self.len(), self.prompt_len, self.sampling.seed);
        let logprobs = self.logprobs.map(|top| logprobs_of(self.history, token, top));
        assert_eq!(sampled, Sampled { token, logprobs }, "token {} strays", self.outcome.sampled.len());
        self.history = link(self.history, token);
        self.outcome.sampled.push(sampled);
        if self.stop_token_ids.contains(&token) {
            self.must_end = Some(FinishReason::Stop { token });
        } else if self.outcome.sampled.len() == self.max_tokens {
            self.must_end = Some(FinishReason::Length);
        }
    }

    fn finished(&mut self, reason: FinishReason) {
        assert_eq!(Some(reason), self.must_end, "the stream ended otherwise");
        let due = if self.prompt_logprobs.is_some() { self.prompt_len - 1 } else { 0 };
        assert_eq!(self.outcome.prompt_logprobs, due, "prompt log-probabilities are missing");
        assert!(self.outcome.cached_tokens.is_some(), "it ended before its prompt was computed");
        self.outcome.end = Some(End::Finished(reason));
    }

    fn failed(&mut self, error: &GenerationError) {
        let position = self.len();
        assert!(self.breaks_here() && self.max_tokens > 0, "the scheduler failed it: {error}");
        assert_eq!(*error, GenerationError::NotFinite { position });
        self.outcome.end = Some(End::Broken(position));
    }
}

impl Oracle {
    /// Remembers in which lives the sequences of a result are, before it is absorbed.
    pub(in crate::scheduler::simulation) fn before_absorb(
        &mut self,
        scheduler: &Scheduler,
        sequences: impl Iterator<Item = SequenceId>,
    ) {
        for sequence in sequences {
            let life = scheduler.sequences.find(sequence).map(|slot| scheduler.sequences[slot].life);
            if let Some(stream) = self.streams.get_mut(&sequence) {
                stream.life = life.unwrap_or(0);
            }
        }
    }

    /// Takes what the scheduler said when it absorbed `step`, which took `step_ns`. `longest_ns` is the longest so far.
    pub(in crate::scheduler::simulation) fn absorbed(
        &mut self,
        events: Vec<Event>,
        step: Step,
        now_ns: u64,
        (step_ns, longest_ns): (u64, u64),
    ) {
        if let Some((_, steps)) = &mut self.head {
            *steps += 1;
            self.seen.steps_first_max = self.seen.steps_first_max.max(*steps);
        }
        for Event { sequence, event } in events {
            let stream = self.streams.get_mut(&sequence).expect("an event of an unknown sequence");
            assert!(stream.is_open(), "{sequence} went on after its end: {event:?}");
            match event {
                GenerationEvent::PromptLogprobs(part) => stream.report_prompt(&part),
                GenerationEvent::Prefilled { cached_tokens } => stream.prefilled(cached_tokens),
                GenerationEvent::Token(sampled) => {
                    stream.token(sampled);
                    stream.first_token_ns.get_or_insert(now_ns);
                    let arrived = Arrived { life: stream.life, step, at_ns: now_ns };
                    let last = stream.last.replace(arrived).filter(|last| last.life == arrived.life);
                    self.seen.tokens += 1;
                    if let Some(last) = last {
                        let between = step.0 - last.step.0 - 1;
                        let awaited = if stream.awaits_tokens { STEPS_AWAITED_MAX } else { 0 };
                        let most = STEPS_BETWEEN_MAX + awaited;
                        assert!(between <= most, "{sequence} waited for {between} steps");
                        let gap_ns = now_ns - last.at_ns;
                        // Beside the step that draws it, two at most.
                        let most_ns = (2 + awaited) * longest_ns;
                        assert!(gap_ns - step_ns <= most_ns, "{sequence} waited for {gap_ns} ns");
                        self.seen.steps_between_max = self.seen.steps_between_max.max(between);
                        self.seen.token_gap_max_ns = self.seen.token_gap_max_ns.max(gap_ns);
                    }
                }
                GenerationEvent::Finished(reason) => {
                    stream.finished(reason);
                    self.seen.finished += 1;
                }
                GenerationEvent::Failed(error) => {
                    stream.failed(&error);
                    self.seen.failed += 1;
                }
            }
        }
    }
}
