//! Two tiers of pages: the device's, and a bounded pool of the host where cached pages are kept beyond their eviction.
//!
//! Cached pages that are soon to be taken are **saved ahead of that**, a few in each step, so that nobody who needs a
//! page waits for a copy. A prefix whose pages the device has given up is **loaded**, a few pages in each step, while
//! all others go on; its sequence runs once every shard has reported that the pages are there. Until a transfer is
//! reported, the page it reads is not written, and the page it writes is neither read nor given away. The host's
//! content lasts as long as the group's present life: a rank that is built anew has none of it, so nobody relies on
//! any.

use std::collections::VecDeque;

use consort_parallel::ids::{BlockId, HostBlock};

use super::{
    bugs::{Bug, planted},
    host_pool::HostPool,
    pool::PageState,
    sequence::Sequence,
    state::Scheduler,
};
use crate::{config::CacheSpec, ids::Step};

/// Pages that one step saves and loads together. A CPU copies them within the step: with pages of 2 MiB (16 tokens of
/// an 8B model) these are 32 MiB, 5 to 7 ms of one core at 5 to 6 GB/s. It also bounds what a newcomer waits for in a
/// step that only moves pages.
pub const TRANSFERS_PER_STEP: usize = 16;

/// Transfers that may be ordered and not reported: a slow link is not given ever more to do, and no more pages than
/// this are withheld for it.
const TRANSFERS_UNDER_WAY_MAX: usize = 4 * TRANSFERS_PER_STEP;

/// Fewer blocks than this are computed: that needs a part of one step, a load needs two.
const LOAD_BLOCKS_MIN: usize = 2;

/// A page on its way to the device, for a sequence's present life.
#[derive(Clone, Copy, Debug)]
struct Load {
    from: HostBlock,
    to: BlockId,
    slot: usize,
    life: u64,
}

#[derive(Clone, Copy, Debug)]
enum Transfer {
    Save { from: BlockId, to: HostBlock },
    Load(Load),
}

/// Pages to copy in one step.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    pub(super) saves: Vec<(BlockId, HostBlock)>,
    pub(super) loads: Vec<(HostBlock, BlockId)>,
}

/// The host's tier, and what moves between the two.
#[derive(Clone, Debug)]
pub(super) struct Tiers {
    pub(super) host: HostPool,
    /// Loads to be ordered by the next plans.
    queue: VecDeque<Load>,
    /// Ordered and not reported, oldest first.
    ordered: VecDeque<(Step, Transfer)>,
    /// Device pages that are kept expendable, if saving can do it. So many stand on both tiers, hence at most half of
    /// the host's: else saving the next ones would evict from the host what the device gives up first.
    lead: usize,
}

impl Tiers {
    pub(super) fn new(cache: &CacheSpec) -> Self {
        // Content without a name is never looked for.
        let blocks = if cache.prefix_caching { cache.host_blocks } else { 0 };
        Self {
            host: HostPool::new(blocks, cache.block_size),
            queue: VecDeque::new(),
            ordered: VecDeque::new(),
            lead: (cache.num_blocks / 4).min(blocks.div_ceil(2)),
        }
    }

    fn is_off(&self) -> bool {
        self.host.total() == 0
    }

    /// Whether a page is on its way, or about to be.
    pub(super) fn is_moving(&self) -> bool {
        !self.queue.is_empty() || !self.ordered.is_empty()
    }

    /// Every load there is.
    fn loads(&self) -> impl Iterator<Item = &Load> {
        let ordered = self.ordered.iter().filter_map(|(_, transfer)| match transfer {
            Transfer::Load(load) => Some(load),
            Transfer::Save { .. } => None,
        });
        self.queue.iter().chain(ordered)
    }

    /// Transfers that were ordered and not reported.
    pub(super) fn under_way(&self) -> usize {
        self.ordered.len()
    }
}

impl Scheduler {
    /// Blocks of the longest prefix that the device and the host have together, of which the device alone has `cached`;
    /// these, if the rest is not worth loading or there is no room for it.
    pub(super) fn prefix_with_host(&self, state: &Sequence, cached: usize) -> usize {
        if self.tiers.is_off() || self.is_loaded_by_another(state, cached) {
            return cached;
        }
        let in_host = |block, group| {
            state.content(block, &self.cache).and_then(|content| self.tiers.host.find(content, group))
        };
        let has =
            |block, group| self.on_device(state, block, group).is_some() || in_host(block, group).is_some();
        let blocks = self.longest_prefix(state, has);
        if blocks < cached + LOAD_BLOCKS_MIN {
            return cached;
        }
        let firsts = self.first_blocks(blocks);
        // What the device has is not available any more once it is shared.
        let taken =
            (0..self.groups).flat_map(|group| (firsts[group]..blocks).map(move |block| (block, group)));
        let taken = taken.filter(|&(block, group)| {
            let page = self.on_device(state, block, group);
            page.is_none_or(|page| self.pool.state(page) == PageState::Cached)
        });
        if taken.count() > self.pool.available() { cached } else { blocks }
    }

