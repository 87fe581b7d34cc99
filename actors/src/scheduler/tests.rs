//! Single decisions of the scheduler, one at a time.

use consort_kernels::sampling::SamplingParams;

use super::{
    AbsorbError, PREEMPTIONS_MAX, PagePool, Scheduler,
    pool::Content,
    simulation::{SimShard, Simulation, VOCAB},
};
use crate::{
    config::{CacheSpec, LayerGroups, SchedulerConfig},
    ids::{Epoch, SequenceId, Step},
    plan::{Output, StepPlan, StepResult, Tokens},
    prefix::BlockKey,
    request::{FinishReason, GenerationError, GenerationEvent, Request, SubmitError},
};

const CONFIG: SchedulerConfig = SchedulerConfig {
    max_num_seqs: 4,
    max_num_batched_tokens: 8,
    max_model_len: 64,
    max_waiting_requests: 3,
    priority_aging_ms: 1000,
};
const CACHE: CacheSpec = uncached(16);

/// Blocks of four tokens that nobody shares.
const fn uncached(num_blocks: usize) -> CacheSpec {
    CacheSpec { prefix_caching: false, ..CacheSpec::new(4, num_blocks) }
}

fn request(prompt_len: usize, max_tokens: usize) -> Request {
    Request {
        prompt: (0..prompt_len as u32).collect(),
        sampling: SamplingParams::default(),
        max_tokens,
        stop_token_ids: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    }
}

fn scheduler() -> Scheduler {
    Scheduler::new(CONFIG, CACHE, VOCAB, Epoch(0))
}

fn spans(plan: &StepPlan) -> Vec<(u64, usize)> {
    let len = |tokens: &Tokens| if let Tokens::Given(given) = tokens { given.len() } else { 1 };
    plan.run.iter().map(|span| (span.sequence.0, len(&span.tokens))).collect()
}

#[test]
fn a_long_prompt_is_prefilled_in_chunks_of_the_budget() {
    let mut scheduler = scheduler();
    scheduler.submit(0, SequenceId(0), request(20, 4), None).unwrap();
    let mut shard = SimShard::new(CACHE, Epoch(0));
    let mut chunks = Vec::new();
    for _ in 0..3 {
        let plan = scheduler.plan().unwrap();
        chunks.push((spans(&plan)[0].1, plan.run[0].output));
        scheduler.absorb(shard.execute_at_once(&plan)).unwrap();
    }
    assert_eq!(chunks, [(8, Output::Nothing), (8, Output::Nothing), (4, Output::Sample)]);
}

#[test]
fn decodes_go_before_prefill_chunks_and_share_the_budget() {
    let mut scheduler = scheduler();
    let mut shard = SimShard::new(CACHE, Epoch(0));
    scheduler.submit(0, SequenceId(0), request(3, 9), None).unwrap();
    let first = scheduler.plan().unwrap();
    scheduler.submit(0, SequenceId(1), request(20, 4), None).unwrap();
    let second = scheduler.plan().unwrap();
    assert_eq!(spans(&first), [(0, 3)]);
    assert_eq!(spans(&second), [(0, 1), (1, 7)]);
    assert_eq!(second.run[0].tokens, Tokens::LastSampled);
    scheduler.absorb(shard.execute_at_once(&first)).unwrap();
    scheduler.absorb(shard.execute_at_once(&second)).unwrap();
}

#[test]
fn no_more_than_two_steps_are_in_flight() {
    let mut scheduler = scheduler();
    scheduler.submit(0, SequenceId(0), request(3, 9), None).unwrap();
    assert!(scheduler.plan().is_some() && scheduler.plan().is_some());
    assert!(scheduler.plan().is_none());
}

#[test]
fn transfers_of_a_step_that_is_still_to_come_are_no_answer() {
    let (mut scheduler, mut shard) = (scheduler(), SimShard::new(CACHE, Epoch(0)));
    scheduler.submit(0, SequenceId(0), request(3, 9), None).unwrap();
    let plan = scheduler.plan().unwrap();
    let result = StepResult { transferred: Some(Step(1)), ..shard.execute_at_once(&plan) };
    assert!(matches!(scheduler.absorb(result), Err(AbsorbError::Content { step: Step(0), .. })));
}

