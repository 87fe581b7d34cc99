//! The host's pool: copies of pages that the device may have given up, found by the same names.
//!
//! A page is *empty*, *filling* (a transfer writes it), or *full*. Full pages are found, and give way to others,
//! longest unused first, unless a transfer reads them. A page whose content is not to be trusted loses its name, and is
//! empty once no transfer uses it.

use std::collections::BTreeSet;

use consort_parallel::ids::HostBlock;

use super::{
    bugs::{Bug, planted},
    names::Names,
    pool::{Content, Name},
};
use crate::prefix::BlockKey;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SlotState {
    #[default]
    Empty,
    Filling,
    /// The moment of its last use. `readers` are the transfers to the device that are ordered, or about to be.
    Full {
        used: u64,
        readers: u32,
    },
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    state: SlotState,
    group: u8,
    name: Option<Name>,
}

/// What the host keeps, the same on all ranks. Decides nothing of the device's pages.
#[derive(Clone, Debug)]
pub(super) struct HostPool {
    block_size: usize,
    slots: Vec<Slot>,
    /// Taken from the end.
    empty: Vec<HostBlock>,
    names: Names<HostBlock>,
    /// `block_size` for each page.
    tokens: Vec<u32>,
    /// Full pages that nobody reads, longest unused first.
    unread: BTreeSet<(u64, HostBlock)>,
    /// Counts uses.
    now: u64,
}

impl HostPool {
    pub(super) fn new(blocks: usize, block_size: usize) -> Self {
        let count = u32::try_from(blocks).expect("a pool has at most u32::MAX pages");
        Self {
            block_size,
            slots: vec![Slot::default(); blocks],
            empty: (0..count).rev().map(HostBlock).collect(),
            names: Names::default(),
            tokens: vec![0; blocks * block_size],
            unread: BTreeSet::new(),
            now: 0,
        }
    }

    pub(super) fn total(&self) -> usize {
        self.slots.len()
    }

    /// Pages that hold something, or are about to.
    pub(super) fn used(&self) -> usize {
        self.slots.len() - self.empty.len()
    }

    /// Whether a page of `group` has this name, be it only about to be filled.
    pub(super) fn has(&self, key: BlockKey, group: usize) -> bool {
        self.names.get(key, group as u8).is_some()
    }

    /// A page for this content of `group`: an empty one, else the one that was unused longest. `None` where transfers
    /// use all.
    pub(super) fn fill(&mut self, content: Content<'_>, group: usize) -> Option<HostBlock> {
        debug_assert!(!self.has(content.key, group), "content is kept once");
        let block = self.empty.pop().or_else(|| self.evict())?;
        let name = Name { key: content.key, parent: content.parent };
        self.slots[block.index()] = Slot { state: SlotState::Filling, group: group as u8, name: Some(name) };
        self.names.insert(content.key, group as u8, block);
        let at = block.index() * self.block_size;
        self.tokens[at..at + self.block_size].copy_from_slice(content.tokens);
        Some(block)
    }

    /// The transfer that fills it is done.
    pub(super) fn filled(&mut self, block: HostBlock) {
        let slot = &mut self.slots[block.index()];
        assert_eq!(slot.state, SlotState::Filling, "host page {} was filled unasked", block.0);
        if slot.name.is_none() {
            self.clear(block);
            return;
        }
        self.now += 1;
        slot.state = SlotState::Full { used: self.now, readers: 0 };
        self.unread.insert((self.now, block));
    }

    /// The full page of `group` with this content. Tokens are compared, whatever the key says.
    pub(super) fn find(&self, content: Content<'_>, group: usize) -> Option<HostBlock> {
        let block = self.names.get(content.key, group as u8)?;
        let slot = &self.slots[block.index()];
        let at = block.index() * self.block_size;
        let same = matches!(slot.state, SlotState::Full { .. })
            && slot.name.is_some_and(|name| name.parent == content.parent)
            && self.tokens[at..at + self.block_size] == *content.tokens;
        same.then_some(block)
    }

