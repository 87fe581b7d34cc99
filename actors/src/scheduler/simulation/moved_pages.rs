//! Claims on pages that go to the host and come back, by hand and in any order of planning and absorbing.

use consort_kernels::sampling::SamplingParams;

use super::{
    Random, STOP, SeedNote, VOCAB,
    model::salt,
    rig::{Ask, Simulation},
};
use crate::{
    config::{CacheSpec, LayerGroups, SchedulerConfig},
    ids::SequenceId,
    request::{Request, SubmitError},
    scheduler::{SchedulerCounters, TRANSFERS_PER_STEP},
};

const CONFIG: SchedulerConfig = SchedulerConfig {
    max_num_seqs: 8,
    max_num_batched_tokens: 64,
    max_model_len: 512,
    max_waiting_requests: 64,
    priority_aging_ms: 1000,
};

const LONG: CacheSpec = CacheSpec { host_blocks: 400, ..CacheSpec::new(4, 100) };

fn groups(windows: &[Option<usize>]) -> LayerGroups {
    LayerGroups::new(windows).expect("valid groups")
}

/// The same for two groups, of which one sees nine tokens.
fn long_with_a_window() -> CacheSpec {
    CacheSpec { groups: groups(&[None, Some(9)]), num_blocks: 200, host_blocks: 800, ..LONG }
}

/// Requests of one family begin alike.
fn request(family: u64, tokens: usize, max_tokens: usize) -> Request {
    let mut prefix = Random::new(1000 + family);
    Request {
        prompt: (0..tokens).map(|_| prefix.below(VOCAB) as u32).collect(),
        sampling: SamplingParams { seed: family, ..SamplingParams::default() },
        max_tokens,
        stop_token_ids: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    }
}

/// A long prompt is computed, pushed out by others, and asked for again. Returns the simulation before that.
fn pushed_out(cache: CacheSpec) -> Simulation {
    let mut simulation = Simulation::new(CONFIG, cache, 2);
    simulation.submit(0, request(0, 240, 1)).expect("it fits");
    simulation.drain();
    for family in 1..9 {
        simulation.submit(family, request(family, 60, 20)).expect("it fits");
        simulation.drain();
    }
    assert!(simulation.scheduler.counters().host_saves >= 60, "what is evicted was saved before");
    simulation
}

/// What was counted since `before`.
fn since(before: SchedulerCounters, simulation: &Simulation) -> SchedulerCounters {
    let after = simulation.scheduler.counters();
    SchedulerCounters {
        steps: after.steps - before.steps,
        computed_tokens: after.computed_tokens - before.computed_tokens,
        host_loads: after.host_loads - before.host_loads,
        host_hits: after.host_hits - before.host_hits,
        ..after
    }
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
    while simulation.outcome(11).sampled.is_empty() {
        assert!(simulation.plan());
        let plan = simulation.executor.newest().expect("it was just planned");
        assert!(
            plan.run.iter().any(|span| span.sequence == SequenceId(10)),
            "the decode was left out of a step"
        );
        steps_with_loads += usize::from(!plan.loads.is_empty());
        simulation.absorb();
    }
    let counted = since(before, &simulation);
    println!("{} pages in {steps_with_loads} steps", counted.host_loads);
    assert!(steps_with_loads >= 3, "a long prefix takes several steps");
    assert!(counted.host_hits >= 200, "nearly all of the prompt came from the host");
    // The last block, and a decode a step.
    assert!(counted.computed_tokens <= 40 + steps_with_loads as u64 + 8);
    simulation.drain();
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
        let counted = since(before, &simulation);
        assert!(counted.host_loads <= pages && counted.host_loads > pages - 10, "{counted:?}");
        assert!(counted.computed_tokens < 6 * 8 + 40, "{counted:?}");
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
        let counted = since(before, &simulation);
        assert!(counted.host_loads >= 50, "{counted:?}");
        assert!(counted.computed_tokens < 8 + 40, "{counted:?}");
    }
}

#[test]
fn alone_it_is_loaded_in_steps_that_only_move_pages() {
    let mut simulation = pushed_out(LONG);
    let before = simulation.scheduler.counters();
    simulation.submit(20, request(0, 240, 1)).expect("it fits");
    let (mut moved, mut rounds) = (0, 0);
    while !simulation.scheduler.is_idle() {
        assert!(simulation.plan());
        let plan = simulation.executor.newest().expect("it was just planned");
        let is_alone = plan.run.is_empty();
        moved += usize::from(is_alone && !plan.loads.is_empty());
        assert!(!is_alone || !simulation.plan(), "nothing is planned behind a step that waits");
        simulation.absorb();
        rounds += 1;
    }
    assert!(moved >= 3 && rounds < 12, "{moved} of {rounds}");
    assert_eq!(since(before, &simulation).steps, rounds);
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
    let counted = since(before, &simulation);
    assert_eq!((counted.host_loads, counted.computed_tokens), (0, 240));
}

