//! The pure router: places requests and follows them.

mod invariants;
mod moving;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    OPEN_REQUEST_TOKENS,
    index::PrefixIndex,
    work::{RouterConfig, WorkShape},
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

/// What a request's prompt costs its replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cost {
    /// Tokens that are computed.
    uncached: usize,
    /// Pages that are taken.
    pages: usize,
}

impl Cost {
    fn plus(self, other: Self) -> Self {
        Self { uncached: self.uncached + other.uncached, pages: self.pages + other.pages }
    }

    fn max(self, other: Self) -> Self {
        Self { uncached: self.uncached.max(other.uncached), pages: self.pages.max(other.pages) }
    }
}

/// One open request.
#[derive(Clone, Debug)]
struct Placed {
    shape: WorkShape,
    /// It and all that were placed together with it.
    group: Arc<[SequenceId]>,
    at: ReplicaId,
    cost: Cost,
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
        if self.stage == Stage::Decoding { 0 } else { self.cost.uncached }
    }
}

/// One replica as the router sees it.
#[derive(Clone, Debug)]
struct Seat {
    is_ready: bool,
    index: PrefixIndex,
    /// Pages that its scheduler could give to newcomers, when it last said so. Those that will be taken by requests
    /// which have started are none of them.
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
/// **Groups.** Requests of one prompt that were placed together share what the first of them computes; when it ends
/// before the others, the next one computes it. They stay together: they are moved all at once, and none is once one of
/// them has started.
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

    /// Pages that a replica could give to newcomers now: neither held by requests that run, nor still to be taken by
    /// them.
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
        let newcomer = |(nth, &sequence): (usize, &SequenceId)| {
            let shape = WorkShape { is_whole: shape.is_whole && nth == 0, ..shape.clone() };
            (sequence, Newcomer { shape, group: Arc::clone(&group), moves: 0 })
        };
        self.enter(sequences.iter().enumerate().map(newcomer), at);
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

    /// Tokens of this prompt that a replica need not compute, because it is believed to hold them, or to hold them by
    /// then. The last token is computed in any case: its row is what is drawn from.
    pub fn known_tokens(&self, replica: ReplicaId, shape: &WorkShape) -> usize {
        let blocks = self.seats.get(replica.index()).map_or(0, |seat| seat.index.known(&shape.keys));
        self.saved_tokens(blocks, shape)
    }

    /// Tokens of a prompt that need not be computed where so many of its blocks are there.
    fn saved_tokens(&self, blocks: usize, shape: &WorkShape) -> usize {
        match shape.is_whole {
            true => 0,
            false => (blocks * self.config.cache.block_size).min(shape.prompt_tokens.saturating_sub(1)),
        }
    }

    #[cfg(test)]
    pub(super) fn moves_of(&self, sequence: SequenceId) -> Option<u8> {
        self.open.get(&sequence).map(|placed| placed.moves)
    }

    #[cfg(test)]
    pub(super) fn uncached_of(&self, sequence: SequenceId) -> Option<usize> {
        self.open.get(&sequence).map(|placed| placed.cost.uncached)
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
        let needed: usize = (0..count).map(|nth| self.cost_of(replica, shape, nth).pages).sum();
        seat.open + seat.arriving + count <= self.config.max_num_seqs
            && seat.pledged.saturating_add(needed) <= seat.free_blocks
    }

    /// What the `nth` of a group costs a replica: the first one computes the prompt for all.
    fn cost_of(&self, replica: ReplicaId, shape: &WorkShape, nth: usize) -> Cost {
        let saved = match nth {
            0 => self.known_tokens(replica, shape),
            _ => shape.prompt_tokens.saturating_sub(1),
        };
        self.cost(shape, saved)
    }

    /// What a request costs a replica where nobody computes anything for it who has not begun.
    fn cost_alone(&self, replica: ReplicaId, shape: &WorkShape) -> Cost {
        let blocks = self.seats.get(replica.index()).map_or(0, |seat| seat.index.begun(&shape.keys));
        self.cost(shape, self.saved_tokens(blocks, shape))
    }

