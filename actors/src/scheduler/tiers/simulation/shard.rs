//! The simulated shard: tokens in pages, read back through block tables.

use std::collections::BTreeMap;

use consort_kernels::sampling::SamplingParams;
use consort_parallel::ids::BlockId;

use super::{VOCAB, host::SimHost, mix};
use crate::{
    config::CacheSpec,
    ids::{Epoch, SequenceId, Step},
    plan::{
        CachedTokens, GroupImage, NewSequence, Output, Sampled, Span, SpanOutput, StepPlan, StepResult,
        TokenLogprobs, Tokens,
    },
};

fn history_hash(history: &[u32]) -> u64 {
    history.iter().fold(0x1234_5678, |hash, &token| mix(hash ^ u64::from(token)))
}

/// The "model": the token after `history`, drawn with `seed` at the history's length, from what each group of layers
/// sees of it. As with penalties, it matters how much of the history is prompt.
pub(super) fn draw(seen: &[&[u32]], len: usize, prompt_len: usize, seed: u64) -> u32 {
    let key = mix(seed ^ len as u64) ^ mix(prompt_len as u64);
    let hash = seen.iter().fold(key, |hash, part| mix(hash ^ history_hash(part)));
    (hash % VOCAB as u64) as u32
}

/// What the groups see of a history.
pub(super) fn seen<'a>(history: &'a [u32], cache: &CacheSpec) -> Vec<&'a [u32]> {
    let windows = cache.groups.windows();
    windows
        .map(|window| &history[window.map_or(0, |window| history.len().saturating_sub(window))..])
        .collect()
}

pub(super) fn logprobs_of(history: &[u32], token: u32, top: u32) -> TokenLogprobs {
    let logprob = -((history_hash(history) % 1000) as f32) - token as f32;
    TokenLogprobs { token, logprob, top: (0..top).map(|id| (id, logprob)).collect() }
}

/// One token in a page, and under which salt it was written.
pub(super) type Slot = Option<(u32, u64)>;

/// A shard as the protocol describes it.
pub(super) struct SimShard {
    cache: CacheSpec,
    epoch: Epoch,
    next: Step,
    /// Tokens by page; what was never written, or was wiped, is absent.
    pages: BTreeMap<BlockId, Vec<Slot>>,
    pub(super) host: SimHost,
    sequences: BTreeMap<SequenceId, SimSequence>,
    /// Where sequences go on. They may have taken over tokens that they are told of with their next span, and see
    /// nothing any more of what lies a window before.
    positions: BTreeMap<SequenceId, usize>,
    /// Salts that are not 0: what requests must not read of each other.
    salts: BTreeMap<SequenceId, u64>,
}

struct SimSequence {
    prompt_len: usize,
    sampling: SamplingParams,
    logprobs: Option<u32>,
    table: Vec<Option<BlockId>>,
    history: Vec<u32>,
    last: Option<u32>,
}

impl SimSequence {
    fn new(new: &NewSequence) -> Self {
        Self {
            prompt_len: new.prompt_len,
            sampling: new.sampling.clone(),
            logprobs: new.logprobs,
            table: Vec::new(),
            history: Vec::new(),
            last: None,
        }
    }

    fn take_over(&mut self, cached: &CachedTokens) {
        self.history.extend(&cached.tokens);
        self.table.extend(&cached.pages);
    }
}

impl SimShard {
    pub(super) fn new(cache: CacheSpec, epoch: Epoch) -> Self {
        Self {
            cache,
            epoch,
            next: Step(0),
            pages: BTreeMap::new(),
            host: SimHost::default(),
            sequences: BTreeMap::new(),
            positions: BTreeMap::new(),
            salts: BTreeMap::new(),
        }
    }

    pub(super) fn set_salt(&mut self, sequence: SequenceId, salt: u64) {
        self.salts.insert(sequence, salt);
    }

    pub(super) fn set_positions(&mut self, positions: impl Iterator<Item = (SequenceId, usize)>) {
        self.positions = positions.collect();
    }

    /// The group has lost this shard and its pages.
    pub(super) fn lose(&mut self, epoch: Epoch) {
        (self.epoch, self.next) = (epoch, Step(0));
        self.pages.clear();
        self.host.lose();
        self.sequences.clear();
    }

    /// Forgets every sequence and learns them anew: the pages stay.
    pub(super) fn relearn(&mut self, image: &GroupImage) {
        assert_eq!((image.epoch, image.next_step), (self.epoch, self.next));
        self.sequences.clear();
        for sequence in &image.sequences {
            let mut state = SimSequence::new(&sequence.new);
            state.take_over(&sequence.cached);
            state.last = sequence.last_sampled;
            self.sequences.insert(sequence.new.sequence, state);
        }
        for &sequence in &image.ended {
            let nothing =
                NewSequence { sequence, prompt_len: 0, sampling: SamplingParams::default(), logprobs: None };
            self.sequences.entry(sequence).or_insert_with(|| SimSequence::new(&nothing));
        }
    }

    /// A plan exists, and its pages have new holders, though it may execute much later.
    pub(super) fn hand_out(&mut self, plan: &StepPlan) {
        let copied = plan.copies.iter().map(|copy| &copy.to).chain(plan.loads.iter().map(|(_, to)| to));
        for block in plan.run.iter().flat_map(|span| &span.new_blocks).chain(copied) {
            self.pages.remove(block);
        }
        self.host.hand_out(plan);
    }

    /// Forgets what pages hold that nobody may touch.
    pub(super) fn wipe_free(&mut self, is_free: impl Fn(BlockId) -> bool) {
        self.pages.retain(|&block, _| !is_free(block));
    }

