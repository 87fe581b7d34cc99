//! A seeded simulation of scheduler and shard: random requests, cancellations and losses, with invariants checked
//! after every event.
//!
//! The simulated shard stores tokens in pages and reads the history through block tables, as a model does. Its draw
//! is a pure function of that history, so a wrong table, page or position shows as a wrong token.

use std::collections::{BTreeMap, VecDeque};

use consort_kernels::sampling::SamplingParams;
use consort_parallel::ids::BlockId;

use super::{Event, PREEMPTIONS_MAX, STEPS_IN_FLIGHT_MAX, Scheduler};
use crate::{
    config::{CacheSpec, SchedulerConfig},
    ids::{Epoch, SequenceId, Step},
    plan::{Output, Sampled, SpanOutput, StepPlan, StepResult, TokenLogprobs, Tokens},
    request::{FinishReason, GenerationEvent, Request, SubmitError},
};

pub(super) const VOCAB: usize = 97;
const STOP: u32 = 7;

/// splitmix64: small, seeded, the same everywhere.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Prints the seed when a test fails under it.
pub(super) struct SeedNote(pub(super) u64);

impl Drop for SeedNote {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("simulation failed with seed {}", self.0);
        }
    }
}

fn history_hash(history: &[u32]) -> u64 {
    history.iter().fold(0x1234_5678, |hash, &token| mix(hash ^ u64::from(token)))
}

/// The "model": the token after `history`, drawn with `seed` at the history's length.
fn draw(history: &[u32], seed: u64) -> u32 {
    (mix(history_hash(history) ^ mix(seed ^ history.len() as u64)) % VOCAB as u64) as u32
}

fn logprobs_of(history: &[u32], token: u32, top: u32) -> TokenLogprobs {
    let logprob = -((history_hash(history) % 1000) as f32) - token as f32;
    TokenLogprobs { token, logprob, top: (0..top).map(|id| (id, logprob)).collect() }
}

/// A shard as the protocol describes it.
pub(super) struct SimShard {
    block_size: usize,
    epoch: Epoch,
    next: Step,
    pages: BTreeMap<(BlockId, usize), u32>,
    sequences: BTreeMap<SequenceId, SimSequence>,
}

struct SimSequence {
    sampling: SamplingParams,
    logprobs: Option<u32>,
    table: Vec<BlockId>,
    len: usize,
    last: Option<u32>,
}

impl SimShard {
    pub(super) fn new(block_size: usize, epoch: Epoch) -> Self {
        Self { block_size, epoch, next: Step(0), pages: BTreeMap::new(), sequences: BTreeMap::new() }
    }

    pub(super) fn execute(&mut self, plan: &StepPlan) -> StepResult {
        assert_eq!((plan.epoch, plan.step), (self.epoch, self.next), "a shard refuses what is out of turn");
        self.next = plan.step.next();
        assert!(!plan.run.is_empty());
        for new in &plan.begin {
            assert!(plan.run.iter().any(|span| span.sequence == new.sequence), "begun without running");
            assert!(!plan.end.contains(&new.sequence), "begun and ended in one step");
            let state = SimSequence {
                sampling: new.sampling.clone(),
                logprobs: new.logprobs,
                table: Vec::new(),
                len: 0,
                last: None,
            };
            self.sequences.insert(new.sequence, state);
        }
        let outputs = plan.run.iter().filter_map(|span| self.execute_span(span)).collect();
        plan.end.iter().for_each(|sequence| {
            self.sequences.remove(sequence).expect("a sequence is ended that was never begun");
        });
        StepResult { epoch: plan.epoch, step: plan.step, outputs, digest: 0 }
    }

