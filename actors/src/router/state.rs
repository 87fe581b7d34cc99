//! The pure router: places requests, follows them, and says which of those that wait should move.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{INDEX_ENTRIES_MAX, MOVES_MAX, OPEN_REQUEST_TOKENS, index::PrefixIndex};
use crate::{
    config::{CacheSpec, SchedulerConfig},
    ids::{ReplicaId, SequenceId},
    prefix::BlockKey,
};

/// What a router must know of the replicas, which are all alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterConfig {
    /// How many there are.
    pub replicas: usize,
    /// Most sequences that one runs at a time.
    pub max_num_seqs: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Pages of one's pool.
    pub num_blocks: usize,
}

impl RouterConfig {
    /// That of replicas with these schedulers and caches.
    pub fn new(replicas: usize, scheduler: &SchedulerConfig, cache: &CacheSpec) -> Self {
        let CacheSpec { block_size, num_blocks, .. } = *cache;
        Self { replicas, max_num_seqs: scheduler.max_num_seqs, block_size, num_blocks }
    }
}

/// What a router must know of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkShape {
    /// Tokens of its prompt, at least one.
    pub prompt_tokens: usize,
    /// Lower comes first.
    pub priority: i32,
    /// Keys of the prompt's full blocks; none where nothing is cached, or where there is no choice.
    pub keys: Arc<[BlockKey]>,
}

/// A request that waits at one replica, to be asked back and given to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withdrawal {
    /// Which.
    pub sequence: SequenceId,
    /// Where it waits.
    pub from: ReplicaId,
    /// Where it would be served sooner.
    pub to: ReplicaId,
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It has never run.
    Waiting,
    /// As above, and its replica was asked to give it back for this one.
    Leaving(ReplicaId),
    /// Its prompt is being computed.
    Prefilling,
    /// It draws.
    Decoding,
}

impl Stage {
    fn is_unstarted(self) -> bool {
        matches!(self, Stage::Waiting | Stage::Leaving(_))
    }
}

/// One open request.
#[derive(Clone, Debug)]
struct Placed {
    shape: WorkShape,
    at: ReplicaId,
    /// Tokens of its prompt that its replica computes.
    uncached: usize,
    stage: Stage,
    moves: u8,
}

impl Placed {
    /// Tokens of prefill that are still to be computed, as far as anybody was told.
    fn outstanding(&self) -> usize {
        if self.stage == Stage::Decoding { 0 } else { self.uncached }
    }
}

/// One replica as the router sees it.
#[derive(Clone, Debug)]
struct Seat {
    is_ready: bool,
    index: PrefixIndex,
    /// Pages that its scheduler could hand out, when it last said so.
    free_blocks: usize,
    /// Open requests, and those that are on their way here.
    open: usize,
    arriving: usize,
    /// Requests that have not started, in the order in which they are served.
    waiting: BTreeSet<(i32, SequenceId)>,
    /// Prefill of all its requests, and of those that have started.
    outstanding: usize,
    outstanding_of_started: usize,
    /// Blocks that those which have not started will take, and those that are on their way.
    pledged: usize,
}

impl Seat {
    /// How much it has to do, in tokens of prefill.
    fn load(&self) -> usize {
        self.open * OPEN_REQUEST_TOKENS + self.outstanding
    }
}

/// Decides which replica serves a request. A plain value: no clock, no channel.
///
/// **Choice.** A request goes where its prompt is computed soonest: to the replica with the least load plus prefill
/// that the request itself needs there, both in tokens. So the longest known prefix wins, unless its replica's load
/// exceeds the least loaded one's by more than the prefill that it saves. Ties go to the longer prefix, then to the
/// lesser load, then to the lower number. Replicas that are not ready get nothing, and full ones only where all are
/// full.
///
/// **What is known of prefixes** is learned from where requests were sent; a replica that loses its cache says so.
///
/// **Order.** Numbers of sequences are the order of arrival everywhere; a request that is moved keeps its own.
#[derive(Clone, Debug)]
pub struct Router {
    config: RouterConfig,
    seats: Vec<Seat>,
    open: BTreeMap<SequenceId, Placed>,
    moved: u64,
}

impl Router {
    /// A router that knows of no ready replica.
    pub fn new(config: RouterConfig) -> Self {
        let seat = Seat {
            is_ready: false,
            index: PrefixIndex::new(config.num_blocks.min(INDEX_ENTRIES_MAX)),
            free_blocks: config.num_blocks,
            open: 0,
            arriving: 0,
            waiting: BTreeSet::new(),
            outstanding: 0,
            outstanding_of_started: 0,
            pledged: 0,
        };
        Self { config, seats: vec![seat; config.replicas], open: BTreeMap::new(), moved: 0 }
    }

