//! A factory of model-free executors whose faults tests choose.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use consort_parallel::{collective::Collective, ids::Rank, model::TokenLogprobs};

use crate::{
    error::ShardError,
    ids::{Epoch, SequenceId},
    plan::{Output, Sampled, SpanOutput, StepPlan, StepResult, Tokens},
    shard::{Pipeline, ProgressReporter, RankShare, Rejoined, ShardExecutor, ShardFactory},
};

pub(super) const VOCAB: usize = 101;

/// What goes wrong, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Building fails.
    Load,
    /// Building panics.
    LoadPanic,
    /// Building blocks until [`FakeFactory::release`].
    LoadHang,
    /// Building takes [`SLOW_LOAD`], and says so all the while.
    LoadSlow,
    /// `join` panics.
    JoinPanic,
    /// `join` fails.
    JoinError,
    /// `join` blocks until [`FakeFactory::release`].
    JoinHang,
    /// `join` aborts the collective and finds it aborted.
    JoinAbort,
    /// `execute` panics.
    Panic,
    /// `execute` fails.
    Error,
    /// `execute` blocks until [`FakeFactory::release`].
    Hang,
    /// The digest differs from the other ranks'.
    Digest,
    /// A result names a sequence that was not in the plan.
    Nonsense,
}

/// How often an executor that has room for another step says that its oldest has not ended.
const ASKED_MAX: u32 = 500;

/// See [`Fault::LoadSlow`].
pub(super) const SLOW_LOAD: Duration = Duration::from_millis(3500);

/// Holds threads back. Open at first.
#[derive(Default)]
pub(super) struct Latch {
    /// How many may still pass; `None` lets all pass.
    permits: Mutex<Option<u64>>,
    changed: Condvar,
}

impl Latch {
    pub(super) fn close(&self) {
        *self.permits.lock().unwrap() = Some(0);
    }

    /// Lets `count` more pass.
    pub(super) fn allow(&self, count: u64) {
        *self.permits.lock().unwrap().get_or_insert_default() += count;
        self.changed.notify_all();
    }

    pub(super) fn open(&self) {
        *self.permits.lock().unwrap() = None;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let permits = self.permits.lock().unwrap();
        let mut permits = self.changed.wait_while(permits, |permits| *permits == Some(0)).unwrap();
        if let Some(permits) = permits.as_mut() {
            *permits -= 1;
        }
    }
}

/// Faults by rank and by the number of the build, of the join or of the step (of the rank's whole life) that they
/// strike.
pub(super) struct FakeFactory {
    faults: Mutex<Vec<(Rank, u64, Fault)>>,
    /// Builds by rank.
    builds: Mutex<BTreeMap<Rank, u64>>,
    /// Joins by rank.
    joins: Mutex<BTreeMap<Rank, u64>>,
    /// Executors that exist.
    alive: Arc<AtomicU64>,
    released: Arc<AtomicBool>,
    /// Every build passes it.
    pub(super) build_latch: Latch,
    /// Every executor passes it when it is dropped, out of the collective already.
    pub(super) drop_latch: Latch,
    /// Rank 0 passes it with every step, and the others wait for rank 0.
    pub(super) step_latch: Latch,
    pub(super) step_time: Duration,
    pub(super) keeps_weights: bool,
    /// Steps that executors have under way together; 0 where they carry them out one by one.
    depth: usize,
    /// Steps that were under way together as one of them failed, or as the group was found aborted.
    pub(super) failed_under_way: Mutex<Vec<usize>>,
    pub(super) aborted_under_way: Mutex<Vec<usize>>,
}

impl FakeFactory {
    pub(super) fn new() -> Self {
        Self {
            faults: Mutex::default(),
            builds: Mutex::default(),
            joins: Mutex::default(),
            alive: Arc::default(),
            released: Arc::default(),
            build_latch: Latch::default(),
            drop_latch: Latch::default(),
            step_latch: Latch::default(),
            step_time: Duration::ZERO,
            keeps_weights: true,
            depth: 0,
            failed_under_way: Mutex::default(),
            aborted_under_way: Mutex::default(),
        }
    }

    pub(super) fn with_fault(self, rank: u16, at: u64, fault: Fault) -> Self {
        self.faults.lock().unwrap().push((Rank(rank), at, fault));
        self
    }

    pub(super) fn builds(&self) -> Vec<u64> {
        self.builds.lock().unwrap().values().copied().collect()
    }

