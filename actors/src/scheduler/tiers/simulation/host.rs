//! The host's pool in the simulation, whose transfers are carried out and reported at any time that is legal.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use consort_parallel::ids::{BlockId, HostBlock};

use super::{
    CONFIG, Random, SeedNote, Simulation, assert_solo, groups, related_request, salt, shard::Slot, solo,
};
use crate::{
    config::{CacheSpec, LayerGroups},
    ids::{Epoch, SequenceId, Step},
    plan::StepPlan,
    request::{Request, SubmitError},
    scheduler::{SchedulerCounters, TRANSFERS_PER_STEP},
};

/// Pages of the host, and copies that were ordered. Without a seed every step carries out its own.
#[derive(Default)]
pub(in crate::scheduler) struct SimHost {
    pages: BTreeMap<HostBlock, Vec<Slot>>,
    ordered: VecDeque<Ordered>,
    done: Option<Step>,
    /// When what is done; absent where nothing is ever late.
    moods: Option<Random>,
}

struct Ordered {
    step: Step,
    saves: Vec<(BlockId, HostBlock)>,
    loads: Vec<(HostBlock, BlockId)>,
}

impl SimHost {
    /// Copies happen anywhere between their order and their report, which comes up to three steps late.
    fn is_late(&mut self, seed: u64) {
        self.moods = Some(Random::new(seed));
    }

    /// A plan exists: nobody may rely on what its transfers will write.
    pub(super) fn hand_out(&mut self, plan: &StepPlan) {
        assert!(plan.saves.len() + plan.loads.len() <= TRANSFERS_PER_STEP, "a step moves too much");
        plan.saves.iter().for_each(|(_, to)| drop(self.pages.remove(to)));
    }

    pub(super) fn order(&mut self, plan: &StepPlan, pages: &mut BTreeMap<BlockId, Vec<Slot>>) {
        let ordered = Ordered { step: plan.step, saves: plan.saves.clone(), loads: plan.loads.clone() };
        if self.moods.as_mut().is_some_and(|moods| moods.chance(50)) {
            // The copies are made at once, and the report of them is late.
            self.copy(&ordered, pages);
            self.ordered.push_back(Ordered { saves: Vec::new(), loads: Vec::new(), ..ordered });
        } else {
            self.ordered.push_back(ordered);
        }
    }

    /// Carries out what is due and says up to which step all is done. A step that runs nothing waits for everything.
    pub(super) fn report(
        &mut self,
        plan: &StepPlan,
        pages: &mut BTreeMap<BlockId, Vec<Slot>>,
    ) -> Option<Step> {
        let is_late = !plan.run.is_empty();
        let late = self.moods.as_mut().filter(|_| is_late).map_or(0, |moods| moods.below(4));
        self.done = self.done.max(plan.step.0.checked_sub(late as u64).map(Step));
        while let Some(ordered) = self.ordered.pop_front_if(|oldest| Some(oldest.step) <= self.done) {
            self.copy(&ordered, pages);
        }
        self.done
    }

    fn copy(&mut self, ordered: &Ordered, pages: &mut BTreeMap<BlockId, Vec<Slot>>) {
        for (from, to) in &ordered.saves {
            let page = pages.get(from).expect("a page is saved that was wiped").clone();
            assert!(page.iter().all(Option::is_some), "a page is saved that is not full");
            self.pages.insert(*to, page);
        }
        for (from, to) in &ordered.loads {
            let page = self.pages.get(from).expect("a page is loaded that was not saved").clone();
            pages.insert(*to, page);
        }
    }

    pub(super) fn lose(&mut self) {
        self.pages.clear();
        self.ordered.clear();
        self.done = None;
    }
}

fn request(family: u64, tokens: usize, max_tokens: usize) -> Request {
    let mut random = Random::new(family);
    let mut request = super::random_request(&mut random, 4);
    let mut prefix = Random::new(1000 + family);
    request.prompt = (0..tokens).map(|_| prefix.below(super::VOCAB) as u32).collect();
    (request.max_tokens, request.prompt_logprobs, request.stop_token_ids) = (max_tokens, None, Vec::new());
    request
}

