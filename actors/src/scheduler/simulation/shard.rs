//! The simulated shard: contents in pages, read back through block tables.
//!
//! What a row leaves in a page says of which history and under which salt, and every row checks all that it sees: a
//! page that is another's, was wiped, or was never written shows at once. Steps execute as late as is legal; a page
//! loses its content when it is free, and again when it is handed out, so a step that is still under way finds out
//! when one of its pages changed hands too early. Everything that a step reads of earlier ones is read before the step
//! writes anything.

use std::{collections::BTreeMap, ops::Range};

use consort_kernels::sampling::SamplingParams;
use consort_parallel::ids::BlockId;

use super::{
    host::SimHost,
    model::{EMPTY, content, draw, history_in, link, logprobs_of},
};
use crate::{
    config::CacheSpec,
    ids::{Epoch, SequenceId, Step},
    plan::{
        CachedTokens, GroupImage, NewSequence, Output, Sampled, Span, SpanOutput, StepPlan, StepResult,
        Tokens,
    },
};

/// What the simulation knows of a sequence, and the protocol does not say.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hidden {
    /// Number of its salt; 0 for none.
    pub(super) salt: u64,
    /// Generated tokens after which its logits are not finite.
    pub(super) breaks_after: Option<usize>,
}

/// Pages with contents; 0 where nothing is.
pub(super) struct Pages {
    block_size: usize,
    contents: Vec<u64>,
    /// Pages that hold anything.
    is_written: Vec<bool>,
}

impl Pages {
    pub(super) fn new(pages: usize, block_size: usize) -> Self {
        Self { block_size, contents: vec![0; pages * block_size], is_written: vec![false; pages] }
    }

    /// What each token of a page left.
    pub(super) fn page(&self, page: usize) -> &[u64] {
        &self.contents[page * self.block_size..][..self.block_size]
    }

    fn write(&mut self, page: usize, at: usize, content: u64) {
        self.contents[page * self.block_size + at] = content;
        self.is_written[page] = true;
    }

    /// Puts a whole page there.
    pub(super) fn fill(&mut self, page: usize, contents: &[u64]) {
        self.contents[page * self.block_size..][..self.block_size].copy_from_slice(contents);
        self.is_written[page] = true;
    }

    fn copy(&mut self, from: usize, to: usize) {
        assert!(self.is_written[from], "page {from}, which was wiped, is copied");
        self.contents.copy_within(from * self.block_size..(from + 1) * self.block_size, to * self.block_size);
        self.is_written[to] = true;
    }

    pub(super) fn wipe(&mut self, page: usize) {
        if std::mem::take(&mut self.is_written[page]) {
            self.contents[page * self.block_size..][..self.block_size].fill(0);
        }
    }

    pub(super) fn wipe_all(&mut self) {
        self.contents.fill(0);
        self.is_written.fill(false);
    }
}

/// A shard as the protocol describes it.
pub(in crate::scheduler) struct SimShard {
    cache: CacheSpec,
    windows: Vec<Option<usize>>,
    epoch: Epoch,
    next: Step,
    pages: Pages,
    pub(super) host: SimHost,
    sequences: BTreeMap<SequenceId, SimSequence>,
    hidden: BTreeMap<SequenceId, Hidden>,
}

struct SimSequence {
    new: NewSequence,
    hidden: Hidden,
    table: Vec<Option<BlockId>>,
    history: Vec<u32>,
    /// What each token of the history leaves in a page.
    contents: Vec<u64>,
    last: Option<u32>,
}

impl SimSequence {
    fn new(new: &NewSequence, hidden: Hidden) -> Self {
        let (table, history, contents) = (Vec::new(), Vec::new(), Vec::new());
        Self { new: new.clone(), hidden, table, history, contents, last: None }
    }

    fn take_over(&mut self, cached: &CachedTokens) {
        self.append(&cached.tokens);
        self.table.extend(&cached.pages);
    }

    fn append(&mut self, tokens: &[u32]) {
        let mut history = self.history_to(self.history.len());
        for &token in tokens {
            history = link(history, token);
            self.history.push(token);
            self.contents.push(content(history, self.hidden.salt));
        }
    }

