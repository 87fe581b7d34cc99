//! Which of those that wait should move.

use super::{Cost, Placed, Router, Seat, Stage};
use crate::{
    ids::{ReplicaId, SequenceId},
    order::Place,
    router::{MOVES_MAX, OPEN_REQUEST_TOKENS, Withdrawal},
};

/// The first of those at a replica that may be moved, with all of its group.
struct Candidate {
    place: Place,
    at: ReplicaId,
    /// Those of them that are open.
    sequences: Vec<SequenceId>,
}

impl Router {
    /// Requests that wait where it is full while another replica could serve them at once, or sooner. They are to be
    /// asked back; [`Router::given_back`], [`Router::kept`] or [`Router::started`] says what came of that.
    pub fn rebalance(&mut self) -> Vec<Withdrawal> {
        let mut withdrawals = Vec::new();
        // Replicas whose first one that could go is to stay: those behind it are not served before it anywhere.
        let mut settled = vec![false; self.seats.len()];
        while let Some(first) = self.next_waiting(&settled) {
            match self.better_place(&first) {
                Some(to) => {
                    let Candidate { at: from, sequences, .. } = first;
                    self.promise(&sequences, to);
                    withdrawals.push(Withdrawal { sequences, from, to });
                }
                None => settled[first.at.index()] = true,
            }
        }
        withdrawals
    }

    /// The first in line of all that wait and may be moved, except at the replicas that are `settled`.
    fn next_waiting(&self, settled: &[bool]) -> Option<Candidate> {
        let numbered = (0..).map(ReplicaId).zip(&self.seats).zip(settled);
        let first = |((replica, seat), settled): ((ReplicaId, &Seat), &bool)| {
            // What waits where nothing is served is given back unasked.
            if *settled || !seat.is_ready {
                return None;
            }
            seat.waiting.iter().find(|place| self.may_move(place.sequence)).map(|&place| (place, replica))
        };
        let (place, at) = numbered.filter_map(first).min()?;
        let group = &self.open.get(&place.sequence)?.group;
        let open = group.iter().copied().filter(|sequence| self.open.contains_key(sequence));
        Some(Candidate { place, at, sequences: open.collect() })
    }

    /// Whether all of a request's group wait, and were not moved too often.
    fn may_move(&self, sequence: SequenceId) -> bool {
        let Some(placed) = self.open.get(&sequence) else { return false };
        let mut group = placed.group.iter().filter_map(|sequence| self.open.get(sequence));
        group.all(|one| one.stage == Stage::Waiting && one.at == placed.at && one.moves < MOVES_MAX)
    }

    /// Where a group would be served sooner than where it waits.
    fn better_place(&self, group: &Candidate) -> Option<ReplicaId> {
        let Candidate { place, at: from, sequences } = group;
        let placed = self.open.get(&place.sequence)?;
        let others = self.ready_replicas().filter(|(replica, _)| replica != from);
        let with_room = others.filter(|(replica, _)| self.has_room(*replica, &placed.shape, sequences.len()));
        let with_room: Vec<(ReplicaId, &Seat)> = with_room.collect();
        let here = self.seats.get(from.index()).filter(|_| !with_room.is_empty())?;
        // Nobody is admitted before those that stay before it, and nobody else computes anything for it.
        let before = here.waiting.range(..*place).filter_map(|place| self.open.get(&place.sequence));
        let staying: Vec<Cost> =
            before.filter(|one| one.stage == Stage::Waiting).map(|one| self.cost_in_line(one)).collect();
        let ahead = here.open - here.waiting.len() + staying.len();
        let needed = staying.iter().fold(self.cost_in_line(placed), |sum, cost| sum.plus(*cost));
        let is_full = ahead >= self.config.max_num_seqs || here.free_blocks < needed.pages;
        let stays = here.outstanding_of_started + needed.uncached;
        let goes = |replica: ReplicaId, seat: &Seat| {
            seat.outstanding + placed.shape.prompt_tokens - self.known_tokens(replica, &placed.shape)
        };
        // Sooner, and not against what it was placed by: a prefix does not call it back to where more is open.
        let is_sooner = |(replica, seat): &(ReplicaId, &Seat)| {
            let goes = goes(*replica, seat);
            let weighed = goes + seat.open * OPEN_REQUEST_TOKENS;
            stays > goes && stays + ahead * OPEN_REQUEST_TOKENS > weighed
        };
        let better = with_room.into_iter().filter(|other| is_full || is_sooner(other));
        let best = better.min_by_key(|(replica, seat)| (goes(*replica, seat), seat.load(), *replica));
        best.map(|(to, _)| to)
    }

    /// What one that waits costs its replica when its turn comes. The first of a group finds only what others have
    /// begun: of what was still to come when it was placed, those who were to compute it may have left.
    fn cost_in_line(&self, placed: &Placed) -> Cost {
        let mut group = placed.group.iter().filter_map(|sequence| self.open.get(sequence));
        let is_first = group.clone().next().is_some_and(|first| std::ptr::eq(first, placed));
        match is_first && group.all(|one| one.stage.is_unstarted()) {
            true => self.cost_alone(placed.at, &placed.shape),
            false => placed.cost,
        }
    }

    /// Keeps places for a group that is asked back.
    fn promise(&mut self, sequences: &[SequenceId], to: ReplicaId) {
        for (nth, sequence) in sequences.iter().enumerate() {
            let Some(placed) = self.open.get(sequence) else { continue };
            let Cost { pages, .. } = self.cost_of(to, &placed.shape, nth);
            let seat = &mut self.seats[to.index()];
            seat.arriving += 1;
            seat.pledged += pages;
            if let Some(placed) = self.open.get_mut(sequence) {
                placed.stage = Stage::Leaving { to, pages };
            }
        }
    }
}