    /// One more transfer reads a full page: it stays until that is done.
    pub(super) fn hold(&mut self, block: HostBlock) {
        let SlotState::Full { used, readers } = &mut self.slots[block.index()].state else {
            panic!("host page {} is read while it is not full", block.0);
        };
        *readers += 1;
        if !planted(Bug::EvictsHostPagesThatAreRead) {
            self.unread.remove(&(*used, block));
        }
    }

    /// One reader less.
    pub(super) fn release(&mut self, block: HostBlock) {
        let SlotState::Full { used, readers } = &mut self.slots[block.index()].state else {
            panic!("host page {} was given back while it is not full", block.0);
        };
        *readers = readers.checked_sub(1).expect("a host page has as many ends of reads as beginnings");
        if *readers > 0 {
            return;
        }
        self.now += 1;
        *used = self.now;
        match self.slots[block.index()].name {
            Some(_) => {
                self.unread.insert((self.now, block));
            }
            None => self.clear(block),
        }
    }

    /// Nobody finds this content of `group` any more. Transfers that use its page go on.
    pub(super) fn forget(&mut self, key: BlockKey, group: usize) {
        let Some(block) = self.names.get(key, group as u8) else { return };
        self.names.remove(key, group as u8);
        let slot = &mut self.slots[block.index()];
        slot.name = None;
        if let SlotState::Full { used, readers: 0 } = slot.state {
            self.unread.remove(&(used, block));
            self.clear(block);
        }
    }

    fn clear(&mut self, block: HostBlock) {
        self.slots[block.index()] = Slot::default();
        self.empty.push(block);
    }

    fn evict(&mut self) -> Option<HostBlock> {
        let (_, block) = self.unread.pop_first()?;
        let slot = std::mem::take(&mut self.slots[block.index()]);
        let name = slot.name.expect("a full page has a name");
        self.names.remove(name.key, slot.group);
        Some(block)
    }

    /// Panics unless names, states and counts agree, and `readers` and `filling` are exactly the transfers there are.
    pub(super) fn check_invariants(
        &self,
        readers: impl Iterator<Item = HostBlock>,
        filling: impl Iterator<Item = HostBlock>,
    ) {
        let mut read = vec![0; self.total()];
        readers.for_each(|block| read[block.index()] += 1);
        let mut filled = vec![0; self.total()];
        filling.for_each(|block| filled[block.index()] += 1);
        let (mut unread, mut named) = (0, 0);
        for (at, slot) in self.slots.iter().enumerate() {
            let block = HostBlock(at as u32);
            let found = slot.name.map(|name| self.names.get(name.key, slot.group));
            assert!(found.is_none_or(|found| found == Some(block)), "host page {at} is not found");
            let is_named_empty = slot.name.is_some() && slot.state == SlotState::Empty;
            assert!(!is_named_empty, "empty host page {at} has a name");
            named += usize::from(slot.name.is_some());
            let (state_readers, state_filling) = match slot.state {
                SlotState::Empty => (0, 0),
                SlotState::Filling => (0, 1),
                SlotState::Full { used, readers } => {
                    assert_eq!(
                        self.unread.contains(&(used, block)),
                        readers == 0,
                        "host page {at} is listed"
                    );
                    assert!(readers > 0 || slot.name.is_some(), "host page {at} is full of nothing");
                    unread += usize::from(readers == 0);
                    (readers, 0)
                }
            };
            assert_eq!(state_readers, read[at], "host page {at} has another number of readers");
            assert_eq!(state_filling, filled[at], "host page {at} is filled by another number of transfers");
        }
        assert_eq!(unread, self.unread.len(), "a host page that is read may be evicted");
        assert_eq!(self.names.len(), named, "a name leads to a host page that does not have it");
        let empty = self.empty.iter().all(|block| self.slots[block.index()].state == SlotState::Empty);
        assert!(empty, "an empty host page is not");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(tokens: &[u32; 4]) -> Content<'_> {
        let parent = BlockKey::root(None);
        Content { key: parent.next(tokens), parent, tokens }
    }

