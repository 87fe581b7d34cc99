//! What a part found: a row of the table for each case.

use serde::{Deserialize, Deserializer, Serialize};

/// One number, and which way is better.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    /// NaN where it is no number; JSON has `null` for that, and for infinities.
    #[serde(deserialize_with = "number_or_nan")]
    pub(crate) value: f64,
    /// As in "TB/s".
    pub(crate) unit: String,
    pub(crate) better: Better,
}

/// Which way a number is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Better {
    Higher,
    Lower,
}

fn number_or_nan<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// What a figure is hoped to be at least, or at most where lower is better.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Goal {
    pub(crate) value: f64,
    /// Where it comes from, as in "80 % of copy".
    pub(crate) of: String,
    /// Whether missing it fails the check: what is wrong does, what is slow does not.
    pub(crate) required: bool,
}

/// One case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// As in "linear m=8 8B down".
    pub(crate) case: String,
    pub(crate) ours: Option<Figure>,
    /// The same case in PyTorch, in the same run, in our unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peer: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) goal: Option<Goal>,
    /// What else there is to say; why a number is missing.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) note: String,
}

impl Figure {
    /// A rate.
    pub(crate) fn rate(value: f64, unit: &str) -> Figure {
        Figure { value, unit: unit.to_owned(), better: Better::Higher }
    }

    /// A time, a difference.
    pub(crate) fn cost(value: f64, unit: &str) -> Figure {
        Figure { value, unit: unit.to_owned(), better: Better::Lower }
    }

    /// How many times as good as `other`, in the same unit.
    pub(crate) fn times(&self, other: f64) -> f64 {
        match self.better {
            Better::Higher => self.value / other,
            Better::Lower => other / self.value,
        }
    }
}

impl Goal {
    /// One to be known of.
    pub(crate) fn hoped(value: f64, of: impl Into<String>) -> Goal {
        Goal { value, of: of.into(), required: false }
    }

    /// One without which the check fails.
    pub(crate) fn required(value: f64, of: impl Into<String>) -> Goal {
        Goal { value, of: of.into(), required: true }
    }
}

impl Row {
    pub(crate) fn new(case: impl Into<String>, ours: Figure) -> Row {
        Row { case: case.into(), ours: Some(ours), peer: None, goal: None, note: String::new() }
    }

    /// A case without a number.
    pub(crate) fn without(case: impl Into<String>, why: impl Into<String>) -> Row {
        Row { case: case.into(), ours: None, peer: None, goal: None, note: why.into() }
    }

    pub(crate) fn beside(mut self, peer: Option<f64>) -> Row {
        self.peer = peer;
        self
    }

    pub(crate) fn goal(mut self, goal: Goal) -> Row {
        self.goal = Some(goal);
        self
    }

    pub(crate) fn note(mut self, note: impl Into<String>) -> Row {
        self.note = note.into();
        self
    }

    /// One more thing to say, if there is any.
    pub(crate) fn also(mut self, more: &str) -> Row {
        if !self.note.is_empty() && !more.is_empty() {
            self.note.push_str("; ");
        }
        self.note.push_str(more);
        self
    }

    /// Whether the goal is met, where there is one. A case without a number meets none, nor does one that is NaN.
    pub(crate) fn met(&self) -> Option<bool> {
        let goal = self.goal.as_ref()?;
        Some(self.ours.as_ref().is_some_and(|ours| match ours.better {
            Better::Higher => ours.value >= goal.value,
            Better::Lower => ours.value <= goal.value,
        }))
    }

    /// Whether this case is one that the check fails for.
    pub(crate) fn is_wrong(&self) -> bool {
        self.goal.as_ref().is_some_and(|goal| goal.required) && self.met() == Some(false)
    }
}

/// Numbers that must be the same, as many as were compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Compared {
    /// Those that differ, and those that are missing or too many.
    pub(crate) wrong: usize,
    pub(crate) pairs: usize,
}

impl Compared {
    pub(crate) fn between<T: PartialEq>(expected: &[T], got: &[T]) -> Compared {
        let pairs = expected.iter().zip(got);
        let wrong = pairs.clone().filter(|(expected, got)| expected != got).count();
        Compared { wrong: wrong + expected.len().abs_diff(got.len()), pairs: pairs.len() }
    }

    pub(crate) fn and(self, other: Compared) -> Compared {
        Compared { wrong: self.wrong + other.wrong, pairs: self.pairs + other.pairs }
    }

    /// A case that fails the check unless all are as `of` says. Where none was compared, nothing is right.
    pub(crate) fn row(self, case: impl Into<String>, unit: &str, of: &str) -> Row {
        let wrong = if self.pairs == 0 { self.wrong.max(1) } else { self.wrong };
        Row::new(case, Figure::cost(wrong as f64, unit)).goal(Goal::required(0.0, of))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_differ_are_missing_or_too_many_are_wrong_and_so_are_none() {
        let compared = |wrong, pairs| Compared { wrong, pairs };
        assert_eq!(Compared::between(&[1, 2, 3], &[1, 2, 3]), compared(0, 3));
        assert_eq!(Compared::between(&[1, 2, 3], &[1, 7, 3]), compared(1, 3));
        assert_eq!(Compared::between(&[1, 2, 3], &[1]), compared(2, 1));
        assert_eq!(Compared::between(&[1], &[4, 5]), compared(2, 1));
        assert_eq!(compared(1, 2).and(compared(3, 4)), compared(4, 6));
        let is_wrong = |wrong, pairs| compared(wrong, pairs).row("a", "wrong", "the same").is_wrong();
        assert_eq!([is_wrong(0, 3), is_wrong(1, 3), is_wrong(0, 0)], [false, true, true]);
    }

    #[test]
    fn goals_are_met_from_the_better_side_and_never_by_nan() {
        let fast = |value| Row::new("a", Figure::rate(value, "TB/s")).goal(Goal::hoped(2.0, "half of copy"));
        assert_eq!(
            (fast(2.0).met(), fast(1.9).met(), fast(f64::NAN).met()),
            (Some(true), Some(false), Some(false))
        );
        let near =
            |value| Row::new("a", Figure::cost(value, "of tolerance")).goal(Goal::required(1.0, "tolerance"));
        assert_eq!((near(0.5).met(), near(1.5).met()), (Some(true), Some(false)));
        assert!(near(f64::NAN).is_wrong() && !near(1.0).is_wrong() && !fast(0.0).is_wrong());
        assert_eq!(Row::new("a", Figure::rate(1.0, "x")).met(), None);
    }

    #[test]
    fn a_figure_that_is_no_number_is_read_back_and_meets_no_goal() {
        for value in [f64::INFINITY, f64::NAN] {
            let row =
                Row::new("a", Figure::cost(value, "of tolerance")).goal(Goal::required(1.0, "tolerance"));
            let read: Row = serde_json::from_str(&serde_json::to_string(&row).unwrap()).unwrap();
            assert!(read.is_wrong(), "{read:?}");
        }
    }

    #[test]
    fn what_is_said_of_a_row_is_told_apart() {
        let row = |first: &str, more: &str| Row::without("a", first).also(more).note;
        assert_eq!([row("a", "b"), row("", "b"), row("a", "")], ["a; b", "b", "a"]);
    }

    #[test]
    fn a_ratio_says_how_many_times_as_good() {
        assert_eq!(Figure::rate(3.0, "TB/s").times(2.0), 1.5);
        assert_eq!(Figure::cost(2.0, "us").times(3.0), 1.5);
    }
}