#[test]
fn a_length_limit_is_never_planned_beyond() {
    let mut scheduler = scheduler();
    scheduler.submit(0, SequenceId(0), request(3, 1), None).unwrap();
    assert!(scheduler.plan().is_some());
    assert!(scheduler.plan().is_none(), "the only token is in flight");
}

#[test]
fn a_token_drawn_after_a_stop_is_discarded() {
    let mut shard = SimShard::new(CACHE, Epoch(0));
    let mut scheduler = scheduler();
    let mut stopping = request(3, 9);
    stopping.stop_token_ids = (0..VOCAB as u32).collect();
    scheduler.submit(0, SequenceId(0), stopping, None).unwrap();
    let (first, ahead) = (scheduler.plan().unwrap(), scheduler.plan().unwrap());
    let events = scheduler.absorb(shard.execute_at_once(&first)).unwrap();
    assert!(matches!(events[2].event, GenerationEvent::Finished(FinishReason::Stop { .. })), "{events:?}");
    assert_eq!(scheduler.used_blocks(), 1, "the step ahead may still write its block");
    assert_eq!(scheduler.absorb(shard.execute_at_once(&ahead)).unwrap(), []);
    assert_eq!(scheduler.used_blocks(), 0);
    assert_eq!(scheduler.counters().generated_tokens, 1);
}

#[test]
fn blocks_of_a_cancelled_request_are_free_within_two_steps() {
    let mut shard = SimShard::new(CACHE, Epoch(0));
    let mut scheduler = scheduler();
    scheduler.submit(0, SequenceId(0), request(6, 9), None).unwrap();
    let plans = [scheduler.plan().unwrap(), scheduler.plan().unwrap()];
    assert!(scheduler.cancel(SequenceId(0)));
    scheduler.check_invariants();
    assert_eq!(scheduler.used_blocks(), 2);
    for plan in plans {
        assert_eq!(scheduler.absorb(shard.execute_at_once(&plan)).unwrap(), []);
    }
    assert_eq!(scheduler.used_blocks(), 0);
}

#[test]
fn ended_sequences_are_named_in_the_next_plan() {
    let mut scheduler = scheduler();
    let mut shard = SimShard::new(CACHE, Epoch(0));
    scheduler.submit(0, SequenceId(0), request(3, 1), None).unwrap();
    let plan = scheduler.plan().unwrap();
    scheduler.absorb(shard.execute_at_once(&plan)).unwrap();
    scheduler.submit(0, SequenceId(1), request(3, 1), None).unwrap();
    assert_eq!(scheduler.plan().unwrap().end, [SequenceId(0)]);
}

#[test]
fn what_can_never_be_served_is_refused_at_once() {
    let mut scheduler = Scheduler::new(CONFIG, uncached(5), VOCAB, Epoch(0));
    let mut submit = |request| scheduler.submit(0, SequenceId(0), request, None).unwrap_err();
    assert_eq!(submit(request(0, 1)), SubmitError::EmptyPrompt);
    assert!(matches!(submit(request(1, usize::MAX)), SubmitError::TooLong { .. }));
    assert!(matches!(
        submit(request(10, 12)),
        SubmitError::NeverFits { needed_blocks: 6, total_blocks: 5, .. }
    ));
    let mut unknown = request(2, 1);
    unknown.prompt[1] = VOCAB as u32;
    assert!(matches!(submit(unknown), SubmitError::UnknownToken { position: 1, .. }));
    assert!(scheduler.is_idle());
    // The last token is never written: this one fits to the token.
    scheduler.submit(0, SequenceId(1), request(10, 11), None).unwrap();
}

#[test]
fn the_waiting_queue_is_bounded() {
    let mut scheduler = scheduler();
    for id in 0..3 {
        scheduler.submit(0, SequenceId(id), request(8, 1), None).unwrap();
    }
    let refusal = scheduler.submit(0, SequenceId(3), request(8, 1), None).unwrap_err();
    assert_eq!(refusal, SubmitError::Overloaded { waiting: 3, limit: 3 });
    scheduler.plan();
    scheduler.submit(0, SequenceId(3), request(8, 1), None).unwrap();
}

