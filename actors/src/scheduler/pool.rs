//! The pool of pages: who holds which, what each contains, and when it may change hands.
//!
//! A page is *free*, *owned* by one or more sequences, *quarantined* (nobody holds it, but a step under way may touch it)
//! or *cached* (nobody holds it and its content has a name). Cached pages are taken, longest unused first, when none is
//! free. A page with a name is full, and is never written again while it has it.

use std::collections::BTreeMap;

use consort_parallel::ids::BlockId;

use super::names::Names;
use crate::{ids::Step, prefix::BlockKey};

/// Whether a sequence may start to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Enough pages can be had.
    Fits,
    /// It fits the pool, but not now.
    Wait,
}

/// What may become of one page next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageState {
    Free,
    Owned,
    Quarantined,
    Cached,
}

/// No neighbour in the list of cached pages.
const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Page {
    state: PageState,
    /// The layer group whose keys and values it holds.
    group: u8,
    /// Sequences that hold it.
    refs: u32,
    /// Last step of a former holder that may touch it.
    until: Option<Step>,
    /// Name of its content, when it is full and can be found.
    name: Option<Name>,
    /// Neighbours among the cached: towards longer and shorter unused.
    older: u32,
    newer: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Name {
    key: BlockKey,
    parent: BlockKey,
}

/// A block's content as the cache knows it: the key, and what it was made of, so that a hit compares the tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Content<'a> {
    pub(super) key: BlockKey,
    pub(super) parent: BlockKey,
    pub(super) tokens: &'a [u32],
}

/// Pages of one replica's KV cache, the same on all of its ranks.
#[derive(Clone, Debug)]
pub struct PagePool {
    block_size: usize,
    pages: Vec<Page>,
    /// Taken from the end.
    free: Vec<BlockId>,
    /// Where each name is found.
    names: Names,
    /// Tokens of named pages, `block_size` for each page.
    tokens: Vec<u32>,
    /// Ends of the list of cached pages.
    oldest: u32,
    newest: u32,
    cached: usize,
    /// Pages by the last step that may touch them; those that were taken up again meanwhile are skipped.
    quarantine: BTreeMap<Step, Vec<BlockId>>,
    quarantined: usize,
    absorbed: Option<Step>,
}