    /// A replica serves from now on. Its cache is empty.
    pub fn ready(&mut self, replica: ReplicaId) {
        let num_blocks = self.config.num_blocks;
        let Some(seat) = self.seats.get_mut(replica.index()) else { return };
        seat.is_ready = true;
        seat.free_blocks = num_blocks;
        seat.index.clear();
    }

    /// A replica serves no more, and its cache is gone. What becomes of its requests is still to be told.
    pub fn lost(&mut self, replica: ReplicaId) {
        let Some(seat) = self.seats.get_mut(replica.index()) else { return };
        seat.is_ready = false;
        seat.index.clear();
    }

    /// A replica is gone, with all its requests.
    pub fn gone(&mut self, replica: ReplicaId) {
        self.lost(replica);
        let there = self.open.iter().filter(|(_, placed)| placed.at == replica);
        let there: Vec<SequenceId> = there.map(|(sequence, _)| *sequence).collect();
        there.into_iter().for_each(|sequence| self.ended(sequence));
    }

    /// Pages that a replica could hand out now.
    pub fn observe(&mut self, replica: ReplicaId, free_blocks: usize) {
        if let Some(seat) = self.seats.get_mut(replica.index()) {
            seat.free_blocks = free_blocks;
        }
    }

    /// Places requests of one prompt, all of them at one replica. `None` when none is ready: then nothing changes.
    pub fn place(&mut self, sequences: &[SequenceId], shape: &WorkShape) -> Option<ReplicaId> {
        let at = self.choose(shape, sequences.len())?;
        for &sequence in sequences {
            self.enter(sequence, shape.clone(), at, 0);
        }
        Some(at)
    }

    /// A replica gave back a request that had not started: where it goes now. `None` when it has ended meanwhile, or
    /// when no replica is ready; it is forgotten then.
    pub fn given_back(&mut self, sequence: SequenceId) -> Option<ReplicaId> {
        let placed = self.leave(sequence)?;
        let wanted = match placed.stage {
            Stage::Leaving(to) if self.is_ready(to) => Some(to),
            _ => None,
        };
        let is_asked_for = matches!(placed.stage, Stage::Leaving(_));
        let at = wanted.or_else(|| self.choose(&placed.shape, 1))?;
        self.moved += u64::from(at != placed.at);
        self.enter(sequence, placed.shape, at, placed.moves + u8::from(is_asked_for));
        Some(at)
    }

    /// A request was admitted for the first time: it cannot be moved any more.
    pub fn started(&mut self, sequence: SequenceId) {
        self.reach(sequence, Stage::Prefilling);
    }

    /// A request's prompt is computed.
    pub fn prefilled(&mut self, sequence: SequenceId) {
        self.reach(sequence, Stage::Decoding);
    }

    /// A request ended, however.
    pub fn ended(&mut self, sequence: SequenceId) {
        self.leave(sequence);
    }

    /// Where a request is, if it is open.
    pub fn place_of(&self, sequence: SequenceId) -> Option<ReplicaId> {
        self.open.get(&sequence).map(|placed| placed.at)
    }

    /// Requests that wait where it is full while another replica could serve them at once, or sooner. Each is to be
    /// asked back; [`Router::given_back`] or [`Router::started`] says what came of that.
    pub fn rebalance(&mut self) -> Vec<Withdrawal> {
        let mut withdrawals = Vec::new();
        // Replicas whose first in line is to stay: those behind it are not served before it anywhere.
        let mut settled = vec![false; self.seats.len()];
        while let Some((from, sequence)) = self.next_waiting(&settled) {
            match self.better_place(sequence, from) {
                Some(to) => {
                    self.promise(sequence, to);
                    withdrawals.push(Withdrawal { sequence, from, to });
                }
                None => settled[from.index()] = true,
            }
        }
        withdrawals
    }

    /// Requests that are open.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Times a request was moved to another replica.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// How much a replica has to do: tokens of prefill that were not reported as done, and
    /// [`OPEN_REQUEST_TOKENS`] for each open request.
    pub fn load(&self, replica: ReplicaId) -> usize {
        self.seats.get(replica.index()).map_or(0, Seat::load)
    }

    /// Tokens of this prompt that a replica is believed to hold. The last token is computed in any case: its row is
    /// what is drawn from.
    pub fn known_tokens(&self, replica: ReplicaId, shape: &WorkShape) -> usize {
        let blocks = self.seats.get(replica.index()).map_or(0, |seat| seat.index.known(&shape.keys));
        (blocks * self.config.block_size).min(shape.prompt_tokens.saturating_sub(1))
    }

