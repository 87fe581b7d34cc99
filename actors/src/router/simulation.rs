//! The router among replicas that are modelled: messages travel, replicas are lost and come back, readers leave.
//!
//! Every run prints its seed when it fails; `CONSORT_ROUTER_SEED` runs one of them again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{MOVES_MAX, OPEN_REQUEST_TOKENS, Router, RouterConfig, WorkShape};
use crate::{
    ids::{ReplicaId, SequenceId},
    prefix::BlockKey,
};

/// Tokens of one modelled step.
const STEP_TOKENS: usize = 48;
const BLOCK: usize = 16;

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
}

enum ToReplica {
    Submit(SequenceId),
    Cancel(SequenceId),
    GiveBack(SequenceId),
}

enum ToRouter {
    Started(SequenceId),
    Prefilled(SequenceId),
    Ended(SequenceId),
    GivenBack(Vec<SequenceId>),
    /// With the number of the scheduler to speak to.
    Ready(u64),
    Lost,
    Gone,
}

struct Running {
    prefill: usize,
    decodes: usize,
    blocks: usize,
}

/// A scheduler and its group, as simple as they can be: first in line, first served.
#[derive(Default)]
struct Replica {
    is_up: bool,
    /// Schedulers before the present one.
    scheduler: u64,
    inbox: VecDeque<ToReplica>,
    /// What it has told and the router has not heard.
    outbox: VecDeque<ToRouter>,
    waiting: BTreeSet<(i32, SequenceId)>,
    running: BTreeMap<SequenceId, Running>,
    cache: BTreeSet<BlockKey>,
    free_blocks: usize,
}

struct Simulation {
    config: RouterConfig,
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
        let config = RouterConfig {
            replicas: 2 + random.below(3),
            max_num_seqs: 1 + random.below(8),
            block_size: BLOCK,
            num_blocks: 40 + random.below(200),
        };
        let replica = || Replica { free_blocks: config.num_blocks, ..Replica::default() };
        let mut simulation = Self {
            replicas: (0..config.replicas).map(|_| replica()).collect(),
            known: vec![None; config.replicas],
            router: Router::new(config),
            waiting_max: 4 + random.below(60),
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

    fn come_up(&mut self, at: usize) {
        let replica = &mut self.replicas[at];
        if !replica.is_up {
            replica.is_up = true;
            replica.outbox.push_back(ToRouter::Ready(replica.scheduler));
        }
    }

    /// Loses a replica's group, or its scheduler with it.
    fn lose(&mut self, at: usize, with_scheduler: bool) {
        let replica = &mut self.replicas[at];
        if !replica.is_up && !with_scheduler {
            return;
        }
        replica.is_up = false;
        replica.cache.clear();
        replica.free_blocks = self.config.num_blocks;
        let running = std::mem::take(&mut replica.running).into_keys();
        let mut failed: Vec<SequenceId> = running.collect();
        let waiting: Vec<SequenceId> =
            std::mem::take(&mut replica.waiting).into_iter().map(|(_, sequence)| sequence).collect();
        if with_scheduler {
            failed.extend(waiting);
            failed.extend(replica.inbox.drain(..).filter_map(|message| match message {
                ToReplica::Submit(sequence) => Some(sequence),
                _ => None,
            }));
            replica.scheduler += 1;
            replica.outbox.push_back(ToRouter::Gone);
        } else {
            replica.outbox.push_back(ToRouter::Lost);
            replica.outbox.push_back(ToRouter::GivenBack(waiting));
            replica.outbox.extend(failed.iter().map(|sequence| ToRouter::Ended(*sequence)));
        }
        failed.into_iter().for_each(|sequence| self.end(sequence, End::Failed));
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
        let count = if self.random.chance(15) { 2 + self.random.below(2) } else { 1 };
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
            priority: if self.random.chance(20) { -1 } else { 0 },
            keys: BlockKey::chain(None, &tokens, BLOCK).into(),
        };
        if self.waiting + count > self.waiting_max {
            self.refused += 1;
            return;
        }
        let first = self.asked.len() as u64;
        let sequences: Vec<SequenceId> = (first..first + count as u64).map(SequenceId).collect();
        for &sequence in &sequences {
            let decodes = 1 + self.random.below(30);
            let asked = Asked { shape: shape.clone(), decodes, end: None, started: false };
            self.asked.insert(sequence, asked);
            self.waiting += 1;
        }
        self.observe();
        let before = self.router.clone();
        match self.router.place(&sequences, &shape) {
            Some(at) => {
                self.check_choice(&before, at, &shape, count);
                self.placed += 1;
                sequences.into_iter().for_each(|sequence| self.send(at, sequence));
            }
            None => sequences.into_iter().for_each(|sequence| self.end(sequence, End::Failed)),
        }
    }