impl PagePool {
    /// A pool of `num_blocks` free pages.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        let count = u32::try_from(num_blocks).ok().filter(|&count| count < NONE);
        let count = count.expect("a pool has fewer than u32::MAX pages; checked by the ensemble's spec");
        let page = Page {
            state: PageState::Free,
            group: 0,
            refs: 0,
            until: None,
            name: None,
            older: NONE,
            newer: NONE,
        };
        Self {
            block_size,
            pages: vec![page; num_blocks],
            free: (0..count).rev().map(BlockId).collect(),
            names: Names::default(),
            tokens: vec![0; num_blocks * block_size],
            oldest: NONE,
            newest: NONE,
            cached: 0,
            quarantine: BTreeMap::new(),
            quarantined: 0,
            absorbed: None,
        }
    }

    /// Pages there are.
    pub fn total(&self) -> usize {
        self.pages.len()
    }

    /// Pages that can be taken now: free ones, and cached ones, whose content is given up then.
    pub fn available(&self) -> usize {
        self.free.len() + self.cached
    }

    /// Pages that nobody holds and whose content can be found.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Pages that become available when steps in flight are absorbed.
    pub fn quarantined(&self) -> usize {
        self.quarantined
    }

    /// Takes a page for `group`: a free one, else the one that was unused longest.
    pub fn take(&mut self, group: usize) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => self.evict()?,
        };
        let page = &mut self.pages[block.index()];
        (page.state, page.group, page.refs, page.until) = (PageState::Owned, group as u8, 1, None);
        Some(block)
    }

    /// One more holder of a page that is owned, or that was found.
    pub fn share(&mut self, block: BlockId) {
        match self.pages[block.index()].state {
            PageState::Owned => {}
            PageState::Cached => self.unlink(block),
            PageState::Quarantined => self.quarantined -= 1,
            PageState::Free => panic!("page {} was shared while it was free", block.0),
        }
        let page = &mut self.pages[block.index()];
        page.state = PageState::Owned;
        page.refs += 1;
    }

    /// One holder less. `until` is the holder's last step, which may still be under way.
    ///
    /// Panics when nobody holds it: that would be a page in a table that has no right to it.
    pub fn release(&mut self, block: BlockId, until: Option<Step>) {
        let page = &mut self.pages[block.index()];
        assert!(page.state == PageState::Owned && page.refs > 0, "page {} released twice", block.0);
        page.refs -= 1;
        page.until = page.until.max(until);
        if page.refs > 0 {
            return;
        }
        match page.until.filter(|until| Some(*until) > self.absorbed) {
            Some(step) => {
                page.state = PageState::Quarantined;
                self.quarantined += 1;
                self.quarantine.entry(step).or_default().push(block);
            }
            None => self.rest(block),
        }
    }

    /// Everything until `step` has been executed and read.
    pub fn absorbed(&mut self, step: Step) {
        self.absorbed = Some(step);
        while let Some(entry) = self.quarantine.first_entry().filter(|entry| *entry.key() <= step) {
            let step = *entry.key();
            for block in entry.remove() {
                let page = &self.pages[block.index()];
                // Taken up again since, or released again for a later step.
                if page.state == PageState::Quarantined && page.until == Some(step) {
                    self.quarantined -= 1;
                    self.rest(block);
                }
            }
        }
    }

    /// Gives the content of an owned page its name, unless it has one or another page has the same content.
    pub(super) fn register(&mut self, block: BlockId, content: Content<'_>) {
        let page = &mut self.pages[block.index()];
        assert!(page.state == PageState::Owned, "page {} is named and nobody holds it", block.0);
        if page.name.is_some() {
            return;
        }
        if self.names.insert(content.key, page.group, block) {
            page.name = Some(Name { key: content.key, parent: content.parent });
            let at = block.index() * self.block_size;
            self.tokens[at..at + self.block_size].copy_from_slice(content.tokens);
        }
    }

    /// The page of `group` with this content. Tokens are compared, whatever the key says.
    pub(super) fn find(&self, content: Content<'_>, group: usize) -> Option<BlockId> {
        let block = self.names.get(content.key, group as u8)?;
        let name = self.pages[block.index()].name?;
        let at = block.index() * self.block_size;
        let same = name.parent == content.parent && self.tokens[at..at + self.block_size] == *content.tokens;
        same.then_some(block)
    }

    /// Whether a page of `group` has this name and a sequence holds it.
    pub(super) fn is_held(&self, key: BlockKey, group: usize) -> bool {
        self.names.get(key, group as u8).is_some_and(|block| self.pages[block.index()].refs > 0)
    }

    /// What may become of a page next.
    pub(super) fn state(&self, block: BlockId) -> PageState {
        self.pages[block.index()].state
    }

    /// Takes the name from the page that was unused longest.
    fn evict(&mut self) -> Option<BlockId> {
        let block = (self.oldest != NONE).then_some(BlockId(self.oldest))?;
        self.unlink(block);
        let page = &mut self.pages[block.index()];
        let name = page.name.take().expect("a cached page has a name");
        self.names.remove(name.key, page.group);
        Some(block)
    }

    /// Nobody holds it and no step touches it.
    fn rest(&mut self, block: BlockId) {
        if self.pages[block.index()].name.is_none() {
            self.pages[block.index()].state = PageState::Free;
            self.free.push(block);
            return;
        }
        let newest = std::mem::replace(&mut self.newest, block.0);
        let page = &mut self.pages[block.index()];
        (page.state, page.older, page.newer) = (PageState::Cached, newest, NONE);
        match newest {
            NONE => self.oldest = block.0,
            newest => self.pages[newest as usize].newer = block.0,
        }
        self.cached += 1;
    }

    fn unlink(&mut self, block: BlockId) {
        let page = &mut self.pages[block.index()];
        let (older, newer) =
            (std::mem::replace(&mut page.older, NONE), std::mem::replace(&mut page.newer, NONE));
        match older {
            NONE => self.oldest = newer,
            older => self.pages[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.pages[newer as usize].older = older,
        }
        self.cached -= 1;
    }

    /// Panics unless lists, counts and names agree, and `held` are exactly the holders: one entry for each table that
    /// a page stands in, with the group whose table it is.
    pub fn check_invariants(&self, held: impl Iterator<Item = (BlockId, usize)>) {
        let mut holders = vec![0u32; self.total()];
        for (block, group) in held {
            holders[block.index()] += 1;
            let page = &self.pages[block.index()];
            assert_eq!(usize::from(page.group), group, "page {} is in another group's table", block.0);
        }
        let mut counts = BTreeMap::<&str, usize>::new();
        for (at, page) in self.pages.iter().enumerate() {
            assert_eq!(page.refs, holders[at], "page {at} has another number of holders than tables");
            assert_eq!(page.state == PageState::Owned, page.refs > 0, "page {at} is {:?}", page.state);
            let named = page.name.map(|name| self.names.get(name.key, page.group));
            assert!(named.is_none_or(|found| found == Some(BlockId(at as u32))), "page {at} is not found");
            assert!(page.name.is_none() || page.state != PageState::Free, "free page {at} has a name");
            assert!(page.name.is_some() || page.state != PageState::Cached, "cached page {at} has no name");
            let count = match page.state {
                PageState::Free => "free",
                PageState::Owned => "owned",
                PageState::Quarantined => "quarantined",
                PageState::Cached => "cached",
            };
            *counts.entry(count).or_default() += 1;
        }
        let count = |name| counts.get(name).copied().unwrap_or(0);
        assert_eq!(self.free.len(), count("free"), "free pages are miscounted");
        assert!(self.free.iter().all(|&block| self.state(block) == PageState::Free), "a free page is not");
        assert_eq!(self.quarantined, count("quarantined"), "quarantined pages are miscounted");
        assert_eq!(self.cached, count("cached"), "cached pages are miscounted");
        assert_eq!(count("free") + count("owned") + count("quarantined") + count("cached"), self.total());
        let names = self.pages.iter().filter(|page| page.name.is_some()).count();
        assert_eq!(names, self.names.len(), "a name leads to a page that does not have it");
        self.check_list();
        let waiting = self.quarantine.values().flatten();
        let waiting = waiting.filter(|&&block| self.state(block) == PageState::Quarantined).count();
        assert!(waiting >= self.quarantined, "a quarantined page is in no list");
        let overdue = self.quarantine.keys().find(|step| Some(**step) <= self.absorbed);
        assert_eq!(overdue, None, "pages are quarantined for a step that was absorbed");
    }

    fn check_list(&self) {
        let (mut at, mut last, mut walked) = (self.oldest, NONE, 0);
        while at != NONE {
            let page = &self.pages[at as usize];
            assert_eq!((page.state, page.older), (PageState::Cached, last), "the list breaks at page {at}");
            (last, at) = (at, page.newer);
            walked += 1;
            assert!(walked <= self.cached, "the list of cached pages runs in a circle");
        }
        assert_eq!((last, walked), (self.newest, self.cached), "the list ends elsewhere");
    }
}