    /// Whether another sequence is loading a block of `state`, which then waits and shares it.
    pub(super) fn is_loaded_by_another(&self, state: &Sequence, block: usize) -> bool {
        let end = (block + 1) * self.cache.block_size;
        let loads = |other: &Sequence| {
            other.is_loading()
                && other.id != state.id
                && end <= other.computed
                && other.key(block) == state.key(block)
        };
        // Most of the time nobody loads, and nobody need be asked.
        self.tiers.is_moving() && self.running.iter().any(|running| loads(&self.sequences[running.slot]))
    }

    /// Takes a page for each that the table of `slot` lacks from `firsts` of each group on, and has it loaded. There
    /// are as many, and the host has them all: see `prefix_with_host`.
    pub(super) fn load_missing(&mut self, slot: usize, firsts: &[usize], tokens: usize) {
        let groups = self.groups;
        let state = &mut self.sequences[slot];
        for at in 0..state.table.len() {
            let (block, group) = (at / groups, at % groups);
            if state.table[at].is_some() || block < firsts[group] {
                continue;
            }
            let content = state.content(block, &self.cache);
            let from = content.and_then(|content| self.tiers.host.find(content, group));
            let from = from.expect("the host has what the device lacks of a prefix");
            let to = self.pool.take(group).expect("as many pages are available as are loaded");
            self.tiers.host.hold(from);
            self.tiers.queue.push_back(Load { from, to, slot, life: state.life });
            state.table[at] = Some(to);
            state.held += 1;
            state.loading += 1;
        }
        state.loading_tokens = tokens;
    }

    /// What `slot` computed or shared is found by nobody any more, on either tier: whatever spoilt it must not meet the
    /// next request that begins alike.
    pub(super) fn forget_contents(&mut self, slot: usize) {
        let state = &self.sequences[slot];
        // Those behind its windows are not its pages any more, and may have their names still.
        // Blocks without names count, too, where no prefixes are cached.
        for &key in state.keys().iter().take(state.named) {
            for group in 0..self.groups {
                self.pool.forget(key, group);
                self.tiers.host.forget(key, group);
            }
        }
    }

    /// Whether another sequence is loading the next block of `state`.
    pub(super) fn is_loaded_for(&self, state: &Sequence) -> bool {
        state.next_block(&self.cache).is_some_and(|block| self.is_loaded_by_another(state, block))
    }

    /// Begins once more for one that has not run and waited for what another one loaded: which may be there now, or
    /// left to it to load. Block after block it would find only what every group has from the beginning on, and of a
    /// window's group no more than the prefix's end was loaded.
    pub(super) fn take_over_loaded(&mut self, slot: usize) {
        let state = &self.sequences[slot];
        if !state.awaits_load || state.last_step.is_some() || self.is_loaded_for(state) {
            return;
        }
        let state = &mut self.sequences[slot];
        (state.awaits_load, state.held) = (false, 0);
        let pages = std::mem::take(&mut state.table);
        pages.into_iter().rev().flatten().for_each(|page| self.pool.release(page, None));
        self.take_over_prefix(slot);
    }

    /// Forgets loads of a life that ends, where they were not ordered.
    pub(super) fn forget_loads(&mut self, slot: usize) {
        let state = &self.sequences[slot];
        if !state.is_loading() {
            return;
        }
        let host = &mut self.tiers.host;
        self.tiers.queue.retain(|load| {
            let goes_on = load.life != state.life;
            if !goes_on && !planted(Bug::LeaksHostPages) {
                host.release(load.from);
            }
            goes_on
        });
    }

    /// Whether sequences are left that can go on only once pages have been moved: then a step is worth its while in
    /// which nothing else happens.
    pub(super) fn awaits_transfers(&self) -> bool {
        self.in_flight.is_empty() && self.tiers.is_moving() && !self.is_idle()
    }