    #[cfg(test)]
    pub(super) fn moves_of(&self, sequence: SequenceId) -> Option<u8> {
        self.open.get(&sequence).map(|placed| placed.moves)
    }

    pub(super) fn is_ready(&self, replica: ReplicaId) -> bool {
        self.seats.get(replica.index()).is_some_and(|seat| seat.is_ready)
    }

    fn ready_replicas(&self) -> impl Iterator<Item = (ReplicaId, &Seat)> {
        let numbered = (0..).map(ReplicaId).zip(&self.seats);
        numbered.filter(|(_, seat)| seat.is_ready)
    }

    /// The one place where a replica is chosen.
    fn choose(&self, shape: &WorkShape, count: usize) -> Option<ReplicaId> {
        let cost = |(replica, seat): &(ReplicaId, &Seat)| {
            let known = self.known_tokens(*replica, shape);
            let soonest = seat.load() + shape.prompt_tokens.saturating_sub(known);
            (soonest, usize::MAX - known, seat.load(), *replica)
        };
        let with_room = self.ready_replicas().filter(|(at, _)| self.has_room(*at, shape, count));
        let best = with_room.min_by_key(cost).or_else(|| self.ready_replicas().min_by_key(cost));
        best.map(|(replica, _)| replica)
    }

    /// Whether `count` more requests of this shape would run there at once, as far as can be told.
    pub(super) fn has_room(&self, replica: ReplicaId, shape: &WorkShape, count: usize) -> bool {
        let Some(seat) = self.seats.get(replica.index()) else { return false };
        let needed = self.blocks(shape.prompt_tokens - self.known_tokens(replica, shape));
        seat.open + seat.arriving + count <= self.config.max_num_seqs
            && seat.pledged.saturating_add(needed) <= seat.free_blocks
    }

