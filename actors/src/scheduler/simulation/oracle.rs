//! What must be true of streams and plans, found out from outside: from requests, events and plans alone, and from
//! looking at who runs and who waits.
//!
//! [`streams`] holds every stream against what its request yields alone. [`plans`] holds every plan against what is
//! promised of plans: the budget, the order of service, who gives way, that nobody starves.

mod plans;
mod streams;

use std::collections::BTreeMap;

pub(super) use streams::{End, Outcome, Stream};

use super::shard::Hidden;
use crate::{
    config::{CacheSpec, SchedulerConfig, kv_tokens_max},
    ids::SequenceId,
    request::{Request, SubmitError},
};

/// Steps that may pass, between two tokens of a sequence that runs, without one for it.
pub(super) const STEPS_BETWEEN_MAX: u64 = 2;

/// The same, more of them, for one that awaits its tokens: steps that were planned before its last one came.
pub(super) const STEPS_AWAITED_MAX: u64 = crate::scheduler::STEPS_IN_FLIGHT_MAX as u64 - 1;

/// Plans in a row that may pass without a row for the first that is prefilled: two in which its page is on its way, one
/// in which the last in the order gives way to it, and those until what that one held is out of the steps in flight.
pub(super) const STARVED_MAX: u64 = 3 + crate::scheduler::STEPS_IN_FLIGHT_MAX as u64;

/// Where a request stands in the order of service: when it is due, then when it came.
pub(super) type Due = (i128, SequenceId);

/// All that is known from outside.
pub(super) struct Oracle {
    config: SchedulerConfig,
    cache: CacheSpec,
    streams: BTreeMap<SequenceId, Stream>,
    /// Who has been first of the waiting, and for how many steps without a break.
    head: Option<(SequenceId, u64)>,
    /// The life that was first to be prefilled, and plans in a row that had nothing for it.
    starved: Option<(u64, u64)>,
    pub(super) seen: Seen,
}

/// The most of what is bounded, and how much there was of what is to be tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// Preemptions of one sequence.
    pub(super) preemptions_max: u8,
    /// Sequences that gave way as often as may be, and are kept from then on.
    pub(super) kept: u64,
    /// Admissions that were taken back in the same plan.
    pub(super) at_once: u64,
    /// Steps between two tokens of one that ran.
    pub(super) steps_between_max: u64,
    /// Time between two such tokens.
    pub(super) token_gap_max_ns: u64,
    /// Steps for which one was first of the waiting.
    pub(super) steps_first_max: u64,
    /// Plans in a row without a row for the first that is prefilled.
    pub(super) starved_max: u64,
    pub(super) tokens: u64,
    pub(super) finished: u64,
    pub(super) failed: u64,
    pub(super) cancelled: u64,
    pub(super) refused: u64,
}

impl Seen {
    /// Both together.
    pub(super) fn add(&mut self, other: &Seen) {
        self.preemptions_max = self.preemptions_max.max(other.preemptions_max);
        self.starved_max = self.starved_max.max(other.starved_max);
        self.steps_between_max = self.steps_between_max.max(other.steps_between_max);
        self.token_gap_max_ns = self.token_gap_max_ns.max(other.token_gap_max_ns);
        self.steps_first_max = self.steps_first_max.max(other.steps_first_max);
        self.kept += other.kept;
        self.at_once += other.at_once;
        self.tokens += other.tokens;
        self.finished += other.finished;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.refused += other.refused;
    }
}

impl Oracle {
    pub(super) fn new(config: SchedulerConfig, cache: CacheSpec) -> Self {
        Self { config, cache, streams: BTreeMap::new(), head: None, starved: None, seen: Seen::default() }
    }

    /// A request was taken in.
    pub(super) fn admitted(
        &mut self,
        now_ms: u64,
        sequence: SequenceId,
        request: &Request,
        hidden: Hidden,
        is_follower: bool,
    ) {
        assert_eq!(self.refusal(request), None, "{sequence} was taken in and can never be served");
        let later = i128::from(request.priority) * i128::from(self.config.priority_aging_ms);
        let due = (i128::from(now_ms) + later, sequence);
        let may_share = self.cache.prefix_caching || is_follower;
        let stream = Stream::new(request, due, hidden, may_share);
        assert!(self.streams.insert(sequence, stream).is_none(), "{sequence} was submitted twice");
    }

    /// A request was refused while `unstarted` waited.
    pub(super) fn refused(&mut self, request: &Request, refusal: &SubmitError, unstarted: usize) {
        self.seen.refused += 1;
        let for_good = self.refusal(request);
        let expected = match for_good {
            Some(expected) => expected,
            None if unstarted >= self.config.max_waiting_requests => {
                SubmitError::Overloaded { waiting: unstarted, limit: self.config.max_waiting_requests }
            }
            None => panic!("a request was refused without a reason: {refusal}"),
        };
        assert_eq!(*refusal, expected);
    }

    /// Why a request can never be served, if so. Prompts here are of known tokens.
    fn refusal(&self, request: &Request) -> Option<SubmitError> {
        let (prompt_tokens, max_tokens) = (request.prompt.len(), request.max_tokens);
        let (max_model_len, block_size) = (self.config.max_model_len, self.cache.block_size);
        if prompt_tokens == 0 {
            return Some(SubmitError::EmptyPrompt);
        }
        if prompt_tokens + max_tokens > max_model_len {
            return Some(SubmitError::TooLong { prompt_tokens, max_tokens, max_model_len });
        }
        let needed_blocks = self.cache.pages_for(kv_tokens_max(request));
        let total_blocks = self.cache.num_blocks;
        let never =
            SubmitError::NeverFits { needed_blocks, total_blocks, block_size, prompt_tokens, max_tokens };
        (needed_blocks > total_blocks).then_some(never)
    }

    /// A request was cancelled; `existed` is what the scheduler said of it.
    pub(super) fn cancelled(&mut self, sequence: SequenceId, existed: bool) {
        let Some(stream) = self.streams.get_mut(&sequence) else {
            assert!(!existed, "{sequence} is unknown and was cancelled");
            return;
        };
        assert_eq!(
            existed,
            stream.is_open(),
            "{sequence} was cancelled, and the scheduler errs about its end"
        );
        if existed {
            stream.cancel();
            self.seen.cancelled += 1;
        }
    }

    /// The group was lost: whoever ran waits again, and its tokens have a pause.
    pub(super) fn lost(&mut self) {
        self.head = None;
        self.streams.values_mut().for_each(Stream::pause);
    }

    /// Whether nobody is owed anything.
    pub(super) fn check_settled(&self) {
        let open = self.streams.iter().find(|(_, stream)| stream.is_open());
        assert!(open.is_none(), "{} never ended", open.map_or(SequenceId(0), |(id, _)| *id));
    }

    /// What came out of a request so far.
    pub(super) fn outcome(&self, sequence: SequenceId) -> &Outcome {
        &self.streams[&sequence].outcome
    }

    pub(super) fn streams(&self) -> impl Iterator<Item = (SequenceId, &Stream)> {
        self.streams.iter().map(|(&sequence, stream)| (sequence, stream))
    }

    fn stream(&self, sequence: SequenceId) -> &Stream {
        self.streams.get(&sequence).unwrap_or_else(|| panic!("{sequence} is unknown"))
    }
}
