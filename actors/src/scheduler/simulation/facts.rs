//! Claims on whole runs, with their figures.

use consort_kernels::sampling::SamplingParams;

use super::{
    Random, VOCAB,
    cost::CostModel,
    rig::{Ask, Simulation},
    scenario::{Action, Scenario, Setup, sequence_of},
    trace,
    world::{Report, World, run},
};
use crate::{
    config::{CacheSpec, LayerGroups, SchedulerConfig},
    ids::SequenceId,
    request::Request,
    scheduler::PREEMPTIONS_MAX,
};

const CONFIG: SchedulerConfig = SchedulerConfig {
    max_num_seqs: 64,
    max_num_batched_tokens: 512,
    max_model_len: 40_000,
    max_waiting_requests: 1000,
    priority_aging_ms: 1000,
};

fn setup(num_blocks: usize) -> Setup {
    Setup {
        config: CONFIG,
        cache: CacheSpec::new(16, num_blocks),
        cost: CostModel::ONE_CARD,
        depth: 2,
        late_transfers: None,
        events_per_check: 16,
    }
}

fn tokens(seed: u64, count: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.below(VOCAB) as u32).collect()
}

fn request(prompt: Vec<u32>, max_tokens: usize, seed: u64) -> Request {
    Request {
        prompt,
        sampling: SamplingParams { seed, ..SamplingParams::default() },
        max_tokens,
        stop_token_ids: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    }
}

/// The system prompt that everybody sends: 93 full blocks and 12 tokens.
const SHARED: usize = 1500;
const IN_FULL_BLOCKS: usize = 1488;
const CLIENTS: usize = 32;
const GENERATED: usize = 8;
/// A generation's last token is never computed.
const DECODES: u64 = (CLIENTS * (GENERATED - 1)) as u64;

/// 32 clients, or one with 32 choices, at once.
fn crowd(choices: usize, prefix_caching: bool) -> Scenario {
    let mut setup = setup(2000);
    setup.cache.prefix_caching = prefix_caching;
    let ask = |seed| Ask { choices, ..Ask::new(request(tokens(1, SHARED), GENERATED, seed)) };
    let actions = (0..CLIENTS / choices).map(|client| (0, Action::Submit(ask(client as u64 * 100))));
    Scenario::new(setup, actions.collect())
}

/// Runs until the prompt is half computed, and says by whom.
fn run_to_the_middle(scenario: &Scenario) -> (World, SequenceId) {
    let mut world = World::new(scenario);
    scenario.events.iter().for_each(|event| world.happen(event));
    let first = SequenceId(sequence_of(0, 0));
    let computed = |world: &World| {
        let slot = world.simulation.scheduler.sequences.find(first).expect("it is there");
        world.simulation.scheduler.sequences[slot].computed
    };
    while computed(&world) < SHARED / 2 {
        assert!(world.simulation.absorb() && world.simulation.plan());
    }
    assert!(computed(&world) < IN_FULL_BLOCKS);
    (world, first)
}

#[test]
fn a_prompt_that_32_clients_send_at_once_is_computed_once() {
    let computed = run(&crowd(1, true)).counters.computed_tokens;
    // Each computes the last block, which is not full, by itself.
    let last_blocks = (CLIENTS - 1) * (SHARED - IN_FULL_BLOCKS);
    assert_eq!(computed, (SHARED + last_blocks) as u64 + DECODES);
}

#[test]
fn the_prompt_of_32_choices_is_computed_once_with_and_without_a_prefix_cache() {
    for prefix_caching in [true, false] {
        let computed = run(&crowd(CLIENTS, prefix_caching)).counters.computed_tokens;
        // The row of the last token draws, and each choice has one.
        assert_eq!(computed, (SHARED + CLIENTS - 1) as u64 + DECODES);
    }
}

