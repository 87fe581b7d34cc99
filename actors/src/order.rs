//! The order of service, which is one for all replicas: where a request stands among all that were accepted.

use crate::ids::SequenceId;

/// When a request is due: when it came, later by so many milliseconds for each point of priority. So waiting makes up
/// for priority, and a late request comes before an early one only within a bounded time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Due {
    ms: i64,
}

impl Due {
    /// Of a request that came at `arrived_ms`, which counts from any fixed moment.
    pub fn new(arrived_ms: u64, priority: i32, aging_ms: u64) -> Self {
        let aging_ms = i64::try_from(aging_ms).unwrap_or(i64::MAX);
        let arrived_ms = i64::try_from(arrived_ms).unwrap_or(i64::MAX);
        Self { ms: arrived_ms.saturating_add(i64::from(priority).saturating_mul(aging_ms)) }
    }
}

/// Where a sequence stands in the order of service, which never changes while it lives, wherever it is moved. Of those
/// that are due together, the one that was accepted first comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// When it is due.
    pub due: Due,
    /// Which.
    pub sequence: SequenceId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_makes_up_for_priority_and_the_order_of_acceptance_breaks_ties() {
        let place = |arrived_ms, priority, sequence| Place {
            due: Due::new(arrived_ms, priority, 100),
            sequence: SequenceId(sequence),
        };
        assert!(place(0, 2, 0) > place(199, 0, 1), "the better one comes first within 200 ms");
        assert!(place(0, 2, 0) < place(200, 0, 1), "and no longer");
        assert!(place(0, 0, 0) < place(0, 0, 1));
        assert!(place(5, -1, 7) < place(0, 0, 1));
    }

    #[test]
    fn without_aging_only_arrival_counts_and_extremes_stay_in_order() {
        let due = |arrived_ms, priority| Due::new(arrived_ms, priority, 0);
        assert!(due(1, i32::MIN) > due(0, i32::MAX));
        let most = Due::new(u64::MAX, i32::MAX, u64::MAX);
        let least = Due::new(0, i32::MIN, u64::MAX);
        assert!(least < Due::new(0, 0, u64::MAX) && Due::new(0, 0, u64::MAX) < most);
    }
}