/// Requests of many families under pressure, cancelled, relearned, lost: each as it is alone. Returns what was counted.
fn run(seed: u64, groups: LayerGroups, host_blocks: usize) -> SchedulerCounters {
    let mut random = Random::new(seed);
    let num_blocks = 24 * groups.count() + random.below(40);
    let cache = CacheSpec { groups, host_blocks, ..CacheSpec::new(4, num_blocks) };
    let depth = 1 + random.below(2);
    let mut simulation = Simulation::new(CONFIG, cache, depth);
    if random.chance(80) {
        simulation.shard.host.is_late(!seed);
    }
    let (mut expected, mut cancelled, mut epoch, mut id) = (BTreeMap::new(), BTreeSet::new(), 0, 0);
    while id < 300 {
        let request = related_request(&mut random, 9);
        let leader = id;
        for choice in 0..if random.chance(15) { 1 + random.below(3) as u64 } else { 1 } {
            let mut request = request.clone();
            request.sampling.seed = request.sampling.seed.wrapping_add(choice);
            let of = (choice > 0).then_some(leader);
            while let Err(refusal) = simulation.submit_choice(id, request.clone(), of) {
                assert!(matches!(refusal, SubmitError::Overloaded { .. }), "{refusal}");
                simulation.plan();
                simulation.absorb();
            }
            expected.insert(SequenceId(id), solo(&request, &cache));
            id += 1;
        }
        for _ in 0..random.below(14) {
            if random.chance(55) {
                simulation.plan()
            } else {
                simulation.absorb()
            };
        }
        if random.chance(12) {
            let victim = id - 1 - random.below(12).min(id as usize - 1) as u64;
            if simulation.scheduler.journal(SequenceId(victim)).is_some() {
                cancelled.insert(SequenceId(victim));
            }
            simulation.cancel(victim);
        }
        if random.chance(10) {
            simulation.relearn();
        }
        if random.chance(1) {
            epoch += 1;
            simulation.lose_group(Epoch(epoch));
        }
        if random.chance(5) {
            simulation.drain();
        }
    }
    simulation.drain();
    assert_solo(&simulation.outcomes, &expected, &cancelled);
    let scheduler = &simulation.scheduler;
    assert_eq!(scheduler.used_blocks(), scheduler.pool.moving(), "only transfers keep pages at the end");
    assert!(scheduler.host_used_blocks() <= host_blocks);
    assert!(!simulation.plan(), "an idle engine waits for nothing");
    simulation.scheduler.counters()
}

#[test]
fn requests_whose_prefixes_come_back_from_the_host_equal_their_solo_runs() {
    let arrangements =
        [groups(&[None]), groups(&[None, Some(9)]), groups(&[Some(6)]), groups(&[Some(1), None, Some(17)])];
    let (mut saves, mut loads, mut hits, mut preemptions) = (0, 0, 0, 0);
    for seed in 500..548 {
        let _note = SeedNote(seed);
        let mut random = Random::new(seed);
        let groups = arrangements[seed as usize % 4];
        // From pools that are full at once to some that hold everything.
        let host_blocks = [1, 5, 20, 60, 400][random.below(5)] * groups.count();
        let counters = run(seed, groups, host_blocks);
        saves += counters.host_saves;
        loads += counters.host_loads;
        hits += counters.host_hits;
        preemptions += counters.preemptions;
    }
    println!("{saves} pages saved, {loads} loaded for {hits} tokens, {preemptions} preemptions");
    assert!(saves > 5_000 && loads > 500 && hits > 2_000 && preemptions > 100);
}

#[test]
fn without_a_host_pool_nothing_is_moved() {
    let counters = run(600, groups(&[None]), 0);
    assert_eq!((counters.host_saves, counters.host_loads, counters.host_hits), (0, 0, 0));
}

/// A long prompt is computed, pushed out by others, and asked for again. Returns the simulation before that.
fn pushed_out(cache: CacheSpec) -> Simulation {
    let config = crate::config::SchedulerConfig { max_model_len: 512, max_num_batched_tokens: 64, ..CONFIG };
    let mut simulation = Simulation::new(config, cache, 2);
    simulation.submit(0, request(0, 240, 1)).expect("it fits");
    simulation.drain();
    for family in 1..9 {
        simulation.submit(family, request(family, 60, 20)).expect("it fits");
        simulation.drain();
    }
    assert!(simulation.scheduler.counters().host_saves >= 60, "what is evicted was saved before");
    simulation
}

const LONG: CacheSpec = CacheSpec { host_blocks: 400, ..CacheSpec::new(4, 100) };

/// The same for two groups, of which one sees nine tokens.
fn long_with_a_window() -> CacheSpec {
    CacheSpec { groups: groups(&[None, Some(9)]), num_blocks: 200, host_blocks: 800, ..LONG }
}

#[test]
fn decodes_go_on_in_every_step_while_a_long_prefix_is_loaded() {
    let mut simulation = pushed_out(LONG);
    simulation.submit(10, request(10, 4, 60)).expect("it fits");
    for _ in 0..3 {
        simulation.plan();
        simulation.absorb();
    }
    let before = simulation.scheduler.counters();
    simulation.submit(11, request(0, 240, 2)).expect("it fits");
    let mut steps_with_loads = 0;
    while simulation.outcomes[&SequenceId(11)].sampled.is_empty() {
        let computed = simulation.computed[&SequenceId(10)];
        assert!(simulation.plan());
        assert_eq!(simulation.computed[&SequenceId(10)], computed + 1, "the decode was left out of a step");
        let plan = simulation.on_the_way.back().expect("it was just planned");
        assert!(plan.saves.len() + plan.loads.len() <= TRANSFERS_PER_STEP);
        steps_with_loads += usize::from(!plan.loads.is_empty());
        simulation.absorb();
    }
    let after = simulation.scheduler.counters();
    println!("{} pages in {steps_with_loads} steps", after.host_loads - before.host_loads);
    assert!(steps_with_loads >= 3, "a long prefix takes several steps");
    assert!(after.host_hits - before.host_hits >= 200, "nearly all of the prompt came from the host");
    // The last block, and a decode a step.
    assert!(after.computed_tokens - before.computed_tokens <= 40 + steps_with_loads as u64 + 8);
    simulation.drain();
    assert_eq!(simulation.outcomes[&SequenceId(11)], solo(&request(0, 240, 2), &LONG));
}