#[test]
fn a_shared_prompt_is_computed_once_though_the_first_of_them_leaves_in_the_middle() {
    for choices in [1, CLIENTS] {
        let (mut world, first) = run_to_the_middle(&crowd(choices, true));
        world.simulation.cancel(first.0);
        let computed = world.finish().counters.computed_tokens;
        // What it had computed stays; chunks end with blocks here. The others compute their last blocks.
        let last_blocks = (CLIENTS - 2) * (SHARED - IN_FULL_BLOCKS);
        let decodes = DECODES - (GENERATED as u64 - 1);
        assert_eq!(computed, (SHARED + last_blocks) as u64 + decodes, "{choices} choices");
    }
}

#[test]
fn a_shared_prompt_is_computed_once_though_the_first_of_them_gives_way_in_the_middle() {
    for choices in [1, CLIENTS] {
        let (mut world, first) = run_to_the_middle(&crowd(choices, true));
        let scheduler = &mut world.simulation.scheduler;
        let slot = scheduler.sequences.find(first).expect("it runs");
        scheduler.preempt(slot);
        let report = world.finish();
        assert_eq!(report.counters.preemptions, 1);
        let last_blocks = (CLIENTS - 1) * (SHARED - IN_FULL_BLOCKS);
        let most = (SHARED + last_blocks) as u64 + DECODES;
        let computed = report.counters.computed_tokens;
        // Choices take over the last block too, from whichever has computed it.
        assert!((SHARED as u64..=most).contains(&computed), "{computed} of {most}, {choices} choices");
    }
}

#[test]
fn nobody_waits_for_one_that_has_yet_to_compute_what_is_there() {
    // All of it is cached but the end; the first to ask again wants a word on each token, and computes every row.
    let prompt = tokens(3, 20_000);
    let ask = |tokens: usize, prompt_logprobs| {
        Action::Submit(Ask::new(Request { prompt_logprobs, ..request(prompt[..tokens].to_vec(), 2, 0) }))
    };
    let later_ns = 20_000_000_000;
    let actions =
        vec![(0, ask(16_000, None)), (later_ns, ask(20_000, Some(0))), (later_ns, ask(20_000, None))];
    let scenario = Scenario::new(setup(4000), actions);
    let mut world = World::new(&scenario);
    scenario.events.iter().for_each(|event| world.happen(event));
    world.pass_until(u64::MAX);
    let outcome = world.simulation.outcome(sequence_of(2, 0));
    assert_eq!(outcome.cached_tokens, Some(16_000));
    let streams: Vec<_> = world.simulation.oracle.streams().filter_map(|(_, it)| it.first_token_ns).collect();
    // 40 chunks against 8 of half a budget each.
    let [slow, fast] = [streams[1], streams[2]].map(|first_token_ns| first_token_ns - later_ns);
    println!("{:.0} ms with every row, {:.0} without", slow as f64 / 1e6, fast as f64 / 1e6);
    assert!(fast * 2 < slow);
}

/// A scheduler for 8 sequences of 96 tokens over pages of one token each.
fn tiny(num_blocks: usize, windows: &[Option<usize>], max_num_batched_tokens: usize) -> Setup {
    let groups = LayerGroups::new(windows).expect("valid windows");
    let config = SchedulerConfig { max_num_seqs: 8, max_num_batched_tokens, max_model_len: 96, ..CONFIG };
    let cache = CacheSpec { groups, ..CacheSpec::new(1, num_blocks) };
    Setup { config, cache, events_per_check: 1, ..setup(0) }
}

#[test]
fn a_chunk_s_window_takes_no_page_that_another_sequence_is_about_to_need() {
    // Each decodes with six pages. A chunk sees more, and two chunks that take all they can drive each other out.
    let asks = [(56, 31), (54, 42)].map(|(prompt, generated)| {
        (0, Action::Submit(Ask::new(request(tokens(prompt as u64, prompt), generated, 0))))
    });
    for depth in [1, 2] {
        let setup = Setup { depth, ..tiny(14, &[Some(6)], 32) };
        let report = run(&Scenario::new(setup, asks.to_vec()));
        assert_eq!((report.counters.preemptions, report.seen.finished), (0, 2));
    }
}