#[test]
fn prompt_logprobs_cross_chunks_with_the_token_that_follows() {
    let mut scheduler = scheduler();
    let mut asking = request(12, 0);
    asking.prompt_logprobs = Some(1);
    scheduler.submit(0, SequenceId(0), asking, None).unwrap();
    let plans = [scheduler.plan().unwrap(), scheduler.plan().unwrap()];
    assert_eq!(plans[0].run[0].output, Output::PromptLogprobs { top: 1, next: Some(8), sample: false });
    assert_eq!(plans[1].run[0].output, Output::PromptLogprobs { top: 1, next: None, sample: false });
    let mut shard = SimShard::new(CACHE, Epoch(0));
    let mut positions = Vec::new();
    let mut last = None;
    for plan in plans {
        for event in scheduler.absorb(shard.execute_at_once(&plan)).unwrap() {
            match event.event {
                GenerationEvent::PromptLogprobs(part) => {
                    positions.extend(part.iter().map(|entry| entry.token))
                }
                other => last = Some(other),
            }
        }
    }
    assert_eq!(positions, (1..12).collect::<Vec<u32>>());
    assert_eq!(last, Some(GenerationEvent::Finished(FinishReason::Length)));
    assert_eq!(scheduler.used_blocks(), 0);
}

#[test]
fn the_newest_sequence_gives_way_and_keeps_its_prefix() {
    let cache = uncached(4);
    let mut simulation = Simulation::new(CONFIG, cache, 1);
    simulation.submit(0, request(3, 10)).unwrap();
    simulation.submit(1, request(3, 10)).unwrap();
    while simulation.scheduler.counters().preemptions == 0 {
        simulation.plan();
        if simulation.scheduler.counters().preemptions == 0 {
            simulation.absorb();
        }
    }
    let emitted: Vec<u32> = simulation.outcome(1).sampled.iter().map(|s| s.token).collect();
    let journal = simulation.scheduler.journal(SequenceId(1)).unwrap();
    assert!(!emitted.is_empty());
    assert_eq!(journal[3..], emitted);
    assert_eq!((simulation.scheduler.running(), simulation.scheduler.waiting()), (1, 1));
    simulation.drain();
    assert!((0..2).all(|id| simulation.outcome(id).sampled.len() == 10));
}

#[test]
fn a_newcomer_waits_until_what_runs_can_grow() {
    let cache = uncached(4);
    let mut simulation = Simulation::new(CONFIG, cache, 1);
    simulation.submit(0, request(8, 9)).unwrap();
    simulation.plan();
    // Two blocks are free, which is all that this one takes: the other one's next block would be taken from it.
    simulation.submit(1, request(5, 1)).unwrap();
    simulation.absorb();
    simulation.plan();
    assert_eq!((simulation.scheduler.running(), simulation.scheduler.waiting()), (1, 1));
    simulation.drain();
    assert_eq!(simulation.scheduler.counters().preemptions, 0);
    assert_eq!(simulation.outcome(1).sampled.len(), 1);
}

#[test]
fn what_cannot_grow_any_more_reserves_nothing() {
    let cache = uncached(4);
    let mut simulation = Simulation::new(CONFIG, cache, 1);
    simulation.submit(0, request(7, 2)).unwrap();
    simulation.submit(1, request(7, 2)).unwrap();
    simulation.plan();
    simulation.absorb();
    simulation.plan();
    assert_eq!((simulation.scheduler.running(), simulation.scheduler.used_blocks()), (2, 4));
    simulation.drain();
}

#[test]
fn a_sequence_alone_may_take_the_whole_pool() {
    let cache = uncached(4);
    let mut simulation = Simulation::new(CONFIG, cache, 2);
    simulation.submit(0, request(15, 2)).unwrap();
    simulation.drain();
    assert_eq!(simulation.outcome(0).sampled.len(), 2);
}

