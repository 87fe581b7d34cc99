//! Where a block's content is found: a page for each name and layer group.
//!
//! The one unordered container of the core, because a long prompt is thousands of look-ups. It is never walked, so its
//! order cannot show in an outcome.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasherDefault, Hasher},
};

use crate::prefix::BlockKey;

/// Pages by what they contain.
#[derive(Clone, Debug)]
pub(super) struct Names<Page> {
    pages: HashMap<(BlockKey, u8), Page, BuildHasherDefault<KeyHasher>>,
    changes: u64,
}

impl<Page> Default for Names<Page> {
    fn default() -> Self {
        Self { pages: HashMap::default(), changes: 0 }
    }
}

impl<Page: Copy> Names<Page> {
    /// Notes where `key` is found in `group`, unless it is found elsewhere already. Returns whether it was noted.
    pub(super) fn insert(&mut self, key: BlockKey, group: u8, page: Page) -> bool {
        match self.pages.entry((key, group)) {
            Entry::Vacant(entry) => {
                entry.insert(page);
                self.changes += 1;
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    pub(super) fn get(&self, key: BlockKey, group: u8) -> Option<Page> {
        self.pages.get(&(key, group)).copied()
    }

    pub(super) fn remove(&mut self, key: BlockKey, group: u8) {
        self.pages.remove(&(key, group));
        self.changes += 1;
    }

    /// Names that came and went so far: as long as it is the same, so is all that is found.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }
}

/// Keys are hashes already: some of their bytes are enough to spread them.
#[derive(Clone, Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.0 = (self.0.rotate_left(5) ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }
}
