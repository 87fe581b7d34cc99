//! Who may begin to run: pages that are to be had, against those that others will take before long.

use super::{
    STEPS_IN_FLIGHT_MAX,
    bugs::{Bug, planted},
    pool::Admission,
    sequence::Sequence,
    state::{Running, Scheduler},
};

impl Scheduler {
    /// Whether a waiting sequence can run, given that `shared` leading blocks of it are others': its known tokens fit,
    /// and what runs then can go on growing for a while. Without that margin a newcomer would take the last pages, be
    /// prefilled, and give way to the next sequence that crosses a block boundary. A sequence that would run alone
    /// always fits.
    pub(super) fn admission(&self, state: &Sequence, shared: usize) -> Admission {
        let each = state.reserve_per_sequence(&self.cache);
        let (mut reserve, mut kept) = (state.growth(&self.cache).min(each), 0);
        for running in &self.running {
            kept += if running.order.may_be_preempted { 0 } else { self.sequences[running.slot].pages_max };
            reserve += self.reserve_of(*running, each);
        }
        let stays = state.order().may_be_preempted || kept + state.pages_max <= self.pool.total();
        let known = self.cache.pages_for(state.tokens.len());
        let needed = known.saturating_sub(shared * self.cache.groups.full()) + reserve;
        let (available, lag) = (self.pool.available(), self.pages_between_hands());
        let is_room = needed <= available && needed + lag <= available + self.pool.quarantined();
        match stays && is_room {
            true => Admission::Fits,
            false => Admission::Wait,
        }
    }

    /// Pages that windows have left and steps in flight still see, when all that run decode and one more: each takes a
    /// page as often as it gives one up, and must not wait for that one. Nobody waits for others where it runs alone.
    fn pages_between_hands(&self) -> usize {
        let windows = self.groups - self.cache.groups.full();
        let each = windows * STEPS_IN_FLIGHT_MAX.div_ceil(self.cache.block_size);
        let is_alone = self.running.is_empty() || planted(Bug::IsPatientForEver);
        if is_alone { 0 } else { each * (self.running.len() + 1) }
    }

    /// Pages that one that runs will take, and of those that it may take after that no more than `each`.
    fn reserve_of(&self, running: Running, each: usize) -> usize {
        let state = &self.sequences[running.slot];
        let each = if running.order.may_be_preempted { each } else { usize::MAX };
        state.committed(&self.cache) + state.growth(&self.cache).min(each)
    }

    /// Pages that all that run, but for one, will take before long.
    pub(super) fn spoken_for(&self, except: usize) -> usize {
        let others = self.running.iter().filter(|running| running.slot != except);
        others.map(|running| self.reserve_of(*running, self.groups)).sum()
    }

    /// Pages that a newcomer could be given: those that are available, without what those that run will take before
    /// long, and without what those that were preempted take when they come back.
    pub(crate) fn free_for_newcomers(&self) -> usize {
        let each = self.groups;
        let running: usize = self.running.iter().map(|running| self.reserve_of(*running, each)).sum();
        let waiting = self.waiting.values().map(|slot| &self.sequences[*slot]);
        // Mostly none, and nobody is looked at then.
        let preempted = waiting.filter(|state| state.started).take(self.waiting.len() - self.unstarted);
        let preempted: usize = preempted.map(|state| self.cache.pages_for(state.tokens.len())).sum();
        self.pool.available().saturating_sub(running + preempted)
    }
}