#[test]
fn results_out_of_turn_are_refused_and_change_nothing() {
    let mut scheduler = scheduler();
    scheduler.submit(0, SequenceId(0), request(3, 2), None).unwrap();
    let plan = scheduler.plan().unwrap();
    let good = SimShard::new(CACHE, Epoch(0)).execute_at_once(&plan);
    let wrong = |change: fn(&mut StepResult)| {
        let mut result = good.clone();
        change(&mut result);
        result
    };
    let mut refuse = |change| scheduler.absorb(wrong(change)).unwrap_err();
    assert!(matches!(refuse(|r| r.epoch = Epoch(1)), AbsorbError::Epoch { .. }));
    assert!(matches!(refuse(|r| r.step = Step(1)), AbsorbError::Order { expected: Some(Step(0)), .. }));
    assert_eq!(scheduler.absorb(good).unwrap().len(), 2);
}

#[test]
fn a_result_that_does_not_answer_its_plan_is_refused() {
    for change in [
        (|r: &mut StepResult| r.outputs.clear()) as fn(&mut StepResult),
        |r| r.outputs[0].sampled.clear(),
        |r| r.outputs[0].sequence = SequenceId(9),
        |r| r.outputs[0].sampled[0].token = VOCAB as u32,
    ] {
        let mut scheduler = scheduler();
        scheduler.submit(0, SequenceId(0), request(3, 2), None).unwrap();
        let mut result = SimShard::new(CACHE, Epoch(0)).execute_at_once(&scheduler.plan().unwrap());
        change(&mut result);
        assert!(matches!(scheduler.absorb(result), Err(AbsorbError::Content { .. })));
    }
}

#[test]
fn a_released_page_is_to_be_had_once_its_steps_are_absorbed() {
    let mut pool = PagePool::new(3, 4);
    let taken = [pool.take(0).unwrap(), pool.take(0).unwrap()];
    taken.into_iter().for_each(|page| pool.release(page, Some(Step(1))));
    pool.absorbed(Step(0));
    assert_eq!((pool.available(), pool.quarantined()), (1, 2));
    pool.absorbed(Step(1));
    assert_eq!((pool.available(), pool.quarantined()), (3, 0));
    pool.check_invariants(std::iter::empty());
}

#[test]
#[should_panic(expected = "released twice")]
fn a_page_released_twice_is_a_broken_invariant() {
    let mut pool = PagePool::new(1, 4);
    let page = pool.take(0).unwrap();
    pool.release(page, None);
    pool.release(page, None);
}

#[test]
fn a_choice_that_gives_way_in_the_plan_in_which_it_shares_a_prompt_blocks_nobody() {
    let config = SchedulerConfig { max_num_seqs: 3, max_num_batched_tokens: 3, ..CONFIG };
    let cache = CacheSpec { prefix_caching: false, ..CacheSpec::new(1, 16) };
    let mut scheduler = Scheduler::new(config, cache, VOCAB, Epoch(0));
    let mut shard = SimShard::new(cache, Epoch(0));
    let mut plans = std::collections::VecDeque::new();
    let mut step = |scheduler: &mut Scheduler, submit: bool| {
        if submit {
            scheduler.submit(0, SequenceId(1), request(10, 1), None).unwrap();
            scheduler.submit(0, SequenceId(2), request(10, 1), Some(SequenceId(1))).unwrap();
        }
        let planned = scheduler.plan();
        let is_done = planned.is_none();
        plans.extend(planned);
        scheduler.check_invariants();
        if is_done || plans.len() == 2 {
            let oldest = plans.pop_front().expect("somebody is left and nothing is under way");
            scheduler.absorb(shard.execute_at_once(&oldest)).unwrap();
            scheduler.check_invariants();
        }
    };
    scheduler.submit(0, SequenceId(0), request(1, 6), None).unwrap();
    step(&mut scheduler, false);
    step(&mut scheduler, true);
    for _ in 0..40 {
        if !scheduler.is_idle() {
            step(&mut scheduler, false);
        }
    }
    assert!(scheduler.is_idle(), "{} run and {} wait", scheduler.running(), scheduler.waiting());
    assert!(scheduler.counters().preemptions > 0, "the pool is meant to be too small");
}

