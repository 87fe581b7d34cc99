//! Pure parts of the group.

use std::time::{Duration, Instant};

use consort_parallel::ids::Rank;

use super::{
    muster::{Muster, Mustered},
    state::{
        Gather, GatherError, Incident, RESTART_WINDOW, RESTARTS_MAX, RestartBudget, SILENCE_MAX, Silence,
    },
};
use crate::{
    ids::{Epoch, Step},
    plan::StepResult,
};

fn result(step: u64, digest: u64) -> StepResult {
    StepResult { epoch: Epoch(0), step: Step(step), outputs: Vec::new(), transferred: None, digest }
}

#[test]
fn a_result_is_complete_when_all_ranks_have_reported() {
    let mut gather = Gather::new(3);
    gather.dispatched(Step(0));
    gather.dispatched(Step(1));
    assert_eq!(gather.arrived(Rank(0), result(0, 5)), Ok(None));
    assert_eq!(gather.arrived(Rank(2), result(0, 5)), Ok(None));
    // A faster rank may be a step ahead.
    assert_eq!(gather.arrived(Rank(2), result(1, 6)), Ok(None));
    assert_eq!(gather.arrived(Rank(1), result(0, 5)), Ok(Some(result(0, 5))));
}

#[test]
fn a_group_has_transferred_what_all_ranks_have_and_a_rank_that_is_behind_is_no_disagreement() {
    let transferred = |until: Option<u64>| StepResult { transferred: until.map(Step), ..result(4, 5) };
    for (ranks, least) in [([Some(4), Some(2), Some(3)], Some(2)), ([Some(4), Some(4), None], None)] {
        let mut gather = Gather::new(3);
        gather.dispatched(Step(4));
        assert_eq!(gather.arrived(Rank(0), transferred(ranks[0])), Ok(None));
        assert_eq!(gather.arrived(Rank(1), transferred(ranks[1])), Ok(None));
        assert_eq!(gather.arrived(Rank(2), transferred(ranks[2])), Ok(Some(transferred(least))));
    }
}

#[test]
fn ranks_that_disagree_are_named() {
    let mut gather = Gather::new(2);
    gather.dispatched(Step(0));
    assert_eq!(gather.arrived(Rank(0), result(0, 5)), Ok(None));
    let error = gather.arrived(Rank(1), result(0, 6)).unwrap_err();
    assert_eq!(error, GatherError::Digest { step: Step(0), rank: Rank(1), got: 6, expected: 5 });
}

#[test]
fn a_rank_reports_once_and_only_what_it_was_asked_for() {
    let mut gather = Gather::new(2);
    gather.dispatched(Step(0));
    assert_eq!(gather.arrived(Rank(0), result(0, 5)), Ok(None));
    assert!(matches!(gather.arrived(Rank(0), result(0, 5)), Err(GatherError::Unexpected { .. })));
    assert!(matches!(gather.arrived(Rank(1), result(7, 5)), Err(GatherError::Unexpected { .. })));
    assert!(matches!(gather.arrived(Rank(9), result(0, 5)), Err(GatherError::Unexpected { .. })));
}

#[test]
fn restarts_are_counted_within_a_window() {
    let start = Instant::now();
    let mut budget = RestartBudget::default();
    for attempt in 1..=RESTARTS_MAX {
        assert_eq!(budget.spend(start + Duration::from_secs(u64::from(attempt))), Some(attempt));
    }
    assert_eq!(budget.spend(start + Duration::from_secs(10)), None);
    assert_eq!(budget.spend(start + Duration::from_secs(1) + RESTART_WINDOW), Some(RESTARTS_MAX));
}

#[test]
fn ranks_lost_together_are_one_incident() {
    let mut incident = Incident::default();
    assert!(!incident.absorbs(Rank(1)) && incident.may_restart(), "the first loss is counted");
    assert!(incident.absorbs(Rank(0)));
    assert!(!incident.absorbs(Rank(1)), "its successor was lost too");
    incident.end();
    assert!(!incident.absorbs(Rank(0)));
}

#[test]
fn the_ranks_that_miss_the_oldest_step_are_known() {
    let mut gather = Gather::new(3);
    assert_eq!(gather.missing(), None);
    gather.dispatched(Step(0));
    gather.dispatched(Step(1));
    for (rank, step) in [(1, 0), (1, 1), (0, 1)] {
        assert_eq!(gather.arrived(Rank(rank), result(step, 5)), Ok(None));
    }
    assert_eq!(gather.missing(), Some((Step(0), vec![Rank(0), Rank(2)])));
}

#[test]
fn silence_counts_from_the_last_sign_of_life() {
    let mut now = Instant::now();
    let mut silence = Silence::new(SILENCE_MAX, now);
    let period = silence.check_period();
    assert!(period <= Duration::from_secs(1));
    let looks = SILENCE_MAX.as_millis() / period.as_millis();
    let mut look = |silence: &mut Silence| {
        now += period;
        silence.exceeded(now)
    };
    for _ in 1..looks {
        assert_eq!(look(&mut silence), None);
    }
    assert_eq!(look(&mut silence), Some(SILENCE_MAX));
    silence.broken(now);
    assert_eq!(silence.exceeded(now + period), None);
}

#[test]
fn time_in_which_the_process_stood_still_is_no_silence() {
    let start = Instant::now();
    let mut silence = Silence::new(SILENCE_MAX, start);
    assert_eq!(silence.exceeded(start + 10 * SILENCE_MAX), None);
    assert_eq!(silence.exceeded(start + 10 * SILENCE_MAX + silence.check_period()), None);
}

#[test]
fn restarts_that_never_play_are_bounded_however_long_they_take() {
    let (mut incident, mut budget) = (Incident::default(), RestartBudget::default());
    let mut now = Instant::now();
    for _ in 0..RESTARTS_MAX {
        assert!(incident.may_restart());
        assert_eq!(budget.spend(now), Some(1), "each falls out of the window before the next");
        now += RESTART_WINDOW;
    }
    assert!(!incident.may_restart());
    incident.end();
    assert!(incident.may_restart(), "a group that played in between starts counting anew");
}

#[test]
fn an_epoch_begins_when_all_ranks_have_met() {
    let mut muster = Muster::new(3);
    for rank in 0..3 {
        assert_eq!(muster.missing(), (rank..3).map(Rank).collect::<Vec<_>>(), "who waits is not waited for");
        muster.built(Rank(rank));
    }
    assert_eq!(muster.missing(), [Rank(0), Rank(1), Rank(2)], "any of them may be what keeps the others");
    assert_eq!((muster.joined(Rank(1)), muster.joined(Rank(0))), (None, None));
    assert_eq!(muster.missing(), [Rank(2)]);
    assert_eq!(muster.joined(Rank(2)), Some(Mustered::All));
}

#[test]
fn ranks_sent_away_wait_for_the_one_that_has_not_answered() {
    let mut muster = Muster::new(3);
    (0..3).for_each(|rank| muster.built(Rank(rank)));
    assert_eq!(
        muster.aborted(Rank(2), "rank 1 left".into()),
        None,
        "rank 1 failed, and its end will be told"
    );
    assert_eq!(muster.joined(Rank(0)), None);
    let aborted = muster.aborted(Rank(1), "so it is".into());
    assert_eq!(aborted, Some(Mustered::Aborted(Rank(2), "rank 1 left".into())), "nobody failed");
}