#[test]
fn a_prefix_that_several_ask_for_is_loaded_once() {
    // 59 blocks, and what a window of nine tokens sees of them.
    for (cache, pages) in [(LONG, 59), (long_with_a_window(), 59 + 2)] {
        let mut simulation = pushed_out(cache);
        let before = simulation.scheduler.counters();
        for id in 20..26 {
            simulation.submit(id, request(0, 240, 2)).expect("it fits");
        }
        simulation.drain();
        let after = simulation.scheduler.counters();
        let loads = after.host_loads - before.host_loads;
        assert!(loads <= pages && loads > pages - 10, "{before:?} {after:?}");
        assert!(after.computed_tokens - before.computed_tokens < 6 * 8 + 40, "{before:?} {after:?}");
    }
}

#[test]
fn whoever_waits_for_a_load_that_is_given_up_loads_by_itself() {
    for cache in [LONG, long_with_a_window()] {
        let mut simulation = pushed_out(cache);
        let before = simulation.scheduler.counters();
        for id in 20..22 {
            simulation.submit(id, request(0, 240, 2)).expect("it fits");
        }
        simulation.plan();
        simulation.cancel(20);
        simulation.drain();
        let after = simulation.scheduler.counters();
        assert!(after.host_loads - before.host_loads >= 50, "{before:?} {after:?}");
        assert!(after.computed_tokens - before.computed_tokens < 8 + 40, "{before:?} {after:?}");
    }
}

#[test]
fn alone_it_is_loaded_in_steps_that_only_move_pages() {
    let mut simulation = pushed_out(LONG);
    let steps = simulation.scheduler.counters().steps;
    simulation.submit(20, request(0, 240, 1)).expect("it fits");
    let (mut moved, mut rounds) = (0, 0);
    while !simulation.scheduler.is_idle() {
        assert!(simulation.plan());
        let plan = simulation.on_the_way.back().expect("it was just planned");
        moved += usize::from(plan.run.is_empty() && !plan.loads.is_empty());
        let is_alone = plan.run.is_empty();
        assert!(!is_alone || !simulation.plan(), "nothing is planned behind a step that waits");
        simulation.absorb();
        rounds += 1;
    }
    assert!(moved >= 3 && rounds < 12, "{moved} of {rounds}");
    assert!(simulation.scheduler.counters().steps - steps == rounds);
    assert!(!simulation.plan(), "an idle engine makes no steps");
}

#[test]
fn a_request_that_is_cancelled_while_it_is_loaded_gives_its_pages_back_after_the_report() {
    let mut simulation = pushed_out(LONG);
    simulation.submit(10, request(10, 4, 60)).expect("it fits");
    simulation.plan();
    simulation.absorb();
    let before = simulation.scheduler.used_blocks();
    simulation.submit(20, request(0, 240, 1)).expect("it fits");
    simulation.plan();
    simulation.cancel(20);
    let moving = simulation.scheduler.pool.moving();
    assert!(moving > 0 && moving <= TRANSFERS_PER_STEP, "{moving} pages wait for the report");
    while simulation.scheduler.transfers_under_way() > 0 {
        simulation.plan();
        simulation.absorb();
    }
    assert_eq!(simulation.scheduler.pool.moving(), 0);
    assert!(simulation.scheduler.used_blocks() <= before + 2);
    simulation.drain();
}

#[test]
fn salts_keep_requests_apart_in_the_host_too() {
    let mut simulation = pushed_out(LONG);
    let before = simulation.scheduler.counters();
    simulation.submit(20, Request { cache_salt: Some(salt(1)), ..request(0, 240, 1) }).expect("it fits");
    simulation.drain();
    let after = simulation.scheduler.counters();
    assert_eq!(after.host_loads, before.host_loads);
    assert_eq!(after.computed_tokens - before.computed_tokens, 240);
}

#[test]
fn a_lost_group_takes_the_hosts_content_with_it() {
    let mut simulation = pushed_out(LONG);
    assert!(simulation.scheduler.host_used_blocks() > 0);
    simulation.lose_group(Epoch(1));
    assert_eq!(simulation.scheduler.host_used_blocks(), 0);
    let before = simulation.scheduler.counters();
    simulation.submit(20, request(0, 240, 1)).expect("it fits");
    simulation.drain();
    assert_eq!(simulation.scheduler.counters().host_loads, before.host_loads);
}
