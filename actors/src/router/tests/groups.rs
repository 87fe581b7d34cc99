//! What the choices of a request weigh when one of them ends, and when one takes nothing over.

use super::*;

/// Ten thousand tokens in 625 pages, with keys and without.
fn long() -> [WorkShape; 2] {
    [plain(10_000), prompt(1, 9984, 0, 16)]
}

fn of_eight() -> Router {
    router(RouterConfig { max_num_seqs: 8, ..CONFIG })
}

#[test]
fn when_the_first_choice_ends_while_it_waits_the_next_one_weighs_as_much() {
    for shape in long() {
        let mut router = of_eight();
        place_at_zero(&mut router, &[0, 1, 2], &shape);
        router.observe(ZERO, 20);
        router.observe(ONE, 20);
        assert_eq!(router.rebalance(), [], "there is no room anywhere");
        end(&mut router, 0);
        assert_eq!(router.load(ZERO), 2 * OPEN_REQUEST_TOKENS + 10_001);
        router.observe(ZERO, 631);
        assert!(router.has_room(ZERO, &plain(80), 1) && !router.has_room(ZERO, &plain(81), 1));
        router.observe(ZERO, 20);
        router.observe(ONE, 1000);
        assert_eq!(router.rebalance(), [withdrawal(&[1, 2])]);
        // Where they go, as much is kept for them when once more the first of them ends.
        end(&mut router, 1);
        router.observe(ONE, 630);
        assert!(router.has_room(ONE, &plain(80), 1) && !router.has_room(ONE, &plain(81), 1));
        assert_eq!(router.given_back(&ids(&[2])), Some(ONE));
        router.check_invariants();
        assert_eq!((router.load(ZERO), router.load(ONE)), (0, OPEN_REQUEST_TOKENS + 10_000));
    }
}

#[test]
fn when_another_choice_ends_the_first_one_weighs_what_it_did() {
    for shape in long() {
        let mut router = of_eight();
        place_at_zero(&mut router, &[0, 1, 2], &shape);
        end(&mut router, 1);
        assert_eq!(router.load(ZERO), 2 * OPEN_REQUEST_TOKENS + 10_001);
    }
}

#[test]
fn when_the_choice_that_computes_the_prompt_ends_another_one_computes_it() {
    for shape in long() {
        let mut router = of_eight();
        place_at_zero(&mut router, &[0, 1, 2], &shape);
        router.started(SequenceId(0));
        router.started(SequenceId(1));
        end(&mut router, 0);
        assert_eq!(router.load(ZERO), 2 * OPEN_REQUEST_TOKENS + 10_001);
        router.prefilled(SequenceId(1));
        router.check_invariants();
        assert_eq!(router.load(ZERO), 2 * OPEN_REQUEST_TOKENS + 1);
        // The prompt is there as long as one of them is.
        router.started(SequenceId(2));
        end(&mut router, 1);
        assert_eq!(router.load(ZERO), OPEN_REQUEST_TOKENS + 1);
    }
}

#[test]
fn a_choice_that_begins_after_all_others_ended_finds_what_is_cached_and_nothing_else() {
    for (shape, uncached) in long().into_iter().zip([10_000, 1]) {
        let mut router = of_eight();
        place_at_zero(&mut router, &[0, 1], &shape);
        router.started(SequenceId(0));
        router.prefilled(SequenceId(0));
        end(&mut router, 0);
        assert_eq!(router.load(ZERO), OPEN_REQUEST_TOKENS + uncached);
    }
}

#[test]
fn who_counted_on_a_prompt_that_nobody_computes_is_moved() {
    let mut router = of_eight();
    let shape = |own| prompt(1, 1600, own, 1);
    place_at_zero(&mut router, &[0], &shape(0));
    place_at_zero(&mut router, &[1], &shape(1));
    router.observe(ZERO, 20);
    router.observe(ONE, 0);
    assert_eq!(router.rebalance(), []);
    end(&mut router, 0);
    router.observe(ONE, 1000);
    assert_eq!(router.rebalance(), [withdrawal(&[1])], "its hundred blocks are not there");
    // Where the prompt was begun, it is waited for.
    let mut router = of_eight();
    place_at_zero(&mut router, &[0], &shape(0));
    router.started(SequenceId(0));
    router.prefilled(SequenceId(0));
    place_at_zero(&mut router, &[1], &shape(1));
    router.observe(ZERO, 20);
    assert_eq!(router.rebalance(), []);
}

#[test]
fn who_computes_all_of_its_prompt_goes_by_load_alone_and_weighs_all_of_it() {
    let mut router = of_eight();
    assert_eq!(run(&mut router, 0, &plain(10)), ZERO);
    assert_eq!(run(&mut router, 1, &prompt(1, 1600, 0, 1)), ONE);
    assert_eq!(run(&mut router, 2, &prompt(1, 1600, 1, 1)), ONE);
    let whole = WorkShape { is_whole: true, ..prompt(1, 1600, 2, 1) };
    router.observe(ONE, 100);
    assert!(!router.has_room(ONE, &whole, 1), "a hundred and one blocks");
    assert_eq!(router.place(&ids(&[3, 4]), &whole), Some(ZERO), "where less runs");
    router.check_invariants();
    // Another choice takes over what the first one computes.
    assert_eq!(router.load(ZERO), 3 * OPEN_REQUEST_TOKENS + 1601 + 1);
    // And computes the prompt in its place, but for what is there.
    end(&mut router, 3);
    assert_eq!(router.load(ZERO), 2 * OPEN_REQUEST_TOKENS + 1601);
    assert_eq!(place(&mut router, 5, &whole), ZERO);
    assert_eq!(router.load(ZERO), 3 * OPEN_REQUEST_TOKENS + 2 * 1601);
}

#[test]
fn who_computes_all_of_its_prompt_does_not_wait_where_its_prefix_is() {
    let mut router = of_eight();
    assert_eq!(run(&mut router, 0, &prompt(1, 1600, 0, 1)), ZERO);
    place_at_zero(&mut router, &[1], &WorkShape { is_whole: true, ..prompt(1, 1600, 1, 1) });
    router.observe(ZERO, 101);
    assert_eq!(router.rebalance(), []);
    router.observe(ZERO, 100);
    assert_eq!(router.rebalance(), [withdrawal(&[1])]);
}
