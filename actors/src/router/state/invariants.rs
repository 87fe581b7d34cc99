//! What always holds of a router's books.

use std::collections::BTreeSet;

use super::{Placed, Router, Stage};
use crate::{
    ids::{ReplicaId, SequenceId},
    order::Place,
    router::MOVES_MAX,
};

impl Router {
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
            let of_started: usize = started.map(|(_, placed)| placed.cost.uncached).sum();
            assert_eq!(seat.outstanding_of_started, of_started, "{replica} lost count of what it computes");
            let arriving = self.open.values().filter_map(|placed| match placed.stage {
                Stage::Leaving { to, pages } if to == replica => Some(pages),
                _ => None,
            });
            let arriving: Vec<usize> = arriving.collect();
            assert_eq!(seat.arriving, arriving.len(), "{replica} lost count of who comes");
            let pledged: usize = unstarted().map(|(_, placed)| placed.cost.pages).sum();
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
