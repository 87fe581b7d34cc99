//! Pages that several sequences have in common: prefixes that are cached, blocks that another sequence is about to
//! compute, and the prompt of a request with several choices.

use super::{
    bugs::{Bug, planted},
    planning::{Draft, Share},
    sequence::Sequence,
    state::Scheduler,
};
use consort_parallel::ids::BlockId;

use crate::plan::BlockCopy;

impl Scheduler {
    /// Begins a life with the longest prefix that every group still has what it needs of: the groups that see
    /// everything all of its blocks, the others those within their window. What only the host has of it is loaded.
    pub(super) fn take_over_prefix(&mut self, slot: usize) {
        let state = &self.sequences[slot];
        let cached = self.longest_prefix(state, |block, group| self.on_device(state, block, group).is_some());
        let blocks = self.prefix_with_host(state, cached);
        let firsts = self.first_blocks(blocks);
        let mut table = Vec::with_capacity(blocks * self.groups);
        for block in 0..blocks {
            for (group, &first) in firsts.iter().enumerate() {
                table.push(if block < first { None } else { self.on_device(state, block, group) });
            }
        }
        let state = &mut self.sequences[slot];
        for page in table.iter().flatten() {
            self.pool.share(*page);
            state.held += 1;
        }
        for (to, &first) in state.first_block.iter_mut().zip(&firsts) {
            *to = first as u32;
        }
        state.table = table;
        (state.computed, state.named) = (blocks * self.cache.block_size, blocks);
        if !state.has_lived {
            state.cached_tokens = state.computed;
        }
        if blocks > cached {
            // Named once they are there.
            state.named = 0;
            self.load_missing(slot, &firsts, (blocks - cached) * self.cache.block_size);
        }
    }

    /// The page of `group` that has the content of a block.
    pub(super) fn on_device(&self, state: &Sequence, block: usize, group: usize) -> Option<BlockId> {
        state.content(block, &self.cache).and_then(|content| self.pool.find(content, group))
    }

    /// Of each group the first block of which a token behind `blocks` blocks sees anything.
    pub(super) fn first_blocks(&self, blocks: usize) -> Vec<usize> {
        let position = blocks * self.cache.block_size;
        self.cache.groups.windows().map(|window| self.cache.first_block_seen(position, window)).collect()
    }

    /// Blocks of the longest prefix of which every group has what it needs, as `has` says.
    pub(super) fn longest_prefix(&self, state: &Sequence, has: impl Fn(usize, usize) -> bool) -> usize {
        let limit = state.blocks_to_find(&self.cache);
        let groups = || self.cache.groups.windows().enumerate();
        let missing = |&block: &usize| groups().any(|(group, window)| window.is_none() && !has(block, group));
        let mut blocks = match self.cache.groups.full() {
            0 => limit,
            _ => (0..limit).find(missing).unwrap_or(limit),
        };
        let first_seen =
            |blocks: usize, window| self.cache.first_block_seen(blocks * self.cache.block_size, window);
        // A block that a window lacks can only be behind it: the prefix ends before that block, or elsewhere further
        // left.
        while let Some(lacking) =
            groups().filter(|(_, window)| window.is_some()).find_map(|(group, window)| {
                (first_seen(blocks, window)..blocks).rev().find(|&block| !has(block, group))
            })
        {
            if planted(Bug::FindsInOneGroup) {
                break;
            }
            blocks = lacking;
        }
        blocks
    }

    /// Takes over what has become available since: blocks that others have computed, and a leader's whole prompt.
    pub(super) fn take_over(&mut self, slot: usize, draft: &mut Draft) {
        let before = self.sequences[slot].computed;
        while let Some(block) = self.sequences[slot].next_block(&self.cache) {
            let state = &self.sequences[slot];
            let Some(content) = state.content(block, &self.cache) else { break };
            let found = (0..self.groups).map(|group| self.pool.find(content, group));
            let Some(pages) = found.collect::<Option<Vec<_>>>() else { break };
            let state = &mut self.sequences[slot];
            for page in pages {
                self.pool.share(page);
                state.table.push(Some(page));
                state.held += 1;
            }
            state.computed += self.cache.block_size;
            state.named = block + 1;
        }
        self.fork(slot, draft);
        let state = &mut self.sequences[slot];
        if state.computed > before {
            let computed = state.computed;
            state.found(computed - before);
            self.leave_window(slot, computed);
        }
    }