    fn execute_span(&mut self, span: &crate::plan::Span) -> Option<SpanOutput> {
        let state = self.sequences.get_mut(&span.sequence).expect("a span of an unknown sequence");
        state.table.extend(&span.new_blocks);
        let tokens = match &span.tokens {
            Tokens::Given(tokens) => tokens.clone(),
            Tokens::LastSampled => vec![state.last.expect("nothing was drawn")],
        };
        let start = state.len;
        for token in tokens {
            let page = state.table[state.len / self.block_size];
            self.pages.insert((page, state.len % self.block_size), token);
            state.len += 1;
        }
        assert_eq!(state.table.len(), state.len.div_ceil(self.block_size), "the table covers exactly");
        let read = |at: usize| self.pages[&(state.table[at / self.block_size], at % self.block_size)];
        let history: Vec<u32> = (0..state.len).map(read).collect();
        let mut output =
            SpanOutput { sequence: span.sequence, sampled: Vec::new(), prompt_logprobs: Vec::new() };
        let sample = match span.output {
            Output::Nothing => false,
            Output::Sample => true,
            Output::PromptLogprobs { top, next, sample } => {
                for row in start..state.len {
                    if let Some(token) = history.get(row + 1).copied().or(next) {
                        output.prompt_logprobs.push(logprobs_of(&history[..=row], token, top));
                    }
                }
                sample
            }
        };
        if sample {
            let token = draw(&history, state.sampling.seed);
            state.last = Some(token);
            let logprobs = state.logprobs.map(|top| logprobs_of(&history, token, top));
            output.sampled.push(Sampled { token, logprobs });
        }
        (!output.sampled.is_empty() || !output.prompt_logprobs.is_empty()).then_some(output)
    }
}

/// What came out of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    pub(super) prompt_logprobs: Vec<TokenLogprobs>,
    pub(super) sampled: Vec<Sampled>,
    pub(super) finished: Option<FinishReason>,
}

/// What a request must yield, whatever its company: the model applied to its own history.
fn solo(request: &Request) -> Outcome {
    let mut history = request.prompt.clone();
    let mut outcome = Outcome::default();
    if let Some(top) = request.prompt_logprobs {
        let positions = 1..history.len();
        outcome.prompt_logprobs = positions.map(|at| logprobs_of(&history[..at], history[at], top)).collect();
    }
    while outcome.sampled.len() < request.max_tokens {
        let token = draw(&history, request.sampling.seed);
        let logprobs = request.logprobs.map(|top| logprobs_of(&history, token, top));
        outcome.sampled.push(Sampled { token, logprobs });
        history.push(token);
        if request.stop_token_ids.contains(&token) {
            outcome.finished = Some(FinishReason::Stop { token });
            return outcome;
        }
    }
    outcome.finished = Some(FinishReason::Length);
    outcome
}

/// Scheduler, shard, and results on their way.
pub(super) struct Simulation {
    pub(super) scheduler: Scheduler,
    shard: SimShard,
    on_the_way: VecDeque<StepResult>,
    depth: usize,
    pub(super) outcomes: BTreeMap<SequenceId, Outcome>,
    /// Most preemptions of one sequence.
    pub(super) preempted_most: u8,
}

impl Simulation {
    pub(super) fn new(config: SchedulerConfig, cache: CacheSpec, depth: usize) -> Self {
        assert!(depth <= STEPS_IN_FLIGHT_MAX);
        Self {
            scheduler: Scheduler::new(config, cache, VOCAB, Epoch(0)),
            shard: SimShard::new(cache.block_size, Epoch(0)),
            on_the_way: VecDeque::new(),
            depth,
            outcomes: BTreeMap::new(),
            preempted_most: 0,
        }
    }

    pub(super) fn submit(&mut self, id: u64, request: Request) -> Result<(), SubmitError> {
        let submitted = self.scheduler.submit(SequenceId(id), request);
        self.scheduler.check_invariants();
        if submitted.is_ok() {
            self.outcomes.insert(SequenceId(id), Outcome::default());
        }
        submitted
    }

    pub(super) fn cancel(&mut self, id: u64) {
        self.scheduler.cancel(SequenceId(id));
        self.scheduler.check_invariants();
    }

    pub(super) fn plan(&mut self) -> bool {
        if self.scheduler.steps_in_flight() >= self.depth {
            return false;
        }
        let plan = self.scheduler.plan();
        self.scheduler.check_invariants();
        let preempted = self.scheduler.sequences.values().map(|state| state.preemptions);
        self.preempted_most = preempted.chain([self.preempted_most]).max().unwrap_or(0);
        let Some(plan) = plan else { return false };
        self.on_the_way.push_back(self.shard.execute(&plan));
        true
    }

