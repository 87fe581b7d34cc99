//! The router among replicas that are modelled: messages travel, replicas are lost and come back, readers leave.
//!
//! Every run prints its seed when it fails; `CONSORT_ROUTER_SEED` runs one of them again.

mod checks;
mod replica;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use replica::{Replica, ToReplica, ToRouter};

use super::{OPEN_REQUEST_TOKENS, Router, RouterConfig, Withdrawal, WorkShape};
use crate::{
    config::{CacheSpec, LayerGroups},
    ids::{ReplicaId, SequenceId},
    order::{Due, Place},
    prefix::BlockKey,
};

const BLOCK: usize = 16;
/// Tokens of the longest prompt.
const PROMPT_MAX: usize = 200;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finished,
    Cancelled,
    Failed,
}

struct Asked {
    shape: WorkShape,
    decodes: usize,
    end: Option<End>,
    /// Whether it has ever run, which is when it gives its place among the waiting back.
    started: bool,
    /// It and all that were asked for together with it.
    group: Vec<SequenceId>,
}

impl Asked {
    fn place(&self, sequence: SequenceId) -> Place {
        Place { due: self.shape.due, sequence }
    }
}

/// What a block of tokens takes, in every run another one of these.
fn layer_groups(random: &mut Random) -> LayerGroups {
    let all: [&[Option<usize>]; 5] = [
        &[None],
        &[None, Some(32)],
        &[None, None, Some(48), Some(1)],
        &[Some(100), Some(20)],
        &[None, None, None],
    ];
    LayerGroups::new(all[random.below(all.len())]).expect("one to four groups")
}