    /// Shares the prompt of the choice that came first, once it is computed. The page that both would write is copied.
    /// All but the prompt's last token is taken over: its row draws this choice's first token.
    fn fork(&mut self, slot: usize, draft: &mut Draft) {
        let block_size = self.cache.block_size;
        let state = &self.sequences[slot];
        let Some(leader_slot) = self.leader(state) else { return };
        let leader = &self.sequences[leader_slot];
        let target = state.prompt_len - 1;
        let begun = state.computed >= target || !state.computed.is_multiple_of(block_size);
        if begun || leader.computed < state.prompt_len || leader.is_loading() {
            return;
        }
        let (first, last, is_split) =
            (state.computed / block_size, target / block_size, !target.is_multiple_of(block_size));
        let page = |block: usize, group: usize| leader.table[block * self.groups + group];
        let seen = |window| self.cache.first_block_seen(target, window);
        if !self.keeps_prompt(leader, first) || (is_split && self.pool.available() < self.groups) {
            return;
        }
        let mut shared = Vec::with_capacity((last - first) * self.groups);
        for block in first..last {
            for (group, window) in self.cache.groups.windows().enumerate() {
                shared.push(page(block, group).filter(|_| block >= seen(window)));
            }
        }
        let split: Vec<_> =
            (0..self.groups).filter(|_| is_split).filter_map(|group| page(last, group)).collect();
        shared.iter().flatten().for_each(|&page| self.pool.share(page));
        for (group, from) in split.into_iter().enumerate() {
            if planted(Bug::SharesWrittenPage) {
                self.pool.share(from);
                shared.push(Some(from));
                continue;
            }
            let to = self.pool.take(group);
            shared.push(to);
            draft.copies.extend(to.map(|to| BlockCopy { from, to }));
        }
        // The copies are part of the step that is being planned.
        draft.has_forked = true;
        let step = self.next_step;
        let leader = &mut self.sequences[leader_slot];
        if !planted(Bug::CopiesWithoutHolding) {
            leader.last_step = leader.last_step.max(Some(step));
        }
        let state = &mut self.sequences[slot];
        state.held += shared.iter().flatten().count();
        state.table.extend(shared);
        state.last_step = state.last_step.max(Some(step));
        (state.computed, state.named) = (target, last);
    }

    /// Whether a leader that has computed its prompt still has the pages, from block `first` on, that the prompt's last
    /// token sees.
    fn keeps_prompt(&self, leader: &Sequence, first: usize) -> bool {
        let target = leader.prompt_len - 1;
        let end = self.cache.blocks_for(target);
        self.cache.groups.windows().enumerate().all(|(group, window)| {
            let seen = self.cache.first_block_seen(target, window).max(first);
            (seen..end).all(|block| leader.table[block * self.groups + group].is_some())
        })
    }

    /// The running choice that `state` may share the prompt of.
    fn leader(&self, state: &Sequence) -> Option<usize> {
        if state.needs_every_row() || state.tokens.len() > state.prompt_len {
            return None;
        }
        let slot = self.sequences.find(state.leader?)?;
        (self.sequences[slot].life > 0).then_some(slot)
    }

    /// Whether one of `shares`, or its leader, computes this sequence's next block or what follows it: then it waits,
    /// and takes it over. What it expects to share beyond that is forgotten as soon as nobody computes it.
    pub(super) fn is_promised(&mut self, slot: usize, shares: &[Share]) -> bool {
        let state = &self.sequences[slot];
        let awaits_load = self.is_loaded_for(state);
        let promised = awaits_load || self.is_leaders(state) || self.is_shares(state, shares);
        self.sequences[slot].awaits_load = awaits_load;
        if !promised && planted(Bug::WaitsForNobody) && self.sequences[slot].promised > 0 {
            return true;
        }
        if !promised {
            self.sequences[slot].promised = 0;
        }
        promised
    }

    /// Whether its leader is about to compute what it needs. Nobody waits for one that comes later in the order, whose
    /// turn may be far, or that is behind.
    fn is_leaders(&self, state: &Sequence) -> bool {
        let Some(leader) = self.leader(state) else { return false };
        let leader = &self.sequences[leader];
        let is_at_block = state.computed.is_multiple_of(self.cache.block_size);
        let is_ahead = leader.order() < state.order() && leader.computed >= state.computed;
        is_at_block && is_ahead && state.computed + 1 < state.prompt_len && leader.is_prefilling()
    }

    fn is_shares(&self, state: &Sequence, shares: &[Share]) -> bool {
        let Some(block) = state.next_block(&self.cache) else { return false };
        let Some(key) = state.key(block) else { return false };
        let end = (block + 1) * self.cache.block_size;
        // Whoever is behind, since it has to compute every row, is nobody to wait for.
        let is_next = |other: &Sequence| (state.computed..end).contains(&other.computed);
        let mut computing = shares.iter().filter_map(|share| self.sequences.get(share.slot));
        computing.any(|other| is_next(other) && end <= other.prefill_target && other.key(block) == Some(key))
    }