    #[test]
    fn a_page_is_found_once_it_is_full_and_by_its_tokens_parent_and_group() {
        let mut pool = HostPool::new(2, 4);
        let [one, two] = [[1, 2, 3, 4], [5, 6, 7, 8]];
        let block = pool.fill(content(&one), 1).unwrap();
        assert!(pool.has(content(&one).key, 1) && pool.find(content(&one), 1).is_none(), "it is not full");
        pool.filled(block);
        assert_eq!(pool.find(content(&one), 1), Some(block));
        assert_eq!(pool.find(content(&one), 0), None);
        let forged = [
            Content { tokens: &two, ..content(&one) },
            Content { parent: BlockKey::root(None).next(&two), ..content(&one) },
        ];
        forged.into_iter().for_each(|forged| assert_eq!(pool.find(forged, 1), None));
        pool.check_invariants([].into_iter(), [].into_iter());
    }

    #[test]
    fn the_longest_unused_page_gives_way_and_one_that_a_transfer_uses_never_does() {
        let mut pool = HostPool::new(2, 4);
        let tokens = [[1; 4], [2; 4], [3; 4], [4; 4]];
        let [a, b] = [0, 1].map(|at| pool.fill(content(&tokens[at]), 0).unwrap());
        assert_eq!(pool.fill(content(&tokens[2]), 0), None, "both are being filled");
        pool.filled(a);
        pool.filled(b);
        pool.hold(a);
        pool.hold(a);
        assert_eq!(pool.fill(content(&tokens[2]), 0), Some(b), "the older one is read");
        assert_eq!(pool.fill(content(&tokens[3]), 0), None);
        pool.release(a);
        pool.check_invariants([a].into_iter(), [b].into_iter());
        assert_eq!(pool.fill(content(&tokens[3]), 0), None, "one reader is left");
        pool.release(a);
        pool.filled(b);
        assert_eq!(pool.find(content(&tokens[0]), 0), Some(a));
        assert_eq!(pool.fill(content(&tokens[3]), 0), Some(a), "read before the other was filled");
        assert_eq!((pool.find(content(&tokens[0]), 0), pool.used()), (None, 2));
        pool.check_invariants([].into_iter(), [a].into_iter());
    }

    #[test]
    fn a_forgotten_page_is_found_by_nobody_and_empty_once_no_transfer_uses_it() {
        let mut pool = HostPool::new(3, 4);
        let tokens = [[1; 4], [2; 4], [3; 4]];
        let [full, read, filling] = [0, 1, 2].map(|at| pool.fill(content(&tokens[at]), 0).unwrap());
        [full, read].into_iter().for_each(|block| pool.filled(block));
        pool.hold(read);
        tokens.iter().for_each(|tokens| pool.forget(content(tokens).key, 1));
        assert_eq!(pool.find(content(&tokens[0]), 0), Some(full), "another group's were forgotten");
        tokens.iter().for_each(|tokens| pool.forget(content(tokens).key, 0));
        assert!(tokens.iter().all(|tokens| !pool.has(content(tokens).key, 0)));
        assert_eq!(pool.used(), 2);
        pool.check_invariants([read].into_iter(), [filling].into_iter());
        let again = pool.fill(content(&tokens[2]), 0).unwrap();
        assert_eq!(again, full, "the others are in use");
        pool.filled(filling);
        assert_eq!(pool.find(content(&tokens[2]), 0), None, "the old transfer filled the old page");
        pool.release(read);
        pool.filled(again);
        assert_eq!((pool.find(content(&tokens[2]), 0), pool.used()), (Some(again), 1));
        pool.check_invariants([].into_iter(), [].into_iter());
    }
}
