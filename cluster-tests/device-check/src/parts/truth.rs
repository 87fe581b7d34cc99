//! How far results are from the truth.

use crate::figures::{Figure, Goal, Row};

/// What an error counts as that is infinite or no number: JSON has neither.
const BEYOND: f64 = 1e30;

/// The largest of several errors, each a share of what is tolerated, and where it was.
#[derive(Default)]
pub(super) struct Worst {
    seen: bool,
    error: f64,
    place: String,
}

impl Worst {
    pub(super) fn see(&mut self, error: f64, place: impl Into<String>) {
        let error = if error.is_finite() { error } else { BEYOND };
        if !self.seen || error > self.error {
            (self.error, self.place) = (error, place.into());
        }
        self.seen = true;
    }

    /// A row without which the check fails. Where nothing was seen, nothing is right.
    pub(super) fn row(self, case: impl Into<String>) -> Row {
        let error = if self.seen { self.error } else { BEYOND };
        let row = Row::new(case, Figure::cost(error, "of tolerance"));
        row.goal(Goal::required(1.0, "tolerance")).note(self.place)
    }
}

/// The largest of several errors; those that are no numbers are beyond all others.
pub(super) fn largest(errors: impl Iterator<Item = f64>) -> f64 {
    errors.map(|error| if error.is_finite() { error } else { BEYOND }).fold(0.0, f64::max)
}

/// `count` numbers below `len`, the first and the last among them; all where there are fewer.
pub(super) fn spread(len: usize, count: usize) -> Vec<usize> {
    if len <= count {
        (0..len).collect()
    } else {
        (0..count).map(|at| at * (len - 1) / (count - 1)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_and_what_was_never_compared_is_wrong() {
        let mut worst = Worst::default();
        assert!(Worst::default().row("none").is_wrong());
        worst.see(0.25, "a");
        worst.see(0.75, "b");
        worst.see(0.5, "c");
        let row = worst.row("some");
        assert_eq!(
            (row.is_wrong(), row.note.as_str(), row.ours.map(|ours| ours.value)),
            (false, "b", Some(0.75))
        );
        for error in [f64::NAN, f64::INFINITY, largest([0.1, f64::NAN, 0.2].into_iter())] {
            let mut worst = Worst::default();
            worst.see(error, "here");
            worst.see(0.5, "there");
            let row = worst.row("no number");
            let written = serde_json::to_string(&row).unwrap();
            assert!(serde_json::from_str::<Row>(&written).unwrap().is_wrong());
        }
    }

    #[test]
    fn numbers_are_spread_from_the_first_to_the_last() {
        assert_eq!(spread(3, 8), [0, 1, 2]);
        assert_eq!(spread(513, 5), [0, 128, 256, 384, 512]);
    }
}
