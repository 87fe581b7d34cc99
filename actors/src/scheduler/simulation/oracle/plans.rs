//! A plan, held against what is promised of plans.

use std::collections::{BTreeMap, BTreeSet};

use super::{Due, Oracle, STARVED_MAX, STEPS_AWAITED_MAX, STEPS_BETWEEN_MAX};
use crate::{
    ids::SequenceId,
    plan::{Span, StepPlan, Tokens},
    scheduler::{PREEMPTIONS_MAX, Scheduler},
};

/// Who ran and who waited before a plan.
pub(in crate::scheduler::simulation) struct Before {
    running: Vec<Standing>,
    waiting: BTreeSet<Due>,
    /// Preemptions so far.
    preemptions: u64,
}

/// One that runs.
#[derive(Clone, Copy)]
struct Standing {
    sequence: SequenceId,
    slot: usize,
    life: u64,
    due: Due,
    /// Whether it was preempted as often as may be.
    is_kept: bool,
    wants_decode: bool,
    /// Tokens of the prompt, or of a replay, that are left.
    to_prefill: usize,
    computed: usize,
    /// Blocks that its table covers.
    table: usize,
    /// Whether it waits for what it will share or have: for another one to compute it, or for pages of the host.
    is_follower: bool,
}

fn rows(span: &Span) -> usize {
    if let Tokens::Given(tokens) = &span.tokens { tokens.len() } else { 1 }
}

impl Oracle {
    /// To be asked before a plan is made.
    pub(in crate::scheduler::simulation) fn before_plan(&self, scheduler: &Scheduler) -> Before {
        let waiting =
            scheduler.waiting.values().map(|&slot| self.stream(scheduler.sequences[slot].id).due).collect();
        Before { running: self.standings(scheduler), waiting, preemptions: scheduler.counters().preemptions }
    }

    fn standings(&self, scheduler: &Scheduler) -> Vec<Standing> {
        let standing = |slot: usize| {
            let state = &scheduler.sequences[slot];
            Standing {
                sequence: state.id,
                slot,
                life: state.life,
                due: self.stream(state.id).due,
                is_kept: state.preemptions >= PREEMPTIONS_MAX,
                wants_decode: state.wants_decode(),
                to_prefill: state.prefill_target.saturating_sub(state.computed),
                computed: state.computed,
                table: state.table.len() / scheduler.groups,
                is_follower: state.leader.is_some() || state.is_loading() || scheduler.is_loaded_for(state),
            }
        };
        scheduler.running.iter().map(|running| standing(running.slot)).collect()
    }

    /// Holds a plan, or that there was none, against what was before.
    pub(in crate::scheduler::simulation) fn planned(
        &mut self,
        scheduler: &Scheduler,
        before: &Before,
        plan: Option<&StepPlan>,
    ) {
        let now = self.standings(scheduler);
        self.check_order(before, &now);
        let kept = |standing: &&Standing| standing.is_kept && before.waiting.contains(&standing.due);
        self.seen.kept += now.iter().filter(kept).count() as u64;
        if let Some(plan) = plan {
            self.check_plan(plan);
            let by_sequence: BTreeMap<SequenceId, usize> =
                plan.run.iter().map(|span| (span.sequence, rows(span))).collect();
            assert_eq!(by_sequence.len(), plan.run.len(), "a sequence has two spans in one step");
            self.count_rows(plan);
            self.check_decodes(before, &now, &by_sequence);
            self.check_first_prefill(scheduler, before, &now, &by_sequence);
            check_pages(scheduler, before, plan);
        } else if scheduler.steps_in_flight() < crate::scheduler::STEPS_IN_FLIGHT_MAX {
            check_nothing_to_do(scheduler, &now);
        }
        let lost = scheduler.counters().preemptions - before.preemptions;
        let runs: BTreeSet<u64> = now.iter().map(|standing| standing.life).collect();
        let gave_way = before.running.iter().filter(|standing| !runs.contains(&standing.life)).count() as u64;
        self.seen.at_once += lost - gave_way;
        for (_, state) in scheduler.sequences.iter() {
            self.seen.preemptions_max = self.seen.preemptions_max.max(state.preemptions);
        }
        self.watch_head(scheduler, before, &now);
    }

    fn check_plan(&self, plan: &StepPlan) {
        let tokens: usize = plan.run.iter().map(rows).sum();
        let budget = self.config.max_num_batched_tokens;
        assert!(tokens <= budget, "{} has {tokens} tokens and {budget} are allowed", plan.step);
        assert!(plan.run.len() <= self.config.max_num_seqs, "{} runs too many", plan.step);
        for span in plan.run.iter().filter(|span| self.stream(span.sequence).awaits_tokens) {
            let knows = span.tokens != Tokens::LastSampled;
            assert!(knows, "{} awaits its tokens and {} has none for it", span.sequence, plan.step);
        }
    }

