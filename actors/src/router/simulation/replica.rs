//! The modelled replica: a scheduler and its group, which take pages chunk by chunk.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Asked, BLOCK, End, Simulation};
use crate::{config::CacheSpec, ids::SequenceId, order::Place, prefix::BlockKey, router::WorkShape};

/// Tokens of one modelled step.
const STEP_TOKENS: usize = 40;

pub(super) enum ToReplica {
    Submit(Vec<SequenceId>),
    Cancel(SequenceId),
    GiveBack(Vec<SequenceId>),
}

pub(super) enum ToRouter {
    Started(SequenceId),
    Prefilled(SequenceId),
    Ended(SequenceId),
    Kept(SequenceId),
    /// All of one group.
    GivenBack(Vec<SequenceId>),
    /// With the number of the scheduler to speak to.
    Ready(u64),
    Lost,
    Gone,
}

struct Running {
    /// Tokens of its prompt that are still to be computed, of so many when it was admitted.
    prefill: usize,
    prefill_all: usize,
    decodes: usize,
    /// Pages that it has, and that it has once its prompt is computed.
    taken: usize,
    pages: usize,
}

impl Running {
    /// Computes some of its prompt, and says how many pages that takes.
    fn compute(&mut self, chunk: usize) -> usize {
        self.prefill -= chunk;
        let left = self.pages * self.prefill / self.prefill_all;
        let before = std::mem::replace(&mut self.taken, self.pages - left);
        self.taken - before
    }
}

/// A scheduler and its group, as simple as they can be: first in line, first served.
pub(super) struct Replica {
    pub(super) is_up: bool,
    /// Schedulers before the present one.
    pub(super) scheduler: u64,
    pub(super) inbox: VecDeque<ToReplica>,
    /// What it has told and the router has not heard.
    pub(super) outbox: VecDeque<ToRouter>,
    pub(super) waiting: BTreeSet<Place>,
    running: BTreeMap<SequenceId, Running>,
    cache: BTreeSet<BlockKey>,
    free_blocks: usize,
}

impl Replica {
    pub(super) fn new(free_blocks: usize) -> Self {
        Self {
            is_up: false,
            scheduler: 0,
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            waiting: BTreeSet::new(),
            running: BTreeMap::new(),
            cache: BTreeSet::new(),
            free_blocks,
        }
    }

    fn holds(&self, sequence: SequenceId) -> bool {
        self.running.contains_key(&sequence) || self.waiting.iter().any(|place| place.sequence == sequence)
    }

    pub(super) fn running(&self) -> usize {
        self.running.len()
    }

    /// Whether nothing runs or waits, and all pages are free.
    pub(super) fn is_idle(&self, num_blocks: usize) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.free_blocks == num_blocks
    }

    /// Pages that those which run leave to others.
    pub(super) fn free_for_newcomers(&self) -> usize {
        let to_take: usize = self.running.values().map(|running| running.pages - running.taken).sum();
        self.free_blocks.checked_sub(to_take).expect("those that run were promised more pages than there are")
    }

    /// Tokens of a prompt that need not be computed here: a prefix that is cached, or what another choice has.
    pub(super) fn cached(&self, asked: &Asked) -> usize {
        let Asked { shape, group, .. } = asked;
        let known = shape.keys.iter().take_while(|key| self.cache.contains(key)).count();
        let all_but_last = shape.prompt_tokens - 1;
        match group.iter().any(|one| self.running.contains_key(one)) {
            _ if shape.is_whole => 0,
            true => all_but_last,
            false => (known * BLOCK).min(all_but_last),
        }
    }
}

impl Simulation {
    pub(super) fn come_up(&mut self, at: usize) {
        let replica = &mut self.replicas[at];
        if !replica.is_up {
            replica.is_up = true;
            replica.outbox.push_back(ToRouter::Ready(replica.scheduler));
        }
    }

    /// Loses a replica's group, or its scheduler with it.
    pub(super) fn lose(&mut self, at: usize, with_scheduler: bool) {
        let replica = &mut self.replicas[at];
        if !replica.is_up && !with_scheduler {
            return;
        }
        replica.is_up = false;
        replica.cache.clear();
        replica.free_blocks = self.config.cache.num_blocks;
        let running = std::mem::take(&mut replica.running).into_keys();
        let mut failed: Vec<SequenceId> = running.collect();
        let waiting: Vec<SequenceId> =
            std::mem::take(&mut replica.waiting).into_iter().map(|place| place.sequence).collect();
        if with_scheduler {
            failed.extend(waiting);
            failed.extend(replica.inbox.drain(..).flat_map(|message| match message {
                ToReplica::Submit(group) => group,
                _ => Vec::new(),
            }));
            replica.scheduler += 1;
            replica.outbox.push_back(ToRouter::Gone);
        } else {
            replica.outbox.push_back(ToRouter::Lost);
            let mut groups: BTreeMap<SequenceId, Vec<SequenceId>> = BTreeMap::new();
            for sequence in waiting {
                groups.entry(self.asked[&sequence].group[0]).or_default().push(sequence);
            }
            replica.outbox.extend(groups.into_values().map(ToRouter::GivenBack));
            replica.outbox.extend(failed.iter().map(|sequence| ToRouter::Ended(*sequence)));
        }
        failed.into_iter().for_each(|sequence| self.end(sequence, End::Failed));
    }

