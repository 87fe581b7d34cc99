//! The pure router, one decision at a time.

use std::{collections::VecDeque, sync::Arc};

use super::{
    MOVES_MAX, OPEN_REQUEST_TOKENS, Router, RouterConfig, Withdrawal, WorkShape, index::PrefixIndex,
};
use crate::{
    config::{CacheSpec, LayerGroups},
    ids::{ReplicaId, SequenceId},
    order::Due,
    prefix::BlockKey,
};

mod groups;
mod line;

const CONFIG: RouterConfig = RouterConfig { replicas: 2, max_num_seqs: 4, cache: CacheSpec::new(16, 1000) };
const ZERO: ReplicaId = ReplicaId(0);
const ONE: ReplicaId = ReplicaId(1);

fn router(config: RouterConfig) -> Router {
    let mut router = Router::new(config);
    (0..config.replicas as u16).for_each(|replica| router.ready(ReplicaId(replica)));
    router
}

/// A prompt of `prefix` tokens that all of `family` share, and `own` tokens of this one's.
fn prompt(family: u32, prefix: usize, one: u32, own: usize) -> WorkShape {
    let shared = std::iter::repeat_n(family, prefix);
    let tokens: Vec<u32> = shared.chain(std::iter::repeat_n(1_000_000 + one, own)).collect();
    let keys = BlockKey::chain(None, &tokens, CONFIG.cache.block_size);
    WorkShape { prompt_tokens: tokens.len(), due: Due::new(0, 0, 0), keys: keys.into(), is_whole: false }
}

fn plain(tokens: usize) -> WorkShape {
    WorkShape { prompt_tokens: tokens, due: Due::new(0, 0, 0), keys: Arc::default(), is_whole: false }
}

/// A short one that came then; a point of priority is 100 milliseconds.
fn due(arrived_ms: u64, priority: i32) -> WorkShape {
    WorkShape { due: Due::new(arrived_ms, priority, 100), ..plain(10) }
}

fn ids(sequences: &[u64]) -> Vec<SequenceId> {
    sequences.iter().copied().map(SequenceId).collect()
}

/// From replica 0 to 1.
fn withdrawal(sequences: &[u64]) -> Withdrawal {
    Withdrawal { sequences: ids(sequences), from: ZERO, to: ONE }
}

/// Places a group while replica 1 is not to be had.
fn place_at_zero(router: &mut Router, sequences: &[u64], shape: &WorkShape) {
    router.lost(ONE);
    assert_eq!(router.place(&ids(sequences), shape), Some(ZERO));
    router.ready(ONE);
    router.check_invariants();
}

fn place(router: &mut Router, sequence: u64, shape: &WorkShape) -> ReplicaId {
    let at = router.place(&[SequenceId(sequence)], shape).expect("one is ready");
    router.check_invariants();
    at
}

/// Places a request that decodes at once.
fn run(router: &mut Router, sequence: u64, shape: &WorkShape) -> ReplicaId {
    let at = place(router, sequence, shape);
    router.started(SequenceId(sequence));
    router.prefilled(SequenceId(sequence));
    router.check_invariants();
    at
}

fn end(router: &mut Router, sequence: u64) {
    router.ended(SequenceId(sequence));
    router.check_invariants();
}

#[test]
fn without_prefixes_the_least_loaded_replica_serves_and_then_the_lowest_number() {
    let mut router = router(RouterConfig { replicas: 3, ..CONFIG });
    let sent: Vec<u16> = (0..6).map(|sequence| place(&mut router, sequence, &plain(100)).0).collect();
    assert_eq!(sent, [0, 1, 2, 0, 1, 2]);
    end(&mut router, 1);
    assert_eq!(place(&mut router, 6, &plain(1)), ONE);
}

#[test]
fn a_prompt_goes_where_its_longest_prefix_is() {
    let mut router = router(CONFIG);
    assert_eq!(run(&mut router, 0, &prompt(1, 160, 0, 20)), ZERO);
    assert_eq!(run(&mut router, 1, &prompt(2, 160, 1, 20)), ONE);
    for sequence in 2..6 {
        let family = 1 + (sequence % 2) as u32;
        let at = run(&mut router, sequence, &prompt(family, 160, sequence as u32, 20));
        assert_eq!(at, if family == 1 { ZERO } else { ONE });
    }
    let shape = prompt(2, 160, 9, 20);
    assert_eq!((router.known_tokens(ZERO, &shape), router.known_tokens(ONE, &shape)), (0, 160));
}

