//! One sequence as the scheduler sees it: the journal of its tokens, and how far its present life has come.

use consort_kernels::sampling::SamplingParams;
use consort_parallel::ids::BlockId;

use super::{
    PREEMPTIONS_MAX, RESERVE_GROWTH_BITS,
    bugs::{Bug, planted},
    pool::Content,
};
use crate::{
    config::{CacheSpec, LAYER_GROUPS_MAX, kv_tokens_max},
    ids::{SequenceId, Step},
    order::{Due, Place},
    plan::{CachedTokens, NewSequence, Output, SequenceImage, Span, Tokens},
    prefix::BlockKey,
    request::Request,
};

/// Where a request comes in the order of service.
pub(super) fn place(now_ms: u64, priority: i32, aging_ms: u64, sequence: SequenceId) -> Place {
    let priority = match priority {
        _ if planted(Bug::IgnoresPriority) => 0,
        priority if planted(Bug::TurnsPriorityRound) => -priority,
        priority => priority,
    };
    Place { due: Due::new(now_ms, priority, aging_ms), sequence }
}

/// Order among the running: those that must not be preempted any more come first, then by place. The last gives way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RunOrder {
    pub(super) may_be_preempted: bool,
    pub(super) place: Place,
}

/// A request's tokens and progress.
///
/// A *life* runs from an admission to the next preemption; what a step computed for an earlier life is discarded,
/// because draws are keyed by seed and position and the next life draws the same tokens again.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) place: Place,
    /// Prompt and absorbed tokens: all that is needed to continue elsewhere.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    pub(super) stop_token_ids: Vec<u32>,
    /// Length at which the sequence ends.
    pub(super) token_limit: usize,
    /// Pages it may come to hold.
    pub(super) pages_max: usize,
    /// First prompt position whose log-probabilities were not reported yet. Position 0 has none.
    pub(super) prompt_logprobs_next: usize,
    pub(super) preemptions: u8,
    pub(super) started: bool,
    /// Whether its reader knows that the prompt is computed.
    pub(super) prefilled: bool,
    /// Lives are numbered through, over all sequences; 0 while it waits.
    pub(super) life: u64,
    /// Another choice of the same request, which came before: what it has of the prompt is shared.
    pub(super) leader: Option<SequenceId>,
    /// Tokens of this life whose keys and values are written by planned steps, or were there.
    pub(super) computed: usize,
    /// Tokens that its first life found and need not compute. What later lives find may be its own.
    pub(super) cached_tokens: usize,
    /// Whether an earlier life of it may have left pages.
    pub(super) has_lived: bool,
    /// Tokens known when this life began: prefill ends here.
    pub(super) prefill_target: usize,
    /// Draws of this life that are planned and not absorbed.
    pub(super) draws_ahead: usize,
    /// One page per group for each block of tokens, block after block; none behind a group's window.
    pub(super) table: Vec<Option<BlockId>>,
    /// Pages in the table.
    pub(super) held: usize,
    /// Of each group the first block whose page may still be read.
    pub(super) first_block: [u32; LAYER_GROUPS_MAX],
    /// Whether the shards know of this life.
    pub(super) announced: bool,
    /// Tokens that they know of.
    pub(super) told: usize,
    /// Blocks up to here are expected to be another sequence's: it is about to compute them.
    pub(super) promised: usize,
    /// Whether it waits for what another sequence loads from the host.
    pub(super) awaits_load: bool,
    /// Pages of the table that are on their way from the host. It runs once all are there.
    pub(super) loading: usize,
    /// Tokens that were found only because of them.
    pub(super) loading_tokens: usize,
    /// Names of the full blocks of `tokens`, where prefixes are cached.
    keys: Vec<BlockKey>,
    root: Option<BlockKey>,
    /// Blocks of this life that were given their names.
    pub(super) named: usize,
    /// Plans in a row that left out its decode, or all of its chunk, because the page for it was on its way.
    pub(super) missed: u8,
    /// Last step with a span of this life.
    pub(super) last_step: Option<Step>,
    sampling: SamplingParams,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    draws: bool,
    /// Whether its next step must know the tokens before it.
    awaits_tokens: bool,
}

