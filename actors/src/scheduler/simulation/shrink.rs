//! From a scenario that fails to a small one that fails too: events are left out, many at a time and then fewer, as
//! long as it still fails (delta debugging).

use super::scenario::Scenario;

/// Runs that one reduction may take.
const RUNS_MAX: usize = 2000;

/// The smallest scenario that was found to fail. No single event of it can be left out, unless runs gave out.
pub(super) fn shrink(scenario: &Scenario, fails: impl Fn(&Scenario) -> bool) -> Scenario {
    let mut kept = scenario.numbers();
    let (mut parts, mut runs) = (2, 0);
    while kept.len() >= 2 && runs < RUNS_MAX {
        let size = kept.len().div_ceil(parts);
        // From the end: what comes late is least often the cause.
        let without = (0..kept.len()).step_by(size).rev().find_map(|from| {
            let rest = [&kept[..from], &kept[(from + size).min(kept.len())..]].concat();
            runs += 1;
            (runs <= RUNS_MAX && fails(&scenario.only(&rest))).then_some(rest)
        });
        match without {
            Some(rest) => {
                kept = rest;
                parts = (parts - 1).max(2);
            }
            None if size == 1 => break,
            None => parts = (parts * 2).min(kept.len()),
        }
    }
    scenario.only(&kept)
}