#[test]
fn load_outweighs_a_prefix_once_it_exceeds_the_prefill_that_is_saved() {
    let mut router = router(RouterConfig { max_num_seqs: 100, ..CONFIG });
    let hot = |sequence: u64| prompt(1, 256, sequence as u32, 8);
    assert_eq!(run(&mut router, 0, &hot(0)), ZERO);
    let mut sequence = 1;
    // Each open request weighs so much; up to a difference of 256 the prefix is worth it.
    while router.load(ZERO) <= 256 {
        assert_eq!(run(&mut router, sequence, &hot(sequence)), ZERO, "load {}", router.load(ZERO));
        sequence += 1;
    }
    assert_eq!(sequence as usize, 256 / OPEN_REQUEST_TOKENS + 1);
    assert_eq!(run(&mut router, sequence, &hot(sequence)), ONE);
    // Now both hold it, and load alone decides.
    for next in sequence + 1..sequence + 8 {
        run(&mut router, next, &hot(next));
        assert!(router.load(ZERO).abs_diff(router.load(ONE)) <= 256);
    }
    let (zero, one) = (router.load(ZERO), router.load(ONE));
    assert!(zero.abs_diff(one) <= OPEN_REQUEST_TOKENS, "{zero} and {one}");
}

#[test]
fn a_middling_prefix_at_an_idle_replica_beats_the_longest_at_a_busy_one() {
    let mut router = router(RouterConfig { replicas: 3, ..CONFIG });
    let short = prompt(1, 1600, 0, 1);
    let long = prompt(1, 1760, 1, 1);
    assert_eq!(place(&mut router, 0, &short), ZERO);
    end(&mut router, 0);
    // Replica 0 is kept busy while the longer one comes.
    assert_eq!(place(&mut router, 1, &plain(1700)), ZERO);
    assert_eq!(place(&mut router, 2, &long), ONE);
    end(&mut router, 1);
    // Replica 1 computes 1761 tokens still, replica 0 is idle and lacks 160 of them.
    assert_eq!(place(&mut router, 3, &long), ZERO);
}

#[test]
fn a_replica_that_lost_its_cache_is_preferred_no_more() {
    for lose in [Router::lost as fn(&mut Router, ReplicaId), Router::gone] {
        let mut router = router(CONFIG);
        run(&mut router, 0, &plain(10));
        let shape = prompt(1, 160, 1, 1);
        assert_eq!(run(&mut router, 1, &shape), ONE);
        (0..2).for_each(|sequence| end(&mut router, sequence));
        assert_eq!(router.known_tokens(ONE, &shape), 160);
        lose(&mut router, ONE);
        assert_eq!(run(&mut router, 2, &shape), ZERO, "nothing goes to one that is not ready");
        router.ready(ONE);
        assert_eq!((router.known_tokens(ONE, &shape), router.known_tokens(ZERO, &shape)), (0, 160));
        router.check_invariants();
    }
}

#[test]
fn where_no_replica_is_ready_nothing_is_placed_and_nothing_changes() {
    let mut router = Router::new(CONFIG);
    assert_eq!(router.place(&[SequenceId(0)], &plain(1)), None);
    router.ready(ONE);
    assert_eq!(place(&mut router, 0, &plain(1)), ONE);
    router.lost(ONE);
    assert_eq!(router.given_back(&ids(&[0])), None, "it ends");
    assert_eq!((router.open(), router.place_of(SequenceId(0))), (0, None));
    router.check_invariants();
}

#[test]
fn requests_of_one_prompt_stay_together_and_prefer_room_for_all() {
    let mut router = router(CONFIG);
    let three: Vec<SequenceId> = (0..3).map(SequenceId).collect();
    assert_eq!(router.place(&three, &prompt(1, 160, 0, 1)), Some(ZERO));
    assert!(three.iter().all(|sequence| router.place_of(*sequence) == Some(ZERO)));
    // Computed once, 16 tokens at a time: those that follow compute their last block's rest.
    assert_eq!(router.load(ZERO), 3 * OPEN_REQUEST_TOKENS + 161 + 2);
    // The prefix is at 0, but only one seat.
    let two: Vec<SequenceId> = (3..5).map(SequenceId).collect();
    assert_eq!(router.place(&two, &prompt(1, 160, 0, 1)), Some(ONE));
    router.check_invariants();
}