#[test]
fn a_prompt_after_which_nothing_is_drawn_is_reported_and_counted() {
    let cache = CacheSpec::new(4, 16);
    let mut scheduler = Scheduler::new(CONFIG, cache, VOCAB, Epoch(0));
    let mut shard = SimShard::new(cache, Epoch(0));
    for (id, cached_tokens) in [(0, 0), (1, 4)] {
        scheduler.submit(0, SequenceId(id), request(8, 0), None).unwrap();
        let plan = scheduler.plan().unwrap();
        let events = scheduler.absorb(shard.execute_at_once(&plan)).unwrap();
        let events: Vec<_> = events.into_iter().map(|event| event.event).collect();
        let due =
            [GenerationEvent::Prefilled { cached_tokens }, GenerationEvent::Finished(FinishReason::Length)];
        assert_eq!(events, due);
    }
    let counters = scheduler.counters();
    assert_eq!((counters.prefix_cache_queries, counters.prefix_cache_hits), (16, 4));
}

#[test]
fn what_a_sequence_computed_before_it_gave_way_is_no_hit() {
    let mut simulation = Simulation::new(CONFIG, CacheSpec::new(4, 16), 1);
    simulation.submit(0, request(20, 2)).unwrap();
    simulation.plan();
    simulation.absorb();
    let slot = simulation.scheduler.sequences.find(SequenceId(0)).unwrap();
    simulation.scheduler.preempt(slot);
    simulation.drain();
    assert_eq!(simulation.outcome(0).cached_tokens, Some(0));
    let counters = simulation.scheduler.counters();
    assert_eq!((counters.prefix_cache_queries, counters.prefix_cache_hits), (20, 0));
    assert_eq!(counters.computed_tokens, 21, "it finds its own pages all the same");
}

#[test]
fn a_choice_waits_for_the_first_one_only_if_that_comes_before_it_in_the_order() {
    for (is_kept, due) in [(false, vec![(0, 8)]), (true, vec![(0, 4), (1, 4)])] {
        let (mut scheduler, mut shard) = (scheduler(), SimShard::new(CACHE, Epoch(0)));
        scheduler.submit(0, SequenceId(0), request(20, 1), None).unwrap();
        scheduler.submit(0, SequenceId(1), request(20, 1), Some(SequenceId(0))).unwrap();
        let follower = scheduler.sequences.find(SequenceId(1)).unwrap();
        scheduler.sequences[follower].preemptions = if is_kept { PREEMPTIONS_MAX } else { 0 };
        let first = scheduler.plan().unwrap();
        assert_eq!(spans(&first), [(0, 8)]);
        scheduler.absorb(shard.execute_at_once(&first)).unwrap();
        assert_eq!(spans(&scheduler.plan().unwrap()), due);
        scheduler.check_invariants();
    }
}

#[test]
fn blocks_whose_windows_are_gone_are_not_counted_as_shared() {
    let config = SchedulerConfig { max_num_batched_tokens: 16, max_model_len: 96, ..CONFIG };
    let groups = LayerGroups::new(&[None, Some(9)]).unwrap();
    let mut simulation = Simulation::new(config, CacheSpec { groups, ..CacheSpec::new(1, 100) }, 1);
    simulation.submit(0, request(40, 50)).unwrap();
    // Every token takes two pages: by then those of the prompt that its window left are taken again.
    while simulation.outcome(0).sampled.len() < 36 {
        simulation.plan();
        simulation.absorb();
    }
    let mut alike = request(41, 4);
    alike.prompt[40] = 96;
    simulation.submit(1, alike).unwrap();
    simulation.drain();
    let counters = simulation.scheduler.counters();
    assert_eq!((counters.preemptions, counters.prefix_cache_hits), (0, 0));
    assert_eq!(simulation.outcome(1).sampled.len(), 4);
}