    /// Rows of prompts, whose number says how much of a prompt was there.
    fn count_rows(&mut self, plan: &StepPlan) {
        for span in &plan.run {
            let stream = self.streams.get_mut(&span.sequence).expect("it is known");
            if let Tokens::Given(tokens) = &span.tokens {
                stream.rows += tokens.len();
            }
        }
    }

    /// The waiting are served in their order, and who gives way is the last in it that may.
    fn check_order(&mut self, before: &Before, now: &[Standing]) {
        let ran: BTreeSet<u64> = before.running.iter().map(|standing| standing.life).collect();
        let newcomers = now.iter().filter(|standing| !ran.contains(&standing.life));
        let newcomers: BTreeSet<Due> = newcomers.map(|standing| standing.due).collect();
        let passed_over = before.waiting.iter().find(|due| !newcomers.contains(due));
        // Whoever was admitted and had to give way at once is among neither; it waited before.
        if let (Some(last), Some(first)) = (newcomers.last(), passed_over) {
            let is_known = |due: &Due| before.waiting.contains(due);
            assert!(last < first || !is_known(last), "{} was passed over by {}", first.1, last.1);
        }
        let runs: BTreeSet<u64> = now.iter().map(|standing| standing.life).collect();
        let gave_way = before.running.iter().filter(|standing| !runs.contains(&standing.life));
        let Some(first) = gave_way.clone().map(|standing| standing.due).min() else { return };
        for standing in gave_way {
            let stream = self.streams.get_mut(&standing.sequence).expect("it ran");
            stream.preemptions += 1;
            let often = stream.preemptions;
            assert!(often <= PREEMPTIONS_MAX, "{} gave way {often} times", standing.sequence);
            assert!(!standing.is_kept, "{} was to be kept and gave way", standing.sequence);
            stream.has_lived |= stream.rows > 0;
        }
        let stays = now.iter().filter(|standing| !standing.is_kept).map(|standing| standing.due).max();
        assert!(stays.is_none_or(|stays| stays < first), "{} gave way before later ones", first.1);
    }

    /// Whoever can decode does so in each step, or in one of the next two when pages are on their way.
    fn check_decodes(&mut self, before: &Before, now: &[Standing], planned: &BTreeMap<SequenceId, usize>) {
        let lives: BTreeSet<u64> = now.iter().map(|standing| standing.life).collect();
        let decodes = before.running.iter().filter(|standing| standing.wants_decode);
        for standing in decodes.filter(|standing| lives.contains(&standing.life)) {
            let stream = self.streams.get_mut(&standing.sequence).expect("it runs");
            if stream.missed_life != standing.life || planned.contains_key(&standing.sequence) {
                stream.missed = 0;
            }
            stream.missed_life = standing.life;
            stream.missed += u64::from(!planned.contains_key(&standing.sequence));
            let missed = stream.missed;
            assert!(missed <= STEPS_BETWEEN_MAX, "{} is left out for {missed} steps", standing.sequence);
        }
    }

    /// Of what decodes leave of the budget, the first prefill in the order gets half, when there are pages for it.
    fn check_first_prefill(
        &mut self,
        scheduler: &Scheduler,
        before: &Before,
        now: &[Standing],
        planned: &BTreeMap<SequenceId, usize>,
    ) {
        let Some(first) = before.running.iter().find(|standing| standing.to_prefill > 0) else { return };
        let Some(after) = now.iter().find(|standing| standing.life == first.life) else { return };
        // Where there are windows, a chunk may hold more than its sequence was admitted for, if nobody else needs it.
        let has_windows = scheduler.cache.groups.full() < scheduler.groups;
        let spoken_for = if has_windows { scheduler.spoken_for(first.slot) } else { 0 };
        let decodes = before.running.iter().filter(|standing| standing.wants_decode);
        let (decodes, left_out): (Vec<&Standing>, Vec<&Standing>) =
            decodes.partition(|standing| planned.contains_key(&standing.sequence));
        let left_out = left_out.iter().filter(|out| now.iter().any(|standing| standing.life == out.life));
        // Pages that are on their way to those who went without are not for its chunk's later blocks.
        let needed = (1 + left_out.count()) * scheduler.groups + spoken_for;
        // What others gave up after its chunk had been cut short is no page that it could have had.
        let was_short = scheduler.counters().preemptions > before.preemptions
            || scheduler.pool.available() < scheduler.groups + spoken_for
            || scheduler.pool.available() + scheduler.pool.pending() < needed;
        let decodes = decodes.len();
        let half = (self.config.max_num_batched_tokens - decodes).div_ceil(2);
        let got = planned.get(&first.sequence).copied().unwrap_or(0);
        let taken_over = after.computed - first.computed - got;
        let due = half.min(first.to_prefill - taken_over);
        if first.is_follower || after.is_follower {
            return;
        }
        let starved = match self.starved {
            Some((life, plans)) if life == first.life && got == 0 => plans + 1,
            _ => u64::from(got == 0),
        };
        self.starved = Some((first.life, starved));
        self.seen.starved_max = self.seen.starved_max.max(starved);
        let sequence = first.sequence;
        assert!(
            starved <= STARVED_MAX,
            "{sequence} is the first to prefill and gets nothing in {starved} plans"
        );
        // It has the rest of its last block, however short pages are.
        let room = after.table * scheduler.cache.block_size - (after.computed - got);
        let due = if was_short { due.min(room) } else { due };
        assert!(got >= due, "{sequence} is the first to prefill and gets {got} tokens of {due}");
    }