    /// One message reaches a replica.
    pub(super) fn deliver(&mut self, at: usize) {
        let replica = &mut self.replicas[at];
        match replica.inbox.pop_front() {
            None => {}
            Some(ToReplica::Submit(group)) if replica.is_up => {
                replica
                    .waiting
                    .extend(group.into_iter().map(|sequence| self.asked[&sequence].place(sequence)));
            }
            Some(ToReplica::Submit(group)) => replica.outbox.push_back(ToRouter::GivenBack(group)),
            Some(ToReplica::Cancel(sequence)) => {
                replica.waiting.remove(&self.asked[&sequence].place(sequence));
                if let Some(running) = replica.running.remove(&sequence) {
                    replica.free_blocks += running.taken;
                }
                replica.outbox.push_back(ToRouter::Ended(sequence));
            }
            Some(ToReplica::GiveBack(group)) => {
                let open: Vec<SequenceId> =
                    group.into_iter().filter(|sequence| replica.holds(*sequence)).collect();
                if open.iter().any(|sequence| replica.running.contains_key(sequence)) {
                    replica.outbox.extend(open.into_iter().map(ToRouter::Kept));
                } else if !open.is_empty() {
                    for sequence in &open {
                        replica.waiting.remove(&self.asked[sequence].place(*sequence));
                    }
                    replica.outbox.push_back(ToRouter::GivenBack(open));
                }
            }
        }
    }

    /// Pages that a prompt takes beside those of so many tokens that are there.
    pub(super) fn pages(&self, shape: &WorkShape, cached: usize) -> usize {
        let CacheSpec { groups, .. } = self.config.cache;
        let blocks = shape.prompt_tokens.div_ceil(BLOCK);
        groups
            .windows()
            .map(|window| match window {
                None => blocks - cached / BLOCK,
                // A window that begins in the middle of a block reaches into one more.
                Some(window) => blocks.min(window.saturating_sub(1).div_ceil(BLOCK) + 1),
            })
            .sum()
    }

    /// One step of a replica: decodes, prefill, admissions, all in order.
    pub(super) fn step(&mut self, at: usize) {
        let replica = &mut self.replicas[at];
        if !replica.is_up {
            return;
        }
        let mut budget = STEP_TOKENS;
        let mut ended = Vec::new();
        for (sequence, running) in &mut replica.running {
            if running.prefill > 0 {
                let chunk = running.prefill.min(budget);
                replica.free_blocks -= running.compute(chunk);
                budget -= chunk;
                if running.prefill == 0 {
                    replica.outbox.push_back(ToRouter::Prefilled(*sequence));
                }
            } else {
                running.decodes -= 1;
                budget = budget.saturating_sub(1);
                if running.decodes == 0 {
                    ended.push(*sequence);
                }
            }
        }
        for sequence in &ended {
            let running = replica.running.remove(sequence).expect("it ran");
            replica.free_blocks += running.taken;
            replica.outbox.push_back(ToRouter::Ended(*sequence));
        }
        while let Some(&place) = self.replicas[at].waiting.first()
            && self.replicas[at].running.len() < self.config.max_num_seqs
            && budget > 0
        {
            let (sequence, replica) = (place.sequence, &self.replicas[at]);
            let asked = &self.asked[&sequence];
            let cached = replica.cached(asked);
            let prefill = asked.shape.prompt_tokens - cached;
            let pages = self.pages(&asked.shape, cached);
            if pages > replica.free_for_newcomers() {
                break;
            }
            let replica = &mut self.replicas[at];
            let asked = self.asked.get_mut(&sequence).expect("it was asked for");
            replica.waiting.remove(&place);
            replica.cache.extend(asked.shape.keys.iter());
            let (prefill_all, decodes) = (prefill, asked.decodes);
            replica.running.insert(sequence, Running { prefill, prefill_all, decodes, taken: 0, pages });
            replica.outbox.push_back(ToRouter::Started(sequence));
            assert!(!asked.started, "{sequence} started twice");
            asked.started = true;
            self.waiting -= usize::from(asked.end.is_none());
            // Its first chunk is the next step's.
            budget = budget.saturating_sub(prefill);
        }
        ended.into_iter().for_each(|sequence| self.end(sequence, End::Finished));
    }
}