#[test]
fn pages_of_a_sequence_without_finite_logits_are_not_found_in_the_host_either() {
    let cache = CacheSpec { host_blocks: 8, ..CacheSpec::new(4, 32) };
    let mut scheduler = Scheduler::new(CONFIG, cache, VOCAB, Epoch(0));
    let mut shard = SimShard::new(cache, Epoch(0));
    let of = |prompt: std::ops::Range<u32>, max_tokens| Request {
        prompt: prompt.collect(),
        ..request(1, max_tokens)
    };
    // All but two pages come to be cached, and the oldest are saved.
    for (id, prompt) in [(0, 0..28), (1, 30..90), (2, 60..92)] {
        scheduler.submit(0, SequenceId(id), of(prompt, 1), None).unwrap();
        while !scheduler.is_idle() {
            let plan = scheduler.plan().unwrap();
            scheduler.absorb(shard.execute_at_once(&plan)).unwrap();
        }
    }
    let keys = BlockKey::chain(None, &(0..28).collect::<Vec<u32>>(), 4);
    let in_host = |scheduler: &Scheduler| -> Vec<usize> {
        (0..7).filter(|&block| scheduler.tiers.host.has(keys[block], 0)).collect()
    };
    scheduler.submit(0, SequenceId(3), of(96..97, 9), None).unwrap();
    let plan = scheduler.plan().unwrap();
    let result = StepResult { transferred: None, ..shard.execute_at_once(&plan) };
    scheduler.absorb(result).unwrap();
    assert_eq!((in_host(&scheduler), scheduler.transfers_under_way()), (vec![4, 5, 6], 1));
    // Six of its blocks are there. Of the last one it computes a page of its own.
    scheduler.submit(0, SequenceId(4), of(0..28, 1), None).unwrap();
    let plan = scheduler.plan().unwrap();
    assert_eq!(spans(&plan), [(3, 1), (4, 4)]);
    let mut result = StepResult { transferred: None, ..shard.execute_at_once(&plan) };
    result.outputs[1].broken = true;
    let events = scheduler.absorb(result).unwrap();
    assert!(events.iter().any(|event| matches!(event.event, GenerationEvent::Failed(_))), "{events:?}");
    scheduler.check_invariants();
    assert_eq!(in_host(&scheduler), [0; 0]);
    let plan = scheduler.plan().unwrap();
    scheduler.absorb(shard.execute_at_once(&plan)).unwrap();
    scheduler.check_invariants();
    assert_eq!((in_host(&scheduler), scheduler.transfers_under_way()), (vec![], 0));
}

#[test]
fn pages_that_a_sequence_without_finite_logits_left_behind_its_window_are_not_found() {
    let groups = LayerGroups::new(&[None, Some(9)]).unwrap();
    let cache = CacheSpec { groups, host_blocks: 100, ..CacheSpec::new(4, 100) };
    let config = SchedulerConfig { max_num_batched_tokens: 16, max_model_len: 200, ..CONFIG };
    let (mut scheduler, mut shard) =
        (Scheduler::new(config, cache, VOCAB, Epoch(0)), SimShard::new(cache, Epoch(0)));
    let mut run = |id, prompt: Vec<u32>, breaks: bool| {
        scheduler.submit(0, SequenceId(id), Request { prompt, ..request(1, 1) }, None).unwrap();
        let mut rows = 0;
        while !scheduler.is_idle() {
            let plan = scheduler.plan().unwrap();
            rows += spans(&plan).iter().map(|(_, count)| count).sum::<usize>();
            let mut result = shard.execute_at_once(&plan);
            result.outputs.iter_mut().for_each(|output| output.broken = breaks);
            scheduler.absorb(result).unwrap();
            scheduler.check_invariants();
        }
        rows
    };
    let prompt: Vec<u32> = (0..97).collect();
    assert_eq!(run(0, prompt.clone(), true), 97);
    // The next one leaves pages of its own, in the window's group too.
    assert_eq!(run(1, prompt.clone(), false), 97);
    // Alike up to the middle: what its window sees of that is the second one's.
    let mut alike = prompt;
    alike[62] = 0;
    assert_eq!(run(2, alike, false), 97 - 60);
    let keys = BlockKey::chain(None, &(0..96).collect::<Vec<u32>>(), 4);
    let names = (0..24).filter(|&block| scheduler.pool.is_named(keys[block], 1)).count();
    assert_eq!(names, 24, "each block of the window's group was named anew");
}