    pub(super) fn absorb(&mut self) -> bool {
        let Some(result) = self.on_the_way.pop_front() else { return false };
        let events = self.scheduler.absorb(result).expect("the simulated shard answers its plans");
        self.scheduler.check_invariants();
        for Event { sequence, event } in events {
            let outcome = self.outcomes.get_mut(&sequence).expect("an event of an unknown sequence");
            assert_eq!(outcome.finished, None, "{sequence} went on after its end");
            match event {
                GenerationEvent::PromptLogprobs(part) => {
                    assert!(outcome.sampled.is_empty(), "prompt log-probabilities come before tokens");
                    outcome.prompt_logprobs.extend(part);
                }
                GenerationEvent::Token(sampled) => outcome.sampled.push(sampled),
                GenerationEvent::Finished(reason) => outcome.finished = Some(reason),
                GenerationEvent::Failed(error) => panic!("the pure scheduler failed {sequence}: {error}"),
            }
        }
        true
    }

    /// The group is lost: results on their way vanish, shards know nothing, sequences replay.
    fn lose_group(&mut self, epoch: Epoch) {
        self.on_the_way.clear();
        self.shard = SimShard::new(self.shard.block_size, epoch);
        self.scheduler.restart(epoch);
        self.scheduler.check_invariants();
    }

    /// Runs until nothing is left; every round must make progress.
    pub(super) fn drain(&mut self) {
        let mut rounds = 0;
        while !self.scheduler.is_idle() || self.scheduler.steps_in_flight() > 0 {
            while self.plan() {}
            assert!(self.absorb(), "sequences are left, and nothing is in flight nor can be planned");
            rounds += 1;
            assert!(rounds < 1_000_000, "requests starve");
        }
    }
}

fn random_request(random: &mut Random, longest: usize) -> Request {
    let prompt_len = 1 + random.below(longest);
    let max_tokens = if random.chance(5) { 0 } else { 1 + random.below(longest) };
    Request {
        prompt: (0..prompt_len).map(|_| random.below(VOCAB) as u32).collect(),
        sampling: SamplingParams { seed: random.next(), ..SamplingParams::default() },
        max_tokens,
        stop_token_ids: if random.chance(70) { vec![STOP] } else { Vec::new() },
        logprobs: random.chance(20).then_some(2),
        prompt_logprobs: (max_tokens == 0 || random.chance(20)).then_some(1),
    }
}

const CONFIG: SchedulerConfig = SchedulerConfig {
    max_num_seqs: 8,
    max_num_batched_tokens: 16,
    max_model_len: 96,
    max_waiting_requests: 64,
};
/// Small enough that 8 sequences never fit together.
const TIGHT: CacheSpec = CacheSpec { block_size: 4, num_blocks: 28 };

struct Run {
    outcomes: BTreeMap<SequenceId, Outcome>,
    preemptions: u64,
    preempted_most: u8,
}

/// Mixed requests under pressure, each compared with its solo run.
fn run_mixed(seed: u64, depth: usize, requests: usize, losses: bool) -> Run {
    let mut random = Random::new(seed);
    let mut faults = Random::new(!seed);
    let mut simulation = Simulation::new(CONFIG, TIGHT, depth);
    let (mut expected, mut epoch) = (BTreeMap::new(), 0);
    for id in 0..requests as u64 {
        let request = random_request(&mut random, 40);
        expected.insert(SequenceId(id), solo(&request));
        while let Err(refusal) = simulation.submit(id, request.clone()) {
            assert!(matches!(refusal, SubmitError::Overloaded { .. }), "{refusal}");
            simulation.plan();
            simulation.absorb();
        }
        // Uneven arrival: sometimes a burst, sometimes the queue runs dry.
        for _ in 0..faults.below(6) {
            if faults.chance(60) {
                simulation.plan()
            } else {
                simulation.absorb()
            };
        }
        if losses && faults.chance(3) {
            epoch += 1;
            simulation.lose_group(Epoch(epoch));
        }
    }
    simulation.drain();
    assert_eq!(simulation.scheduler.used_blocks(), 0, "all blocks are free at the end");
    for (sequence, outcome) in &simulation.outcomes {
        assert_eq!(outcome, &expected[sequence], "{sequence} differs from its solo run");
    }
    assert_eq!(simulation.outcomes.len(), requests);
    Run {
        outcomes: simulation.outcomes,
        preemptions: simulation.scheduler.counters().preemptions,
        preempted_most: simulation.preempted_most,
    }
}