    /// The scheduler that the router knows of, if it still is.
    fn inbox(&mut self, at: ReplicaId) -> Option<&mut VecDeque<ToReplica>> {
        let replica = &mut self.replicas[at.index()];
        (self.known[at.index()] == Some(replica.scheduler)).then_some(&mut replica.inbox)
    }

    fn send(&mut self, at: ReplicaId, sequence: SequenceId) {
        match self.inbox(at) {
            Some(inbox) => inbox.push_back(ToReplica::Submit(sequence)),
            None => {
                self.router.lost(at);
                self.place_again(sequence);
            }
        }
    }

    /// The bound that is stated: of those with room for all of them, none has so much less to do that the prefill which
    /// is saved would not make up for it.
    fn check_choice(&self, before: &Router, at: ReplicaId, shape: &WorkShape, count: usize) {
        let saved = |replica| before.known_tokens(replica, shape);
        let has_room = |replica| before.is_ready(replica) && before.has_room(replica, shape, count);
        let all = || (0..self.config.replicas as u16).map(ReplicaId);
        assert!(
            before.is_ready(at) && (has_room(at) || !all().any(has_room)),
            "{at} is full, another is not"
        );
        for other in all().filter(|other| before.is_ready(*other) && has_room(*other) == has_room(at)) {
            assert!(
                before.load(at) + saved(other) <= before.load(other) + saved(at),
                "{at} has {} to do and saves {}, {other} has {} and saves {}",
                before.load(at),
                saved(at),
                before.load(other),
                saved(other)
            );
        }
    }

    fn observe(&mut self) {
        for (at, replica) in (0..).map(ReplicaId).zip(&self.replicas) {
            self.router.observe(at, replica.free_blocks);
        }
    }

    /// One message reaches a replica.
    fn deliver(&mut self, at: usize) {
        let replica = &mut self.replicas[at];
        match replica.inbox.pop_front() {
            None => {}
            Some(ToReplica::Submit(sequence)) if replica.is_up => {
                replica.waiting.insert((self.asked[&sequence].shape.priority, sequence));
            }
            Some(ToReplica::Submit(sequence)) => {
                replica.outbox.push_back(ToRouter::GivenBack(vec![sequence]));
            }
            Some(ToReplica::Cancel(sequence)) => {
                replica.waiting.remove(&(self.asked[&sequence].shape.priority, sequence));
                if let Some(running) = replica.running.remove(&sequence) {
                    replica.free_blocks += running.blocks;
                }
                replica.outbox.push_back(ToRouter::Ended(sequence));
            }
            Some(ToReplica::GiveBack(sequence)) => {
                let is_waiting = replica.waiting.remove(&(self.asked[&sequence].shape.priority, sequence));
                replica.outbox.extend(is_waiting.then(|| ToRouter::GivenBack(vec![sequence])));
            }
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
            Some(ToRouter::Ready(scheduler)) => {
                self.router.ready(here);
                self.known[at] = Some(scheduler);
            }
            Some(ToRouter::Lost) => self.router.lost(here),
            Some(ToRouter::Gone) => {
                self.router.gone(here);
                self.known[at] = None;
            }
            Some(ToRouter::GivenBack(sequences)) => {
                sequences.into_iter().for_each(|sequence| self.place_again(sequence));
            }
        }
        self.router.check_invariants();
    }

