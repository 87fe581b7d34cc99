//! How far the ranks of an epoch have come in joining it. A plain value.

use consort_parallel::ids::Rank;

/// One rank's way into an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It loads, or has not heard of the epoch.
    Awaited,
    /// It has its weights, and waits until all others do.
    Waiting,
    /// It has met the others.
    Joined,
    /// It was sent away because the collective was aborted, and is sound.
    Freed,
}

/// All ranks of one epoch on their way.
#[derive(Debug)]
pub(super) struct Muster {
    standings: Vec<Standing>,
    /// What the first rank that was sent away said.
    aborted: Option<(Rank, String)>,
}

/// What came of a muster to which every rank has answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Mustered {
    /// The epoch can begin.
    All,
    /// All ranks are sound, and nobody ended; yet the collective was aborted, as this one found.
    Aborted(Rank, String),
}

impl Muster {
    pub(super) fn new(ranks: usize) -> Self {
        Self { standings: vec![Standing::Awaited; ranks], aborted: None }
    }

    /// A rank waits for the others.
    pub(super) fn built(&mut self, rank: Rank) {
        self.stands(rank, Standing::Waiting);
    }

    /// A rank has met the others. Says what came of it all, if it was the last.
    pub(super) fn joined(&mut self, rank: Rank) -> Option<Mustered> {
        self.stands(rank, Standing::Joined);
        self.outcome()
    }

    /// A sound rank could not meet the others. Expected where one of them failed: that one never answers, and its end
    /// says more. Says what came of it all, if it was the last.
    pub(super) fn aborted(&mut self, rank: Rank, reason: String) -> Option<Mustered> {
        self.stands(rank, Standing::Freed);
        self.aborted.get_or_insert((rank, reason));
        self.outcome()
    }

    /// Whom everybody waits for: those without weights, and where all have theirs, those that have not met the others.
    pub(super) fn missing(&self) -> Vec<Rank> {
        let awaited = self.of(Standing::Awaited);
        if awaited.is_empty() { self.of(Standing::Waiting) } else { awaited }
    }

    fn outcome(&mut self) -> Option<Mustered> {
        if !self.missing().is_empty() {
            return None;
        }
        Some(self.aborted.take().map_or(Mustered::All, |(rank, reason)| Mustered::Aborted(rank, reason)))
    }

    fn stands(&mut self, rank: Rank, standing: Standing) {
        if let Some(of_rank) = self.standings.get_mut(rank.index()) {
            *of_rank = standing;
        }
    }

    fn of(&self, standing: Standing) -> Vec<Rank> {
        (0..)
            .map(Rank)
            .zip(&self.standings)
            .filter(|(_, of)| **of == standing)
            .map(|(rank, _)| rank)
            .collect()
    }
}
