//! Rules that many keys share.

use super::super::{
    error::Violations,
    raw::{Leaf, RawBytes},
    units,
};

pub(super) struct Fields {
    pub(super) violations: Violations,
}

impl Fields {
    /// A number from 1 to `max`. A broken rule is noted, and the default stands in for the rest of the
    /// checks.
    pub(super) fn count(&mut self, key: &str, leaf: &Leaf<i64>, default: i64, max: i64) -> usize {
        let value = self.optional_count(key, leaf, max);
        value.unwrap_or_else(|| usize::try_from(default.clamp(1, max)).unwrap_or(1))
    }

    /// A number from 1 to `max`, where one is given.
    pub(super) fn optional_count(&mut self, key: &str, leaf: &Leaf<i64>, max: i64) -> Option<usize> {
        let given = leaf.as_ref()?;
        if (1..=max).contains(&given.value) {
            return usize::try_from(given.value).ok();
        }
        let problem = format!("{} is out of range", given.value);
        self.violations.add(key, &given.origin, problem, format!("give a whole number from 1 to {max}"));
        None
    }

    /// An amount of memory from 1 byte to `max`, where one is given.
    pub(super) fn bytes(&mut self, key: &str, leaf: &Leaf<RawBytes>, max: u64) -> Option<u64> {
        let given = leaf.as_ref()?;
        let remedy = "give a positive number of bytes, or text with a unit such as \"512MiB\" or \"2GiB\"";
        match units::bytes(&given.value) {
            Ok(0) => self.violations.add(key, &given.origin, "it is 0", remedy),
            Ok(bytes) if bytes > max => {
                let problem = format!("{bytes} bytes are more than {max}");
                self.violations.add(key, &given.origin, problem, format!("give at most {max} bytes"));
            }
            Ok(bytes) => return Some(bytes),
            Err(problem) => self.violations.add(key, &given.origin, problem, remedy),
        }
        None
    }
}