    /// What the first `len` tokens come to.
    fn history_to(&self, len: usize) -> u64 {
        len.checked_sub(1).map_or(EMPTY, |last| history_in(self.contents[last], self.hidden.salt))
    }
}

impl SimShard {
    pub(in crate::scheduler) fn new(cache: CacheSpec, epoch: Epoch) -> Self {
        Self {
            cache,
            windows: cache.groups.windows().collect(),
            epoch,
            next: Step(0),
            pages: Pages::new(cache.num_blocks, cache.block_size),
            host: SimHost::new(cache.host_blocks, cache.block_size),
            sequences: BTreeMap::new(),
            hidden: BTreeMap::new(),
        }
    }

    pub(super) fn hide(&mut self, sequence: SequenceId, hidden: Hidden) {
        self.hidden.insert(sequence, hidden);
    }

    /// The group has lost this shard and its pages.
    pub(super) fn lose(&mut self, epoch: Epoch) {
        (self.epoch, self.next) = (epoch, Step(0));
        self.pages.wipe_all();
        self.host.lose();
        self.sequences.clear();
    }

    /// Forgets every sequence and learns them anew: the pages stay.
    pub(super) fn relearn(&mut self, image: &GroupImage) {
        assert_eq!((image.epoch, image.next_step), (self.epoch, self.next));
        self.sequences.clear();
        for sequence in &image.sequences {
            let mut state = SimSequence::new(&sequence.new, self.hidden_of(sequence.new.sequence));
            state.take_over(&sequence.cached);
            state.last = sequence.last_sampled;
            self.sequences.insert(sequence.new.sequence, state);
        }
        for &sequence in &image.ended {
            let nothing =
                NewSequence { sequence, prompt_len: 0, sampling: SamplingParams::default(), logprobs: None };
            self.sequences.entry(sequence).or_insert_with(|| SimSequence::new(&nothing, Hidden::default()));
        }
    }

    fn hidden_of(&self, sequence: SequenceId) -> Hidden {
        self.hidden.get(&sequence).copied().unwrap_or_default()
    }

    /// A plan exists, and its pages have new holders, though it may execute much later.
    pub(super) fn hand_out(&mut self, plan: &StepPlan) {
        let copied = plan.copies.iter().map(|copy| &copy.to).chain(plan.loads.iter().map(|(_, to)| to));
        for block in plan.run.iter().flat_map(|span| &span.new_blocks).chain(copied) {
            self.pages.wipe(block.index());
        }
        self.host.hand_out(plan);
    }

    /// Forgets what pages hold that nobody may touch.
    pub(super) fn wipe_free(&mut self, is_free: impl Fn(BlockId) -> bool) {
        for block in 0..self.cache.num_blocks {
            if self.pages.is_written[block] && is_free(BlockId(block as u32)) {
                self.pages.wipe(block);
            }
        }
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
        let is_of_use = !plan.run.is_empty() || self.cache.host_blocks > 0;
        assert!(is_of_use, "{} does nothing", plan.step);
        self.host.order(plan, &mut self.pages);
        for new in &plan.begin {
            assert!(plan.run.iter().any(|span| span.sequence == new.sequence), "begun without running");
            let state = SimSequence::new(new, self.hidden_of(new.sequence));
            self.sequences.insert(new.sequence, state);
        }
        for copy in &plan.copies {
            self.pages.copy(copy.from.index(), copy.to.index());
        }
        let starts: Vec<usize> = plan.run.iter().map(|span| self.learn(span)).collect();
        let starts = || plan.run.iter().zip(&starts);
        starts().for_each(|(span, &start)| self.read(span.sequence, start, 0..start));
        for (span, &start) in starts() {
            self.write(span.sequence, start);
        }
        let outputs = starts().filter_map(|(span, &start)| {
            self.read(span.sequence, start, start..usize::MAX);
            let state = self.sequences.get_mut(&span.sequence).expect("it has learned this span");
            output(state, span, start)
        });
        let outputs = outputs.collect();
        plan.end.iter().for_each(|sequence| {
            self.sequences.remove(sequence).expect("a sequence is ended that was never begun");
        });
        let transferred = self.host.report(plan, &mut self.pages);
        StepResult { epoch: plan.epoch, step: plan.step, outputs, digest: 0, transferred }
    }

