//! Faults that strike the ranks of a real engine, when a test says so.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use consort_actors::{
    Epoch, ProgressReporter, RankShare, Rejoined, ShardError, ShardExecutor, ShardFactory,
    plan::{StepPlan, StepResult},
};
use consort_parallel::{collective::Collective, ids::Rank};

/// What failing rebuilds say.
pub(crate) const REBUILD_FAILURE: &str = "the injected disk is gone";
/// The rank that is struck.
const STRUCK: Rank = Rank(1);
/// Longest time that a rebuild waits for its test.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// What becomes of ranks that are built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Rebuild {
    /// Nothing special.
    #[default]
    Succeed,
    /// They take until the test says otherwise.
    Wait,
    /// They fail.
    Fail,
}

/// Handle of the faults of one engine; give it to [`crate::EngineBuilder::faults`]. Strikes nothing until told.
#[derive(Clone)]
pub(crate) struct Faults {
    steps_left: Arc<AtomicI64>,
    rebuild: Arc<Mutex<Rebuild>>,
}

impl Default for Faults {
    fn default() -> Self {
        Self { steps_left: Arc::new(AtomicI64::new(i64::MAX)), rebuild: Arc::default() }
    }
}

impl Faults {
    /// Rank 1 panics once, in the step that follows `steps` more.
    pub(crate) fn panic_at_step(&self, steps: i64) {
        self.steps_left.store(steps, Ordering::SeqCst);
    }

    pub(crate) fn on_rebuild(&self, outcome: Rebuild) {
        *self.rebuild.lock().unwrap_or_else(PoisonError::into_inner) = outcome;
    }

    pub(crate) fn wrap(&self, inner: Arc<dyn ShardFactory>) -> Arc<dyn ShardFactory> {
        Arc::new(FaultyFactory { inner, faults: self.clone() })
    }

    fn rebuild(&self) -> Rebuild {
        *self.rebuild.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct FaultyFactory {
    inner: Arc<dyn ShardFactory>,
    faults: Faults,
}

impl ShardFactory for FaultyFactory {
    fn build(
        &self,
        rank: Rank,
        comm: Box<dyn Collective>,
        progress: &ProgressReporter,
    ) -> Result<Box<dyn ShardExecutor>, ShardError> {
        let limit = Instant::now() + WAIT_MAX;
        while self.faults.rebuild() == Rebuild::Wait && Instant::now() < limit {
            thread::sleep(Duration::from_millis(1));
        }
        if self.faults.rebuild() == Rebuild::Fail {
            return Err(ShardError::load(REBUILD_FAILURE));
        }
        let inner = self.inner.build(rank, comm, progress)?;
        Ok(Box::new(FaultyExecutor { inner, rank, faults: self.faults.clone() }))
    }

    fn describe(&self, rank: Rank) -> RankShare {
        self.inner.describe(rank)
    }
}

struct FaultyExecutor {
    inner: Box<dyn ShardExecutor>,
    rank: Rank,
    faults: Faults,
}

impl ShardExecutor for FaultyExecutor {
    fn join(&mut self) -> Result<(), ShardError> {
        self.inner.join()
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepResult, ShardError> {
        if self.rank == STRUCK && self.faults.steps_left.fetch_sub(1, Ordering::SeqCst) == 0 {
            panic!("injected panic");
        }
        self.inner.execute(plan)
    }

    fn weight_bytes(&self) -> u64 {
        self.inner.weight_bytes()
    }

    fn kv_bytes(&self) -> u64 {
        self.inner.kv_bytes()
    }

    fn rejoin(&mut self, epoch: Epoch, comm: Box<dyn Collective>) -> Result<Rejoined, ShardError> {
        self.inner.rejoin(epoch, comm)
    }
}