#[test]
fn a_full_replica_gets_nothing_while_another_has_room() {
    let mut router = router(CONFIG);
    let hot = |own| prompt(1, 8000, own, 1);
    // By load alone, the prefix would keep far more than four.
    let sent: Vec<ReplicaId> =
        (0..8).map(|sequence| run(&mut router, sequence, &hot(sequence as u32))).collect();
    assert_eq!(sent, [[ZERO; 4], [ONE; 4]].concat());
    assert_eq!(place(&mut router, 8, &hot(8)), ZERO, "where all are full, one of them");
}

#[test]
fn a_pool_without_free_blocks_is_full() {
    let mut router = router(CONFIG);
    router.observe(ZERO, 9);
    assert_eq!(place(&mut router, 0, &plain(200)), ONE, "13 blocks");
    assert_eq!(place(&mut router, 1, &plain(80)), ZERO, "5 blocks");
    router.observe(ONE, 0);
    assert_eq!(place(&mut router, 2, &plain(64)), ZERO, "4 more");
    // The nine are pledged: what comes now has to wait wherever it goes, and goes where there is less to do.
    assert_eq!(place(&mut router, 3, &plain(16)), ONE);
    // What has started is counted by its pool.
    router.started(SequenceId(1));
    router.observe(ZERO, 5);
    assert_eq!(place(&mut router, 4, &plain(16)), ZERO);
}

/// Two groups of layers see everything and one sees 32 tokens: 13 blocks are 13 + 13 + 3 pages.
fn of_groups() -> RouterConfig {
    let groups = LayerGroups::new(&[None, Some(32), None]).expect("three groups");
    RouterConfig { cache: CacheSpec { groups, ..CONFIG.cache }, ..CONFIG }
}

#[test]
fn a_pool_is_full_when_the_pages_of_all_groups_do_not_fit() {
    let mut router = router(of_groups());
    router.observe(ZERO, 28);
    assert_eq!(place(&mut router, 0, &plain(200)), ONE);
    router.observe(ZERO, 29);
    assert_eq!(place(&mut router, 1, &plain(200)), ZERO);
    assert!(!router.has_room(ZERO, &plain(1), 1), "all are pledged");
    router.observe(ZERO, 31);
    assert!(!router.has_room(ZERO, &plain(1), 1), "a block is a page in each of three groups");
    router.observe(ZERO, 32);
    assert!(router.has_room(ZERO, &plain(1), 1));
}

#[test]
fn a_known_prefix_saves_the_pages_of_groups_that_see_everything() {
    let mut router = router(of_groups());
    assert_eq!(run(&mut router, 0, &prompt(1, 160, 0, 16)), ZERO);
    let next = prompt(1, 160, 1, 16);
    router.observe(ZERO, 4);
    assert!(!router.has_room(ZERO, &next, 1), "one block in both, and three within the window");
    router.observe(ZERO, 5);
    assert!(router.has_room(ZERO, &next, 1));
    assert!(
        !router.has_room(ZERO, &next, 2),
        "another choice takes as many for its last block and its window"
    );
    router.observe(ZERO, 10);
    assert!(router.has_room(ZERO, &next, 2));
}

#[test]
fn who_waits_for_pages_of_several_groups_is_moved_to_where_they_are_free() {
    let mut router = router(of_groups());
    place_at_zero(&mut router, &[0], &plain(200));
    router.observe(ZERO, 29);
    assert_eq!(router.rebalance(), [], "it fits");
    // More pages than blocks, and too few.
    router.observe(ZERO, 28);
    assert_eq!(router.rebalance(), [withdrawal(&[0])]);
    router.check_invariants();
}

/// Eight requests that run, four at each replica, and `waiting` more that wait at replica 0.
fn overloaded(waiting: u64) -> Router {
    let mut router = router(CONFIG);
    router.lost(ONE);
    (0..4).for_each(|sequence| assert_eq!(run(&mut router, sequence, &plain(10)), ZERO));
    (8..8 + waiting).for_each(|sequence| assert_eq!(place(&mut router, sequence, &plain(10)), ZERO));
    router.lost(ZERO);
    router.ready(ONE);
    (4..8).for_each(|sequence| assert_eq!(run(&mut router, sequence, &plain(10)), ONE));
    router.ready(ZERO);
    assert_eq!(router.rebalance(), [], "all seats are taken");
    router
}

#[test]
fn who_waits_at_a_full_replica_is_moved_when_another_has_room() {
    let mut router = overloaded(3);
    end(&mut router, 5);
    assert_eq!(router.rebalance(), [withdrawal(&[8])], "the first in line, and no more than there are seats");
    router.check_invariants();
    assert_eq!(router.rebalance(), [], "the seat is kept for it");
    assert_eq!(router.given_back(&ids(&[8])), Some(ONE));
    assert_eq!((router.place_of(SequenceId(8)), router.moved()), (Some(ONE), 1));
    router.check_invariants();
}

