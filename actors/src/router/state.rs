//! The pure router: places requests, follows them, and says which of those that wait should move.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    MOVES_MAX, OPEN_REQUEST_TOKENS,
    index::PrefixIndex,
    work::{RouterConfig, Withdrawal, WorkShape},
};
use crate::{
    ids::{ReplicaId, SequenceId},
    order::Place,
};

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It has never run.
    Waiting,
    /// As above, and its replica was asked to give it back for another one, where so many pages are kept for it.
    Leaving { to: ReplicaId, pages: usize },
    /// Its prompt is being computed.
    Prefilling,
    /// It draws.
    Decoding,
}

impl Stage {
    fn is_unstarted(self) -> bool {
        matches!(self, Stage::Waiting | Stage::Leaving { .. })
    }
}

/// One open request.
#[derive(Clone, Debug)]
struct Placed {
    shape: WorkShape,
    /// It and all that were placed together with it.
    group: Arc<[SequenceId]>,
    at: ReplicaId,
    /// Tokens of its prompt that its replica computes, and pages that it takes for it there.
    uncached: usize,
    pages: usize,
    stage: Stage,
    moves: u8,
}

/// A request that is about to be placed.
struct Newcomer {
    shape: WorkShape,
    group: Arc<[SequenceId]>,
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
    waiting: BTreeSet<Place>,
    /// Prefill of all its requests, and of those that have started.
    outstanding: usize,
    outstanding_of_started: usize,
    /// Pages that those which have not started will take, and those that are on their way.
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
/// **Order.** What waits is moved in the order in which schedulers serve it, see [`Place`]; a request that is moved
/// keeps its place.
///
/// **Groups.** Requests of one prompt that were placed together share what one of them computes. They stay together:
/// they are moved all at once, and none is once one of them has started.
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
            index: PrefixIndex::new(config.blocks_remembered()),
            free_blocks: config.cache.num_blocks,
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
        let num_blocks = self.config.cache.num_blocks;
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

    /// Places requests of one prompt, all of them at one replica, where they stay together. `None` when none is ready:
    /// then nothing changes.
    pub fn place(&mut self, sequences: &[SequenceId], shape: &WorkShape) -> Option<ReplicaId> {
        let at = self.choose(shape, sequences.len())?;
        let group: Arc<[SequenceId]> = sequences.into();
        let newcomer = |&sequence: &SequenceId| {
            (sequence, Newcomer { shape: shape.clone(), group: Arc::clone(&group), moves: 0 })
        };
        self.enter(sequences.iter().map(newcomer), at);
        Some(at)
    }

    /// A replica gave back requests of one group, none of which had started: where all of them go now. `None` when they
    /// have ended meanwhile, or when no replica is ready; they are forgotten then.
    pub fn given_back(&mut self, sequences: &[SequenceId]) -> Option<ReplicaId> {
        let left = sequences.iter().filter_map(|&sequence| Some((sequence, self.leave(sequence)?)));
        let left: Vec<(SequenceId, Placed)> = left.collect();
        let (_, first) = left.first()?;
        let asked_for = match first.stage {
            Stage::Leaving { to, .. } => Some(to),
            _ => None,
        };
        let wanted = asked_for.filter(|to| self.is_ready(*to));
        let at = wanted.or_else(|| self.choose(&first.shape, left.len()))?;
        self.moved += left.iter().filter(|(_, placed)| placed.at != at).count() as u64;
        let newcomers = left.into_iter().map(|(sequence, placed)| {
            let Placed { shape, group, moves, .. } = placed;
            (sequence, Newcomer { shape, group, moves: moves + u8::from(asked_for.is_some()) })
        });
        self.enter(newcomers, at);
        Some(at)
    }