#[test]
fn whoever_gives_way_before_it_has_run_has_found_nothing_yet() {
    // Two that begin alike: the second waits for the first, gives way, and finds it all when it comes back.
    let mut simulation = Simulation::new(CONFIG, CacheSpec::new(4, 16), 1);
    simulation.submit(0, request(21, 1)).unwrap();
    simulation.submit(1, request(21, 1)).unwrap();
    simulation.plan();
    simulation.absorb();
    simulation.plan();
    let slot = simulation.scheduler.sequences.find(SequenceId(1)).unwrap();
    assert!(!simulation.scheduler.sequences[slot].announced, "it waits for the other one");
    simulation.scheduler.preempt(slot);
    simulation.drain();
    assert_eq!(simulation.outcome(1).cached_tokens, Some(20));
    assert_eq!(simulation.scheduler.counters().prefix_cache_hits, 20);
}

#[test]
fn nothing_counts_as_found_that_was_lost_before_it_was_there() {
    let mut simulation = Simulation::new(CONFIG, CacheSpec::new(4, 16), 1);
    simulation.submit(0, request(21, 1)).unwrap();
    simulation.drain();
    // It finds five blocks, computes the rest, gives way, and then the group is lost.
    simulation.submit(1, request(30, 1)).unwrap();
    simulation.plan();
    let slot = simulation.scheduler.sequences.find(SequenceId(1)).unwrap();
    assert_eq!(simulation.scheduler.sequences[slot].cached_tokens, 20);
    simulation.scheduler.preempt(slot);
    simulation.absorb();
    simulation.lose();
    simulation.form();
    simulation.drain();
    assert_eq!(simulation.outcome(1).cached_tokens, Some(0));
}

#[test]
fn a_page_is_found_by_its_tokens_and_not_by_its_name_alone() {
    let mut pool = PagePool::new(2, 4);
    let (key, parent) = (BlockKey::root(None).next(&[1, 2, 3, 4]), BlockKey::root(None));
    let page = pool.take(0).unwrap();
    let content = |tokens| Content { key, parent, tokens };
    pool.register(page, content(&[1, 2, 3, 4]));
    assert_eq!(pool.find(content(&[1, 2, 3, 4]), 0), Some(page));
    assert_eq!(pool.find(content(&[1, 2, 3, 5]), 0), None, "as if two had one name");
    let other = BlockKey::root(None).next(&[9, 9, 9, 9]);
    assert_eq!(pool.find(Content { parent: other, ..content(&[1, 2, 3, 4]) }, 0), None);
    assert_eq!(pool.find(content(&[1, 2, 3, 4]), 1), None, "another group's page is another one");
}

#[test]
fn a_choice_that_breaks_down_forgets_a_shared_prompt_that_has_no_names() {
    let (mut scheduler, mut shard) = (scheduler(), SimShard::new(CACHE, Epoch(0)));
    scheduler.submit(0, SequenceId(0), request(8, 4), None).unwrap();
    scheduler.submit(0, SequenceId(1), request(8, 4), Some(SequenceId(0))).unwrap();
    let mut failed = Vec::new();
    while !scheduler.is_idle() {
        let plan = scheduler.plan().expect("somebody goes on");
        let mut result = shard.execute_at_once(&plan);
        // The second choice, which takes its prompt over from the first.
        let of_choice = result.outputs.iter_mut().filter(|output| output.sequence == SequenceId(1));
        of_choice.for_each(|output| output.broken = true);
        for event in scheduler.absorb(result).unwrap() {
            if let GenerationEvent::Failed(error) = event.event {
                failed.push((event.sequence, error));
            }
        }
        scheduler.check_invariants();
    }
    assert_eq!(failed, [(SequenceId(1), GenerationError::NotFinite { position: 8 })]);
}

#[test]
fn nobody_counts_on_one_that_computes_what_is_there_because_it_needs_every_row() {
    // Five of ten blocks are cached. Who wants a word on each token computes them anew, for itself alone.
    let mut simulation = Simulation::new(CONFIG, CacheSpec::new(4, 10), 1);
    simulation.submit(0, request(21, 1)).unwrap();
    simulation.drain();
    simulation.submit(1, Request { prompt_logprobs: Some(0), ..request(21, 1) }).unwrap();
    simulation.submit(2, request(21, 10)).unwrap();
    simulation.drain();
    assert_eq!(simulation.scheduler.counters().preemptions, 0);
    assert_eq!(
        (simulation.outcome(1).cached_tokens, simulation.outcome(2).cached_tokens),
        (Some(0), Some(20))
    );
}
