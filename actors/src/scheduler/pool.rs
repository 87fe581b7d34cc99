//! The pool of pages: who holds which, what each contains, and when it may change hands.
//!
//! A page is *free*, *owned* by one or more sequences, *quarantined* (nobody holds it, but a step under way may touch
//! it), *moving* (nobody holds it, but a transfer from or to the host may touch it) or *cached* (nobody holds it and
//! its content has a name). Cached pages are taken, longest unused first, when none is free. A page with a name is
//! full, and is never written again while it has it.

use std::collections::BTreeMap;

use consort_parallel::ids::BlockId;

use super::{
    bugs::{Bug, planted},
    names::Names,
};
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
    Moving,
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
    /// Whether a transfer from or to the host is under way.
    in_transfer: bool,
    /// While it is cached: whether it is in the list of those that the host has, too.
    spare: bool,
    /// Name of its content, when it is full and can be found.
    name: Option<Name>,
    /// Neighbours among the cached: towards longer and shorter unused.
    older: u32,
    newer: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) key: BlockKey,
    pub(super) parent: BlockKey,
}

/// A list of cached pages.
#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
    len: usize,
}

impl List {
    const EMPTY: List = List { oldest: NONE, newest: NONE, len: 0 };
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
    names: Names<BlockId>,
    /// Tokens of named pages, `block_size` for each page.
    tokens: Vec<u32>,
    /// Cached pages: of those that are with the host, too, and are taken first, and of the others.
    spare: List,
    unique: List,
    /// Pages that nobody holds and that wait for the end of a transfer.
    moving: usize,
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
            in_transfer: false,
            spare: false,
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
            spare: List::EMPTY,
            unique: List::EMPTY,
            moving: 0,
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
        self.free.len() + self.cached()
    }

    /// Pages that nobody holds and whose content can be found and be given up.
    pub fn cached(&self) -> usize {
        self.spare.len + self.unique.len
    }

    /// Pages that become available when steps in flight are absorbed.
    pub fn quarantined(&self) -> usize {
        self.quarantined
    }

    /// Pages that become available when steps in flight are absorbed, and transfers reported.
    pub fn pending(&self) -> usize {
        self.quarantined + self.moving
    }

    /// Pages that nobody holds and a transfer uses.
    pub fn moving(&self) -> usize {
        self.moving
    }

    /// Pages that can be taken without losing anything, now or once transfers are done.
    pub(super) fn expendable(&self) -> usize {
        self.free.len() + self.spare.len + self.moving
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
            PageState::Cached if planted(Bug::EvictsHeldPages) => {}
            PageState::Cached => self.unlink(block),
            PageState::Quarantined => self.quarantined -= 1,
            PageState::Moving => self.moving -= 1,
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
        page.refs -= match page.refs > 1 {
            true if planted(Bug::KeepsReference) => 0,
            true if planted(Bug::ReleasesTwice) => 2,
            _ => 1,
        };
        page.until = page.until.max(until);
        if page.refs > 0 {
            return;
        }
        let is_idle = planted(Bug::SkipsQuarantine);
        match page.until.filter(|until| !is_idle && Some(*until) > self.absorbed) {
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
        let step = if planted(Bug::QuarantineEndsEarly) { step.next() } else { step };
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

    /// What was held for `step`, which is not planned, is held until the step `before` it.
    pub(super) fn not_planned(&mut self, step: Step, before: Option<Step>) {
        for page in self.pages.iter_mut().filter(|page| page.until == Some(step)) {
            page.until = before;
        }
        for block in self.quarantine.remove(&step).unwrap_or_default() {
            if self.pages[block.index()].state != PageState::Quarantined {
                continue;
            }
            match before.filter(|before| Some(*before) > self.absorbed) {
                Some(before) => self.quarantine.entry(before).or_default().push(block),
                None => {
                    self.quarantined -= 1;
                    self.rest(block);
                }
            }
        }
    }

    /// Nobody finds this content of `group` any more. Who holds its page goes on.
    pub(super) fn forget(&mut self, key: BlockKey, group: usize) {
        let Some(block) = self.names.get(key, group as u8) else { return };
        self.names.remove(key, group as u8);
        self.pages[block.index()].name = None;
        if self.state(block) == PageState::Cached {
            self.unlink(block);
            self.rest(block);
        }
    }

    /// As long as it is the same, so is all that is found.
    pub(super) fn changes(&self) -> u64 {
        self.names.changes()
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

    /// Whether a page of `group` has this name.
    pub(super) fn is_named(&self, key: BlockKey, group: usize) -> bool {
        self.names.get(key, group as u8).is_some()
    }

    /// Whether a page of `group` has this name and a sequence holds it.
    pub(super) fn is_held(&self, key: BlockKey, group: usize) -> bool {
        self.names.get(key, group as u8).is_some_and(|block| self.pages[block.index()].refs > 0)
    }

    /// The cached page that was unused longest of those that the host is not known to have: its content and group.
    pub(super) fn oldest_unique(&self) -> Option<(BlockId, Content<'_>, usize)> {
        let block = (self.unique.oldest != NONE).then_some(BlockId(self.unique.oldest))?;
        let (page, at) = (&self.pages[block.index()], block.index() * self.block_size);
        let Name { key, parent } = page.name?;
        let tokens = &self.tokens[at..at + self.block_size];
        Some((block, Content { key, parent, tokens }, usize::from(page.group)))
    }

    /// The host has the content of a cached page: it is one of the first to be taken.
    pub(super) fn make_spare(&mut self, block: BlockId) {
        self.unlink(block);
        self.link(block, true);
    }

    /// A transfer from or to the host begins. A page that is cached can be found, but not be taken, until its end.
    pub(super) fn begin_transfer(&mut self, block: BlockId) {
        if self.state(block) == PageState::Cached {
            self.unlink(block);
            self.pages[block.index()].state = PageState::Moving;
            self.moving += 1;
        }
        let page = &mut self.pages[block.index()];
        assert!(matches!(page.state, PageState::Owned | PageState::Moving), "page {} is moved", block.0);
        assert!(!std::mem::replace(&mut page.in_transfer, true), "page {} is moved twice", block.0);
    }

    /// A transfer is done. What it wrote to, or read, is any other page again.
    pub(super) fn end_transfer(&mut self, block: BlockId) {
        let page = &mut self.pages[block.index()];
        assert!(std::mem::take(&mut page.in_transfer), "no transfer of page {} was begun", block.0);
        if page.state != PageState::Moving {
            return;
        }
        self.moving -= 1;
        match self.pages[block.index()].name {
            // It was saved.
            Some(_) => self.link(block, true),
            None => self.rest(block),
        }
    }

    /// Sequences that hold a page.
    #[cfg(test)]
    pub(super) fn holders(&self, block: BlockId) -> u32 {
        self.pages[block.index()].refs
    }

    /// What may become of a page next.
    pub(super) fn state(&self, block: BlockId) -> PageState {
        self.pages[block.index()].state
    }

    /// Takes the name from the page that was unused longest.
    fn evict(&mut self) -> Option<BlockId> {
        let oldest = [self.spare.oldest, self.unique.oldest].into_iter().find(|&oldest| oldest != NONE)?;
        let block = BlockId(oldest);
        self.unlink(block);
        let page = &mut self.pages[block.index()];
        let name = page.name.take().expect("a cached page has a name");
        self.names.remove(name.key, page.group);
        Some(block)
    }

    /// Nobody holds it and no step touches it.
    fn rest(&mut self, block: BlockId) {
        let page = &mut self.pages[block.index()];
        if page.in_transfer {
            page.state = PageState::Moving;
            self.moving += 1;
        } else if page.name.is_none() {
            page.state = PageState::Free;
            self.free.push(block);
        } else {
            self.link(block, false);
        }
    }

    fn list(&mut self, spare: bool) -> &mut List {
        if spare { &mut self.spare } else { &mut self.unique }
    }

    /// Caches a page, as the newest of its list.
    fn link(&mut self, block: BlockId, spare: bool) {
        let list = self.list(spare);
        let newest = std::mem::replace(&mut list.newest, block.0);
        list.len += 1;
        if newest == NONE {
            list.oldest = block.0;
        } else {
            self.pages[newest as usize].newer = block.0;
        }
        let page = &mut self.pages[block.index()];
        (page.state, page.spare, page.older, page.newer) = (PageState::Cached, spare, newest, NONE);
    }

    fn unlink(&mut self, block: BlockId) {
        let page = &mut self.pages[block.index()];
        let (older, newer) =
            (std::mem::replace(&mut page.older, NONE), std::mem::replace(&mut page.newer, NONE));
        let spare = page.spare;
        match older {
            NONE => self.list(spare).oldest = newer,
            older => self.pages[older as usize].newer = newer,
        }
        match newer {
            NONE => self.list(spare).newest = older,
            newer => self.pages[newer as usize].older = older,
        }
        self.list(spare).len -= 1;
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
                PageState::Moving => "moving",
                PageState::Cached => "cached",
            };
            assert!(page.state != PageState::Moving || page.in_transfer, "page {at} waits for no transfer");
            let may_move =
                matches!(page.state, PageState::Owned | PageState::Moving | PageState::Quarantined);
            assert!(!page.in_transfer || may_move, "{:?} page {at} is in a transfer", page.state);
            *counts.entry(count).or_default() += 1;
        }
        let count = |name| counts.get(name).copied().unwrap_or(0);
        assert_eq!(self.free.len(), count("free"), "free pages are miscounted");
        assert!(self.free.iter().all(|&block| self.state(block) == PageState::Free), "a free page is not");
        assert_eq!(self.quarantined, count("quarantined"), "quarantined pages are miscounted");
        assert_eq!(self.cached(), count("cached"), "cached pages are miscounted");
        assert_eq!(self.moving, count("moving"), "moving pages are miscounted");
        assert_eq!(counts.values().sum::<usize>(), self.total());
        let names = self.pages.iter().filter(|page| page.name.is_some()).count();
        assert_eq!(names, self.names.len(), "a name leads to a page that does not have it");
        self.check_list(self.spare, true);
        self.check_list(self.unique, false);
        let waiting = self.quarantine.values().flatten();
        let waiting = waiting.filter(|&&block| self.state(block) == PageState::Quarantined).count();
        assert!(waiting >= self.quarantined, "a quarantined page is in no list");
        let overdue = self.quarantine.keys().find(|step| Some(**step) <= self.absorbed);
        assert_eq!(overdue, None, "pages are quarantined for a step that was absorbed");
    }

    /// Panics unless exactly these pages are in transfers.
    pub(super) fn check_transfers(&self, pages: impl Iterator<Item = BlockId>) {
        let mut moved: Vec<usize> = pages.map(BlockId::index).collect();
        moved.sort_unstable();
        let marked = self.pages.iter().enumerate().filter(|(_, page)| page.in_transfer);
        assert!(marked.map(|(at, _)| at).eq(moved), "pages and transfers disagree");
    }

    fn check_list(&self, list: List, spare: bool) {
        let (mut at, mut last, mut walked) = (list.oldest, NONE, 0);
        while at != NONE {
            let page = &self.pages[at as usize];
            assert_eq!((page.state, page.older), (PageState::Cached, last), "the list breaks at page {at}");
            assert_eq!(page.spare, spare, "page {at} is in the other list");
            (last, at) = (at, page.newer);
            walked += 1;
            assert!(walked <= list.len, "the list of cached pages runs in a circle");
        }
        assert_eq!((last, walked), (list.newest, list.len), "the list ends elsewhere");
    }
}
