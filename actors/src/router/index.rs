//! Which prefixes a replica is believed to hold. A plain value.

use std::collections::BTreeMap;

use crate::prefix::BlockKey;

/// What is remembered of a block.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// When it was last entered, on a clock that counts entries.
    age: u64,
    /// Whether a request that has it was begun. Of a chain, this too is known of its beginning.
    is_begun: bool,
}

/// Keys of blocks that were sent to one replica, the least recently sent forgotten first. Bounded: a replica cannot
/// hold more blocks than its pool has.
///
/// A chain is entered from its end to its beginning, so that a block is never older than those that follow it, and
/// never forgotten before them: what is known of a chain is always its beginning.
#[derive(Clone, Debug)]
pub(super) struct PrefixIndex {
    capacity: usize,
    entered: BTreeMap<BlockKey, Entry>,
    by_age: BTreeMap<u64, BlockKey>,
    next_entry: u64,
}

impl PrefixIndex {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, entered: BTreeMap::new(), by_age: BTreeMap::new(), next_entry: 0 }
    }

    /// How many of these keys are known, from the first on.
    pub(super) fn known(&self, chain: &[BlockKey]) -> usize {
        chain.partition_point(|key| self.entered.contains_key(key))
    }

    /// How many of these keys are known, from the first on, by requests that were begun.
    pub(super) fn begun(&self, chain: &[BlockKey]) -> usize {
        chain.partition_point(|key| self.entered.get(key).is_some_and(|entry| entry.is_begun))
    }

    /// A request was begun that has these blocks, which were entered with it.
    pub(super) fn begin(&mut self, chain: &[BlockKey]) {
        for key in chain {
            let Some(entry) = self.entered.get_mut(key) else { return };
            entry.is_begun = true;
        }
    }

    /// These blocks are, or will be, there.
    pub(super) fn enter(&mut self, chain: &[BlockKey]) {
        // Of a chain longer than all that is remembered, its beginning.
        for key in chain.iter().take(self.capacity).rev() {
            let entry = self.entered.entry(*key).or_insert(Entry { age: self.next_entry, is_begun: false });
            self.by_age.remove(&entry.age);
            entry.age = self.next_entry;
            self.by_age.insert(self.next_entry, *key);
            self.next_entry += 1;
        }
        while self.entered.len() > self.capacity {
            let Some((_, oldest)) = self.by_age.pop_first() else { return };
            self.entered.remove(&oldest);
        }
    }

    /// The replica has lost its cache.
    pub(super) fn clear(&mut self) {
        self.entered.clear();
        self.by_age.clear();
    }

    pub(super) fn check_invariants(&self) {
        assert!(self.entered.len() <= self.capacity, "more prefixes are remembered than may be");
        assert_eq!(self.entered.len(), self.by_age.len(), "a remembered prefix has no age");
        for (age, key) in &self.by_age {
            let entered = self.entered.get(key).map(|entry| entry.age);
            assert_eq!(entered, Some(*age), "{key:?} has two ages");
        }
    }
}
