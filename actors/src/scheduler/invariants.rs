//! What must hold after every event, whatever happened. Simulations call it each time.

use consort_parallel::ids::BlockId;

use super::{PREEMPTIONS_MAX, STEPS_IN_FLIGHT_MAX, sequence::Sequence, state::Scheduler};

impl Scheduler {
    /// Panics when bookkeeping contradicts itself.
    pub fn check_invariants(&self) {
        assert!(self.in_flight.len() <= STEPS_IN_FLIGHT_MAX, "too many steps in flight");
        assert!(self.running.len() <= self.config.max_num_seqs, "too many running sequences");
        assert!(self.unstarted <= self.config.max_waiting_requests, "too many waiting requests");
        assert_eq!(self.running.len() + self.waiting.len(), self.sequences.len(), "a sequence has no place");
        let unstarted = self.sequences.iter().filter(|(_, state)| !state.started).count();
        assert_eq!(self.unstarted, unstarted, "unstarted sequences are miscounted");
        let in_order = self.running.windows(2).all(|pair| pair[0].order < pair[1].order);
        assert!(in_order, "the running are out of order");
        let kept = self.running.iter().filter(|running| !running.order.may_be_preempted);
        let kept: usize = kept.map(|running| self.sequences[running.slot].pages_max).sum();
        assert!(kept <= self.pool.total(), "{kept} pages were promised for good");
        for running in &self.running {
            let state = &self.sequences[running.slot];
            assert_eq!(running.order, state.order(), "{} runs out of its order", state.id);
            assert!(state.life > 0, "{} runs without a life", state.id);
            self.check_running(state);
        }
        for (place, &slot) in &self.waiting {
            let state = &self.sequences[slot];
            assert_eq!(*place, state.place, "{} waits out of its order", state.id);
            assert!(
                state.table.is_empty() && state.computed == 0 && state.life == 0,
                "waiting {} holds something",
                state.id
            );
        }
        for (_, state) in self.sequences.iter() {
            assert!(state.preemptions <= PREEMPTIONS_MAX, "{} was preempted too often", state.id);
            let limit = state.token_limit.max(state.prompt_len + 1);
            assert!(state.tokens.len() < limit, "{} overran its limit", state.id);
        }
        for step in &self.in_flight {
            let tokens: usize = step.spans.iter().map(|span| span.end - span.start).sum();
            assert!(tokens <= self.config.max_num_batched_tokens, "{} is over the token budget", step.step);
        }
        self.pool.check_invariants(self.held_pages());
        self.check_contents();
        self.check_tiers();
    }

    /// Every entry of every table, with its group.
    fn held_pages(&self) -> impl Iterator<Item = (BlockId, usize)> + '_ {
        let groups = self.groups;
        self.sequences.iter().flat_map(move |(_, state)| {
            let entries = state.table.iter().enumerate();
            entries.filter_map(move |(at, page)| page.map(|page| (page, at % groups)))
        })
    }

    /// Two sequences have a page in common only where they have the same tokens up to its end.
    fn check_contents(&self) {
        let mut holders = std::collections::BTreeMap::new();
        for (slot, state) in self.sequences.iter() {
            for (at, page) in state.table.iter().enumerate() {
                let Some(page) = page else { continue };
                let block = at / self.groups;
                let Some((other, other_block)) = holders.insert(*page, (slot, block)) else { continue };
                let other = &self.sequences[other];
                let end = (block + 1) * self.cache.block_size;
                let same = block == other_block
                    && end <= state.tokens.len()
                    && end <= other.tokens.len()
                    && state.tokens[..end] == other.tokens[..end];
                assert!(same, "{} and {} share page {} and differ", state.id, other.id, page.0);
            }
        }
    }

    fn check_running(&self, state: &Sequence) {
        let groups = self.groups;
        let cover = self.cache.blocks_for(state.computed);
        assert_eq!(state.table.len(), cover * groups, "the table of {} does not cover it exactly", state.id);
        assert_eq!(state.held, state.table.iter().flatten().count(), "{} miscounts its pages", state.id);
        for (group, window) in self.cache.groups.windows().enumerate() {
            let seen = self.cache.first_block_seen(state.computed, window);
            let first = seen.min(state.first_block[group] as usize);
            let missing = (seen..cover).find(|block| state.table[block * groups + group].is_none());
            assert_eq!(missing, None, "{} lacks a page that it sees in group {group}", state.id);
            let kept = (0..first).find(|block| state.table[block * groups + group].is_some());
            assert_eq!(kept, None, "{} keeps a page behind the window of group {group}", state.id);
        }
        let in_flight = self.in_flight.iter().flat_map(|step| &step.spans);
        let draws = in_flight.filter(|span| span.life == state.life && span.draws());
        assert_eq!(state.draws_ahead, draws.count(), "{} lost count of its draws", state.id);
        assert!(state.planned_len() <= state.token_limit, "{} is planned beyond its limit", state.id);
        assert!(state.told <= state.computed, "{} told of more than there is", state.id);
        if !state.is_prefilling() && !state.ends_with_prompt() {
            assert_eq!(state.computed + 1, state.planned_len(), "{} decodes at a wrong position", state.id);
        }
        let keys = if self.cache.prefix_caching { state.tokens.len() / self.cache.block_size } else { 0 };
        assert!(state.keys().len() <= keys, "{} names a block that is not full", state.id);
    }
}
