//! Pure modules stay pure: decisions that simulations replay know no clock, lock, channel or unordered container.

use super::{Findings, source::Source};

/// Folders (ending in `/`) and files whose values are plain; tests beside them may do as they like.
pub(super) const PURE: &[&str] = &[
    "actors/src/config.rs",
    "actors/src/order.rs",
    "actors/src/plan.rs",
    "actors/src/prefix.rs",
    "actors/src/router/index.rs",
    "actors/src/router/state.rs",
    "actors/src/router/state/",
    "actors/src/router/work.rs",
    "actors/src/scheduler/admission.rs",
    "actors/src/scheduler/host_pool.rs",
    "actors/src/scheduler/invariants.rs",
    "actors/src/scheduler/planning.rs",
    "actors/src/scheduler/pool.rs",
    "actors/src/scheduler/sequence.rs",
    "actors/src/scheduler/sharing.rs",
    "actors/src/scheduler/slots.rs",
    "actors/src/scheduler/state.rs",
    "actors/src/scheduler/tiers.rs",
    "kernels/src/sampling/",
    "parallel/src/partition.rs",
    "parallel/src/plan/",
];

/// Words that have no place there, and why.
const BANNED: &[(&str, &str)] = &[
    ("Instant", "time comes in as a parameter"),
    ("SystemTime", "time comes in as a parameter"),
    ("tokio", "decisions are made without waiting"),
    ("async", "decisions are made without waiting"),
    ("Mutex", "one owner calls with &mut self"),
    ("RwLock", "one owner calls with &mut self"),
    ("HashMap", "iteration order shows in the outcome: BTreeMap"),
    ("HashSet", "iteration order shows in the outcome: BTreeSet"),
];

pub(super) fn check(sources: &[Source], pure: &[&str]) -> Findings {
    let mut found = Findings::default();
    for part in pure {
        let inside = |path: &str| path == *part || part.ends_with('/') && path.starts_with(*part);
        let mut sources = sources.iter().filter(|source| inside(&source.path)).peekable();
        if sources.peek().is_none() {
            found
                .errors
                .push(format!("{part} is named as pure in xtask/src/tidy/pure.rs and does not exist"));
        }
        for source in sources.filter(|source| !source.is_test()) {
            for (word, reason) in BANNED {
                if let Some(line) = source.line_of_word(word) {
                    found.errors.push(format!("{}:{line}: `{word}` in a pure module: {reason}", source.path));
                }
            }
        }
    }
    found
}

#[cfg(test)]
mod tests;
