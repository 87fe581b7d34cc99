//! What must hold of the router among modelled replicas.

use std::collections::BTreeSet;

use super::{Asked, Replica, Simulation};
use crate::{
    ids::{ReplicaId, SequenceId},
    order::{Due, Place},
    router::{MOVES_MAX, Router, WorkShape},
};

impl Simulation {
    /// The bound that is stated: of those with room for all of them, none has so much less to do that the prefill which
    /// is saved would not make up for it.
    pub(super) fn check_choice(&self, before: &Router, at: ReplicaId, shape: &WorkShape, count: usize) {
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

    pub(super) fn check(&self) {
        self.router.check_invariants();
        let waiting = self.asked.values().filter(|asked| asked.end.is_none() && !asked.started).count();
        assert_eq!(self.waiting, waiting);
        assert!(self.waiting <= self.waiting_max, "more wait than may");
        self.check_groups();
    }

    /// Choices of one request that wait are at one replica.
    fn check_groups(&self) {
        for asked in self.asked.values().filter(|asked| asked.group.len() > 1) {
            let waits = |sequence: &&SequenceId| !self.asked[*sequence].started;
            let places = asked.group.iter().filter(waits).filter_map(|one| self.router.place_of(*one));
            let places: BTreeSet<ReplicaId> = places.collect();
            assert!(places.len() <= 1, "{:?} are at {places:?}", asked.group);
        }
    }

    /// When everybody knows everything, nobody waits at a replica without a seat or pages while another has both.
    pub(super) fn check_fairness(&mut self) {
        self.settle();
        self.observe();
        self.check_room();
        self.check_weights();
        self.rebalance();
        self.settle();
        let seats = self.config.max_num_seqs;
        for replica in self.replicas.iter().filter(|replica| replica.is_up) {
            // Those before the first that may be moved are admitted before it.
            let (mut ahead, mut pages) = (replica.running(), 0);
            let first = replica.waiting.iter().find(|place| {
                let asked = &self.asked[&place.sequence];
                pages += self.pages(&asked.shape, replica.cached(asked));
                let may_move = self.may_move(place.sequence);
                ahead += usize::from(!may_move);
                may_move
            });
            let Some(Place { sequence: first, .. }) = first else { continue };
            if ahead < seats && pages <= replica.free_for_newcomers() {
                continue;
            }
            let Asked { shape, group, .. } = &self.asked[first];
            let open = group.iter().filter(|one| self.asked[*one].end.is_none()).count();
            let together = open.min(seats);
            let pages = self.pages(shape, 0) * together;
            let has_room = |other: &&Replica| {
                let has_seats = other.running() + together <= seats;
                other.is_up && has_seats && other.waiting.is_empty() && other.free_for_newcomers() >= pages
            };
            let elsewhere = self.replicas.iter().filter(has_room).count();
            assert_eq!(elsewhere, 0, "{first} waits while others have room");
        }
    }

    /// Those of a group of which one runs stay with it, and nobody is moved for ever.
    fn may_move(&self, sequence: SequenceId) -> bool {
        let mut open = self.asked[&sequence].group.iter().filter(|one| self.asked[*one].end.is_none());
        open.all(|one| !self.asked[one].started && self.router.moves_of(*one) < Some(MOVES_MAX))
    }

    /// Of choices that wait without a cache, one weighs as much as all of the prompt.
    fn check_weights(&self) {
        let all = self.asked.values().filter(|asked| asked.shape.keys.is_empty());
        for Asked { shape, group, .. } in all {
            let open = || group.iter().filter(|one| self.asked[*one].end.is_none());
            let most = open().filter_map(|one| self.router.uncached_of(*one)).max();
            if most.is_some() && open().all(|one| !self.asked[one].started) {
                assert_eq!(most, Some(shape.prompt_tokens), "{group:?} weigh too little");
            }
        }
    }

    /// What the router takes for room is room, for requests of which nothing is cached.
    fn check_room(&mut self) {
        let keys = Vec::new().into();
        let shape = WorkShape {
            prompt_tokens: 1 + self.random.below(200),
            due: Due::new(0, 0, 0),
            keys,
            is_whole: false,
        };
        for (at, replica) in (0..).map(ReplicaId).zip(&self.replicas) {
            if replica.is_up && self.router.has_room(at, &shape, 1) {
                let has_seat = replica.running() + replica.waiting.len() < self.config.max_num_seqs;
                assert!(
                    has_seat && replica.free_for_newcomers() >= self.pages(&shape, 0),
                    "{at} has no room for {shape:?}"
                );
            }
        }
    }
}
