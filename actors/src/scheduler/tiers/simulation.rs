//! A seeded simulation of scheduler and shard: random requests, cancellations and losses, with invariants checked
//! after every event.
//!
//! The simulated shard stores tokens in pages and reads the history through block tables, as a model does. Its draw
//! is a pure function of that history, so a wrong table, page or position shows as a wrong token. Steps execute as late
//! as is legal, when their result is absorbed; a page loses its content when it is free, and again when it is handed
//! out, so a step that is still under way finds out when one of its pages changed hands too early.

mod host;
mod shard;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use consort_kernels::sampling::SamplingParams;
use shard::SimShard;
use shard::{draw, logprobs_of, seen};

use super::super::{Event, STEPS_IN_FLIGHT_MAX, Scheduler, pool::PageState};
use crate::{
    config::{CacheSpec, LayerGroups, SchedulerConfig},
    ids::{Epoch, SequenceId},
    plan::{Sampled, StepPlan, TokenLogprobs, Tokens},
    prefix::CacheSalt,
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

/// What came out of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    pub(super) prompt_logprobs: Vec<TokenLogprobs>,
    pub(super) sampled: Vec<Sampled>,
    pub(super) finished: Option<FinishReason>,
}

/// What a request must yield, whatever its company: the model applied to its own history.
fn solo(request: &Request, cache: &CacheSpec) -> Outcome {
    let mut history = request.prompt.clone();
    let mut outcome = Outcome::default();
    if let Some(top) = request.prompt_logprobs {
        let positions = 1..history.len();
        outcome.prompt_logprobs = positions.map(|at| logprobs_of(&history[..at], history[at], top)).collect();
    }
    while outcome.sampled.len() < request.max_tokens {
        let token = draw(&seen(&history, cache), history.len(), request.prompt.len(), request.sampling.seed);
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

/// Scheduler, shard, and plans on their way.
pub(super) struct Simulation {
    pub(super) scheduler: Scheduler,
    shard: SimShard,
    /// Planned, neither executed nor absorbed.
    on_the_way: VecDeque<StepPlan>,
    depth: usize,
    pub(super) outcomes: BTreeMap<SequenceId, Outcome>,
    /// Positions computed, by sequence: more than its length when lives are replayed.
    pub(super) computed: BTreeMap<SequenceId, usize>,
    /// Most preemptions of one sequence.
    pub(super) preempted_most: u8,
}

impl Simulation {
    pub(super) fn new(config: SchedulerConfig, cache: CacheSpec, depth: usize) -> Self {
        assert!(depth <= STEPS_IN_FLIGHT_MAX);
        Self {
            scheduler: Scheduler::new(config, cache, VOCAB, Epoch(0)),
            shard: SimShard::new(cache, Epoch(0)),
            on_the_way: VecDeque::new(),
            depth,
            outcomes: BTreeMap::new(),
            computed: BTreeMap::new(),
            preempted_most: 0,
        }
    }

    pub(super) fn submit(&mut self, id: u64, request: Request) -> Result<(), SubmitError> {
        self.submit_choice(id, request, None)
    }

    fn submit_choice(&mut self, id: u64, request: Request, leader: Option<u64>) -> Result<(), SubmitError> {
        let salt = request.cache_salt.map_or(0, salt_number);
        self.shard.set_salt(SequenceId(id), salt);
        let submitted = self.scheduler.submit(id, SequenceId(id), request, leader.map(SequenceId));
        self.scheduler.check_invariants();
        if submitted.is_ok() {
            self.outcomes.insert(SequenceId(id), Outcome::default());
        }
        submitted
    }

    pub(super) fn cancel(&mut self, id: u64) {
        self.scheduler.cancel(SequenceId(id));
        self.scheduler.check_invariants();
        self.wipe_free();
    }

    pub(super) fn plan(&mut self) -> bool {
        if self.scheduler.steps_in_flight() >= self.depth {
            return false;
        }
        let plan = self.scheduler.plan();
        self.scheduler.check_invariants();
        let preempted = self.scheduler.sequences.iter().map(|(_, state)| state.preemptions);
        self.preempted_most = preempted.chain([self.preempted_most]).max().unwrap_or(0);
        let Some(plan) = plan else { return false };
        self.wipe_free(); // Blocks of what was preempted, before any is handed out again.
        self.shard.hand_out(&plan);
        for span in &plan.run {
            let count = if let Tokens::Given(given) = &span.tokens { given.len() } else { 1 };
            *self.computed.entry(span.sequence).or_default() += count;
        }
        self.on_the_way.push_back(plan);
        true
    }

    fn wipe_free(&mut self) {
        let pool = &self.scheduler.pool;
        self.shard.wipe_free(|block| pool.state(block) == PageState::Free);
    }

    pub(super) fn absorb(&mut self) -> bool {
        let Some(plan) = self.on_the_way.pop_front() else { return false };
        let running = self.scheduler.sequences.iter().filter(|(_, state)| state.life > 0);
        self.shard.set_positions(running.map(|(_, state)| (state.id, state.computed)));
        let result = self.shard.execute(&plan);
        let events = self.scheduler.absorb(result).expect("the simulated shard answers its plans");
        self.scheduler.check_invariants();
        self.wipe_free();
        for Event { sequence, event } in events {
            let outcome = self.outcomes.get_mut(&sequence).expect("an event of an unknown sequence");
            assert_eq!(outcome.finished, None, "{sequence} went on after its end");
            match event {
                GenerationEvent::PromptLogprobs(part) => {
                    assert!(outcome.sampled.is_empty(), "prompt log-probabilities come before tokens");
                    outcome.prompt_logprobs.extend(part);
                }
                GenerationEvent::Prefilled { .. } => assert!(outcome.sampled.is_empty()),
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
        self.shard.lose(epoch);
        self.scheduler.restart(epoch);
        self.scheduler.check_invariants();
    }

    /// A shard that has the pages is told the whole state, if nothing is under way.
    fn relearn(&mut self) -> bool {
        let image = self.scheduler.image();
        image.inspect(|image| self.shard.relearn(image)).is_some()
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

/// Salts by number, so that the simulated pages can tell them apart.
fn salt(number: u64) -> CacheSalt {
    CacheSalt::new(&number.to_le_bytes())
}

fn salt_number(wanted: CacheSalt) -> u64 {
    (1..9).find(|&number| salt(number) == wanted).expect("one of the simulation's salts")
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
        prompt_logprobs: random.chance(20).then_some(1),
        priority: 0,
        cache_salt: None,
    }
}

const CONFIG: SchedulerConfig = SchedulerConfig {
    max_num_seqs: 8,
    max_num_batched_tokens: 16,
    max_model_len: 96,
    max_waiting_requests: 64,
    priority_aging_ms: 1000,
};
/// Asserts that each request yielded what it yields alone, and each cancelled one a beginning of that.
fn assert_solo(
    outcomes: &BTreeMap<SequenceId, Outcome>,
    expected: &BTreeMap<SequenceId, Outcome>,
    cancelled: &BTreeSet<SequenceId>,
) {
    assert!(outcomes.keys().eq(expected.keys()), "a request was lost");
    for (sequence, outcome) in outcomes {
        let solo = &expected[sequence];
        if cancelled.contains(sequence) && outcome.finished.is_none() {
            assert!(solo.prompt_logprobs.starts_with(&outcome.prompt_logprobs), "{sequence} strayed");
            assert!(solo.sampled.starts_with(&outcome.sampled), "{sequence} strayed before it was cancelled");
        } else {
            assert_eq!(outcome, solo, "{sequence} differs from its solo run");
        }
    }
}

/// Requests of a few families that begin alike, some salted, some of several choices, some more important than others.
fn related_request(random: &mut Random, families: usize) -> Request {
    let family = random.below(families);
    let mut request = random_request(random, 24);
    let common = Random::new(family as u64).below(40) + 8;
    let mut prefix = Random::new(1000 + family as u64);
    let mut prompt: Vec<u32> = (0..common).map(|_| prefix.below(VOCAB) as u32).collect();
    prompt.extend(&request.prompt[..random.below(request.prompt.len() + 1)]);
    request.prompt = prompt;
    request.priority = if random.chance(20) { random.below(7) as i32 - 3 } else { 0 };
    request.cache_salt = random.chance(30).then(|| salt(1 + random.below(2) as u64));
    request
}

fn groups(windows: &[Option<usize>]) -> LayerGroups {
    LayerGroups::new(windows).expect("valid groups")
}
