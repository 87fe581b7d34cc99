//! Sequences in numbered slots: found by number in no time, by name when somebody asks.

use std::collections::BTreeMap;

use super::sequence::Sequence;
use crate::ids::SequenceId;

/// All sequences of a scheduler. A slot is given again when its sequence has left; who keeps a number compares lives.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots {
    slots: Vec<Option<Sequence>>,
    vacant: Vec<usize>,
    by_id: BTreeMap<SequenceId, usize>,
}

impl Slots {
    /// Panics when a sequence of that name is there.
    pub(super) fn insert(&mut self, state: Sequence) -> usize {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let before = self.by_id.insert(state.id, slot);
        assert!(before.is_none(), "{} was submitted twice", state.id);
        self.slots[slot] = Some(state);
        slot
    }

    pub(super) fn remove(&mut self, slot: usize) -> Sequence {
        let state = self.slots[slot].take().expect("a slot is given up once");
        self.by_id.remove(&state.id);
        self.vacant.push(slot);
        state
    }

    pub(super) fn find(&self, sequence: SequenceId) -> Option<usize> {
        self.by_id.get(&sequence).copied()
    }

    pub(super) fn get(&self, slot: usize) -> Option<&Sequence> {
        self.slots.get(slot)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: usize) -> Option<&mut Sequence> {
        self.slots.get_mut(slot)?.as_mut()
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// All, by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.by_id.values().filter_map(|&slot| self.get(slot).map(|state| (slot, state)))
    }
}

impl std::ops::Index<usize> for Slots {
    type Output = Sequence;

    fn index(&self, slot: usize) -> &Sequence {
        self.slots[slot].as_ref().expect("whoever runs or waits is in its slot")
    }
}

impl std::ops::IndexMut<usize> for Slots {
    fn index_mut(&mut self, slot: usize) -> &mut Sequence {
        self.slots[slot].as_mut().expect("whoever runs or waits is in its slot")
    }
}