    pub(super) fn alive(&self) -> u64 {
        self.alive.load(Ordering::SeqCst)
    }

    /// Lets hanging executors go on.
    pub(super) fn release(&self) {
        self.released.store(true, Ordering::SeqCst);
    }

    /// The same, with two steps under way.
    pub(super) fn pipelined(mut self) -> Self {
        self.depth = 2;
        self
    }

    fn wait_for_release(&self) {
        while !self.released.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn strikes(&self, rank: Rank, at: u64, candidates: &[Fault]) -> Option<Fault> {
        let mut faults = self.faults.lock().unwrap();
        let due =
            |(of, when, fault): &(Rank, u64, Fault)| *of == rank && *when == at && candidates.contains(fault);
        let index = faults.iter().position(due)?;
        Some(faults.remove(index).2)
    }
}

/// Counts one more of `rank`; its number, from 0.
fn count(counts: &Mutex<BTreeMap<Rank, u64>>, rank: Rank) -> u64 {
    let mut counts = counts.lock().unwrap();
    let count = counts.entry(rank).or_default();
    *count += 1;
    *count - 1
}

/// Lets tests keep the factory that an ensemble was given.
pub(super) struct Shared(pub(super) Arc<FakeFactory>);

impl ShardFactory for Shared {
    fn build(
        &self,
        rank: Rank,
        comm: Box<dyn Collective>,
        progress: &ProgressReporter,
    ) -> Result<Box<dyn ShardExecutor>, ShardError> {
        self.0.build_latch.pass();
        let build = count(&self.0.builds, rank);
        let faults = [Fault::Load, Fault::LoadPanic, Fault::LoadHang, Fault::LoadSlow];
        match self.0.strikes(rank, build, &faults) {
            Some(Fault::Load) => {
                let cause = std::io::Error::new(std::io::ErrorKind::NotFound, "model.safetensors is missing");
                return Err(ShardError::load(cause));
            }
            Some(Fault::LoadHang) => self.0.wait_for_release(),
            Some(Fault::LoadSlow) => {
                for part in 0..100 {
                    std::thread::sleep(SLOW_LOAD / 100);
                    progress.report(part, 100);
                }
            }
            Some(fault) => panic!("injected {fault:?}"),
            None => {}
        }
        progress.report(50, 100);
        progress.report(100, 100);
        self.0.alive.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(FakeExecutor {
            factory: Arc::clone(&self.0),
            rank,
            comm,
            steps: 0,
            under_way: VecDeque::new(),
            asked: 0,
            sequences: BTreeMap::new(),
        }))
    }

    fn describe(&self, rank: Rank) -> RankShare {
        let first = rank.index() * 3;
        RankShare { query_heads: first..first + 3, kv_heads: rank.index()..rank.index() + 1 }
    }
}

struct FakeExecutor {
    factory: Arc<FakeFactory>,
    rank: Rank,
    comm: Box<dyn Collective>,
    steps: u64,
    under_way: VecDeque<Arc<StepPlan>>,
    /// How often somebody asked for the oldest.
    asked: u32,
    sequences: BTreeMap<SequenceId, (Vec<u32>, Option<u32>)>,
}

/// The token that follows `history`.
pub(super) fn fake_draw(history: &[u32]) -> u32 {
    let hash =
        history.iter().fold(17u64, |hash, &token| hash.wrapping_mul(31).wrapping_add(u64::from(token) + 1));
    ((hash >> 7) % VOCAB as u64) as u32
}

