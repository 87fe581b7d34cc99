//! Who waits behind those that cannot move, and what a pool has for newcomers.

use consort_kernels::sampling::SamplingParams;

use super::*;
use crate::{config::SchedulerConfig, ids::Epoch, request::Request, scheduler::Scheduler};

/// A request that was moved as often as may be, and waits at replica 0.
fn settled(sequence: u64, shape: &WorkShape) -> Router {
    let mut router = router(CONFIG);
    router.lost(ZERO);
    assert_eq!(place(&mut router, sequence, shape), ONE);
    router.ready(ZERO);
    for _ in 0..MOVES_MAX {
        let at = router.place_of(SequenceId(sequence)).expect("it is open");
        router.observe(at, 0);
        let withdrawals = router.rebalance();
        assert_eq!(withdrawals.len(), 1);
        assert_ne!(router.given_back(&withdrawals[0].sequences), Some(at));
        router.observe(at, 1000);
        router.check_invariants();
    }
    assert_eq!(router.place_of(SequenceId(sequence)), Some(ZERO));
    router
}

#[test]
fn who_waits_behind_one_that_lacks_pages_and_cannot_move_is_moved() {
    let mut router = settled(0, &plain(1600));
    place_at_zero(&mut router, &[1], &plain(32));
    router.observe(ZERO, 102);
    assert_eq!(router.rebalance().len(), 1, "all of its prompt is computed first");
    router.kept(SequenceId(1));
    // Where that is no reason, as the other one has as much to do.
    assert_eq!(place(&mut router, 2, &plain(1700)), ONE);
    router.started(SequenceId(2));
    assert_eq!(router.rebalance(), [], "both have their pages");
    router.observe(ZERO, 101);
    assert_eq!(router.rebalance(), [withdrawal(&[1])], "it comes after a hundred pages");
    router.check_invariants();
}

#[test]
fn who_waits_behind_those_that_take_the_last_seats_and_cannot_move_is_moved() {
    let mut router = settled(0, &plain(16));
    router.lost(ONE);
    (1..4).for_each(|sequence| assert_eq!(run(&mut router, sequence, &plain(1)), ZERO));
    router.ready(ONE);
    // As much to compute at either.
    assert_eq!(place(&mut router, 4, &plain(100)), ONE);
    router.started(SequenceId(4));
    place_at_zero(&mut router, &[5], &plain(16));
    assert_eq!(router.rebalance(), [withdrawal(&[5])], "the fourth seat is another one's");
    // Those that are asked back take no seat before it.
    let mut router = overloaded(2);
    end(&mut router, 5);
    assert_eq!(router.rebalance(), [withdrawal(&[8])]);
    end(&mut router, 0);
    end(&mut router, 6);
    assert_eq!(router.rebalance(), [], "a seat is free here, and nobody comes before it");
}

#[test]
fn pages_that_a_prompt_is_still_to_take_are_no_room_for_others() {
    let cache = CacheSpec::new(16, 100);
    let config = SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 1600,
        max_waiting_requests: 10,
        priority_aging_ms: 0,
    };
    let request = |tokens: u32, first: u32| Request {
        prompt: (first..first + tokens).collect(),
        sampling: SamplingParams::default(),
        max_tokens: 1,
        stop_token_ids: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    };
    let mut outcomes = Vec::new();
    for newcomer in [1, 40, 50, 51, 60, 96] {
        let mut scheduler = Scheduler::new(config, cache, 10_000, Epoch(0));
        let mut router = router(RouterConfig::new(2, &config, &cache));
        let tokens = newcomer as u32 * 16;
        let long = plain(800);
        assert_eq!(place(&mut router, 0, &long), ZERO);
        scheduler.submit(0, SequenceId(0), request(800, 0), None).expect("it fits");
        scheduler.plan().expect("there is something to run");
        router.started(SequenceId(0));
        assert_eq!(scheduler.used_blocks(), 4, "the first chunk's");
        router.observe(ZERO, scheduler.free_for_newcomers());
        let has_room = router.has_room(ZERO, &plain(tokens as usize), 1);
        scheduler.submit(1, SequenceId(1), request(tokens, 2000), None).expect("it fits alone");
        // The first of those that compute leaves some of a step to the next ones.
        scheduler.plan();
        assert_eq!(scheduler.running() == 2, has_room, "{newcomer} pages");
        outcomes.push(has_room);
    }
    assert_eq!(outcomes, [true, true, true, false, false, false]);
}