    /// Takes tokens and pages of a span into its sequence, and says where its rows begin.
    fn learn(&mut self, span: &Span) -> usize {
        let groups = self.windows.len();
        let sequence = span.sequence;
        let state = self.sequences.get_mut(&sequence);
        let state = state.unwrap_or_else(|| panic!("a span of unknown {sequence}"));
        state.take_over(&span.cached);
        let covered = |state: &SimSequence| state.history.len().div_ceil(self.cache.block_size) * groups;
        assert_eq!(state.table.len(), covered(state), "{sequence} knows pages for other tokens");
        state.table.extend(span.new_blocks.iter().copied().map(Some));
        let start = state.history.len();
        match &span.tokens {
            Tokens::Given(tokens) => state.append(tokens),
            Tokens::LastSampled => state.append(&[state.last.expect("nothing was drawn")]),
        }
        assert_eq!(state.table.len(), covered(state), "the table of {sequence} covers exactly");
        start
    }

    /// Writes the rows from `start` on into their pages.
    fn write(&mut self, sequence: SequenceId, start: usize) {
        let (block_size, groups) = (self.cache.block_size, self.windows.len());
        let state = &self.sequences[&sequence];
        for position in start..state.history.len() {
            for group in 0..groups {
                let page = state.table[position / block_size * groups + group];
                let page = page.unwrap_or_else(|| panic!("{sequence} writes to a page that it gave up"));
                self.pages.write(page.index(), position % block_size, state.contents[position]);
            }
        }
    }

    /// Reads what the rows from `start` on see of `positions`, through the table, as attention does.
    fn read(&self, sequence: SequenceId, start: usize, positions: Range<usize>) {
        let (block_size, groups) = (self.cache.block_size, self.windows.len());
        let state = &self.sequences[&sequence];
        let end = positions.end.min(state.history.len());
        for (group, window) in self.windows.iter().enumerate() {
            let first = window.map_or(0, |window| (start + 1).saturating_sub(window));
            let mut at = first.max(positions.start);
            while at < end {
                let block = at / block_size;
                let until = end.min((block + 1) * block_size);
                let page = state.table[block * groups + group];
                let page = page.unwrap_or_else(|| panic!("{sequence} lacks a page that it sees"));
                let found = &self.pages.page(page.index())[at % block_size..][..until - at];
                assert!(
                    *found == state.contents[at..until],
                    "{sequence} reads page {} of group {group} at {at}, which was wiped or is another's",
                    page.0
                );
                at = until;
            }
        }
    }
}

/// What a span sends back.
fn output(state: &mut SimSequence, span: &Span, start: usize) -> Option<SpanOutput> {
    let len = state.history.len();
    let (mut sampled, mut prompt_logprobs, mut broken) = (Vec::new(), Vec::new(), false);
    let sample = match span.output {
        Output::Nothing => false,
        Output::Sample => true,
        Output::PromptLogprobs { top, next, sample } => {
            for row in start..len {
                if let Some(token) = state.history.get(row + 1).copied().or(next) {
                    prompt_logprobs.push(logprobs_of(state.history_to(row + 1), token, top));
                }
            }
            sample
        }
    };
    if sample {
        let history = state.history_to(len);
        let token = draw(history, len, state.new.prompt_len, state.new.sampling.seed);
        state.last = Some(token);
        broken = state.hidden.breaks_after.is_some_and(|tokens| len >= state.new.prompt_len + tokens);
        let logprobs = state.new.logprobs.map(|top| logprobs_of(history, token, top));
        sampled.push(Sampled { token, logprobs });
    }
    let says_something = sample || !prompt_logprobs.is_empty();
    says_something.then_some(SpanOutput { sequence: span.sequence, sampled, prompt_logprobs, broken })
}