impl Sequence {
    pub(super) fn new(
        id: SequenceId,
        place: Place,
        request: Request,
        max_model_len: usize,
        cache: &CacheSpec,
    ) -> Self {
        let prompt_len = request.prompt.len();
        let mut state = Self {
            id,
            place,
            prompt_len,
            token_limit: prompt_len.saturating_add(request.max_tokens).min(max_model_len),
            pages_max: cache.pages_for(kv_tokens_max(&request)),
            prompt_logprobs_next: 1,
            preemptions: 0,
            started: false,
            prefilled: false,
            life: 0,
            leader: None,
            computed: 0,
            cached_tokens: 0,
            has_lived: false,
            prefill_target: prompt_len,
            draws_ahead: 0,
            table: Vec::new(),
            held: 0,
            first_block: [0; LAYER_GROUPS_MAX],
            announced: false,
            told: 0,
            promised: 0,
            awaits_load: false,
            loading: 0,
            loading_tokens: 0,
            keys: Vec::new(),
            root: cache
                .prefix_caching
                .then(|| BlockKey::root(request.cache_salt.filter(|_| !planted(Bug::LeavesSaltOut)))),
            named: 0,
            missed: 0,
            last_step: None,
            draws: request.max_tokens > 0,
            awaits_tokens: request.awaits_tokens && !planted(Bug::AwaitsNothing),
            tokens: request.prompt,
            stop_token_ids: request.stop_token_ids,
            sampling: request.sampling,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
        };
        state.extend_keys(cache);
        state
    }

    pub(super) fn has_prompt(&self, prompt: &[u32]) -> bool {
        self.tokens[..self.prompt_len] == *prompt
    }

    /// Whether a block is full and has not been named.
    pub(super) fn has_full_block(&self, cache: &CacheSpec) -> bool {
        self.computed.min(self.tokens.len()) >= (self.named + 1) * cache.block_size
    }

    /// All that a shard which has the pages must know of it.
    pub(super) fn image(&self, cache: &CacheSpec) -> SequenceImage {
        let pages = cache.blocks_for(self.told) * cache.groups.count();
        SequenceImage {
            new: self.announcement(),
            cached: CachedTokens {
                tokens: self.tokens[..self.told].to_vec(),
                pages: self.table[..pages].to_vec(),
            },
            last_sampled: self.tokens.get(self.told).copied().filter(|_| !self.is_prefilling()),
        }
    }

    pub(super) fn is_prefilling(&self) -> bool {
        self.computed < self.prefill_target
    }

    /// Whether pages of its prefix are on their way from the host.
    pub(super) fn is_loading(&self) -> bool {
        self.loading > 0 && !planted(Bug::RunsBeforeLoaded)
    }

    /// Whether a decode can be planned: tokens in flight count, so that the length limit is never overrun, and whoever
    /// awaits its tokens has none in flight.
    pub(super) fn wants_decode(&self) -> bool {
        let knows_enough = !self.awaits_tokens || self.draws_ahead == 0;
        self.draws && !self.is_prefilling() && self.planned_len() < self.token_limit && knows_enough
    }

    /// Whether nothing is left once the prompt is computed.
    pub(super) fn ends_with_prompt(&self) -> bool {
        !self.draws
    }

    /// Whether every row must be computed, because something is told of each.
    pub(super) fn needs_every_row(&self) -> bool {
        self.prompt_logprobs.is_some()
    }

    /// Tokens once all planned draws are in.
    pub(super) fn planned_len(&self) -> usize {
        self.tokens.len() + if planted(Bug::OverrunsLimit) { 0 } else { self.draws_ahead }
    }

    pub(super) fn order(&self) -> RunOrder {
        let may_be_preempted = self.preemptions < PREEMPTIONS_MAX || planted(Bug::PreemptsTheKept);
        RunOrder { may_be_preempted, place: self.place }
    }

    /// Pages that it takes for the tokens known when it was admitted, beyond those it holds or will share.
    pub(super) fn committed(&self, cache: &CacheSpec) -> usize {
        let table = self.table.len() / cache.groups.count();
        let shared = self.promised.saturating_sub(table) * cache.groups.full();
        cache.pages_for(self.prefill_target).saturating_sub(self.held + shared)
    }

    /// Pages that it may take after that.
    pub(super) fn growth(&self, cache: &CacheSpec) -> usize {
        self.pages_max.saturating_sub(cache.pages_for(self.prefill_target).max(self.held))
    }

    /// Pages that must stay to be had for every running sequence when this one is admitted: four times as many after
    /// each preemption, and all they may ever take after the last.
    pub(super) fn reserve_per_sequence(&self, cache: &CacheSpec) -> usize {
        if self.preemptions < PREEMPTIONS_MAX {
            cache.groups.count() << (RESERVE_GROWTH_BITS * u32::from(self.preemptions))
        } else {
            usize::MAX
        }
    }

