//! One sequence as the scheduler sees it: the journal of its tokens, and how far its present life has come.

use consort_kernels::sampling::SamplingParams;
use consort_parallel::ids::BlockId;

use super::{PREEMPTIONS_MAX, RESERVE_GROWTH_BITS};
use crate::{
    config::{CacheSpec, kv_tokens_max},
    ids::{SequenceId, Step},
    plan::{NewSequence, Output, Span, Tokens},
    request::Request,
};

/// A request's tokens and progress.
///
/// A *life* runs from an admission to the next preemption; what a step computed for an earlier life is discarded,
/// because draws are keyed by seed and position and the next life draws the same tokens again.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    /// Prompt and absorbed tokens: all that is needed to continue elsewhere.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    pub(super) stop_token_ids: Vec<u32>,
    /// Length at which the sequence ends.
    pub(super) token_limit: usize,
    /// Blocks it may come to hold.
    pub(super) blocks_max: usize,
    /// First prompt position whose log-probabilities were not reported yet. Position 0 has none.
    pub(super) prompt_logprobs_next: usize,
    pub(super) preemptions: u8,
    pub(super) started: bool,
    /// Counts lives.
    pub(super) life: u32,
    /// Tokens of this life whose keys and values are written by planned steps.
    pub(super) computed: usize,
    /// Tokens known when this life began: prefill ends here.
    pub(super) prefill_target: usize,
    /// Draws of this life that are planned and not absorbed.
    pub(super) draws_ahead: usize,
    pub(super) blocks: Vec<BlockId>,
    /// Blocks of the table that the shards know.
    pub(super) blocks_sent: usize,
    /// Last step with a span of this life.
    pub(super) last_step: Option<Step>,
    sampling: SamplingParams,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    draws: bool,
}

impl Sequence {
    pub(super) fn new(id: SequenceId, request: Request, max_model_len: usize, cache: &CacheSpec) -> Self {
        let prompt_len = request.prompt.len();
        Self {
            id,
            prompt_len,
            token_limit: prompt_len.saturating_add(request.max_tokens).min(max_model_len),
            blocks_max: cache.blocks_for(kv_tokens_max(&request)),
            prompt_logprobs_next: 1,
            preemptions: 0,
            started: false,
            life: 0,
            computed: 0,
            prefill_target: prompt_len,
            draws_ahead: 0,
            blocks: Vec::new(),
            blocks_sent: 0,
            last_step: None,
            draws: request.max_tokens > 0,
            tokens: request.prompt,
            stop_token_ids: request.stop_token_ids,
            sampling: request.sampling,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
        }
    }

    pub(super) fn is_prefilling(&self) -> bool {
        self.computed < self.prefill_target
    }

    /// Whether a decode can be planned: tokens in flight count, so that the length limit is never overrun.
    pub(super) fn wants_decode(&self) -> bool {
        self.draws && !self.is_prefilling() && self.planned_len() < self.token_limit
    }

    /// Whether nothing is left once the prompt is computed.
    pub(super) fn ends_with_prompt(&self) -> bool {
        !self.draws
    }

    /// Tokens once all planned draws are in.
    pub(super) fn planned_len(&self) -> usize {
        self.tokens.len() + self.draws_ahead
    }

    /// Blocks to take at admission: what the known tokens fill. More are taken as it grows.
    pub(super) fn blocks_at_admission(&self, cache: &CacheSpec) -> usize {
        cache.blocks_for(self.tokens.len())
    }

    /// Blocks it may still take once it holds `held`.
    pub(super) fn room(&self, held: usize) -> usize {
        self.blocks_max.saturating_sub(held)
    }

    /// Blocks that must stay free for every running sequence when this one is admitted: four times as many after
    /// each preemption, and all they may ever take after the last.
    pub(super) fn reserve_per_sequence(&self) -> usize {
        if self.preemptions < PREEMPTIONS_MAX {
            1 << (RESERVE_GROWTH_BITS * u32::from(self.preemptions))
        } else {
            usize::MAX
        }
    }

    /// Forgets the present life: what remains is prompt and emitted tokens, to be replayed.
    pub(super) fn end_life(&mut self) -> Vec<BlockId> {
        self.life += 1;
        self.computed = 0;
        self.prefill_target = self.tokens.len();
        self.draws_ahead = 0;
        self.blocks_sent = 0;
        self.last_step = None;
        std::mem::take(&mut self.blocks)
    }

    /// What shards must know before the first span of a life.
    pub(super) fn announcement(&self) -> NewSequence {
        NewSequence {
            sequence: self.id,
            prompt_len: self.prompt_len,
            sampling: self.sampling.clone(),
            logprobs: self.logprobs,
        }
    }

    /// Plans the next `count` tokens in `step`. Blocks for them are already in the table.
    pub(super) fn advance(&mut self, count: usize, step: Step, cache: &CacheSpec) -> (Span, PlannedSpan) {
        let start = self.computed;
        let end = start + count;
        let tokens = if self.is_prefilling() {
            Tokens::Given(self.tokens[start..end].to_vec())
        } else {
            Tokens::LastSampled
        };
        let sample = self.draws && end >= self.prefill_target;
        let output = self.output(start, end, sample);
        let blocks_end = cache.blocks_for(end);
        let new_blocks = self.blocks[self.blocks_sent..blocks_end].to_vec();
        self.blocks_sent = blocks_end;
        self.computed = end;
        self.draws_ahead += usize::from(sample);
        self.last_step = Some(step);
        let planned = PlannedSpan { sequence: self.id, life: self.life, start, end, output };
        (Span { sequence: self.id, tokens, new_blocks, output }, planned)
    }

    fn output(&self, start: usize, end: usize, sample: bool) -> Output {
        // Rows `start..end` predict positions `start + 1..=end`; a replay reports none twice.
        let unreported = start < self.prompt_len && end.min(self.prompt_len - 1) >= self.prompt_logprobs_next;
        match self.prompt_logprobs {
            Some(top) if unreported => {
                // Emitted tokens come after all prompt log-probabilities, so such a span ends within the prompt.
                Output::PromptLogprobs {
                    top,
                    next: self.tokens.get(end).copied().filter(|_| end < self.prompt_len),
                    sample,
                }
            }
            _ if sample => Output::Sample,
            _ => Output::Nothing,
        }
    }
}

/// What the scheduler remembers of a span in flight.
#[derive(Clone, Debug)]
pub(super) struct PlannedSpan {
    pub(super) sequence: SequenceId,
    pub(super) life: u32,
    /// Positions `start..end` are computed.
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) output: Output,
}

impl PlannedSpan {
    /// Whether a token is drawn.
    pub(super) fn draws(&self) -> bool {
        matches!(self.output, Output::Sample | Output::PromptLogprobs { sample: true, .. })
    }

    /// Prompt positions that the result must report.
    pub(super) fn prompt_logprobs(&self) -> usize {
        match self.output {
            Output::PromptLogprobs { next, .. } => self.end - self.start - usize::from(next.is_none()),
            Output::Nothing | Output::Sample => 0,
        }
    }
}