    /// A request that was asked back stays where it is: another one of its group has started there.
    pub fn kept(&mut self, sequence: SequenceId) {
        self.stay(sequence);
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

    /// Requests that wait where it is full while another replica could serve them at once, or sooner. They are to be
    /// asked back; [`Router::given_back`], [`Router::kept`] or [`Router::started`] says what came of that.
    pub fn rebalance(&mut self) -> Vec<Withdrawal> {
        let mut withdrawals = Vec::new();
        // Replicas whose first in line is to stay: those behind it are not served before it anywhere.
        let mut settled = vec![false; self.seats.len()];
        while let Some((from, sequences)) = self.next_waiting(&settled) {
            match self.better_place(&sequences, from) {
                Some(to) => {
                    self.promise(&sequences, to);
                    withdrawals.push(Withdrawal { sequences, from, to });
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
        (blocks * self.config.cache.block_size).min(shape.prompt_tokens.saturating_sub(1))
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

    /// Whether `count` more requests of this shape, or as many of them as ever run at a time, would run there at once,
    /// as far as can be told.
    pub(super) fn has_room(&self, replica: ReplicaId, shape: &WorkShape, count: usize) -> bool {
        let Some(seat) = self.seats.get(replica.index()) else { return false };
        let count = count.min(self.config.max_num_seqs);
        let needed: usize = (0..count).map(|nth| self.pages_at(replica, shape, nth)).sum();
        seat.open + seat.arriving + count <= self.config.max_num_seqs
            && seat.pledged.saturating_add(needed) <= seat.free_blocks
    }

    /// Tokens of its prompt that the `nth` of a group need not compute at a replica: the first one computes it for all.
    fn saved_tokens(&self, replica: ReplicaId, shape: &WorkShape, nth: usize) -> usize {
        if nth == 0 { self.known_tokens(replica, shape) } else { shape.prompt_tokens.saturating_sub(1) }
    }

    /// Pages that the `nth` of a group takes at a replica for its prompt.
    fn pages_at(&self, replica: ReplicaId, shape: &WorkShape, nth: usize) -> usize {
        self.config.pages(shape.prompt_tokens, self.saved_tokens(replica, shape, nth))
    }

    /// The first in line of all that wait, with its group, and where; except at the replicas that are `settled`.
    fn next_waiting(&self, settled: &[bool]) -> Option<(ReplicaId, Vec<SequenceId>)> {
        let numbered = (0..).map(ReplicaId).zip(&self.seats).zip(settled);
        let first = |((replica, seat), settled): ((ReplicaId, &Seat), &bool)| {
            // What waits where nothing is served is given back unasked.
            if *settled || !seat.is_ready {
                return None;
            }
            seat.waiting.iter().find(|place| self.may_move(place.sequence)).map(|&place| (place, replica))
        };
        let (place, replica) = numbered.filter_map(first).min()?;
        let group = &self.open.get(&place.sequence)?.group;
        let open = group.iter().copied().filter(|sequence| self.open.contains_key(sequence));
        Some((replica, open.collect()))
    }

    /// Whether all of a request's group wait, and were not moved too often.
    fn may_move(&self, sequence: SequenceId) -> bool {
        let Some(placed) = self.open.get(&sequence) else { return false };
        let mut group = placed.group.iter().filter_map(|sequence| self.open.get(sequence));
        group.all(|one| one.stage == Stage::Waiting && one.at == placed.at && one.moves < MOVES_MAX)
    }

    /// Where a group that waits at `from`, first in line, would be served sooner.
    fn better_place(&self, sequences: &[SequenceId], from: ReplicaId) -> Option<ReplicaId> {
        let placed = self.open.get(sequences.first()?)?;
        let others = self.ready_replicas().filter(|(replica, _)| *replica != from);
        let with_room = others.filter(|(replica, _)| self.has_room(*replica, &placed.shape, sequences.len()));
        let soonest = |replica: ReplicaId, seat: &Seat| {
            seat.outstanding + placed.shape.prompt_tokens - self.known_tokens(replica, &placed.shape)
        };
        let cost = |(replica, seat): &(ReplicaId, &Seat)| (soonest(*replica, seat), seat.load(), *replica);
        let (to, there) = with_room.min_by_key(cost)?;
        let here = self.seats.get(from.index())?;
        let running = here.open - here.waiting.len();
        let is_full = running >= self.config.max_num_seqs || here.free_blocks < placed.pages;
        // Before it come only those that have started: it is the first in line.
        let stays = here.outstanding_of_started + placed.uncached;
        (is_full || stays > soonest(to, there)).then_some(to)
    }

    /// Takes in requests of one group.
    fn enter(&mut self, group: impl Iterator<Item = (SequenceId, Newcomer)>, at: ReplicaId) {
        for (nth, (sequence, newcomer)) in group.enumerate() {
            let Newcomer { shape, group, moves } = newcomer;
            let uncached = shape.prompt_tokens - self.saved_tokens(at, &shape, nth);
            let pages = self.pages_at(at, &shape, nth);
            let seat = &mut self.seats[at.index()];
            seat.index.enter(&shape.keys);
            seat.open += 1;
            seat.outstanding += uncached;
            seat.pledged += pages;
            seat.waiting.insert(Place { due: shape.due, sequence });
            let placed = Placed { shape, group, at, uncached, pages, stage: Stage::Waiting, moves };
            let before = self.open.insert(sequence, placed);
            assert!(before.is_none(), "{sequence} was placed twice");
        }
    }

    /// Takes a request out. What it was about to do is left in its stage.
    fn leave(&mut self, sequence: SequenceId) -> Option<Placed> {
        let stage = self.open.get(&sequence)?.stage;
        self.stay(sequence);
        let mut placed = self.open.remove(&sequence)?;
        let seat = &mut self.seats[placed.at.index()];
        seat.open -= 1;
        seat.outstanding -= placed.outstanding();
        match placed.stage {
            Stage::Waiting | Stage::Leaving { .. } => {
                seat.waiting.remove(&Place { due: placed.shape.due, sequence });
                seat.pledged -= placed.pages;
            }
            Stage::Prefilling => seat.outstanding_of_started -= placed.uncached,
            Stage::Decoding => {}
        }
        placed.stage = stage;
        Some(placed)
    }

    /// Keeps places for a group that is asked back.
    fn promise(&mut self, sequences: &[SequenceId], to: ReplicaId) {
        for (nth, sequence) in sequences.iter().enumerate() {
            let Some(placed) = self.open.get(sequence) else { continue };
            let pages = self.pages_at(to, &placed.shape, nth);
            let seat = &mut self.seats[to.index()];
            seat.arriving += 1;
            seat.pledged += pages;
            if let Some(placed) = self.open.get_mut(sequence) {
                placed.stage = Stage::Leaving { to, pages };
            }
        }
    }

    /// Gives up the place that was kept elsewhere, if one was.
    fn stay(&mut self, sequence: SequenceId) {
        let Some(placed) = self.open.get_mut(&sequence) else { return };
        let Stage::Leaving { to, pages } = placed.stage else { return };
        placed.stage = Stage::Waiting;
        let seat = &mut self.seats[to.index()];
        seat.arriving -= 1;
        seat.pledged -= pages;
    }

    fn reach(&mut self, sequence: SequenceId, stage: Stage) {
        self.stay(sequence);
        let Some(placed) = self.open.get_mut(&sequence) else { return };
        if !placed.stage.is_unstarted() && stage == Stage::Prefilling {
            return;
        }
        let before = std::mem::replace(&mut placed.stage, stage);
        let seat = &mut self.seats[placed.at.index()];
        if before.is_unstarted() {
            seat.waiting.remove(&Place { due: placed.shape.due, sequence });
            seat.pledged -= placed.pages;
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
            let place = |(sequence, placed): (&SequenceId, &Placed)| Place {
                due: placed.shape.due,
                sequence: *sequence,
            };
            let waiting: BTreeSet<Place> = unstarted().map(place).collect();
            assert_eq!(seat.waiting, waiting, "{replica} lost those who wait");
            let outstanding: usize = here().map(|(_, placed)| placed.outstanding()).sum();
            assert_eq!(seat.outstanding, outstanding, "{replica} lost count of its prefill");
            let started = here().filter(|(_, placed)| placed.stage == Stage::Prefilling);
            let of_started: usize = started.map(|(_, placed)| placed.uncached).sum();
            assert_eq!(seat.outstanding_of_started, of_started, "{replica} lost count of what it computes");
            let arriving = self.open.values().filter_map(|placed| match placed.stage {
                Stage::Leaving { to, pages } if to == replica => Some(pages),
                _ => None,
            });
            let arriving: Vec<usize> = arriving.collect();
            assert_eq!(seat.arriving, arriving.len(), "{replica} lost count of who comes");
            let pledged: usize = unstarted().map(|(_, placed)| placed.pages).sum();
            let promised: usize = arriving.iter().sum();
            assert_eq!(seat.pledged, pledged + promised, "{replica} lost count of pledged pages");
        }
        for (sequence, placed) in &self.open {
            assert!(placed.moves <= MOVES_MAX, "{sequence} was moved too often");
            let is_going_nowhere = matches!(placed.stage, Stage::Leaving { to, .. } if to == placed.at);
            assert!(!is_going_nowhere, "{sequence} moves to where it is");
            assert!(placed.group.contains(sequence), "{sequence} is none of its own group");
        }
    }
}
