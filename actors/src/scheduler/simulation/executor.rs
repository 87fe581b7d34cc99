//! The modelled executor: a group of shards that executes steps in virtual time.
//!
//! Steps come in while earlier ones are under way, execute one after the other, and their results are there at a time
//! that a [`CostModel`] gives. The work itself is done by a [`SimShard`], at the last moment. A group can be lost, with
//! all that is under way, and be formed anew in a later epoch; a fresh shard can be told the whole state.

use std::collections::{BTreeMap, VecDeque};

use super::{
    cost::{CostModel, Load},
    shard::SimShard,
};
use crate::{
    config::CacheSpec,
    ids::{Epoch, SequenceId},
    plan::{GroupImage, StepPlan, StepResult, Tokens},
};

/// A step under way.
struct Scheduled {
    plan: StepPlan,
    duration_ns: u64,
    done_ns: u64,
}

pub(super) struct ModelledExecutor {
    pub(super) shard: SimShard,
    cache: CacheSpec,
    cost: CostModel,
    under_way: VecDeque<Scheduled>,
    /// When the last step taken in is done.
    busy_until_ns: u64,
    /// Tokens of each sequence, once all that is under way is done.
    lengths: BTreeMap<SequenceId, usize>,
    is_formed: bool,
    /// Longest step so far.
    longest_ns: u64,
}

impl ModelledExecutor {
    pub(super) fn new(cache: CacheSpec, cost: CostModel, epoch: Epoch) -> Self {
        Self {
            shard: SimShard::new(cache, epoch),
            cache,
            cost,
            under_way: VecDeque::new(),
            busy_until_ns: 0,
            lengths: BTreeMap::new(),
            is_formed: true,
            longest_ns: 0,
        }
    }

    /// Whether there is a group that takes steps in.
    pub(super) fn is_formed(&self) -> bool {
        self.is_formed
    }

    /// Steps taken in whose results were not read.
    pub(super) fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// The step that was taken in last, if it is under way.
    pub(super) fn newest(&self) -> Option<&StepPlan> {
        self.under_way.back().map(|step| &step.plan)
    }

    /// When the oldest step under way is done.
    pub(super) fn next_done_ns(&self) -> Option<u64> {
        self.under_way.front().map(|step| step.done_ns)
    }

    /// The longest step so far.
    pub(super) fn longest_ns(&self) -> u64 {
        self.longest_ns
    }

    /// Takes a step in at `now_ns`; it begins when those before it are done.
    pub(super) fn accept(&mut self, plan: StepPlan, now_ns: u64) {
        assert!(self.is_formed, "a plan is sent to no group");
        self.shard.hand_out(&plan);
        let load = self.load(&plan);
        let duration_ns = self.cost.step_ns(&load, self.cache.block_size);
        let done_ns = self.busy_until_ns.max(now_ns) + duration_ns;
        self.busy_until_ns = done_ns;
        self.longest_ns = self.longest_ns.max(duration_ns);
        self.under_way.push_back(Scheduled { plan, duration_ns, done_ns });
    }

    /// What a plan amounts to, and what its sequences have come to afterwards.
    fn load(&mut self, plan: &StepPlan) -> Load {
        let mut load = Load { copies: plan.copies.len() as u64, ..Load::default() };
        if plan.run.is_empty() {
            load.moves = (plan.saves.len() + plan.loads.len()) as u64;
        }
        for new in &plan.begin {
            self.lengths.insert(new.sequence, 0);
        }
        for span in &plan.run {
            let rows = if let Tokens::Given(tokens) = &span.tokens { tokens.len() } else { 1 };
            let len = self.lengths.entry(span.sequence).or_default();
            *len += span.cached.tokens.len();
            load.add_rows(rows, *len, &self.cache);
            *len += rows;
        }
        for sequence in &plan.end {
            self.lengths.remove(sequence);
        }
        load
    }

    /// Executes the oldest step under way, whose time has come, and says how long it took.
    pub(super) fn finish(&mut self) -> Option<(StepResult, u64)> {
        let step = self.under_way.pop_front()?;
        Some((self.shard.execute(&step.plan), step.duration_ns))
    }

    /// The group ends; what is under way is never heard of, unless it was too late to hold it back: that is returned.
    pub(super) fn lose(&mut self) -> Option<StepResult> {
        let late = self.finish().map(|(result, _)| result);
        self.under_way.clear();
        self.lengths.clear();
        self.is_formed = false;
        late
    }

    /// A new group forms, without pages or sequences.
    pub(super) fn form(&mut self, epoch: Epoch, now_ns: u64) {
        self.shard.lose(epoch);
        self.busy_until_ns = now_ns;
        self.is_formed = true;
    }

    /// A shard that has the pages is told the whole state. Nothing is under way.
    pub(super) fn relearn(&mut self, image: &GroupImage) {
        assert_eq!(self.under_way.len(), 0);
        self.shard.relearn(image);
        let told = image.sequences.iter().map(|it| (it.new.sequence, it.cached.tokens.len()));
        self.lengths = told.collect();
    }
}