struct Simulation {
    config: RouterConfig,
    aging_ms: u64,
    /// Whether prompts are cached; otherwise only choices of one request share theirs.
    has_keys: bool,
    /// Requests in a hundred that do not come: of those that do, some find a replica idle.
    calm: usize,
    now_ms: u64,
    random: Random,
    router: Router,
    replicas: Vec<Replica>,
    /// The schedulers that the router speaks to.
    known: Vec<Option<u64>>,
    asked: BTreeMap<SequenceId, Asked>,
    /// Bound of requests that were accepted and have not started, and how many there are.
    waiting_max: usize,
    waiting: usize,
    refused: usize,
    placed: usize,
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let groups = layer_groups(&mut random);
        // Pages for one prompt at least, and seldom for many.
        let least = CacheSpec { groups, ..CacheSpec::new(BLOCK, 0) }.pages_for(PROMPT_MAX);
        let config = RouterConfig {
            replicas: 2 + random.below(3),
            max_num_seqs: 1 + random.below(8),
            cache: CacheSpec { groups, ..CacheSpec::new(BLOCK, least + random.below(least * 4)) },
        };
        let replica = || Replica::new(config.cache.num_blocks);
        let mut simulation = Self {
            replicas: (0..config.replicas).map(|_| replica()).collect(),
            known: vec![None; config.replicas],
            router: Router::new(config),
            has_keys: random.chance(75),
            calm: [0, 60, 85][random.below(3)],
            waiting_max: 4 + random.below(60),
            aging_ms: [0, 30, 1000][random.below(3)],
            now_ms: 0,
            config,
            random,
            asked: BTreeMap::new(),
            waiting: 0,
            refused: 0,
            placed: 0,
        };
        (0..config.replicas).for_each(|replica| simulation.come_up(replica));
        simulation.settle();
        simulation
    }

    fn end(&mut self, sequence: SequenceId, end: End) {
        let asked = self.asked.get_mut(&sequence).expect("it was asked for");
        // A reader that has left may be told of nothing more.
        if asked.end == Some(End::Cancelled) {
            return;
        }
        assert_eq!(asked.end, None, "{sequence} ended twice");
        asked.end = Some(end);
        self.waiting -= usize::from(!asked.started);
    }

    fn submit(&mut self) {
        let count = if self.random.chance(25) { 2 + self.random.below(4) } else { 1 };
        let family = self.random.below(6) as u32;
        // A third of all ask for the same long prefix.
        let prefix = if self.random.chance(33) { 160 } else { BLOCK * self.random.below(8) };
        let family = if prefix == 160 { 0 } else { family };
        let own = 1 + self.random.below(40);
        let shared = std::iter::repeat_n(family, prefix);
        let one = 1000 + self.asked.len() as u32;
        let tokens: Vec<u32> = shared.chain(std::iter::repeat_n(one, own)).collect();
        let shape = WorkShape {
            prompt_tokens: tokens.len(),
            due: Due::new(self.now_ms, if self.random.chance(20) { -1 } else { 0 }, self.aging_ms),
            keys: if self.has_keys { BlockKey::chain(None, &tokens, BLOCK).into() } else { Arc::default() },
            is_whole: self.random.chance(25),
        };
        if self.waiting + count > self.waiting_max {
            self.refused += 1;
            return;
        }
        let first = self.asked.len() as u64;
        let sequences: Vec<SequenceId> = (first..first + count as u64).map(SequenceId).collect();
        for &sequence in &sequences {
            let decodes = 1 + self.random.below(30);
            let (mut shape, group) = (shape.clone(), sequences.clone());
            shape.is_whole &= sequence == sequences[0];
            self.asked.insert(sequence, Asked { shape, decodes, end: None, started: false, group });
            self.waiting += 1;
        }
        self.observe();
        let before = self.router.clone();
        match self.router.place(&sequences, &shape) {
            Some(at) => {
                self.check_choice(&before, at, &shape, count);
                self.placed += 1;
                self.send(at, sequences);
            }
            None => sequences.into_iter().for_each(|sequence| self.end(sequence, End::Failed)),
        }
    }

    /// The scheduler that the router knows of, if it still is.
    fn inbox(&mut self, at: ReplicaId) -> Option<&mut VecDeque<ToReplica>> {
        let replica = &mut self.replicas[at.index()];
        (self.known[at.index()] == Some(replica.scheduler)).then_some(&mut replica.inbox)
    }

    fn send(&mut self, at: ReplicaId, group: Vec<SequenceId>) {
        match self.inbox(at) {
            Some(inbox) => inbox.push_back(ToReplica::Submit(group)),
            None => {
                self.router.lost(at);
                self.place_again(&group);
            }
        }
    }

    fn observe(&mut self) {
        for (at, replica) in (0..).map(ReplicaId).zip(&self.replicas) {
            self.router.observe(at, replica.free_for_newcomers());
        }
    }

    /// One message reaches the router, and what it decides is sent.
    fn hear(&mut self, at: usize) {
        let here = ReplicaId(at as u16);
        self.observe();
        let turn = |router: &mut Router, sequence, turn: fn(&mut Router, SequenceId)| {
            if router.place_of(sequence) == Some(here) {
                turn(router, sequence);
            }
        };
        match self.replicas[at].outbox.pop_front() {
            None => return,
            Some(ToRouter::Started(sequence)) => turn(&mut self.router, sequence, Router::started),
            Some(ToRouter::Prefilled(sequence)) => turn(&mut self.router, sequence, Router::prefilled),
            Some(ToRouter::Ended(sequence)) => turn(&mut self.router, sequence, Router::ended),
            Some(ToRouter::Kept(sequence)) => turn(&mut self.router, sequence, Router::kept),
            Some(ToRouter::Ready(scheduler)) => {
                self.router.ready(here);
                self.known[at] = Some(scheduler);
            }
            Some(ToRouter::Lost) => self.router.lost(here),
            Some(ToRouter::Gone) => {
                self.router.gone(here);
                self.known[at] = None;
            }
            Some(ToRouter::GivenBack(group)) => self.place_again(&group),
        }
        self.router.check_invariants();
    }

    fn place_again(&mut self, group: &[SequenceId]) {
        for sequence in group {
            assert!(!self.asked[sequence].started, "{sequence} was given back after it started");
        }
        let is_open = |sequence: &&SequenceId| self.router.place_of(**sequence).is_some();
        let (open, gone): (Vec<&SequenceId>, Vec<&SequenceId>) = group.iter().partition(is_open);
        for sequence in gone {
            assert_eq!(self.asked[sequence].end, Some(End::Cancelled), "{sequence} is lost");
        }
        let open: Vec<SequenceId> = open.into_iter().copied().collect();
        match self.router.given_back(&open) {
            Some(to) => self.send(to, open),
            None => open.into_iter().for_each(|sequence| self.end(sequence, End::Failed)),
        }
    }

    fn rebalance(&mut self) {
        for Withdrawal { sequences, from, to } in self.router.rebalance() {
            assert_ne!(from, to);
            if let Some(inbox) = self.inbox(from) {
                inbox.push_back(ToReplica::GiveBack(sequences));
            }
        }
        self.router.check_invariants();
    }

    fn cancel(&mut self) {
        let open: Vec<SequenceId> = self
            .asked
            .iter()
            .filter(|(_, asked)| asked.end.is_none())
            .map(|(sequence, _)| *sequence)
            .collect();
        if open.is_empty() {
            return;
        }
        let at = self.random.below(self.config.replicas);
        let first = self.replicas[at].waiting.first().map(|place| place.sequence);
        // As often one that others count on.
        let first = first.filter(|first| self.asked[first].end.is_none() && self.random.chance(50));
        let sequence = first.unwrap_or(open[self.random.below(open.len())]);
        self.end(sequence, End::Cancelled);
        if let Some(at) = self.router.place_of(sequence) {
            self.router.ended(sequence);
            if let Some(inbox) = self.inbox(at) {
                inbox.push_back(ToReplica::Cancel(sequence));
            }
        }
    }

    fn event(&mut self) {
        self.now_ms += 1;
        let at = self.random.below(self.config.replicas);
        match self.random.below(1000) {
            0..150 if self.random.chance(self.calm) => {}
            0..150 => self.submit(),
            150..160 => (0..self.random.below(20)).for_each(|_| self.submit()),
            160..420 => self.deliver(at),
            420..680 => self.hear(at),
            680..960 => self.step(at),
            960..985 => self.cancel(),
            985..987 => self.lose(at, false),
            987..988 => self.lose(at, true),
            _ => self.come_up(at),
        }
        self.rebalance();
        self.check();
    }

    /// Lets all messages arrive, while nobody works.
    fn settle(&mut self) {
        while self.replicas.iter().any(|replica| !replica.inbox.is_empty() || !replica.outbox.is_empty()) {
            for at in 0..self.config.replicas {
                self.deliver(at);
                self.hear(at);
            }
            self.rebalance();
        }
    }

    fn finish(&mut self) {
        (0..self.config.replicas).for_each(|at| self.come_up(at));
        for round in 0.. {
            assert!(round < 100_000, "requests never end");
            self.settle();
            if self.asked.values().all(|asked| asked.end.is_some()) {
                break;
            }
            (0..self.config.replicas).for_each(|at| self.step(at));
            self.rebalance();
            self.check();
        }
        self.settle();
        assert_eq!((self.router.open(), self.waiting), (0, 0));
        for replica in &self.replicas {
            assert!(replica.is_idle(self.config.cache.num_blocks), "something still runs, or pages are lost");
        }
        assert!((0..self.config.replicas as u16).all(|at| self.router.load(ReplicaId(at)) == 0));
    }
}

