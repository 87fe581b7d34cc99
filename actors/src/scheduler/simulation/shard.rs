//! The simulated shard: tokens in pages, read back through block tables.

use std::collections::BTreeMap;

use consort_kernels::sampling::SamplingParams;
use consort_parallel::ids::BlockId;

use super::{VOCAB, mix};
use crate::{
    ids::{Epoch, SequenceId, Step},
    plan::{Output, Sampled, Span, SpanOutput, StepPlan, StepResult, TokenLogprobs, Tokens},
};

fn history_hash(history: &[u32]) -> u64 {
    history.iter().fold(0x1234_5678, |hash, &token| mix(hash ^ u64::from(token)))
}

/// The "model": the token after `history`, drawn with `seed` at the history's length. As with penalties, it matters
/// how much of the history is prompt.
pub(super) fn draw(history: &[u32], prompt_len: usize, seed: u64) -> u32 {
    let key = mix(seed ^ history.len() as u64) ^ mix(prompt_len as u64);
    (mix(history_hash(history) ^ key) % VOCAB as u64) as u32
}

pub(super) fn logprobs_of(history: &[u32], token: u32, top: u32) -> TokenLogprobs {
    let logprob = -((history_hash(history) % 1000) as f32) - token as f32;
    TokenLogprobs { token, logprob, top: (0..top).map(|id| (id, logprob)).collect() }
}

/// A shard as the protocol describes it.
pub(in crate::scheduler) struct SimShard {
    pub(super) block_size: usize,
    epoch: Epoch,
    next: Step,
    /// Tokens by page; what was never written, or was wiped, is absent.
    pages: BTreeMap<BlockId, Vec<u32>>,
    /// Whom each page was last handed to by a plan, executed or not.
    holders: BTreeMap<BlockId, SequenceId>,
    sequences: BTreeMap<SequenceId, SimSequence>,
}

struct SimSequence {
    prompt_len: usize,
    sampling: SamplingParams,
    logprobs: Option<u32>,
    table: Vec<BlockId>,
    len: usize,
    last: Option<u32>,
}

impl SimShard {
    pub(in crate::scheduler) fn new(block_size: usize, epoch: Epoch) -> Self {
        Self {
            block_size,
            epoch,
            next: Step(0),
            pages: BTreeMap::new(),
            holders: BTreeMap::new(),
            sequences: BTreeMap::new(),
        }
    }

    /// A plan exists, and its pages have new holders, though it may execute much later.
    pub(super) fn hand_out(&mut self, plan: &StepPlan) {
        for span in &plan.run {
            for &block in &span.new_blocks {
                self.holders.insert(block, span.sequence);
                self.wipe(block);
            }
        }
    }

    /// Forgets what a page holds.
    fn wipe(&mut self, block: BlockId) {
        self.pages.remove(&block);
    }

    /// Forgets what pages hold that nobody may touch.
    pub(super) fn wipe_free(&mut self, is_free: impl Fn(BlockId) -> bool) {
        self.pages.retain(|&block, _| !is_free(block));
        self.holders.retain(|&block, _| !is_free(block));
    }

    /// Executes a plan the moment it exists.
    pub(in crate::scheduler) fn execute_at_once(&mut self, plan: &StepPlan) -> StepResult {
        self.hand_out(plan);
        self.execute(plan)
    }

    /// Executes a plan whose pages were handed out.
    pub(super) fn execute(&mut self, plan: &StepPlan) -> StepResult {
        assert_eq!((plan.epoch, plan.step), (self.epoch, self.next), "a shard refuses what is out of turn");
        self.next = plan.step.next();
        assert!(plan.copies.is_empty(), "nothing copies pages yet");
        assert!(!plan.run.is_empty());
        for new in &plan.begin {
            assert!(plan.run.iter().any(|span| span.sequence == new.sequence), "begun without running");
            assert!(!plan.end.contains(&new.sequence), "begun and ended in one step");
            let state = SimSequence {
                prompt_len: new.prompt_len,
                sampling: new.sampling.clone(),
                logprobs: new.logprobs,
                table: Vec::new(),
                len: 0,
                last: None,
            };
            self.sequences.insert(new.sequence, state);
        }
        let outputs = plan.run.iter().filter_map(|span| self.execute_span(span)).collect();
        plan.end.iter().for_each(|sequence| {
            self.sequences.remove(sequence).expect("a sequence is ended that was never begun");
        });
        StepResult { epoch: plan.epoch, step: plan.step, outputs, digest: 0 }
    }

    fn execute_span(&mut self, span: &Span) -> Option<SpanOutput> {
        let state = self.sequences.get_mut(&span.sequence).expect("a span of an unknown sequence");
        state.table.extend(&span.new_blocks);
        let tokens = match &span.tokens {
            Tokens::Given(tokens) => tokens.clone(),
            Tokens::LastSampled => vec![state.last.expect("nothing was drawn")],
        };
        for block in &state.table {
            let holder = self.holders.get(block);
            assert_eq!(holder, Some(&span.sequence), "page {} changed hands while a step used it", block.0);
        }
        let start = state.len;
        for token in tokens {
            let page = self.pages.entry(state.table[state.len / self.block_size]).or_default();
            // A page is written from its start, in order; what a wiped one lacks is never made up.
            assert_eq!(page.len(), state.len % self.block_size, "{} writes beside its tokens", span.sequence);
            page.push(token);
            state.len += 1;
        }
        assert_eq!(state.table.len(), state.len.div_ceil(self.block_size), "the table covers exactly");
        let history: Vec<u32> = state.table.iter().flat_map(|block| &self.pages[block]).copied().collect();
        assert_eq!(history.len(), state.len, "{} reads a page that was wiped", span.sequence);
        let mut output = SpanOutput {
            sequence: span.sequence,
            sampled: Vec::new(),
            prompt_logprobs: Vec::new(),
            broken: false,
        };
        let sample = match span.output {
            Output::Nothing => false,
            Output::Sample => true,
            Output::PromptLogprobs { top, next, sample } => {
                for row in start..state.len {
                    if let Some(token) = history.get(row + 1).copied().or(next) {
                        output.prompt_logprobs.push(logprobs_of(&history[..=row], token, top));
                    }
                }
                sample
            }
        };
        if sample {
            let token = draw(&history, state.prompt_len, state.sampling.seed);
            state.last = Some(token);
            let logprobs = state.logprobs.map(|top| logprobs_of(&history, token, top));
            output.sampled.push(Sampled { token, logprobs });
        }
        (!output.sampled.is_empty() || !output.prompt_logprobs.is_empty()).then_some(output)
    }
}
