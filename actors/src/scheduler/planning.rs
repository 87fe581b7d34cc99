//! How a step is decided: decodes first, then prefill chunks, then admissions, all under one token budget.
//!
//! **Decodes** go into every step, so that none waits for more than the steps under way. **Prefills share the rest**:
//! the one that is first in the order of service gets at least half of it, the shortest of the others what remains,
//! then whoever can be admitted. So a long prompt neither waits for ever nor keeps short ones waiting for all of its
//! length. A prefill whose next block another one is about to compute waits for it, and takes the block over.

use super::{
    STEPS_IN_FLIGHT_MAX,
    bugs::{Bug, planted},
    pool::Admission,
    sequence::{PlannedSpan, Sequence},
    state::{Scheduler, StepInFlight},
    tiers::Transfers,
};
use crate::{
    ids::Step,
    plan::{BlockCopy, NewSequence, Span, StepPlan},
};

#[cfg(test)]
mod tests;

/// Plans in a row in which one may go without the page that it needs next, because pages are on their way. After that
/// the last in the order gives way to it.
const MISSED_MAX: u8 = 2;

/// A step in the making.
#[derive(Default)]
pub(super) struct Draft {
    budget: usize,
    begin: Vec<NewSequence>,
    run: Vec<Span>,
    pub(super) copies: Vec<BlockCopy>,
    /// Whether somebody shares a prompt from this step on: pages are held for it.
    pub(super) has_forked: bool,
    planned: Vec<PlannedSpan>,
    /// Those who went without and take a page of each group when it is there: nobody is preempted for these, and nobody
    /// else takes them. Whoever gives way claims nothing any more.
    claimants: Vec<usize>,
    /// Whether somebody went without a page. Nothing is admitted then: the next pages are spoken for.
    pressed: bool,
}

/// What came of asking for pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Obtained {
    Pages,
    /// Pages come free when a step in flight is absorbed, or a transfer reported.
    Stalled,
    /// The asking sequence was itself the one to give way.
    Preempted,
}

/// A prefill that wants a part of the budget.
#[derive(Clone, Copy)]
pub(super) struct Share {
    pub(super) slot: usize,
    life: u64,
    remaining: usize,
    count: usize,
}

impl Share {
    fn of(slot: usize, state: &Sequence) -> Self {
        Self { slot, life: state.life, remaining: state.prefill_target - state.computed, count: 0 }
    }

    /// Takes what it wants of `budget`, up to `most`.
    fn give(&mut self, most: usize, budget: &mut usize) {
        let count = (self.remaining - self.count).min(most).min(*budget);
        self.count += count;
        *budget -= count;
    }
}

impl Scheduler {
    /// Decides the next step, or says that there is none now: nothing to run, or enough in flight.
    pub fn plan(&mut self) -> Option<StepPlan> {
        if self.in_flight.len() >= STEPS_IN_FLIGHT_MAX {
            return None;
        }
        let mut is_pressed = false;
        loop {
            let preemptions = self.counters.preemptions;
            let plan = self.try_plan(is_pressed);
            // Where all that is left has waited for one that gave way, it need not wait any more. That comes to an end:
            // each time somebody gives way, who does so four times at most.
            if plan.is_some() || self.counters.preemptions == preemptions {
                return plan;
            }
            // Whoever gave way is not taken in again at once: others run when their tokens have come.
            is_pressed = !self.in_flight.is_empty();
        }
    }

    /// Plans a step. Where it `is_pressed`, somebody gave way just now, and nobody is admitted.
    fn try_plan(&mut self, is_pressed: bool) -> Option<StepPlan> {
        let budget = self.config.max_num_batched_tokens;
        let mut draft = Draft { budget, pressed: is_pressed, ..Draft::default() };
        self.leave_windows();
        self.plan_decodes(&mut draft);
        let shares = self.share_out(&mut draft);
        for share in shares {
            self.plan_chunk(share, &mut draft);
        }
        let is_empty = draft.run.is_empty();
        assert!(!is_empty || draft.copies.is_empty(), "a page was copied for a sequence that does not run");
        if is_empty && !self.awaits_transfers() {
            if draft.has_forked {
                self.forget_step();
            }
            return None;
        }
        let step = self.next_step;
        self.next_step = step.next();
        let Transfers { saves, loads } = self.order_transfers(step, !is_empty);
        // Whoever went without a page that a transfer withholds has it two steps later.
        let is_waited_for = draft.pressed && self.pool.moving() > 0;
        let await_transfers = is_empty || is_waited_for;
        self.in_flight.push_back(StepInFlight { step, spans: draft.planned });
        let end = std::mem::take(&mut self.ending);
        Some(StepPlan {
            epoch: self.epoch,
            step,
            begin: draft.begin,
            run: draft.run,
            copies: draft.copies,
            saves,
            loads,
            await_transfers,
            end,
        })
    }

