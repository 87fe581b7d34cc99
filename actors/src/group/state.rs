//! Pure parts of the group: gathering results, and how often it may restart.

use std::{
    collections::{BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use consort_parallel::ids::Rank;

use crate::{ids::Step, plan::StepResult};

/// Restarts within [`RESTART_WINDOW`] before the group is given up: a fault that recurs this fast will not go away
/// by itself, and an orchestrator should see the failure.
pub(crate) const RESTARTS_MAX: u32 = 5;

/// See [`RESTARTS_MAX`].
pub(crate) const RESTART_WINDOW: Duration = Duration::from_secs(60);

/// How long the ranks may be silent while the group waits for a step or for a restart.
///
/// Within a step there is no sign of life, and the longest step must not be taken for a hang: thousands of prompt
/// tokens through tens of billions of parameters keep a few cores busy for minutes. A rank that is building reports
/// progress in between. Silence after a loss of this kind ends the group: a thread cannot be killed, so what a hung
/// rank holds cannot be had back.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(30 * 60);

/// Looks per [`SILENCE_MAX`], and the longest time between two.
const SILENCE_CHECKS: u32 = 16;
const SILENCE_CHECK_PERIOD_MAX: Duration = Duration::from_secs(1);

/// When the group last heard what it waits for.
#[derive(Debug)]
pub(super) struct Silence {
    limit: Duration,
    silent: Duration,
    looked: Instant,
}

impl Silence {
    pub(super) fn new(limit: Duration, now: Instant) -> Self {
        Self { limit, silent: Duration::ZERO, looked: now }
    }

    /// How often to look.
    pub(super) fn check_period(&self) -> Duration {
        (self.limit / SILENCE_CHECKS).clamp(Duration::from_millis(1), SILENCE_CHECK_PERIOD_MAX)
    }

    /// A sign of life, or nothing to wait for.
    pub(super) fn broken(&mut self, now: Instant) {
        (self.silent, self.looked) = (Duration::ZERO, now);
    }

    /// The limit, when it has passed. Time in which nobody looked counts as two periods at most: a process that was
    /// stopped for an hour has not waited for an hour.
    pub(super) fn exceeded(&mut self, now: Instant) -> Option<Duration> {
        let passed = now.saturating_duration_since(self.looked).min(2 * self.check_period());
        (self.silent, self.looked) = (self.silent + passed, now);
        (self.silent >= self.limit).then_some(self.limit)
    }
}

/// Remembers restarts, and says when there were too many.
#[derive(Debug, Default)]
pub(crate) struct RestartBudget {
    spent: VecDeque<Instant>,
}

/// What happened since the group last played. One fault often ends several ranks, one after another: that is one
/// incident and costs one restart, unless a rank that was already replaced is lost again.
#[derive(Debug, Default)]
pub(super) struct Incident {
    lost: BTreeSet<Rank>,
    restarts: u32,
}

impl Incident {
    /// Whether this loss is one more of an incident that was already counted.
    pub(super) fn absorbs(&mut self, rank: Rank) -> bool {
        let known = self.restarts > 0;
        self.lost.insert(rank) && known
    }

    /// Counts one more restart, unless there were [`RESTARTS_MAX`] already. The window of [`RestartBudget`] does not
    /// matter here: a group that takes long to load, and fails at its end every time, is not to be loaded for ever.
    pub(super) fn may_restart(&mut self) -> bool {
        self.restarts += 1;
        self.restarts <= RESTARTS_MAX
    }

    /// The group plays again.
    pub(super) fn end(&mut self) {
        *self = Self::default();
    }
}

impl RestartBudget {
    /// Spends one restart at `now`: its number within the window, or `None` when the budget is exhausted.
    pub(crate) fn spend(&mut self, now: Instant) -> Option<u32> {
        while self.spent.front().is_some_and(|&then| now.saturating_duration_since(then) >= RESTART_WINDOW) {
            self.spent.pop_front();
        }
        if self.spent.len() >= RESTARTS_MAX as usize {
            return None;
        }
        self.spent.push_back(now);
        Some(self.spent.len() as u32)
    }

    /// The number of the restart that was last counted.
    pub(crate) fn attempt(&self) -> u32 {
        self.spent.len() as u32
    }
}

/// Why results of the ranks do not make a result of the group.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum GatherError {
    #[error("ranks drew different tokens in {step}: {rank} has digest {got:#018x}, others {expected:#018x}")]
    Digest { step: Step, rank: Rank, got: u64, expected: u64 },
    #[error("{rank} reported {step}, which it was not asked for or has reported already")]
    Unexpected { step: Step, rank: Rank },
}

/// A step that not all ranks have reported.
#[derive(Debug)]
struct Gathering {
    step: Step,
    reported: Vec<bool>,
    digest: Option<u64>,
    lead: Option<StepResult>,
    /// The least of what the ranks that reported have transferred.
    transferred: Option<Option<Step>>,
}

/// Results of one epoch, gathered per step.
#[derive(Debug)]
pub(super) struct Gather {
    ranks: usize,
    open: VecDeque<Gathering>,
}

impl Gather {
    pub(super) fn new(ranks: usize) -> Self {
        Self { ranks, open: VecDeque::new() }
    }

    /// A plan was sent to every rank.
    pub(super) fn dispatched(&mut self, step: Step) {
        self.open.push_back(Gathering {
            step,
            reported: vec![false; self.ranks],
            digest: None,
            lead: None,
            transferred: None,
        });
    }

    /// The oldest step that was not gathered, and who is missing.
    pub(super) fn missing(&self) -> Option<(Step, Vec<Rank>)> {
        self.open.front().map(|oldest| (oldest.step, absent(&oldest.reported)))
    }

    /// A rank reported. Returns rank 0's result once all ranks have, in agreement.
    pub(super) fn arrived(
        &mut self,
        rank: Rank,
        result: StepResult,
    ) -> Result<Option<StepResult>, GatherError> {
        let step = result.step;
        let unexpected = GatherError::Unexpected { step, rank };
        let Some(index) = self.open.iter().position(|gathering| gathering.step == step) else {
            return Err(unexpected);
        };
        let gathering = &mut self.open[index];
        match gathering.reported.get_mut(rank.index()) {
            Some(reported) if !*reported => *reported = true,
            _ => return Err(unexpected),
        }
        let expected = *gathering.digest.get_or_insert(result.digest);
        if expected != result.digest {
            return Err(GatherError::Digest { step, rank, got: result.digest, expected });
        }
        // Which ranks are ahead with their transfers is no disagreement. None comes before every step.
        let least = gathering.transferred.map_or(result.transferred, |least| least.min(result.transferred));
        gathering.transferred = Some(least);
        if rank == Rank(0) {
            gathering.lead = Some(result);
        }
        if gathering.reported.contains(&false) {
            return Ok(None);
        }
        let gathered = self.open.remove(index).and_then(|gathering| gathering.lead);
        Ok(gathered.map(|lead| StepResult { transferred: least, ..lead }))
    }
}

/// Ranks that have not done something yet.
fn absent(done: &[bool]) -> Vec<Rank> {
    (0..).map(Rank).zip(done).filter(|(_, done)| !**done).map(|(rank, _)| rank).collect()
}

/// Names for a message.
pub(super) fn names(ranks: &[Rank]) -> String {
    ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