    /// What `step` moves: loads first, because somebody waits for them, and saves where something runs besides.
    pub(super) fn order_transfers(&mut self, step: Step, saves: bool) -> Transfers {
        let mut transfers = Transfers::default();
        if self.tiers.is_off() {
            return transfers;
        }
        let room = TRANSFERS_PER_STEP.min(TRANSFERS_UNDER_WAY_MAX - self.tiers.ordered.len());
        while transfers.loads.len() < room
            && let Some(load) = self.tiers.queue.pop_front()
        {
            self.pool.begin_transfer(load.to);
            transfers.loads.push((load.from, load.to));
            self.tiers.ordered.push_back((step, Transfer::Load(load)));
        }
        if saves {
            self.order_saves(step, room - transfers.loads.len(), &mut transfers);
        }
        transfers
    }

    /// Saves the cached pages that will be taken first, as long as few are expendable. Pages for every sequence's next
    /// block stay available meanwhile: none of them stalls because others are being saved.
    fn order_saves(&mut self, step: Step, room: usize, transfers: &mut Transfers) {
        let kept = self.groups * (self.running.len() + 1);
        while self.pool.expendable() < self.tiers.lead {
            let Some((from, content, group)) = self.pool.oldest_unique() else { return };
            if self.tiers.host.has(content.key, group) {
                self.pool.make_spare(from);
                continue;
            }
            if transfers.saves.len() >= room || self.pool.available() <= kept {
                return;
            }
            let Some(to) = self.tiers.host.fill(content, group) else { return };
            if !planted(Bug::GivesAwaySavedPages) {
                self.pool.begin_transfer(from);
            }
            transfers.saves.push((from, to));
            self.tiers.ordered.push_back((step, Transfer::Save { from, to }));
        }
    }

    /// Every rank has carried out all transfers of plans up to `until`.
    pub(super) fn transfers_done(&mut self, until: Step) {
        let until = if planted(Bug::TakesTransfersForDone) { Step(u64::MAX) } else { until };
        while self.tiers.ordered.front().is_some_and(|(step, _)| *step <= until)
            && let Some((_, transfer)) = self.tiers.ordered.pop_front()
        {
            match transfer {
                Transfer::Save { from, to } => {
                    if !planted(Bug::GivesAwaySavedPages) {
                        self.pool.end_transfer(from);
                    }
                    self.tiers.host.filled(to);
                    self.counters.host_saves += 1;
                }
                Transfer::Load(load) => self.loaded(load),
            }
        }
    }

    fn loaded(&mut self, load: Load) {
        self.pool.end_transfer(load.to);
        self.tiers.host.release(load.from);
        self.counters.host_loads += 1;
        let state = self.sequences.get_mut(load.slot).filter(|state| state.life == load.life);
        let Some(state) = state else { return };
        state.loading -= 1;
        if state.loading == 0 || planted(Bug::NamesPagesOnTheirWay) {
            self.counters.host_hits += std::mem::take(&mut state.loading_tokens) as u64;
            self.name_blocks(load.slot);
        }
    }

    /// Panics unless both tiers agree with what moves between them.
    pub(super) fn check_tiers(&self) {
        let tiers = &self.tiers;
        let saves = || {
            tiers.ordered.iter().filter_map(|(_, transfer)| match *transfer {
                Transfer::Save { from, to } => Some((from, to)),
                Transfer::Load(_) => None,
            })
        };
        tiers.host.check_invariants(tiers.loads().map(|load| load.from), saves().map(|(_, to)| to));
        assert!(tiers.ordered.len() <= TRANSFERS_UNDER_WAY_MAX, "too many transfers are under way");
        assert!(tiers.ordered.iter().is_sorted_by_key(|(step, _)| *step), "transfers are out of order");
        for (_, state) in self.sequences.iter() {
            let loads = tiers.loads().filter(|load| load.life == state.life);
            assert_eq!(state.loading, loads.count(), "{} miscounts its loads", state.id);
            assert!(!state.is_loading() || state.last_step.is_none(), "{} runs while it is loaded", state.id);
        }
        for load in &tiers.queue {
            let state = self.sequences.get(load.slot).filter(|state| state.life == load.life);
            assert!(
                state.is_some_and(|state| state.table.contains(&Some(load.to))),
                "{load:?} is for nobody"
            );
        }
        let ordered = tiers.ordered.iter().map(|(_, transfer)| match *transfer {
            Transfer::Save { from, .. } => from,
            Transfer::Load(load) => load.to,
        });
        self.pool.check_transfers(ordered);
    }
}