    /// Leading blocks of a waiting sequence for which it needs no page of its own in a group that sees everything. A
    /// guess, made without looking at each.
    pub(super) fn blocks_to_share(&self, state: &Sequence, shares: &[Share]) -> Common {
        if self.cache.groups.full() == 0 {
            return Common::default();
        }
        if let Some(leader) = self.leader(state) {
            let leader = &self.sequences[leader];
            let has_computed = leader.computed >= leader.prompt_len && !leader.is_loading();
            if self.is_leaders(state) || has_computed && self.keeps_prompt(leader, 0) {
                return Common { promised: (leader.prompt_len - 1) / self.cache.block_size, held: 0 };
            }
        }
        let limit = state.blocks_to_find(&self.cache);
        let full = self.cache.groups.windows().position(|window| window.is_none());
        let is_held = |at: usize| {
            let key = state.key(at);
            key.zip(full).is_some_and(|(key, group)| self.pool.is_held(key, group))
        };
        let promised = shares.iter().filter_map(|share| self.sequences.get(share.slot)).map(|other| {
            // Keys are chained: once they differ, they differ.
            let both = limit.min(other.prefill_target / self.cache.block_size);
            let both = leading(both, |at| state.key(at) == other.key(at));
            // What it has left behind already is there or is not: nobody computes it again. And what it computes though
            // it is there, since something is told of every row, is nobody to wait for.
            let next = other.computed / self.cache.block_size;
            let is_there = || {
                let key = state.key(next).zip(full);
                key.is_some_and(|(key, group)| self.pool.is_named(key, group))
            };
            if next < both && !is_there() { both } else { 0 }
        });
        Common { promised: promised.max().unwrap_or(0), held: leading(limit, is_held) }
    }

    /// Of `held` leading blocks that others hold in a group that sees everything, those that will be shared: a window's
    /// group may have given up what it needs to go on behind them.
    pub(super) fn held_in_every_group(&mut self, slot: usize, held: usize) -> usize {
        if held == 0 || self.cache.groups.full() == self.groups {
            return held;
        }
        let (state, changes) = (&self.sequences[slot], self.pool.changes());
        let blocks = match self.prefix_of_head {
            Some((sequence, then, blocks)) if (sequence, then) == (state.id, changes) => blocks,
            _ => self.longest_prefix(state, |block, group| self.on_device(state, block, group).is_some()),
        };
        self.prefix_of_head = Some((state.id, changes, blocks));
        held.min(blocks)
    }

    /// Gives up what no row to come sees, of all that run: nobody may go without a page that another one needs no more.
    pub(super) fn leave_windows(&mut self) {
        for at in 0..self.running.len() {
            let slot = self.running[at].slot;
            let computed = self.sequences[slot].computed;
            self.leave_window(slot, computed);
        }
    }

    /// Gives up the pages that no row from `position` on sees.
    pub(super) fn leave_window(&mut self, slot: usize, position: usize) {
        if self.cache.groups.full() == self.groups {
            return;
        }
        let position = match position {
            position if planted(Bug::WindowTooEarly) => position + 1,
            position if planted(Bug::WindowTooLate) => position.saturating_sub(1),
            position => position,
        };
        let state = &mut self.sequences[slot];
        for (group, window) in self.cache.groups.windows().enumerate() {
            let first = self.cache.first_block_seen(position, window);
            let from = std::mem::replace(&mut state.first_block[group], first as u32) as usize;
            debug_assert!(from <= first, "a window moves on");
            for block in from..first {
                let Some(entry) = state.table.get_mut(block * self.groups + group) else { break };
                if let Some(page) = entry.take() {
                    state.held -= 1;
                    self.pool.release(page, state.last_step);
                }
            }
        }
    }

    /// Names the blocks of `slot` that are full and whose tokens are known, so that others find them.
    pub(super) fn name_blocks(&mut self, slot: usize) {
        let state = &mut self.sequences[slot];
        let full = state.computed.min(state.tokens.len()) / self.cache.block_size;
        let full =
            full + usize::from(planted(Bug::NamesPagesBegun) && full < state.table.len() / self.groups);
        while state.named < full {
            let block = state.named;
            let Some(content) = state.content(block, &self.cache) else { break };
            for page in state.table[block * self.groups..][..self.groups].iter().flatten() {
                self.pool.register(*page, content);
            }
            state.named += 1;
        }
    }
}

/// Leading blocks that a waiting sequence has in common with others.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Common {
    /// Others are about to compute them, or have them all: a choice's prompt.
    pub(super) promised: usize,
    /// Others hold them in a group that sees everything.
    pub(super) held: usize,
}

impl Common {
    pub(super) fn most(self) -> usize {
        self.promised.max(self.held)
    }
}

/// How many of `0..count` hold, where all up to some number do and none from there on.
fn leading(count: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        match holds(middle) {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    low
}