    fn place_again(&mut self, sequence: SequenceId) {
        if self.router.place_of(sequence).is_none() {
            assert_eq!(self.asked[&sequence].end, Some(End::Cancelled), "{sequence} is lost");
            return;
        }
        assert!(!self.asked[&sequence].started, "{sequence} was given back after it started");
        match self.router.given_back(sequence) {
            Some(to) => self.send(to, sequence),
            None => self.end(sequence, End::Failed),
        }
    }

    fn rebalance(&mut self) {
        for withdrawal in self.router.rebalance() {
            assert_ne!(withdrawal.from, withdrawal.to);
            if let Some(inbox) = self.inbox(withdrawal.from) {
                inbox.push_back(ToReplica::GiveBack(withdrawal.sequence));
            }
        }
        self.router.check_invariants();
    }

    /// One step of a replica: decodes, prefill, admissions, all in order.
    fn step(&mut self, at: usize) {
        let replica = &mut self.replicas[at];
        if !replica.is_up {
            return;
        }
        let mut budget = STEP_TOKENS;
        let mut ended = Vec::new();
        for (sequence, running) in &mut replica.running {
            if running.prefill > 0 {
                let chunk = running.prefill.min(budget);
                (running.prefill, budget) = (running.prefill - chunk, budget - chunk);
                if running.prefill == 0 {
                    replica.outbox.push_back(ToRouter::Prefilled(*sequence));
                }
            } else {
                running.decodes -= 1;
                budget = budget.saturating_sub(1);
                if running.decodes == 0 {
                    ended.push(*sequence);
                }
            }
        }
        for sequence in &ended {
            let running = replica.running.remove(sequence).expect("it ran");
            replica.free_blocks += running.blocks;
            replica.outbox.push_back(ToRouter::Ended(*sequence));
        }
        while let Some(&(priority, sequence)) = replica.waiting.first()
            && replica.running.len() < self.config.max_num_seqs
            && budget > 0
        {
            let asked = self.asked.get_mut(&sequence).expect("it was asked for");
            let known = asked.shape.keys.iter().take_while(|key| replica.cache.contains(key)).count();
            let cached = (known * BLOCK).min(asked.shape.prompt_tokens - 1);
            let prefill = asked.shape.prompt_tokens - cached;
            let blocks = prefill.div_ceil(BLOCK);
            if blocks > replica.free_blocks {
                break;
            }
            replica.waiting.remove(&(priority, sequence));
            replica.free_blocks -= blocks;
            replica.cache.extend(asked.shape.keys.iter());
            replica.running.insert(sequence, Running { prefill, decodes: asked.decodes, blocks });
            replica.outbox.push_back(ToRouter::Started(sequence));
            assert!(!asked.started, "{sequence} started twice");
            asked.started = true;
            self.waiting -= usize::from(asked.end.is_none());
            budget = budget.saturating_sub(prefill);
        }
        ended.into_iter().for_each(|sequence| self.end(sequence, End::Finished));
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
        let sequence = open[self.random.below(open.len())];
        self.end(sequence, End::Cancelled);
        if let Some(at) = self.router.place_of(sequence) {
            self.router.ended(sequence);
            if let Some(inbox) = self.inbox(at) {
                inbox.push_back(ToReplica::Cancel(sequence));
            }
        }
    }

    fn event(&mut self) {
        let at = self.random.below(self.config.replicas);
        match self.random.below(1000) {
            0..150 => self.submit(),
            150..160 => (0..self.random.below(20)).for_each(|_| self.submit()),
            160..420 => self.deliver(at),
            420..680 => self.hear(at),
            680..975 => self.step(at),
            975..985 => self.cancel(),
            985..987 => self.lose(at, false),
            987..988 => self.lose(at, true),
            _ => self.come_up(at),
        }
        self.rebalance();
        self.check();
    }