    /// Ends the present life: what remains is prompt and emitted tokens, to be replayed. Returns the table's pages,
    /// last block first, so that the beginning of a prefix stays cached longest.
    pub(super) fn end_life(&mut self) -> impl Iterator<Item = BlockId> + use<> {
        self.computed = 0;
        self.prefill_target = self.tokens.len();
        self.draws_ahead = 0;
        self.held = 0;
        self.first_block = [0; LAYER_GROUPS_MAX];
        self.life = 0;
        self.announced &= planted(Bug::ForgetsToBegin);
        self.told = 0;
        self.promised = 0;
        self.awaits_load = false;
        (self.loading, self.loading_tokens) = (0, 0);
        self.named = 0;
        self.missed = 0;
        self.last_step = None;
        std::mem::take(&mut self.table).into_iter().rev().flatten()
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

    /// Blocks that may be taken over instead of being computed: full ones, and never the last token, whose row draws.
    pub(super) fn blocks_to_find(&self, cache: &CacheSpec) -> usize {
        match self.needs_every_row() {
            true => 0,
            false if planted(Bug::FindsLastToken) => self.keys.len(),
            false => self.keys.len().min((self.tokens.len() - 1) / cache.block_size),
        }
    }

    /// The next block that could be taken over, if what is computed ends at a block.
    pub(super) fn next_block(&self, cache: &CacheSpec) -> Option<usize> {
        let block = self.computed / cache.block_size;
        (self.computed.is_multiple_of(cache.block_size) && block < self.blocks_to_find(cache))
            .then_some(block)
    }

    /// Name of a full block.
    pub(super) fn key(&self, block: usize) -> Option<BlockKey> {
        self.keys.get(block).copied()
    }

    pub(super) fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// Content of a full block whose name is known.
    pub(super) fn content(&self, block: usize, cache: &CacheSpec) -> Option<Content<'_>> {
        let key = self.key(block)?;
        let parent = if block == 0 { self.root? } else { self.keys[block - 1] };
        let tokens = &self.tokens[block * cache.block_size..(block + 1) * cache.block_size];
        Some(Content { key, parent, tokens })
    }

    /// Counts tokens that this life found.
    pub(super) fn found(&mut self, tokens: usize) {
        self.cached_tokens += if self.has_lived { 0 } else { tokens };
    }

    /// Names the blocks that have become full.
    pub(super) fn extend_keys(&mut self, cache: &CacheSpec) {
        let Some(root) = self.root else { return };
        while let Some(block) =
            self.tokens.get(self.keys.len() * cache.block_size..(self.keys.len() + 1) * cache.block_size)
        {
            let parent = self.keys.last().copied().filter(|_| !planted(Bug::LeavesParentOut));
            let parent = parent.unwrap_or(root);
            self.keys.push(parent.next(block));
        }
    }

    /// Plans the next `count` tokens in `step`. Pages for them are already in the table.
    pub(super) fn advance(&mut self, count: usize, step: Step, cache: &CacheSpec) -> (Span, PlannedSpan) {
        let (start, end) = (self.computed, self.computed + count);
        let tokens = if self.is_prefilling() || self.awaits_tokens {
            Tokens::Given(self.tokens[start..end].to_vec())
        } else {
            Tokens::LastSampled
        };
        let sample = self.draws && end >= self.prefill_target;
        let output = self.output(start, end, sample);
        let groups = cache.groups.count();
        let [told, known, known_after] =
            [self.told, start, end].map(|tokens| cache.blocks_for(tokens) * groups);
        let cached = match self.told < start {
            true => CachedTokens {
                tokens: self.tokens[self.told..start].to_vec(),
                pages: self.table[told..known].to_vec(),
            },
            false => CachedTokens::default(),
        };
        let new_blocks = self.table[known..known_after].iter().copied();
        let new_blocks = new_blocks
            .map(|page| page.expect("a page is in the table until its window has passed"))
            .collect();
        self.told = end;
        self.computed = end;
        self.draws_ahead += usize::from(sample);
        self.missed = 0;
        self.last_step = Some(step);
        let planned = PlannedSpan { sequence: self.id, slot: 0, life: self.life, start, end, output };
        (Span { sequence: self.id, cached, tokens, new_blocks, output }, planned)
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
    /// Where the sequence is, if it still lives that life.
    pub(super) slot: usize,
    pub(super) life: u64,
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