    /// The step that pages were held for is not planned after all, and may never be: they are held until the one
    /// before.
    fn forget_step(&mut self) {
        let before = self.next_step.0.checked_sub(1).map(Step);
        for running in &self.running {
            let state = &mut self.sequences[running.slot];
            state.last_step = state.last_step.min(before);
        }
        self.pool.not_planned(self.next_step, before);
    }

    fn plan_decodes(&mut self, draft: &mut Draft) {
        draft.run.reserve(self.running.len());
        draft.planned.reserve(self.running.len());
        // Whoever went without comes first, or those before it would take each page that comes free.
        let missed_most = std::mem::take(&mut self.missed_most);
        for missed in (0..=missed_most).rev() {
            self.plan_decodes_of(missed, draft);
        }
    }

    /// Plans decodes of those that went without in so many plans in a row.
    fn plan_decodes_of(&mut self, missed: u8, draft: &mut Draft) {
        let mut at = 0;
        // Whoever gives way is the last, or the one that asks.
        while at < self.running.len() && draft.budget > 0 {
            let slot = self.running[at].slot;
            let state = &self.sequences[slot];
            let is_others_turn = state.missed != missed || state.last_step == Some(self.next_step);
            let is_late = planted(Bug::DecodesLast) && self.is_anyone_prefilling();
            if !state.wants_decode() || is_others_turn || is_late {
                at += 1;
                continue;
            }
            let computed = state.computed;
            let has = self.sequences[slot].table.len() / self.groups;
            if has * self.cache.block_size <= computed {
                match self.obtain_block(slot, draft) {
                    Obtained::Pages => {}
                    Obtained::Stalled => {
                        let missed = missed.saturating_add(1);
                        self.sequences[slot].missed = missed;
                        self.missed_most = self.missed_most.max(missed);
                        at += 1;
                        continue;
                    }
                    Obtained::Preempted => continue,
                }
            }
            self.push_span(slot, 1, draft);
            draft.budget -= usize::from(!planted(Bug::OverrunsBudget));
            at += 1;
        }
    }

    fn is_anyone_prefilling(&self) -> bool {
        self.running.iter().any(|running| self.sequences[running.slot].is_prefilling())
    }

    /// Divides the budget among prefills, and admits what waits while there is some left.
    fn share_out(&mut self, draft: &mut Draft) -> Vec<Share> {
        let mut shares: Vec<Share> = Vec::new();
        for at in 0..self.running.len() {
            let slot = self.running[at].slot;
            let state = &self.sequences[slot];
            if !state.is_prefilling() || state.is_loading() {
                continue;
            }
            self.take_over_loaded(slot);
            if self.sequences[slot].is_loading() {
                continue;
            }
            self.take_over(slot, draft);
            if !self.is_promised(slot, &shares) {
                shares.push(Share::of(slot, &self.sequences[slot]));
            }
        }
        if let Some((first, others)) = shares.split_first_mut() {
            let half = if planted(Bug::StarvesLongPrompts) { 0 } else { draft.budget.div_ceil(2) };
            first.give(half, &mut draft.budget);
            let mut others: Vec<&mut Share> = others.iter_mut().collect();
            others.sort_by_key(|share| share.remaining);
            for share in others {
                share.give(usize::MAX, &mut draft.budget);
            }
        }
        if !draft.pressed {
            self.admit(&mut shares, draft);
        }
        if let Some(first) = shares.first_mut() {
            first.give(usize::MAX, &mut draft.budget);
        }
        shares.retain(|share| share.count > 0);
        shares
    }

    fn admit(&mut self, shares: &mut Vec<Share>, draft: &mut Draft) {
        while draft.budget > 0 && self.running.len() < self.config.max_num_seqs {
            // Only the head of the queue is asked: a large request is not starved by small ones behind it.
            let head = match planted(Bug::AdmitsLast) {
                true => self.waiting.last_key_value(),
                false => self.waiting.first_key_value(),
            };
            let Some((_, &slot)) = head else { return };
            let common = self.blocks_to_share(&self.sequences[slot], shares);
            if self.admission(&self.sequences[slot], common.most()) == Admission::Wait {
                return;
            }
            // Looked at closely only where it may fit.
            let shared = common.promised.max(self.held_in_every_group(slot, common.held));
            let is_less = shared < common.most();
            if is_less && self.admission(&self.sequences[slot], shared) == Admission::Wait {
                return;
            }
            self.start(slot, draft);
            self.sequences[slot].promised = shared;
            if !self.sequences[slot].is_loading() && !self.is_promised(slot, shares) {
                let mut share = Share::of(slot, &self.sequences[slot]);
                share.give(usize::MAX, &mut draft.budget);
                shares.push(share);
            }
        }
    }

