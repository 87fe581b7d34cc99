use consort_parallel::config::GenerationDefaults;

use super::{CacheTooSmall, KvDemand, sane, threads_per_rank};

fn demand(given_bytes: Option<u64>) -> KvDemand {
    KvDemand {
        given_bytes,
        card_blocks: None,
        block_bytes: 1000,
        block_size: 16,
        groups: 1,
        max_model_len: 100,
        max_num_seqs: 4,
    }
}

#[test]
fn given_memory_is_used_whole() {
    assert_eq!(demand(Some(50_999)).num_blocks().expect("fits"), 50);
}

#[test]
fn memory_for_exactly_one_sequence_is_enough() {
    assert_eq!(demand(Some(7_000)).num_blocks().expect("fits"), 7);
}

#[test]
fn cards_give_what_is_left_on_them_unless_less_is_asked_for_or_can_be_used() {
    let on_cards = |blocks, given| KvDemand { card_blocks: Some(blocks), ..demand(given) };
    assert_eq!(on_cards(20, None).num_blocks().expect("fits"), 20);
    assert_eq!(on_cards(1000, None).num_blocks().expect("fits"), 28, "all that four sequences use");
    assert_eq!(on_cards(20, Some(9_000)).num_blocks().expect("fits"), 9);
    match on_cards(6, None).num_blocks() {
        Err(small) => assert_eq!((small.given_bytes, small.given_blocks, small.fitting_len), (6_000, 6, 96)),
        fits => panic!("must be refused, got {fits:?}"),
    }
}

#[test]
fn less_than_one_sequence_is_refused_with_what_would_fit() {
    match demand(Some(6_999)).num_blocks() {
        Err(CacheTooSmall { given_blocks, needed_blocks, needed_bytes, fitting_len, .. }) => {
            assert_eq!((given_blocks, needed_blocks, needed_bytes, fitting_len), (6, 7, 7_000, 96));
        }
        other => panic!("must be refused, got {other:?}"),
    }
}

#[test]
fn a_sequence_takes_a_block_in_each_group_of_layers() {
    let of_three = |given| KvDemand { groups: 3, ..demand(given) };
    assert_eq!(of_three(Some(21_000)).num_blocks().expect("fits"), 21);
    match of_three(Some(20_999)).num_blocks() {
        Err(small) => {
            assert_eq!((small.given_blocks, small.needed_blocks, small.fitting_len), (20, 21, 6 * 16));
        }
        fits => panic!("must be refused, got {fits:?}"),
    }
    assert_eq!(of_three(None).num_blocks().expect("fits"), 4 * 21);
}

#[test]
fn by_default_no_more_is_taken_than_all_sequences_could_use() {
    assert_eq!(demand(None).num_blocks().expect("fits"), 28);
    let many = KvDemand { max_num_seqs: usize::MAX, ..demand(None) };
    assert_eq!(many.num_blocks().expect("fits"), (1 << 30) / 1000);
}

#[test]
fn a_context_too_long_for_the_default_is_refused_and_not_silently_paid_for() {
    let long = KvDemand { max_model_len: 1 << 40, ..demand(None) };
    assert!(matches!(long.num_blocks(), Err(CacheTooSmall { .. })));
}

#[test]
fn cores_are_shared_out_and_every_rank_has_a_thread() {
    assert_eq!(threads_per_rank(None, 8, 3), 2);
    assert_eq!(threads_per_rank(None, 2, 3), 1);
    assert_eq!(threads_per_rank(Some(5), 2, 3), 5);
}

#[test]
fn defaults_that_no_request_could_have_are_ignored() {
    let bad = GenerationDefaults {
        temperature: Some(5.0),
        top_p: Some(0.0),
        min_p: Some(f32::NAN),
        top_k: Some(3),
        repetition_penalty: None,
    };
    let good = GenerationDefaults { top_k: Some(3), ..GenerationDefaults::default() };
    assert_eq!(sane(&bad), good);
}

#[test]
fn a_repetition_penalty_is_kept_where_a_request_could_have_it() {
    for (penalty, kept) in [(1.1, Some(1.1)), (1.0, Some(1.0)), (1000.0, None), (0.001, None)] {
        let defaults =
            GenerationDefaults { repetition_penalty: Some(penalty), ..GenerationDefaults::default() };
        assert_eq!(sane(&defaults).repetition_penalty, kept);
    }
}