    fn check(&self) {
        self.router.check_invariants();
        let waiting = self.asked.values().filter(|asked| asked.end.is_none() && !asked.started).count();
        assert_eq!(self.waiting, waiting);
        assert!(self.waiting <= self.waiting_max, "more wait than may");
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

    /// When everybody knows everything, nobody waits at a replica without a seat while another has one.
    fn check_fairness(&mut self) {
        self.settle();
        self.observe();
        self.rebalance();
        self.settle();
        let seats = self.config.max_num_seqs;
        for replica in self.replicas.iter().filter(|replica| replica.is_up && replica.running.len() >= seats)
        {
            let Some(&(_, first)) = replica.waiting.first() else { continue };
            let shape = &self.asked[&first].shape;
            let has_room = |other: &&Replica| {
                let blocks = shape.prompt_tokens.div_ceil(BLOCK);
                other.is_up
                    && other.running.len() < seats
                    && other.waiting.is_empty()
                    && other.free_blocks >= blocks
            };
            let elsewhere = self.replicas.iter().filter(has_room).count();
            assert!(
                elsewhere == 0 || self.router.moves_of(first) == Some(MOVES_MAX),
                "{first} waits while {elsewhere} others have room"
            );
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
            assert!(replica.running.is_empty() && replica.waiting.is_empty(), "something still runs");
            assert_eq!(replica.free_blocks, self.config.num_blocks, "blocks are lost");
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
                if event % 100 == 99 {
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
    let config = RouterConfig { replicas: 4, max_num_seqs: 64, block_size: BLOCK, num_blocks: 4000 };
    simulation.config = config;
    simulation.router = Router::new(config);
    let replica = || Replica { free_blocks: config.num_blocks, ..Replica::default() };
    (simulation.replicas, simulation.known) = ((0..4).map(|_| replica()).collect(), vec![None; 4]);
    (0..4).for_each(|at| simulation.come_up(at));
    simulation.settle();
    simulation.waiting_max = 1000;
    let mut uncached = 0;
    for one in 0..128u64 {
        let tokens: Vec<u32> =
            std::iter::repeat_n(7, 1504).chain(std::iter::repeat_n(1000 + one as u32, 8)).collect();
        let keys = BlockKey::chain(None, &tokens, BLOCK).into();
        let shape = WorkShape { prompt_tokens: tokens.len(), priority: 0, keys };
        let asked = Asked { shape: shape.clone(), decodes: 10_000, end: None, started: false };
        simulation.asked.insert(SequenceId(one), asked);
        simulation.waiting += 1;
        let before = simulation.router.clone();
        let at = simulation.router.place(&[SequenceId(one)], &shape).expect("all are ready");
        simulation.check_choice(&before, at, &shape, 1);
        uncached += shape.prompt_tokens - before.known_tokens(at, &shape);
        simulation.replicas[at.index()].inbox.push_back(ToReplica::Submit(SequenceId(one)));
        // Each is prefilled before the next comes.
        for _ in 0..40 {
            simulation.settle();
            (0..4).for_each(|at| simulation.step(at));
        }
    }
    simulation.settle();
    let running: Vec<usize> = simulation.replicas.iter().map(|replica| replica.running.len()).collect();
    println!("{running:?} run, {uncached} tokens were computed");
    let bound = 1504 / OPEN_REQUEST_TOKENS + 1;
    let (most, least) = (running.iter().max().expect("four"), running.iter().min().expect("four"));
    assert!(most - least <= bound && *least > 0, "{running:?}");
    assert!(uncached < 4 * 1512 + 128 * 8, "the prefix is computed once at each replica: {uncached}");
}