fn count(simulation: &Simulation, end: End) -> usize {
    simulation.asked.values().filter(|asked| asked.end == Some(end)).count()
}

fn seeds() -> Vec<u64> {
    match std::env::var("CONSORT_ROUTER_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => vec![seed],
        None => (0..60).collect(),
    }
}

#[test]
fn every_request_ends_once_whatever_happens_to_the_replicas() {
    let mut totals = [0; 6];
    for seed in seeds() {
        let outcome = std::panic::catch_unwind(|| {
            let mut simulation = Simulation::new(seed);
            for event in 0..3000 {
                simulation.event();
                if event % 40 == 39 {
                    simulation.check_fairness();
                }
            }
            simulation.finish();
            let ends = [End::Finished, End::Cancelled, End::Failed].map(|end| count(&simulation, end));
            [
                ends[0],
                ends[1],
                ends[2],
                simulation.refused,
                simulation.router.moved() as usize,
                simulation.placed,
            ]
        });
        let Ok(counts) = outcome else { panic!("CONSORT_ROUTER_SEED={seed} shows it") };
        totals.iter_mut().zip(counts).for_each(|(total, count)| *total += count);
    }
    let [finished, cancelled, failed, refused, moved, placed] = totals;
    println!(
        "{finished} finished, {cancelled} cancelled, {failed} failed, {refused} refused, {moved} moved, {placed} placed"
    );
    if std::env::var("CONSORT_ROUTER_SEED").is_err() {
        // Nothing of what is to be shown is missing.
        assert!(totals.iter().all(|total| *total > 50), "{totals:?}");
    }
}

#[test]
fn a_hot_prefix_is_computed_a_few_times_and_spread_over_all_replicas() {
    let mut simulation = Simulation::new(1);
    let config = RouterConfig { replicas: 4, max_num_seqs: 64, cache: CacheSpec::new(BLOCK, 4000) };
    simulation.config = config;
    simulation.router = Router::new(config);
    let replica = || Replica::new(config.cache.num_blocks);
    (simulation.replicas, simulation.known) = ((0..4).map(|_| replica()).collect(), vec![None; 4]);
    (0..4).for_each(|at| simulation.come_up(at));
    simulation.settle();
    simulation.waiting_max = 1000;
    let mut uncached = 0;
    for one in 0..128u64 {
        let tokens: Vec<u32> =
            std::iter::repeat_n(7, 1504).chain(std::iter::repeat_n(1000 + one as u32, 8)).collect();
        let keys = BlockKey::chain(None, &tokens, BLOCK).into();
        let shape =
            WorkShape { prompt_tokens: tokens.len(), due: Due::new(one, 0, 0), keys, is_whole: false };
        let (ours, group) = (shape.clone(), vec![SequenceId(one)]);
        let asked = Asked { shape: ours, decodes: 10_000, end: None, started: false, group };
        simulation.asked.insert(SequenceId(one), asked);
        simulation.waiting += 1;
        let before = simulation.router.clone();
        let at = simulation.router.place(&[SequenceId(one)], &shape).expect("all are ready");
        simulation.check_choice(&before, at, &shape, 1);
        uncached += shape.prompt_tokens - before.known_tokens(at, &shape);
        simulation.replicas[at.index()].inbox.push_back(ToReplica::Submit(vec![SequenceId(one)]));
        // Each is prefilled before the next comes.
        for _ in 0..40 {
            simulation.settle();
            (0..4).for_each(|at| simulation.step(at));
        }
    }
    simulation.settle();
    let running: Vec<usize> = simulation.replicas.iter().map(Replica::running).collect();
    println!("{running:?} run, {uncached} tokens were computed");
    let bound = 1504 / OPEN_REQUEST_TOKENS + 1;
    let (most, least) = (running.iter().max().expect("four"), running.iter().min().expect("four"));
    assert!(most - least <= bound && *least > 0, "{running:?}");
    assert!(uncached < 4 * 1512 + 128 * 8, "the prefix is computed once at each replica: {uncached}");
}