#[test]
fn a_request_that_has_started_meanwhile_stays_and_its_seat_elsewhere_is_free_again() {
    let mut router = overloaded(2);
    end(&mut router, 5);
    assert_eq!(router.rebalance().len(), 1);
    end(&mut router, 0);
    router.started(SequenceId(8));
    router.check_invariants();
    assert_eq!(router.place_of(SequenceId(8)), Some(ZERO));
    assert_eq!((router.rebalance(), router.moved()), (vec![withdrawal(&[9])], 0));
}

#[test]
fn the_better_priority_is_moved_first() {
    let mut router = overloaded(0);
    place_at_zero(&mut router, &[20], &due(0, 0));
    place_at_zero(&mut router, &[21], &due(0, -1));
    end(&mut router, 5);
    assert_eq!(router.rebalance(), [withdrawal(&[21])]);
}

#[test]
fn an_old_request_is_moved_before_a_fresh_better_one_that_is_due_later() {
    for (arrived_ms, first) in [(199, 21), (200, 20)] {
        let mut router = overloaded(0);
        place_at_zero(&mut router, &[20], &due(0, 2));
        place_at_zero(&mut router, &[21], &due(arrived_ms, 0));
        end(&mut router, 5);
        assert_eq!(router.rebalance(), [withdrawal(&[first])], "the better one came at {arrived_ms} ms");
    }
}

#[test]
fn without_aging_moves_follow_arrival() {
    let mut router = overloaded(0);
    // The number that is accepted first need not have come first.
    for (sequence, arrived_ms, priority) in [(20, 7, -5), (21, 3, 9), (22, 5, 0)] {
        let shape = WorkShape { due: Due::new(arrived_ms, priority, 0), ..plain(10) };
        place_at_zero(&mut router, &[sequence], &shape);
    }
    (5..8).for_each(|sequence| end(&mut router, sequence));
    assert_eq!(router.rebalance(), [21, 22, 20].map(|sequence| withdrawal(&[sequence])));
}

#[test]
fn a_flood_of_better_requests_does_not_starve_one_that_waits() {
    let mut router = overloaded(0);
    place_at_zero(&mut router, &[20], &due(0, 5));
    let mut running: VecDeque<u64> = (4..8).collect();
    // With every better one that comes, a seat at the other replica becomes free.
    let moved = (0..1000u64).find(|round| {
        place_at_zero(&mut router, &[100 + round], &due(10 * round, 0));
        end(&mut router, running.pop_front().expect("four run"));
        let withdrawals = router.rebalance();
        let [Withdrawal { sequences, to: ONE, .. }] = withdrawals.as_slice() else {
            panic!("{withdrawals:?}")
        };
        assert_eq!(router.given_back(sequences), Some(ONE));
        router.started(sequences[0]);
        router.prefilled(sequences[0]);
        router.check_invariants();
        running.push_back(sequences[0].0);
        sequences[0] == SequenceId(20)
    });
    assert_eq!(moved, Some(50), "it is due after 500 ms");
}

#[test]
fn choices_of_a_request_are_moved_all_at_once_or_not_at_all() {
    let mut router = overloaded(0);
    place_at_zero(&mut router, &[20, 21, 22], &plain(10));
    (5..7).for_each(|sequence| end(&mut router, sequence));
    assert_eq!(router.rebalance(), [], "two seats are too few");
    end(&mut router, 7);
    assert_eq!(router.rebalance(), [withdrawal(&[20, 21, 22])]);
    router.check_invariants();
    // One of them was cancelled on its way.
    end(&mut router, 20);
    assert_eq!(router.given_back(&ids(&[20, 21, 22])), Some(ONE));
    router.check_invariants();
    assert_eq!(router.moved(), 2);
    assert!((21..23).all(|one| router.place_of(SequenceId(one)) == Some(ONE)));
    assert!((21..23).all(|one| router.moves_of(SequenceId(one)) == Some(1)));
}

#[test]
fn choices_of_which_one_has_started_stay() {
    let mut router = overloaded(0);
    place_at_zero(&mut router, &[20, 21], &plain(10));
    place_at_zero(&mut router, &[30], &plain(10));
    end(&mut router, 0);
    router.started(SequenceId(20));
    (4..8).for_each(|sequence| end(&mut router, sequence));
    // What comes behind them is moved.
    assert_eq!(router.rebalance(), [withdrawal(&[30])]);
    router.check_invariants();
}

