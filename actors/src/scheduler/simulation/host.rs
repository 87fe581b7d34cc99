//! The host's pool as a shard has it, whose transfers are carried out and reported at any time that is legal.

use std::collections::VecDeque;

use consort_parallel::ids::{BlockId, HostBlock};

use super::{Random, shard::Pages};
use crate::{ids::Step, plan::StepPlan, scheduler::TRANSFERS_PER_STEP};

/// Pages of the host, and copies that were ordered.
pub(super) struct SimHost {
    pages: Pages,
    ordered: VecDeque<Ordered>,
    done: Option<Step>,
    /// When what is done; absent where every step carries out its own.
    moods: Option<Random>,
}

struct Ordered {
    step: Step,
    saves: Vec<(BlockId, HostBlock)>,
    loads: Vec<(HostBlock, BlockId)>,
}

impl SimHost {
    pub(super) fn new(pages: usize, block_size: usize) -> Self {
        Self { pages: Pages::new(pages, block_size), ordered: VecDeque::new(), done: None, moods: None }
    }

    /// Copies happen anywhere between their order and their report, which comes up to three steps late.
    pub(super) fn is_late(&mut self, seed: u64) {
        self.moods = Some(Random::new(seed));
    }

    /// A plan exists: nobody may rely on what its transfers will write.
    pub(super) fn hand_out(&mut self, plan: &StepPlan) {
        assert!(plan.saves.len() + plan.loads.len() <= TRANSFERS_PER_STEP, "a step moves too much");
        plan.saves.iter().for_each(|(_, to)| self.pages.wipe(to.index()));
    }

    /// A step begins, and its transfers may.
    pub(super) fn order(&mut self, plan: &StepPlan, device: &mut Pages) {
        let ordered = Ordered { step: plan.step, saves: plan.saves.clone(), loads: plan.loads.clone() };
        if self.moods.as_mut().is_some_and(|moods| moods.chance(50)) {
            // The copies are made at once, and the report of them is late.
            self.copy(&ordered, device);
            self.ordered.push_back(Ordered { saves: Vec::new(), loads: Vec::new(), ..ordered });
        } else {
            self.ordered.push_back(ordered);
        }
    }

    /// A step is done: carries out what is due and says up to which step all is.
    pub(super) fn report(&mut self, plan: &StepPlan, device: &mut Pages) -> Option<Step> {
        let is_late = !plan.await_transfers;
        let late = self.moods.as_mut().filter(|_| is_late).map_or(0, |moods| moods.below(4));
        self.done = self.done.max(plan.step.0.checked_sub(late as u64).map(Step));
        while let Some(ordered) = self.ordered.pop_front_if(|oldest| Some(oldest.step) <= self.done) {
            self.copy(&ordered, device);
        }
        self.done
    }

    fn copy(&mut self, ordered: &Ordered, device: &mut Pages) {
        for (from, to) in &ordered.saves {
            let page = device.page(from.index());
            assert!(page.iter().all(|&content| content != 0), "page {} is saved and is not full", from.0);
            self.pages.fill(to.index(), page);
        }
        for (from, to) in &ordered.loads {
            let page = self.pages.page(from.index());
            assert!(
                page.iter().all(|&content| content != 0),
                "host page {} is loaded and is not full",
                from.0
            );
            device.fill(to.index(), page);
        }
    }

    pub(super) fn lose(&mut self) {
        self.pages.wipe_all();
        self.ordered.clear();
        self.done = None;
    }
}