#[test]
fn a_lost_group_takes_the_hosts_content_with_it() {
    let mut simulation = pushed_out(LONG);
    assert!(simulation.scheduler.host_used_blocks() > 0);
    simulation.lose();
    simulation.form();
    assert_eq!(simulation.scheduler.host_used_blocks(), 0);
    let before = simulation.scheduler.counters();
    simulation.submit(20, request(0, 240, 1)).expect("it fits");
    simulation.drain();
    assert_eq!(since(before, &simulation).host_loads, 0);
}

/// Requests of a few families, some salted, some of several choices, some more important than others.
fn related(random: &mut Random) -> Ask {
    let family = random.below(9) as u64;
    let common = Random::new(family).below(40) + 8;
    let mut request = request(family, common, random.between(0, 24));
    request.prompt.extend((0..random.below(24)).map(|_| random.below(VOCAB) as u32));
    request.sampling.seed = random.next();
    request.priority = if random.chance(20) { random.below(7) as i32 - 3 } else { 0 };
    request.cache_salt = random.chance(30).then(|| salt(1 + random.below(2) as u64));
    request.stop_token_ids = if random.chance(70) { vec![STOP] } else { Vec::new() };
    (request.logprobs, request.prompt_logprobs) =
        (random.chance(20).then_some(2), random.chance(20).then_some(1));
    let choices = if random.chance(15) { random.between(2, 4) } else { 1 };
    Ask { choices, ..Ask::new(request) }
}

/// Requests under pressure, cancelled, relearned, lost, with plans and results in any order: the oracle holds each
/// against what it is alone.
fn run(seed: u64, groups: LayerGroups, host_blocks: usize) -> SchedulerCounters {
    let mut random = Random::new(seed);
    let config = SchedulerConfig { max_num_batched_tokens: 16, max_model_len: 96, ..CONFIG };
    let num_blocks = 24 * groups.count() + random.below(40);
    let cache = CacheSpec { groups, host_blocks, ..CacheSpec::new(4, num_blocks) };
    let mut simulation = Simulation::new(config, cache, random.between(1, 2));
    if random.chance(80) {
        simulation.executor.shard.host.is_late(!seed);
    }
    let mut id = 0;
    while id < 300 {
        let (ask, first) = (related(&mut random), id);
        for choice in 0..ask.choices {
            let leader = (choice > 0).then_some(first);
            while let Err(refusal) = simulation.submit_choice(id, &ask, leader) {
                assert!(matches!(refusal, SubmitError::Overloaded { .. }), "{refusal}");
                simulation.plan();
                simulation.absorb();
            }
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
            simulation.cancel((id - 1).saturating_sub(random.below(12) as u64));
        }
        if random.chance(10) {
            simulation.relearn();
        }
        if random.chance(1) {
            simulation.lose();
            simulation.form();
        }
        if random.chance(5) {
            simulation.drain();
        }
    }
    simulation.drain();
    assert!(!simulation.plan(), "an idle engine waits for nothing");
    simulation.scheduler.counters()
}

#[test]
fn requests_whose_prefixes_come_back_from_the_host_equal_their_solo_runs() {
    let arrangements =
        [groups(&[None]), groups(&[None, Some(9)]), groups(&[Some(6)]), groups(&[Some(1), None, Some(17)])];
    let mut all = SchedulerCounters::default();
    for seed in 500..548 {
        let _note = SeedNote(seed);
        let mut random = Random::new(seed);
        let groups = arrangements[seed as usize % 4];
        // From pools that are full at once to some that hold everything.
        let host_blocks = *random.one_of(&[1, 5, 20, 60, 400]) * groups.count();
        let counters = run(seed, groups, host_blocks);
        all.host_saves += counters.host_saves;
        all.host_loads += counters.host_loads;
        all.host_hits += counters.host_hits;
        all.preemptions += counters.preemptions;
    }
    let SchedulerCounters { host_saves, host_loads, host_hits, preemptions, .. } = all;
    println!(
        "{host_saves} pages saved, {host_loads} loaded for {host_hits} tokens, {preemptions} preemptions"
    );
    assert!(host_saves > 5_000 && host_loads > 500 && host_hits > 2_000 && preemptions > 100);
}

#[test]
fn without_a_host_pool_nothing_is_moved() {
    let counters = run(600, groups(&[None]), 0);
    assert_eq!((counters.host_saves, counters.host_loads, counters.host_hits), (0, 0, 0));
}
