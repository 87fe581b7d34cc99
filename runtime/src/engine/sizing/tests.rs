use consort_parallel::config::GenerationDefaults;

use super::{sane, threads_per_rank};

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