    /// Executes a plan whose pages were handed out.
    pub(super) fn execute(&mut self, plan: &StepPlan) -> StepResult {
        assert_eq!((plan.epoch, plan.step), (self.epoch, self.next), "a shard refuses what is out of turn");
        self.next = plan.step.next();
        self.host.order(plan, &mut self.pages);
        for new in &plan.begin {
            assert!(plan.run.iter().any(|span| span.sequence == new.sequence), "begun without running");
            self.sequences.insert(new.sequence, SimSequence::new(new));
        }
        for copy in &plan.copies {
            let from = self.pages.get(&copy.from).expect("a page that was wiped is copied").clone();
            self.pages.insert(copy.to, from);
        }
        let outputs = plan.run.iter().filter_map(|span| self.execute_span(span, &plan.end)).collect();
        plan.end.iter().for_each(|sequence| {
            self.sequences.remove(sequence).expect("a sequence is ended that was never begun");
        });
        let transferred = self.host.report(plan, &mut self.pages);
        StepResult { epoch: plan.epoch, step: plan.step, outputs, transferred, digest: 0 }
    }

    fn execute_span(&mut self, span: &Span, ended: &[SequenceId]) -> Option<SpanOutput> {
        let (block_size, groups) = (self.cache.block_size, self.cache.groups.count());
        let salt = self.salts.get(&span.sequence).copied().unwrap_or(0);
        let state = self.sequences.get_mut(&span.sequence).expect("a span of an unknown sequence");
        state.take_over(&span.cached);
        assert_eq!(
            state.table.len(),
            state.history.len().div_ceil(block_size) * groups,
            "{} knows pages for other tokens",
            span.sequence
        );
        state.table.extend(span.new_blocks.iter().copied().map(Some));
        let tokens = match &span.tokens {
            Tokens::Given(tokens) => tokens.clone(),
            Tokens::LastSampled => vec![state.last.expect("nothing was drawn")],
        };
        let start = state.history.len();
        state.history.extend(&tokens);
        let len = state.history.len();
        assert_eq!(state.table.len(), len.div_ceil(block_size) * groups, "the table covers exactly");
        self.write(span.sequence, start, salt, ended);
        self.read(span.sequence, start, salt);
        let state = self.sequences.get_mut(&span.sequence).expect("it was just there");
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
                for row in start..len {
                    if let Some(token) = state.history.get(row + 1).copied().or(next) {
                        output.prompt_logprobs.push(logprobs_of(&state.history[..=row], token, top));
                    }
                }
                sample
            }
        };
        if sample {
            let seen = seen(&state.history, &self.cache);
            let token = draw(&seen, len, state.prompt_len, state.sampling.seed);
            state.last = Some(token);
            let logprobs = state.logprobs.map(|top| logprobs_of(&state.history, token, top));
            output.sampled.push(Sampled { token, logprobs });
        }
        (!output.sampled.is_empty() || !output.prompt_logprobs.is_empty()).then_some(output)
    }

    /// Writes the rows from `start` on into their pages, which nobody else may know.
    fn write(&mut self, sequence: SequenceId, start: usize, salt: u64, ended: &[SequenceId]) {
        let (block_size, groups) = (self.cache.block_size, self.cache.groups.count());
        let state = &self.sequences[&sequence];
        for position in start..state.history.len() {
            for group in 0..groups {
                let page = state.table[position / block_size * groups + group];
                let page = page.unwrap_or_else(|| panic!("{sequence} writes to a page that it gave up"));
                let slots = self.pages.entry(page).or_insert_with(|| vec![None; block_size]);
                slots[position % block_size] = Some((state.history[position], salt));
            }
        }
        let written = &state.table[start / block_size * groups..];
        let others = self.sequences.iter().filter(|(other, _)| !ended.contains(other));
        for (other, other_state) in others {
            let shared = written.iter().find(|page| *other != sequence && other_state.table.contains(page));
            // What is behind another one's window it no longer reads; its table does not say so.
            let shared = shared.filter(|page| self.reads(*other, other_state, **page));
            assert_eq!(shared, None, "{sequence} writes to a page of {other}");
        }
    }

    /// Whether a sequence's next row sees anything in `page`.
    fn reads(&self, sequence: SequenceId, state: &SimSequence, page: Option<BlockId>) -> bool {
        let position = self.positions.get(&sequence).copied().unwrap_or(0).max(state.history.len());
        let groups = self.cache.groups.count();
        let windows: Vec<Option<usize>> = self.cache.groups.windows().collect();
        state.table.iter().enumerate().any(|(at, entry)| {
            let first = self.cache.first_block_seen(position, windows[at % groups]);
            *entry == page && at / groups >= first
        })
    }

    /// Reads what the rows from `start` on see, through the table, as attention does.
    fn read(&self, sequence: SequenceId, start: usize, salt: u64) {
        let (block_size, groups) = (self.cache.block_size, self.cache.groups.count());
        let state = &self.sequences[&sequence];
        for (group, window) in self.cache.groups.windows().enumerate() {
            let first = window.map_or(0, |window| (start + 1).saturating_sub(window));
            for position in first..state.history.len() {
                let page = state.table[position / block_size * groups + group];
                let page = page.unwrap_or_else(|| panic!("{sequence} lacks a page that it sees"));
                let slot = self.pages.get(&page).and_then(|slots| slots[position % block_size]);
                assert_eq!(
                    slot,
                    Some((state.history[position], salt)),
                    "{sequence} reads page {} of group {group} at {position}, which was wiped or is another's",
                    page.0
                );
            }
        }
    }
}
