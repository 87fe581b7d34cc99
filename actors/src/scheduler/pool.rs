//! The pool of KV blocks: who may hold which page, and when a page may change hands.

use std::collections::BTreeMap;

use consort_parallel::ids::BlockId;

use crate::ids::Step;

/// Whether a sequence may start to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Enough blocks are free.
    Fits,
    /// It fits the pool, but not now.
    Wait,
    /// It would not fit even alone.
    Never,
}

/// State of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockState {
    Free,
    Owned,
    Quarantined,
}

/// Blocks of one group's KV cache: free, owned by a sequence, or quarantined until every step that may still
/// touch them is absorbed.
#[derive(Clone, Debug)]
pub struct BlockPool {
    states: Vec<BlockState>,
    /// Taken from the end.
    free: Vec<BlockId>,
    /// Blocks of ended sequences by the last step that may touch them.
    quarantined: BTreeMap<Step, Vec<BlockId>>,
    quarantined_count: usize,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks.
    pub fn new(num_blocks: usize) -> Self {
        let count = u32::try_from(num_blocks)
            .expect("a pool has at most u32::MAX blocks; checked by the ensemble's spec");
        Self {
            states: vec![BlockState::Free; num_blocks],
            free: (0..count).rev().map(BlockId).collect(),
            quarantined: BTreeMap::new(),
            quarantined_count: 0,
        }
    }

    /// Blocks there are.
    pub fn total(&self) -> usize {
        self.states.len()
    }

    /// Blocks that can be taken now.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that become free when steps in flight are absorbed.
    pub fn quarantined(&self) -> usize {
        self.quarantined_count
    }

    /// Whether `now` blocks are free, for a sequence that may come to hold `ever`.
    pub fn admission(&self, now: usize, ever: usize) -> Admission {
        if ever > self.total() {
            Admission::Never
        } else if now <= self.free() {
            Admission::Fits
        } else {
            Admission::Wait
        }
    }

    /// Takes one free block.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.states[block.index()] = BlockState::Owned;
        Some(block)
    }

    /// Gives blocks back. With `until`, they stay quarantined until that step is absorbed.
    ///
    /// Panics when a block is not owned: that would be a page in two tables.
    pub fn release(&mut self, blocks: Vec<BlockId>, until: Option<Step>) {
        let state = if until.is_some() { BlockState::Quarantined } else { BlockState::Free };
        for block in &blocks {
            assert_eq!(self.states[block.index()], BlockState::Owned, "block {} released twice", block.0);
            self.states[block.index()] = state;
        }
        match until {
            Some(step) => {
                self.quarantined_count += blocks.len();
                self.quarantined.entry(step).or_default().extend(blocks);
            }
            // Reversed, so that the block taken first is handed out first again.
            None => self.free.extend(blocks.into_iter().rev()),
        }
    }

    /// Frees what was quarantined until `step` or an earlier one.
    pub fn absorbed(&mut self, step: Step) {
        while let Some(entry) = self.quarantined.first_entry().filter(|entry| *entry.key() <= step) {
            let blocks = entry.remove();
            self.quarantined_count -= blocks.len();
            for block in blocks.into_iter().rev() {
                self.states[block.index()] = BlockState::Free;
                self.free.push(block);
            }
        }
    }

    /// Whether nobody may touch this block.
    #[cfg(test)]
    pub(super) fn is_free(&self, block: BlockId) -> bool {
        self.states[block.index()] == BlockState::Free
    }

    /// Panics unless the lists agree with the states, and `owned` are exactly the owned blocks.
    pub fn check_invariants(&self, owned: impl Iterator<Item = BlockId>) {
        let mut seen = vec![None; self.total()];
        let mut mark = |block: BlockId, state: BlockState| {
            assert_eq!(seen[block.index()], None, "block {} stands in two places", block.0);
            assert_eq!(self.states[block.index()], state, "block {} is not what its holder says", block.0);
            seen[block.index()] = Some(state);
        };
        self.free.iter().for_each(|&block| mark(block, BlockState::Free));
        self.quarantined.values().flatten().for_each(|&block| mark(block, BlockState::Quarantined));
        owned.for_each(|block| mark(block, BlockState::Owned));
        assert_eq!(self.quarantined_count, self.quarantined.values().map(Vec::len).sum::<usize>());
        let lost = seen.iter().position(Option::is_none);
        assert_eq!(lost, None, "a block is neither free, owned nor quarantined");
    }
}