#[test]
fn choices_that_were_asked_back_in_vain_leave_their_seats_elsewhere_to_others() {
    let mut router = overloaded(0);
    place_at_zero(&mut router, &[20, 21], &plain(10));
    place_at_zero(&mut router, &[30, 31], &plain(10));
    (6..8).for_each(|sequence| end(&mut router, sequence));
    assert_eq!(router.rebalance(), [withdrawal(&[20, 21])]);
    end(&mut router, 0);
    // The first of them had started when they were asked for, and its reader has left since.
    end(&mut router, 20);
    router.kept(SequenceId(21));
    router.check_invariants();
    router.started(SequenceId(21));
    assert_eq!(router.rebalance(), [withdrawal(&[30, 31])]);
    assert_eq!((router.given_back(&ids(&[30, 31])), router.moved()), (Some(ONE), 2));
    router.check_invariants();
}

#[test]
fn more_choices_than_ever_run_at_a_time_are_moved_to_a_replica_that_is_idle() {
    let mut router = overloaded(0);
    place_at_zero(&mut router, &[20, 21, 22, 23, 24], &plain(10));
    (4..7).for_each(|sequence| end(&mut router, sequence));
    assert_eq!(router.rebalance(), []);
    end(&mut router, 7);
    assert_eq!(router.rebalance(), [withdrawal(&[20, 21, 22, 23, 24])]);
    router.check_invariants();
}

#[test]
fn a_request_behind_a_long_prefill_is_moved_to_where_it_is_computed_sooner() {
    let mut router = router(CONFIG);
    router.lost(ONE);
    assert_eq!(place(&mut router, 0, &plain(5000)), ZERO);
    assert_eq!(place(&mut router, 1, &plain(10)), ZERO);
    router.ready(ONE);
    assert_eq!(router.rebalance(), []);
    router.started(SequenceId(0));
    assert_eq!(router.rebalance(), [withdrawal(&[1])]);
    router.check_invariants();
}

#[test]
fn a_request_is_moved_to_and_fro_a_few_times_at_most() {
    let mut router = overloaded(1);
    let (mut at, mut moves) = (ZERO, 0);
    loop {
        // A seat becomes free at the other one, and is taken again as soon as the request arrives.
        let other = if at == ZERO { ONE } else { ZERO };
        let running = if other == ONE { 4 + moves } else { moves };
        end(&mut router, running);
        let Some(withdrawal) = router.rebalance().into_iter().next() else { break };
        assert_eq!((withdrawal.from, withdrawal.to), (at, other));
        at = router.given_back(&ids(&[8])).expect("both are ready");
        moves += 1;
        let filler = 100 + moves;
        router.lost(if at == ZERO { ONE } else { ZERO });
        assert_eq!(run(&mut router, filler, &plain(1)), at);
        router.ready(if at == ZERO { ONE } else { ZERO });
    }
    assert_eq!(moves, u64::from(MOVES_MAX));
}

#[test]
fn what_waits_at_a_lost_replica_is_placed_again_and_keeps_its_number() {
    let mut router = overloaded(2);
    router.lost(ZERO);
    assert_eq!(router.rebalance(), [], "it is given back unasked");
    for sequence in [8, 9] {
        assert_eq!(router.given_back(&ids(&[sequence])), Some(ONE));
    }
    (0..4).for_each(|sequence| end(&mut router, sequence));
    router.check_invariants();
    assert_eq!((router.load(ZERO), router.open(), router.moved()), (0, 6, 2));
}

#[test]
fn the_index_remembers_so_many_and_forgets_ends_before_beginnings() {
    let mut index = PrefixIndex::new(10);
    let chain = |family: u32, blocks: usize| BlockKey::chain(None, &vec![family; 16 * blocks], 16);
    index.enter(&chain(1, 6));
    index.enter(&chain(2, 6));
    index.check_invariants();
    assert_eq!((index.known(&chain(1, 6)), index.known(&chain(2, 6))), (4, 6));
    index.enter(&chain(1, 2));
    index.enter(&chain(3, 5));
    index.check_invariants();
    let known = [1, 2, 3].map(|family| index.known(&chain(family, 6)));
    assert_eq!(known, [2, 3, 5], "what was sent last stays longest");
    index.enter(&chain(4, 50));
    assert_eq!(index.known(&chain(4, 50)), 10, "of a longer one its beginning");
    index.check_invariants();
    index.clear();
    assert_eq!(index.known(&chain(4, 50)), 0);
}