impl ShardExecutor for FakeExecutor {
    fn join(&mut self) -> Result<(), ShardError> {
        let faults = [Fault::JoinPanic, Fault::JoinError, Fault::JoinHang, Fault::JoinAbort];
        let join = count(&self.factory.joins, self.rank);
        match self.factory.strikes(self.rank, join, &faults) {
            Some(Fault::JoinError) => return Err(ShardError::load("injected: no path to the peers")),
            Some(Fault::JoinHang) => self.factory.wait_for_release(),
            Some(Fault::JoinAbort) => self.comm.abort_handle().abort("injected abort"),
            Some(fault) => panic!("injected {fault:?}"),
            None => {}
        }
        // Where models tell each other their addresses.
        self.comm.barrier().map_err(|error| ShardError::Aborted { reason: error.to_string() })
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepResult, ShardError> {
        let faults = [Fault::Panic, Fault::Error, Fault::Hang, Fault::Digest, Fault::Nonsense];
        let fault = self.factory.strikes(self.rank, self.steps, &faults);
        self.steps += 1;
        match fault {
            Some(Fault::Panic) => panic!("injected panic"),
            Some(Fault::Error) => {
                return Err(ShardError::Plan { step: plan.step, what: "injected error".into() });
            }
            Some(Fault::Hang) => self.factory.wait_for_release(),
            _ => {}
        }
        if self.rank == Rank(0) {
            self.factory.step_latch.pass();
        }
        // Where a real rank would wait for its peers.
        self.comm.barrier().map_err(|error| ShardError::Aborted { reason: error.to_string() })?;
        std::thread::sleep(self.factory.step_time);
        for new in &plan.begin {
            self.sequences.insert(new.sequence, (Vec::new(), None));
        }
        let mut outputs = Vec::new();
        for span in &plan.run {
            let (history, last) = self.sequences.get_mut(&span.sequence).expect("begun");
            history.extend(&span.cached.tokens);
            match &span.tokens {
                Tokens::Given(tokens) => history.extend(tokens),
                Tokens::LastSampled => history.push(last.expect("drawn")),
            }
            let mut output = SpanOutput {
                sequence: span.sequence,
                sampled: Vec::new(),
                prompt_logprobs: Vec::new(),
                broken: false,
            };
            if let (Output::PromptLogprobs { next, .. }, Tokens::Given(tokens)) = (&span.output, &span.tokens)
            {
                let predicted = tokens.iter().skip(1).chain(next);
                let even = |&token: &u32| TokenLogprobs { token, logprob: -1.0, top: Vec::new() };
                output.prompt_logprobs.extend(predicted.map(even));
            }
            if let Output::Sample | Output::PromptLogprobs { sample: true, .. } = span.output {
                let token = fake_draw(history);
                *last = Some(token);
                output.sampled.push(Sampled { token, logprobs: None });
            }
            if span.output != Output::Nothing {
                outputs.push(output);
            }
        }
        for sequence in &plan.end {
            self.sequences.remove(sequence);
        }
        if fault == Some(Fault::Nonsense) {
            outputs.clear();
        }
        let digest = u64::from(fault == Some(Fault::Digest));
        Ok(StepResult { epoch: plan.epoch, step: plan.step, outputs, transferred: Some(plan.step), digest })
    }

    fn pipeline(&mut self) -> Option<&mut dyn Pipeline> {
        if self.factory.depth > 0 { Some(self) } else { None }
    }

    fn weight_bytes(&self) -> u64 {
        1000 + u64::from(self.rank.0)
    }

    fn kv_bytes(&self) -> u64 {
        500
    }

    fn rejoin(&mut self, _epoch: Epoch, comm: Box<dyn Collective>) -> Result<Rejoined, ShardError> {
        if !self.factory.keeps_weights {
            return Ok(Rejoined::Rebuild(comm));
        }
        self.comm = comm;
        self.sequences.clear();
        self.under_way.clear();
        Ok(Rejoined::Kept)
    }
}

impl Pipeline for FakeExecutor {
    fn depth(&self) -> usize {
        self.factory.depth
    }

    fn begin(&mut self, plan: &Arc<StepPlan>) -> Result<(), ShardError> {
        assert!(self.under_way.len() < self.factory.depth, "more steps than may be under way");
        let last = self.under_way.back();
        assert!(last.is_none_or(|last| last.step.next() == plan.step && last.epoch == plan.epoch));
        self.under_way.push_back(Arc::clone(plan));
        Ok(())
    }

    fn finish(&mut self, _patience: Duration) -> Result<Option<StepResult>, ShardError> {
        let under_way = self.under_way.len();
        if under_way < self.factory.depth && self.asked < ASKED_MAX {
            self.asked += 1;
            std::thread::sleep(Duration::from_micros(20));
            return Ok(None);
        }
        self.asked = 0;
        let plan = self.under_way.pop_front().expect("asked for with steps under way only");
        let result = self.execute(&plan);
        if let Err(error) = &result {
            self.under_way.clear();
            match error {
                ShardError::Aborted { .. } => self.factory.aborted_under_way.lock().unwrap().push(under_way),
                _ => self.factory.failed_under_way.lock().unwrap().push(under_way),
            }
        }
        result.map(Some)
    }
}

impl Drop for FakeExecutor {
    fn drop(&mut self) {
        self.comm.abort_handle().abort("a member left the group");
        self.factory.drop_latch.pass();
        self.factory.alive.fetch_sub(1, Ordering::SeqCst);
    }
}