    /// Whoever is first of the waiting runs once those before it have made room: no later than when all that run have
    /// ended, each step taking every one of them further.
    fn watch_head(&mut self, scheduler: &Scheduler, before: &Before, running: &[Standing]) {
        let dues = scheduler.waiting.values().map(|&slot| self.stream(scheduler.sequences[slot].id).due);
        let head = dues.min().filter(|_| !running.is_empty());
        // Whoever came with a better priority and was admitted at once was first for a moment.
        let ran: BTreeSet<u64> = before.running.iter().map(|standing| standing.life).collect();
        let came = running.iter().filter(|standing| !ran.contains(&standing.life));
        let came = came.map(|standing| standing.due).min();
        let is_passed = came.zip(head).is_some_and(|(came, head)| came < head);
        let same = self.head.filter(|(first, _)| !is_passed && Some(*first) == head.map(|head| head.1));
        let steps = same.map_or(0, |(_, steps)| steps);
        self.head = head.map(|head| (head.1, steps));
        let (budget, each) = (self.config.max_num_batched_tokens, self.config.max_model_len);
        // A prefill gets what decodes leave; with the least budget, a token in each step.
        let prefill = self.config.max_num_seqs * each / (budget + 1 - self.config.max_num_seqs);
        let bound = (STEPS_BETWEEN_MAX + STEPS_AWAITED_MAX + 1) * (each + prefill) as u64;
        assert!(steps <= bound, "{head:?} was first of the waiting for {steps} steps");
    }
}

/// Pages that are written are nobody else's, and none is kept that no row sees any more.
fn check_pages(scheduler: &Scheduler, before: &Before, plan: &StepPlan) {
    let (groups, block_size) = (scheduler.groups, scheduler.cache.block_size);
    for span in &plan.run {
        let Some(slot) = scheduler.sequences.find(span.sequence) else { continue };
        let state = &scheduler.sequences[slot];
        // Of what gave way in the same plan nothing is left to be looked at.
        if state.life == 0 {
            continue;
        }
        let start = state.computed - rows(span);
        for (at, page) in state.table.iter().enumerate().skip(start / block_size * groups) {
            let holders = page.map_or(1, |page| scheduler.pool.holders(page));
            assert_eq!(holders, 1, "{} writes page {page:?} at {at} of its table", span.sequence);
        }
        for (group, window) in scheduler.cache.groups.windows().enumerate() {
            let Some(window) = window else { continue };
            let behind = (start + 1).saturating_sub(window) / block_size;
            let kept = (0..behind).find(|block| state.table[block * groups + group].is_some());
            assert_eq!(kept, None, "{} keeps a page that no row sees", span.sequence);
        }
        let was = before.running.iter().find(|standing| standing.slot == slot && standing.life == state.life);
        assert!(was.is_none_or(|was| was.computed <= start), "{} computes rows again", span.sequence);
    }
}

/// There is no plan: then nobody runs who could go on with the pages that it has.
fn check_nothing_to_do(scheduler: &Scheduler, running: &[Standing]) {
    for standing in running {
        let state = &scheduler.sequences[standing.slot];
        let room = state.table.len() / scheduler.groups * scheduler.cache.block_size;
        let has_room = room > standing.computed;
        assert!(!(standing.wants_decode && has_room), "{} could decode", standing.sequence);
        // In the middle of a block nobody waits for another one's.
        let is_between = standing.computed.is_multiple_of(scheduler.cache.block_size);
        assert!(is_between || standing.to_prefill == 0 || !has_room, "{} could prefill", standing.sequence);
    }
    let nothing_is_used = running.is_empty() && scheduler.pool.available() == scheduler.pool.total();
    assert!(!nothing_is_used || scheduler.waiting.is_empty(), "somebody waits for an empty pool");
}