#[test]
fn every_request_equals_its_solo_run_under_preemption() {
    let (mut preemptions, mut preempted_most) = (0, 0);
    for seed in 0..24 {
        let _note = SeedNote(seed);
        let run = run_mixed(seed, 2, 200, false);
        preemptions += run.preemptions;
        preempted_most = run.preempted_most.max(preempted_most);
    }
    println!("{preemptions} preemptions in 4800 requests, {preempted_most} at most of one");
    assert!(preemptions > 500, "the simulation is meant to preempt, and did so {preemptions} times");
    assert_eq!(preempted_most, PREEMPTIONS_MAX, "some sequence ends up guaranteed, and none goes beyond");
}

#[test]
fn depth_one_and_two_draw_equal_tokens() {
    for seed in 100..112 {
        let _note = SeedNote(seed);
        let (one, two) = (run_mixed(seed, 1, 150, false), run_mixed(seed, 2, 150, false));
        assert_eq!(one.outcomes, two.outcomes);
        assert!(one.preemptions > 0 && two.preemptions > 0);
    }
}

#[test]
fn requests_survive_lost_groups_without_a_changed_token() {
    for seed in 200..212 {
        let _note = SeedNote(seed);
        run_mixed(seed, 2, 150, true);
    }
}

#[test]
fn ten_thousand_random_submits_and_aborts_leak_nothing() {
    let _note = SeedNote(42);
    let mut random = Random::new(42);
    let mut simulation = Simulation::new(CONFIG, TIGHT, 2);
    let (mut submitted, mut accepted, mut cancelled, mut overloaded) = (0u64, 0, 0, 0);
    while accepted < 10_000 {
        match simulation.submit(submitted, random_request(&mut random, 24)) {
            Ok(()) => accepted += 1,
            Err(SubmitError::Overloaded { .. }) => overloaded += 1,
            Err(other) => panic!("{other}"),
        }
        while random.chance(90) {
            match random.below(20) {
                0..=8 => drop(simulation.plan()),
                9..=17 => drop(simulation.absorb()),
                _ => {
                    let victim = submitted.saturating_sub(random.below(40) as u64);
                    cancelled += u64::from(simulation.scheduler.journal(SequenceId(victim)).is_some());
                    simulation.cancel(victim);
                }
            }
        }
        submitted += 1;
    }
    let preemptions = simulation.scheduler.counters().preemptions;
    println!("{accepted} accepted, {cancelled} cancelled, {overloaded} overloads, {preemptions} preemptions");
    assert!(cancelled > 1000 && preemptions > 100);
    simulation.drain();
    assert_eq!(simulation.scheduler.used_blocks(), 0);
    assert!(simulation.scheduler.is_idle());
    assert_eq!((simulation.scheduler.running(), simulation.scheduler.waiting()), (0, 0));
}

#[test]
fn a_pool_for_one_long_request_serves_many_of_them() {
    let _note = SeedNote(7);
    let mut random = Random::new(7);
    let cache = CacheSpec { block_size: 4, num_blocks: 20 };
    let mut simulation = Simulation::new(CONFIG, cache, 2);
    let mut expected = BTreeMap::new();
    for id in 0..12 {
        let mut request = random_request(&mut random, 4);
        (request.max_tokens, request.stop_token_ids) = (80 - request.prompt.len(), Vec::new());
        expected.insert(SequenceId(id), solo(&request));
        simulation.submit(id, request).expect("it fits alone");
    }
    simulation.drain();
    assert_eq!(simulation.outcomes, expected);
    assert!(simulation.scheduler.counters().preemptions > 0);
}