    fn cost(&self, shape: &WorkShape, saved: usize) -> Cost {
        let pages = self.config.pages(shape.prompt_tokens, saved);
        Cost { uncached: shape.prompt_tokens - saved, pages }
    }

    /// Takes in requests of one group.
    fn enter(&mut self, group: impl Iterator<Item = (SequenceId, Newcomer)>, at: ReplicaId) {
        for (nth, (sequence, newcomer)) in group.enumerate() {
            let Newcomer { shape, group, moves } = newcomer;
            let cost = self.cost_of(at, &shape, nth);
            let seat = &mut self.seats[at.index()];
            seat.index.enter(&shape.keys);
            seat.open += 1;
            seat.outstanding += cost.uncached;
            seat.pledged += cost.pages;
            seat.waiting.insert(Place { due: shape.due, sequence });
            let placed = Placed { shape, group, at, cost, stage: Stage::Waiting, moves };
            let before = self.open.insert(sequence, placed);
            assert!(before.is_none(), "{sequence} was placed twice");
        }
    }

    /// Takes a request out; what it was to compute for others of its group goes to the next of them. What it was about
    /// to do is left in its stage.
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
                seat.pledged -= placed.cost.pages;
            }
            Stage::Prefilling => seat.outstanding_of_started -= placed.cost.uncached,
            Stage::Decoding => {}
        }
        placed.stage = stage;
        if let Some(heir) = self.heir_of(&placed) {
            // What it has computed itself is at most partly there.
            let cost = match placed.stage == Stage::Decoding || placed.shape.is_whole {
                true => self.open.get(&heir).map(|heir| self.cost_alone(heir.at, &heir.shape)),
                false => Some(placed.cost),
            };
            self.inherit(heir, cost.unwrap_or(placed.cost), placed.stage);
        }
        Some(placed)
    }

    /// Who computes the prompt of a group when one of them has left: nobody where others have it, or are about to.
    fn heir_of(&self, left: &Placed) -> Option<SequenceId> {
        let others = left.group.iter().filter_map(|one| Some((*one, self.open.get(one)?)));
        let others = others.filter(|(_, other)| other.at == left.at);
        if others.clone().any(|(_, other)| other.stage == Stage::Decoding) {
            return None;
        }
        let computing = others.clone().find(|(_, other)| other.stage == Stage::Prefilling);
        let heir = match (computing, left.stage) {
            (Some(_), Stage::Prefilling) => computing,
            (Some(_), _) => None,
            (None, _) => others.clone().next(),
        };
        heir.map(|(sequence, _)| sequence)
    }

    /// A request costs at least as much as another one of its group that was to come first, and has left in this stage.
    fn inherit(&mut self, heir: SequenceId, cost: Cost, left: Stage) {
        let Some(placed) = self.open.get_mut(&heir) else { return };
        let before = placed.cost;
        placed.cost = before.max(cost);
        let uncached = placed.cost.uncached - before.uncached;
        let seat = &mut self.seats[placed.at.index()];
        seat.outstanding += uncached;
        match placed.stage.is_unstarted() {
            true => seat.pledged += placed.cost.pages - before.pages,
            false => seat.outstanding_of_started += uncached,
        }
        if let (Stage::Leaving { to, pages }, Stage::Leaving { pages: kept, .. }) = (&mut placed.stage, left)
        {
            self.seats[to.index()].pledged += kept.saturating_sub(*pages);
            *pages = kept.max(*pages);
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
            seat.pledged -= placed.cost.pages;
            seat.outstanding_of_started += placed.cost.uncached;
            seat.index.begin(&placed.shape.keys);
            // What it is compared by is not asked for again.
            placed.shape.keys = Arc::default();
        }
        if stage == Stage::Decoding && before != Stage::Decoding {
            seat.outstanding -= placed.cost.uncached;
            seat.outstanding_of_started -= placed.cost.uncached;
        }
    }
}
