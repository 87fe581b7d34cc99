//! Runs in which planning and absorbing come in any order, however long nobody plans: nothing depends on an actor's
//! habits.

use std::collections::BTreeMap;

use consort_kernels::sampling::SamplingParams;

use super::{
    Random, STOP, SeedNote, VOCAB,
    oracle::{End, Outcome},
    rig::Simulation,
    workload::said,
};
use crate::{
    config::{CacheSpec, SchedulerConfig},
    ids::SequenceId,
    request::{Request, SubmitError},
    scheduler::PREEMPTIONS_MAX,
};

fn random_request(random: &mut Random, longest: usize) -> Request {
    let prompt_len = 1 + random.below(longest);
    let max_tokens = if random.chance(5) { 0 } else { 1 + random.below(longest) };
    Request {
        prompt: (0..prompt_len).map(|_| random.below(VOCAB) as u32).collect(),
        sampling: SamplingParams { seed: random.next(), ..SamplingParams::default() },
        max_tokens,
        stop_token_ids: if random.chance(70) { vec![STOP] } else { Vec::new() },
        logprobs: random.chance(20).then_some(2),
        prompt_logprobs: random.chance(20).then_some(1),
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    }
}

const CONFIG: SchedulerConfig = SchedulerConfig {
    max_num_seqs: 8,
    max_num_batched_tokens: 16,
    max_model_len: 96,
    max_waiting_requests: 64,
    priority_aging_ms: 1000,
};
/// Small enough that 8 sequences never fit together.
const TIGHT: CacheSpec = CacheSpec::new(4, 28);

#[derive(Default)]
struct Run {
    outcomes: BTreeMap<SequenceId, Outcome>,
    preemptions: u64,
    preempted_most: u8,
    /// Positions that were computed, and those that had to be.
    computed: u64,
    needed: u64,
}

/// Submits, and lets work go on as long as the queue is full.
fn submit(simulation: &mut Simulation, id: u64, request: &Request) {
    while let Err(refusal) = simulation.submit(id, request.clone()) {
        assert!(matches!(refusal, SubmitError::Overloaded { .. }), "{refusal}");
        simulation.plan();
        simulation.absorb();
    }
}

fn ended(simulation: Simulation, needed: u64) -> Run {
    let streams = simulation.oracle.streams();
    Run {
        outcomes: streams.map(|(sequence, stream)| (sequence, stream.outcome.clone())).collect(),
        preemptions: simulation.scheduler.counters().preemptions,
        preempted_most: simulation.oracle.seen.preemptions_max,
        computed: simulation.scheduler.counters().computed_tokens,
        needed,
    }
}

/// Mixed requests under pressure, some of them cancelled.
fn run_mixed(seed: u64, depth: usize, requests: u64) -> Run {
    let (mut random, mut faults) = (Random::new(seed), Random::new(!seed));
    let mut simulation = Simulation::new(CONFIG, TIGHT, depth);
    let mut needed = 0;
    for id in 0..requests {
        let request = random_request(&mut random, 40);
        needed += said(&request, usize::MAX).len() as u64;
        submit(&mut simulation, id, &request);
        // Uneven arrival: sometimes a burst, sometimes the queue runs dry.
        for _ in 0..faults.below(6) {
            if faults.chance(60) {
                simulation.plan()
            } else {
                simulation.absorb()
            };
        }
        if faults.chance(10) {
            simulation.cancel(id.saturating_sub(faults.below(12) as u64));
        }
    }
    simulation.drain();
    ended(simulation, needed)
}