#[test]
fn who_went_without_a_page_is_served_before_those_who_came_earlier() {
    let ask = |seed, prompt: usize, generated, priority, choices| {
        let mut ask = Ask::new(request(tokens(seed, prompt), generated, 0));
        (ask.request.priority, ask.choices) = (priority, choices);
        Action::Submit(ask)
    };
    let later_ns = 60_000_000;
    let actions =
        vec![(0, ask(5, 47, 37, 0, 1)), (0, ask(5, 45, 48, -2, 1)), (later_ns, ask(6, 54, 16, 3, 8))];
    let mut most = 0;
    // Every token takes two pages, and these are too few for ten sequences: those who are last need not be left out
    // again and again.
    for num_blocks in 190..240 {
        let report = run(&Scenario::new(tiny(num_blocks, &[None, Some(9)], 72), actions.clone()));
        assert_eq!(report.seen.finished, 10);
        most = most.max(report.seen.steps_between_max);
    }
    assert_eq!(most, 2, "pages are meant to be short");
}

/// A long prompt that comes first, and two short ones that decode beside it in few pages.
pub(super) fn prompts_beside_decodes() -> Vec<Scenario> {
    let ask = |seed, prompt, generated| {
        (seed, Action::Submit(Ask::new(request(tokens(seed, prompt), generated, 0))))
    };
    let all = [(&[Some(2)][..], 6), (&[Some(2)], 7), (&[Some(2), Some(3)], 16)].into_iter();
    let all = all.flat_map(|(windows, num_blocks)| [1, 2].map(|depth| (windows, num_blocks, depth)));
    let scenario = |(windows, num_blocks, depth)| {
        let mut setup = Setup { depth, ..tiny(num_blocks, windows, 8) };
        setup.cache.prefix_caching = false;
        Scenario::new(setup, vec![ask(0, 60, 1), ask(1, 1, 50), ask(2, 1, 50)])
    };
    all.map(scenario).collect()
}

#[test]
fn a_long_prompt_goes_on_beside_decodes_that_take_every_page_as_it_comes_free() {
    for scenario in prompts_beside_decodes() {
        let Report { seen, .. } = run(&scenario);
        assert_eq!(seen.finished, 3);
        assert!(seen.starved_max <= 2, "{} plans have no row of it: {scenario}", seen.starved_max);
    }
}

/// Conversations of every length, all at once, and how many pages they come to hold together.
fn conversations() -> (Vec<(u64, Action)>, usize) {
    let mut random = Random::new(64);
    let cache = setup(0).cache;
    let (mut actions, mut pages) = (Vec::new(), 0);
    for seed in 0..64 {
        let (prompt, generated) = (random.between(200, 6000), random.between(50, 400));
        pages += cache.pages_for(prompt + generated - 1);
        actions.push((0, Action::Submit(Ask::new(request(tokens(seed, prompt), generated, seed)))));
    }
    (actions, pages)
}

fn tokens_per_s(report: &Report) -> f64 {
    report.seen.tokens as f64 * 1e9 / report.end_ns as f64
}

#[test]
fn a_quarter_of_the_pages_serves_64_requests_at_60_percent_of_the_speed_or_more() {
    let (actions, pages) = conversations();
    let [ample, quarter] = [pages, pages / 4].map(|pages| run(&Scenario::new(setup(pages), actions.clone())));
    let [fast, slow] = [&ample, &quarter].map(tokens_per_s);
    println!("{fast:.0} tokens/s with {pages} pages, {slow:.0} with {}", pages / 4);
    println!("{} preemptions, at most {} of one", quarter.counters.preemptions, quarter.seen.preemptions_max);
    println!("longest gap {:.1} ms", quarter.seen.token_gap_max_ns as f64 / 1e6);
    assert_eq!((ample.seen.finished, quarter.seen.finished), (64, 64));
    assert_eq!(ample.counters.preemptions, 0);
    assert!(quarter.counters.preemptions > 0, "pages are meant to be short");
    assert!(quarter.seen.preemptions_max <= PREEMPTIONS_MAX);
    // The gap in steps and in time is checked with every token.
    assert!(slow >= 0.6 * fast, "{slow:.0} of {fast:.0} tokens/s");
}