    fn blocks(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.config.block_size)
    }

    /// The first in line of all that wait, and where, except at the replicas that are `settled`.
    fn next_waiting(&self, settled: &[bool]) -> Option<(ReplicaId, SequenceId)> {
        let numbered = (0..).map(ReplicaId).zip(&self.seats).zip(settled);
        let first = |((replica, seat), settled): ((ReplicaId, &Seat), &bool)| {
            // What waits where nothing is served is given back unasked.
            if *settled || !seat.is_ready {
                return None;
            }
            let is_free = |entry: &&(i32, SequenceId)| {
                let placed = self.open.get(&entry.1);
                placed.is_some_and(|placed| placed.stage == Stage::Waiting && placed.moves < MOVES_MAX)
            };
            seat.waiting.iter().find(is_free).map(|&entry| (entry, replica))
        };
        numbered.filter_map(first).min().map(|((_, sequence), replica)| (replica, sequence))
    }

    /// Where a request that waits at `from`, first in line, would be served sooner.
    fn better_place(&self, sequence: SequenceId, from: ReplicaId) -> Option<ReplicaId> {
        let placed = self.open.get(&sequence)?;
        let others = self.ready_replicas().filter(|(replica, _)| *replica != from);
        let with_room = others.filter(|(replica, _)| self.has_room(*replica, &placed.shape, 1));
        let soonest = |replica: ReplicaId, seat: &Seat| {
            seat.outstanding + placed.shape.prompt_tokens - self.known_tokens(replica, &placed.shape)
        };
        let cost = |(replica, seat): &(ReplicaId, &Seat)| (soonest(*replica, seat), seat.load(), *replica);
        let (to, there) = with_room.min_by_key(cost)?;
        let here = self.seats.get(from.index())?;
        let running = here.open - here.waiting.len();
        let is_full = running >= self.config.max_num_seqs || here.free_blocks < self.blocks(placed.uncached);
        // Before it come only those that have started: it is the first in line.
        let stays = here.outstanding_of_started + placed.uncached;
        (is_full || stays > soonest(to, there)).then_some(to)
    }

    fn enter(&mut self, sequence: SequenceId, shape: WorkShape, at: ReplicaId, moves: u8) {
        let uncached = shape.prompt_tokens - self.known_tokens(at, &shape);
        let blocks = self.blocks(uncached);
        let seat = &mut self.seats[at.index()];
        seat.index.enter(&shape.keys);
        seat.open += 1;
        seat.outstanding += uncached;
        seat.pledged += blocks;
        seat.waiting.insert((shape.priority, sequence));
        let placed = Placed { shape, at, uncached, stage: Stage::Waiting, moves };
        let before = self.open.insert(sequence, placed);
        assert!(before.is_none(), "{sequence} was placed twice");
    }

    fn leave(&mut self, sequence: SequenceId) -> Option<Placed> {
        self.stay(sequence);
        let placed = self.open.remove(&sequence)?;
        let blocks = self.blocks(placed.uncached);
        let seat = &mut self.seats[placed.at.index()];
        seat.open -= 1;
        seat.outstanding -= placed.outstanding();
        match placed.stage {
            Stage::Waiting | Stage::Leaving(_) => {
                seat.waiting.remove(&(placed.shape.priority, sequence));
                seat.pledged -= blocks;
            }
            Stage::Prefilling => seat.outstanding_of_started -= placed.uncached,
            Stage::Decoding => {}
        }
        Some(placed)
    }

    /// Keeps a place for a request that is asked back.
    fn promise(&mut self, sequence: SequenceId, to: ReplicaId) {
        let Some(placed) = self.open.get_mut(&sequence) else { return };
        placed.stage = Stage::Leaving(to);
        let blocks = placed.shape.prompt_tokens.div_ceil(self.config.block_size);
        let seat = &mut self.seats[to.index()];
        seat.arriving += 1;
        seat.pledged += blocks;
    }

    /// Gives up the place that was kept elsewhere, if one was.
    fn stay(&mut self, sequence: SequenceId) {
        let Some(placed) = self.open.get(&sequence) else { return };
        let Stage::Leaving(to) = placed.stage else { return };
        let blocks = placed.shape.prompt_tokens.div_ceil(self.config.block_size);
        let seat = &mut self.seats[to.index()];
        seat.arriving -= 1;
        seat.pledged -= blocks;
    }

    fn reach(&mut self, sequence: SequenceId, stage: Stage) {
        self.stay(sequence);
        let Some(placed) = self.open.get_mut(&sequence) else { return };
        if !placed.stage.is_unstarted() && stage == Stage::Prefilling {
            return;
        }
        let before = std::mem::replace(&mut placed.stage, stage);
        let blocks = placed.uncached.div_ceil(self.config.block_size);
        let seat = &mut self.seats[placed.at.index()];
        if before.is_unstarted() {
            seat.waiting.remove(&(placed.shape.priority, sequence));
            seat.pledged -= blocks;
            seat.outstanding_of_started += placed.uncached;
            // What it is compared by is not asked for again.
            placed.shape.keys = Arc::default();
        }
        if stage == Stage::Decoding && before != Stage::Decoding {
            seat.outstanding -= placed.uncached;
            seat.outstanding_of_started -= placed.uncached;
        }
    }

    /// Panics when bookkeeping contradicts itself. Called after every event in simulations.
    pub fn check_invariants(&self) {
        for (replica, seat) in (0..).map(ReplicaId).zip(&self.seats) {
            seat.index.check_invariants();
            let here = || self.open.iter().filter(move |(_, placed)| placed.at == replica);
            assert_eq!(seat.open, here().count(), "{replica} lost count of its requests");
            let unstarted = || here().filter(|(_, placed)| placed.stage.is_unstarted());
            let waiting: BTreeSet<(i32, SequenceId)> =
                unstarted().map(|(sequence, placed)| (placed.shape.priority, *sequence)).collect();
            assert_eq!(seat.waiting, waiting, "{replica} lost those who wait");
            let outstanding: usize = here().map(|(_, placed)| placed.outstanding()).sum();
            assert_eq!(seat.outstanding, outstanding, "{replica} lost count of its prefill");
            let started = here().filter(|(_, placed)| placed.stage == Stage::Prefilling);
            let of_started: usize = started.map(|(_, placed)| placed.uncached).sum();
            assert_eq!(seat.outstanding_of_started, of_started, "{replica} lost count of what it computes");
            let arriving =
                || self.open.values().filter(move |placed| placed.stage == Stage::Leaving(replica));
            assert_eq!(seat.arriving, arriving().count(), "{replica} lost count of who comes");
            let pledged: usize = unstarted().map(|(_, placed)| self.blocks(placed.uncached)).sum();
            let promised: usize = arriving().map(|placed| self.blocks(placed.shape.prompt_tokens)).sum();
            assert_eq!(seat.pledged, pledged + promised, "{replica} lost count of pledged blocks");
        }
        for (sequence, placed) in &self.open {
            assert!(placed.moves <= MOVES_MAX, "{sequence} was moved too often");
            assert!(placed.stage != Stage::Leaving(placed.at), "{sequence} moves to where it is");
        }
    }
}