    fn start(&mut self, slot: usize, draft: &mut Draft) {
        self.lives += 1;
        let state = &mut self.sequences[slot];
        state.life = self.lives;
        state.prefill_target = state.tokens.len();
        if !state.started {
            state.started = true;
            self.unstarted -= 1;
            self.counters.prompt_tokens += state.prompt_len as u64;
        }
        let place = state.place;
        self.waiting.remove(&place);
        self.enter_running(slot);
        self.take_over_prefix(slot);
        if !self.sequences[slot].is_loading() {
            self.take_over(slot, draft);
        }
    }

    /// A block for `slot` in every group, at the cost of whoever comes last in the order, be it itself.
    fn obtain_block(&mut self, slot: usize, draft: &mut Draft) -> Obtained {
        loop {
            // Among what is available and what comes free are the pages of those who wait.
            let to_come = self.pool.available() + self.pool.pending();
            let is_enough = to_come >= (draft.claimants.len() + 1) * self.groups;
            if is_enough && self.pool.available() >= self.groups {
                for group in 0..self.groups {
                    let page = self.pool.take(group);
                    debug_assert!(page.is_some(), "as many as are available can be taken");
                    let state = &mut self.sequences[slot];
                    state.held += usize::from(page.is_some());
                    state.table.push(page);
                }
                return Obtained::Pages;
            }
            draft.pressed = true;
            // Pages that come free are others' again and again, where decodes take as many as they give up.
            let is_starving = self.sequences[slot].missed >= MISSED_MAX && self.running.len() > 1;
            let is_starving = is_starving && !planted(Bug::IsPatientForEver);
            if is_enough && !is_starving {
                draft.claimants.push(slot);
                return Obtained::Stalled;
            }
            let last = match planted(Bug::PreemptsFirst) {
                true => self.running.first(),
                false => self.running.last(),
            };
            let last = last.expect("the sequence that asks for a page runs");
            if !last.order.may_be_preempted {
                // All that run are to keep what they have, and together they fit: what they lack is on its way.
                assert!(self.pool.pending() > 0, "sequences were promised more pages than there are");
                if is_enough {
                    draft.claimants.push(slot);
                }
                return Obtained::Stalled;
            }
            let victim = last.slot;
            let table = &self.sequences[victim].table;
            draft.copies.retain(|copy| !table.contains(&Some(copy.to)));
            draft.claimants.retain(|claimant| *claimant != victim);
            self.sequences[slot].missed = 0;
            self.preempt(victim);
            if victim == slot {
                return Obtained::Preempted;
            }
        }
    }

    /// Plans a prefill chunk, of fewer tokens where pages are short.
    fn plan_chunk(&mut self, share: Share, draft: &mut Draft) {
        let Share { slot, life, count, .. } = share;
        // It may have had to give way to another one of this step.
        let lives = |scheduler: &Self| scheduler.sequences.get(slot).is_some_and(|state| state.life == life);
        if !lives(self) {
            return;
        }
        let start = self.sequences[slot].computed;
        let wanted = self.cache.blocks_for(start + count);
        let mut others = None;
        while self.sequences[slot].table.len() / self.groups < wanted {
            let room = (self.sequences[slot].table.len() / self.groups) * self.cache.block_size;
            // The chunk ends where pages do. What its rows see together may be more than the sequence was admitted for:
            // that much it takes only of what nobody else is going to need.
            let state = &self.sequences[slot];
            let spoken_for = match state.held + self.groups > state.pages_max {
                true => *others.get_or_insert_with(|| self.spoken_for(slot)),
                false => 0,
            };
            let to_come = self.pool.available() + self.pool.pending();
            let is_short = self.pool.available() < self.groups + spoken_for
                || to_come < (draft.claimants.len() + 1) * self.groups + spoken_for;
            // Nobody gives way for more than a chunk's first block.
            if room > start && is_short {
                break;
            }
            match self.obtain_block(slot, draft) {
                Obtained::Pages => {}
                Obtained::Stalled => {
                    let state = &mut self.sequences[slot];
                    state.missed = state.missed.saturating_add(1);
                    return;
                }
                Obtained::Preempted => return,
            }
        }
        let room = (self.sequences[slot].table.len() / self.groups) * self.cache.block_size;
        self.push_span(slot, count.min(room - start), draft);
        self.name_blocks(slot);
    }

    fn push_span(&mut self, slot: usize, count: usize, draft: &mut Draft) {
        let step = self.next_step;
        let state = &mut self.sequences[slot];
        if !std::mem::replace(&mut state.announced, true) {
            draft.begin.push(state.announcement());
            let id = state.id;
            // `begin` replaces whatever the shards still know of an earlier life.
            self.ending.retain(|ending| *ending != id);
        }
        let (span, mut planned) = state.advance(count, step, &self.cache);
        planned.slot = slot;
        self.counters.computed_tokens += count as u64;
        draft.run.push(span);
        draft.planned.push(planned);
    }
}