#[test]
fn a_long_prompt_delays_the_first_token_of_short_ones_by_three_steps_at_most() {
    let long = Ask::new(request(tokens(0, 32_000), 2, 0));
    let mut actions = vec![(0, Action::Submit(long))];
    for client in 1..20 {
        let short = Ask::new(request(tokens(client, 120), 20, client));
        actions.push((client * 40_000_000, Action::Submit(short)));
    }
    let scenario = Scenario::new(setup(4000), actions.clone());
    let mut world = World::new(&scenario);
    scenario.events.iter().for_each(|event| world.happen(event));
    world.pass_until(u64::MAX);
    let longest_ns = world.simulation.executor.longest_ns();
    let first_token_ns: Vec<u64> =
        world.simulation.oracle.streams().filter_map(|(_, stream)| stream.first_token_ns).collect();
    assert_eq!(first_token_ns.len(), actions.len());
    let delays = first_token_ns.iter().zip(&actions).skip(1).map(|(first, (came, _))| first - came);
    let delay_ns = delays.max().expect("there are short ones");
    println!("at most {:.1} ms, steps of up to {:.1} ms", delay_ns as f64 / 1e6, longest_ns as f64 / 1e6);
    // Two steps are under way when it comes, and its own prompt fits the half that the long one leaves.
    assert!(delay_ns <= 3 * longest_ns);
    // Nor do they keep it waiting: it has half of what decodes leave in every step.
    let alone = run(&Scenario::new(setup(4000), actions[..1].to_vec())).end_ns;
    println!("the long prompt took {} ms, {} alone", first_token_ns[0] / 1_000_000, alone / 1_000_000);
    assert!(first_token_ns[0] <= 2 * alone);
}

#[test]
fn gpt_oss_120b_holds_a_page_for_16_tokens_and_nine_pages_of_its_window() {
    let groups = LayerGroups::new(&[Some(128), None]).expect("two groups");
    let cache = CacheSpec { groups, ..CacheSpec::new(16, 600) };
    let mut simulation = Simulation::new(CONFIG, cache, 1);
    simulation.submit(0, request(tokens(0, 300), 2000, 0)).expect("it fits");
    let (mut seen, mut lengths) = (0, 0);
    while simulation.plan() {
        let state = &simulation.scheduler.sequences[0];
        let len = state.computed;
        if !state.is_prefilling() && state.last_step > Some(crate::ids::Step(0)) {
            // 128 keys end with a block's end once in 16 tokens, and span eight pages then.
            let window = if len.is_multiple_of(16) { 8 } else { 9 };
            assert_eq!(state.held, len.div_ceil(16) + window, "at {len} tokens");
            seen += window;
            lengths += 1;
        }
        simulation.absorb();
    }
    assert_eq!(lengths, 1999);
    assert!(seen > 8 * lengths);
    assert_eq!(cache.pages_for(2299), 2299_usize.div_ceil(16) + 9);
    // 18 layers of keys and values, 8 heads of 64 elements of two bytes: what the pages come to.
    let page_bytes = 16 * 18 * 2 * 8 * 64 * 2;
    assert_eq!(page_bytes / 16, 36 * 1024, "36 KiB per token");
    assert_eq!(9 * page_bytes, 5_308_416, "5.06 MiB per sequence");
}

#[test]
fn the_office_s_trace_is_served_with_every_promise_kept_at_leisure_and_in_a_rush() {
    for (pages, speed_percent) in [(3000, 100), (1200, 500)] {
        let scenario = trace::scenario(trace::OFFICE, setup(pages), speed_percent).expect("it can be read");
        let report = run(&scenario);
        let Report { steps, counters, seen, end_ns, .. } = &report;
        let (hits, queries) = (counters.prefix_cache_hits, counters.prefix_cache_queries);
        println!(
            "{pages} pages: {steps} steps in {:.1} s, {hits} of {queries} prompt tokens found, {} preemptions, gaps \
             of up to {:.1} ms",
            *end_ns as f64 / 1e9,
            counters.preemptions,
            seen.token_gap_max_ns as f64 / 1e6
        );
        assert_eq!(seen.refused + seen.failed + seen.cancelled, 0);
        // The two system prompts are half of what comes in, and are there after the first time.
        assert!(hits * 5 > queries * 2);
    }
}
