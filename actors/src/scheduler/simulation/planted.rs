//! Every mistake of the list is found within a few seeds, under which the scheduler as it is does nothing wrong.

use super::{
    facts,
    runs::{Failure, outcome},
    workload,
};
use crate::scheduler::bugs::{Bug, plant};

/// Seeds that may be tried until a mistake shows.
const SEEDS_MAX: u64 = 400;

/// Plants a mistake into this thread's schedulers for as long as this lives.
struct Planted;

impl Planted {
    fn new(bug: Bug) -> Self {
        plant(Some(bug));
        Self
    }
}

impl Drop for Planted {
    fn drop(&mut self) {
        plant(None);
    }
}

/// The first seed that shows a mistake, and as what.
fn find(bug: Bug) -> Option<(u64, String)> {
    let _planted = Planted::new(bug);
    (0..SEEDS_MAX).find_map(|seed| Some((seed, outcome(&workload::scenario(seed)).err()?)))
}

#[test]
fn every_planted_bug_is_found_and_without_it_the_same_seeds_pass() {
    let half = Bug::ALL.len() / 2;
    let found = std::thread::scope(|scope| {
        let (some, others) = Bug::ALL.split_at(half);
        let all = |bugs: &'static [Bug]| move || bugs.iter().map(|&bug| (bug, find(bug))).collect::<Vec<_>>();
        let [some, others] = [some, others].map(|bugs| scope.spawn(all(bugs)));
        let mut found = some.join().expect("its panics are caught");
        found.extend(others.join().expect("its panics are caught"));
        found
    });
    let mut last = 0;
    for (bug, found) in &found {
        match found {
            Some((seed, message)) => {
                last = last.max(*seed);
                println!("{bug:?}: seed {seed}: {}", message.lines().next().unwrap_or_default());
            }
            None => println!("{bug:?}: not found"),
        }
    }
    let missed: Vec<Bug> = found.iter().filter(|(_, found)| found.is_none()).map(|(bug, _)| *bug).collect();
    assert!(missed.is_empty(), "not found within {SEEDS_MAX} seeds: {missed:?}");
    for seed in 0..=last {
        let passed = outcome(&workload::scenario(seed));
        assert!(passed.is_ok(), "seed {seed} fails without any bug: {passed:?}");
    }
}

#[test]
fn a_failure_shrinks_to_a_few_events_and_replays_from_its_seed() {
    for bug in [Bug::LeavesSaltOut, Bug::PreemptsFirst, Bug::LeaksWhenPromised] {
        let (seed, message) = find(bug).expect("it is found");
        let _planted = Planted::new(bug);
        let scenario = workload::scenario(seed);
        let failure = Failure::of(seed, &scenario, message);
        let (all, few) = (scenario.events.len(), failure.shrunk.events.len());
        println!("{bug:?}: {all} events became {few}");
        assert!(few * 8 < all && few <= 12, "{failure}");
        // As somebody would do with what it prints.
        let again = workload::scenario(seed).only(&failure.shrunk.numbers());
        assert!(outcome(&again).is_err());
        // No single event of it can be left out.
        let numbers = failure.shrunk.numbers();
        for left_out in &numbers {
            let rest: Vec<usize> = numbers.iter().copied().filter(|number| number != left_out).collect();
            assert!(outcome(&scenario.only(&rest)).is_ok(), "{left_out} is not needed: {failure}");
        }
    }
}

#[test]
fn patience_that_starves_a_prompt_is_found_where_every_page_counts() {
    let scenarios = facts::prompts_beside_decodes();
    let wrong = || scenarios.iter().filter(|scenario| outcome(scenario).is_err()).count();
    assert_eq!(wrong(), 0, "without it nothing is wrong");
    let _planted = Planted::new(Bug::IsPatientForEver);
    println!("{} of {} scenarios show it", wrong(), scenarios.len());
    assert!(wrong() > 0);
}