#[test]
fn preemption_under_pressure_recomputes_less_than_a_fifth() {
    let mut all = Run::default();
    for seed in 0..24 {
        let _note = SeedNote(seed);
        let run = run_mixed(seed, 2, 200);
        all.preemptions += run.preemptions;
        all.preempted_most = run.preempted_most.max(all.preempted_most);
        all.computed += run.computed;
        all.needed += run.needed;
    }
    let Run { computed, needed, preemptions, preempted_most, .. } = all;
    println!("{preemptions} preemptions in 4800 requests, {preempted_most} at most of one");
    println!("{computed} positions were computed where {needed} are needed");
    // Without the reserve of an admission it is every fourth.
    assert!(computed * 10 < needed * 12, "preemption wastes too much");
    assert!(preemptions > 100, "the simulation is meant to preempt, and did so {preemptions} times");
    assert!(preempted_most <= PREEMPTIONS_MAX);
}

#[test]
fn long_generations_that_overcommit_the_pool_recompute_less_than_half() {
    let _note = SeedNote(77);
    let mut random = Random::new(77);
    // Three of these fill the pool, if they do not stop before.
    let mut simulation = Simulation::new(CONFIG, CacheSpec::new(4, 64), 2);
    let mut needed = 0;
    for id in 0..300 {
        let mut request = random_request(&mut random, 12);
        (request.max_tokens, request.prompt_logprobs) = (96 - request.prompt.len(), None);
        needed += said(&request, usize::MAX).len() as u64;
        submit(&mut simulation, id, &request);
    }
    simulation.drain();
    let Run { computed, preemptions, .. } = ended(simulation, needed);
    println!("{computed} positions computed, {needed} needed, {preemptions} preemptions");
    assert!(preemptions > 100);
    assert!(computed * 5 <= needed * 7, "{computed} positions were computed where {needed} are needed");
}

#[test]
fn depth_one_and_two_draw_equal_tokens() {
    for seed in 100..112 {
        let _note = SeedNote(seed);
        let (one, two) = (run_mixed(seed, 1, 150), run_mixed(seed, 2, 150));
        let is_whole = |outcome: &Outcome| outcome.end != Some(End::Cancelled);
        let both = one.outcomes.iter().map(|(id, outcome)| (outcome, &two.outcomes[id]));
        let both = both.filter(|(one, two)| is_whole(one) && is_whole(two));
        both.for_each(|(one, two)| assert_eq!(one.sampled, two.sampled));
        assert!(one.preemptions > 0 && two.preemptions > 0);
    }
}

#[test]
fn ten_thousand_random_submits_and_aborts_leak_nothing() {
    let _note = SeedNote(42);
    let mut random = Random::new(42);
    let mut simulation = Simulation::new(CONFIG, TIGHT, 2);
    let (mut submitted, mut accepted) = (0u64, 0);
    while accepted < 10_000 {
        match simulation.submit(submitted, random_request(&mut random, 24)) {
            Ok(()) => accepted += 1,
            Err(refusal) => assert!(matches!(refusal, SubmitError::Overloaded { .. }), "{refusal}"),
        }
        while random.chance(90) {
            match random.below(20) {
                0..=8 => drop(simulation.plan()),
                9..=17 => drop(simulation.absorb()),
                _ => simulation.cancel(submitted.saturating_sub(random.below(40) as u64)),
            }
        }
        submitted += 1;
    }
    simulation.drain();
    let (seen, preemptions) = (simulation.oracle.seen, simulation.scheduler.counters().preemptions);
    let (cancelled, refused) = (seen.cancelled, seen.refused);
    println!("{accepted} accepted, {cancelled} cancelled, {refused} overloads, {preemptions} preemptions");
    assert!(cancelled > 1000 && preemptions > 100);
}

#[test]
fn a_pool_for_one_long_request_serves_many_of_them() {
    let _note = SeedNote(7);
    let mut random = Random::new(7);
    let mut simulation = Simulation::new(CONFIG, CacheSpec::new(4, 20), 2);
    for id in 0..12 {
        let mut request = random_request(&mut random, 4);
        (request.max_tokens, request.stop_token_ids) = (80 - request.prompt.len(), Vec::new());
        simulation.submit(id, request).expect("it fits alone");
    }
    simulation.drain();
    assert!(simulation.scheduler.counters().preemptions > 0);
}
