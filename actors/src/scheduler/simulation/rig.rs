//! Scheduler, executor and oracle under one hand. Every operation leaves everything checked.

use super::{
    cost::CostModel,
    executor::ModelledExecutor,
    model::salt_number,
    oracle::{Oracle, Outcome},
    shard::Hidden,
};
use crate::{
    config::{CacheSpec, SchedulerConfig},
    ids::{Epoch, SequenceId},
    plan::{StepPlan, StepResult, Tokens},
    request::{Request, SubmitError},
    scheduler::{AbsorbError, STEPS_IN_FLIGHT_MAX, Scheduler, pool::PageState},
};

/// One request: its choices are sequences of their own.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) request: Request,
    pub(super) choices: usize,
    /// Generated tokens after which its logits are not finite.
    pub(super) breaks_after: Option<usize>,
}

impl Ask {
    pub(super) fn new(request: Request) -> Self {
        Self { request, choices: 1, breaks_after: None }
    }

    /// What is submitted for one of its choices.
    pub(super) fn choice(&self, choice: usize) -> Request {
        let mut request = self.request.clone();
        request.sampling.seed = request.sampling.seed.wrapping_add(choice as u64);
        request
    }
}

pub(in crate::scheduler) struct Simulation {
    pub(in crate::scheduler) scheduler: Scheduler,
    pub(super) executor: ModelledExecutor,
    pub(super) oracle: Oracle,
    pub(super) now_ns: u64,
    /// Steps absorbed, in all epochs.
    pub(super) steps: u64,
    pub(super) lost_groups: u64,
    /// Events from one look at everything to the next; in between only what a plan or a result shows is looked at.
    pub(super) events_per_check: u64,
    events: u64,
    /// Whether every plan and result is printed.
    pub(super) is_told: bool,
    depth: usize,
    epoch: Epoch,
    /// A result of an earlier epoch that is still on its way.
    late: Option<StepResult>,
}

impl Simulation {
    pub(in crate::scheduler) fn new(config: SchedulerConfig, cache: CacheSpec, depth: usize) -> Self {
        Self::timed(config, cache, CostModel::ONE_CARD, depth)
    }

    pub(super) fn timed(config: SchedulerConfig, cache: CacheSpec, cost: CostModel, depth: usize) -> Self {
        assert!(depth <= STEPS_IN_FLIGHT_MAX);
        let epoch = Epoch(0);
        Self {
            scheduler: Scheduler::new(config, cache, super::VOCAB, epoch),
            executor: ModelledExecutor::new(cache, cost, epoch),
            oracle: Oracle::new(config, cache),
            now_ns: 0,
            steps: 0,
            lost_groups: 0,
            events_per_check: 1,
            events: 0,
            is_told: false,
            depth,
            epoch,
            late: None,
        }
    }

    pub(in crate::scheduler) fn submit(&mut self, id: u64, request: Request) -> Result<(), SubmitError> {
        self.submit_choice(id, &Ask::new(request), None)
    }

    /// Submits the first choice of `ask`, or another one, whose leader is then named.
    pub(super) fn submit_choice(
        &mut self,
        id: u64,
        ask: &Ask,
        leader: Option<u64>,
    ) -> Result<(), SubmitError> {
        let sequence = SequenceId(id);
        let request = ask.choice(leader.map_or(0, |leader| (id - leader) as usize));
        let hidden = Hidden { salt: salt_number(request.cache_salt), breaks_after: ask.breaks_after };
        let now_ms = self.now_ns / 1_000_000;
        let unstarted = self.scheduler.unstarted;
        let submitted = self.scheduler.submit(now_ms, sequence, request.clone(), leader.map(SequenceId));
        match &submitted {
            Ok(()) => {
                self.executor.shard.hide(sequence, hidden);
                self.oracle.admitted(now_ms, sequence, &request, hidden, leader.is_some());
            }
            Err(refusal) => self.oracle.refused(&request, refusal, unstarted),
        }
        self.check();
        submitted
    }

    pub(in crate::scheduler) fn cancel(&mut self, id: u64) {
        let existed = self.scheduler.cancel(SequenceId(id));
        self.oracle.cancelled(SequenceId(id), existed);
        self.check();
        self.wipe_free();
    }

    /// Plans one step, if there is a group, fewer steps are under way than may be, and there is anything to do.
    pub(in crate::scheduler) fn plan(&mut self) -> bool {
        if !self.executor.is_formed() || self.executor.under_way() >= self.depth {
            return false;
        }
        let before = self.oracle.before_plan(&self.scheduler);
        let plan = self.scheduler.plan();
        self.check();
        self.oracle.planned(&self.scheduler, &before, plan.as_ref());
        let Some(plan) = plan else { return false };
        if self.is_told {
            self.tell(&plan);
        }
        self.wipe_free(); // Pages of what gave way, before any is handed out again.
        self.executor.accept(plan, self.now_ns);
        true
    }

    /// The oldest step under way ends, no earlier than now, and its result is absorbed.
    pub(in crate::scheduler) fn absorb(&mut self) -> bool {
        let Some(done_ns) = self.executor.next_done_ns() else { return false };
        self.now_ns = self.now_ns.max(done_ns);
        let Some((result, step_ns)) = self.executor.finish() else { return false };
        let step = result.step;
        self.oracle.before_absorb(&self.scheduler, result.outputs.iter().map(|output| output.sequence));
        let events = self.scheduler.absorb(result).expect("the simulated shard answers its plans");
        self.steps += 1;
        if self.is_told {
            println!("{:>10.3} ms: {step} absorbed, {} events", self.now_ns as f64 / 1e6, events.len());
        }
        self.check();
        self.wipe_free();
        self.oracle.absorbed(events, step, self.now_ns, (step_ns, self.executor.longest_ns()));
        true
    }

    /// The oldest step under way ends with a result that does not answer its plan, if it can be told.
    pub(super) fn absorb_garbled(&mut self) -> bool {
        let Some((mut result, _)) = self.executor.finish() else { return false };
        match result.outputs.pop() {
            Some(_) => {}
            None => result.step = result.step.next(),
        }
        let refusal = self.scheduler.absorb(result);
        let is_refused = matches!(refusal, Err(AbsorbError::Content { .. } | AbsorbError::Order { .. }));
        assert!(is_refused, "a result that does not answer its plan was taken");
        true
    }

    /// The group is lost: results on their way vanish, sequences that ran wait to be replayed.
    pub(in crate::scheduler) fn lose(&mut self) {
        self.epoch = Epoch(self.epoch.0 + 1);
        self.late = self.executor.lose().or(self.late.take());
        self.scheduler.restart(self.epoch);
        self.oracle.lost();
        self.lost_groups += 1;
        self.check();
    }

    /// A new group forms, and knows nothing. A result of the old one comes in after all.
    pub(in crate::scheduler) fn form(&mut self) {
        self.epoch = Epoch(self.epoch.0 + 1);
        self.executor.form(self.epoch, self.now_ns);
        self.scheduler.restart(self.epoch);
        if let Some(late) = self.late.take() {
            let refusal = self.scheduler.absorb(late);
            assert!(
                matches!(refusal, Err(AbsorbError::Epoch { .. })),
                "a result of an earlier epoch was taken"
            );
        }
        self.check();
    }

    /// A shard that has the pages is told the whole state, if nothing is under way.
    pub(super) fn relearn(&mut self) -> bool {
        let image = self.scheduler.image();
        image.inspect(|image| self.executor.relearn(image)).is_some()
    }

    /// Whether nobody is left, or something is under way. Anything else would be forgotten work.
    pub(super) fn is_at_work(&self) -> bool {
        self.scheduler.is_idle() || self.executor.under_way() > 0
    }

    /// Runs until nothing is left; every round must make progress.
    pub(in crate::scheduler) fn drain(&mut self) {
        let mut rounds = 0;
        while !self.scheduler.is_idle() || self.executor.under_way() > 0 {
            while self.plan() {}
            assert!(self.absorb(), "sequences are left, and nothing is in flight nor can be planned");
            rounds += 1;
            assert!(rounds < 1_000_000, "requests starve");
        }
        self.check_settled();
    }

    /// Everybody was served and everything given back.
    pub(super) fn check_settled(&self) {
        self.scheduler.check_invariants();
        self.oracle.check_settled();
        assert!(self.scheduler.is_idle(), "a sequence that ended is kept");
        assert_eq!((self.scheduler.running(), self.scheduler.waiting()), (0, 0));
        let moving = self.scheduler.pool.moving();
        assert_eq!(
            self.scheduler.used_blocks(),
            moving,
            "pages were lost: only transfers keep any at the end"
        );
        assert!(self.scheduler.host_used_blocks() <= self.scheduler.cache.host_blocks);
        let may_keep = self.scheduler.cache.prefix_caching;
        assert!(may_keep || self.scheduler.cached_blocks() == 0, "pages are cached where nothing is to be");
    }

    pub(in crate::scheduler) fn outcome(&self, id: u64) -> &Outcome {
        self.oracle.outcome(SequenceId(id))
    }

    /// Prints a plan: rows of each sequence, and what is left of the pool.
    fn tell(&self, plan: &StepPlan) {
        let spans = plan.run.iter().map(|span| match &span.tokens {
            Tokens::Given(tokens) => format!("{}:{}", span.sequence.0, tokens.len()),
            Tokens::LastSampled => span.sequence.0.to_string(),
        });
        let scheduler = &self.scheduler;
        println!(
            "{:>10.3} ms: {} planned: {}; {} copies, {} saved, {} loaded, {} run, {} wait, {} pages available, {} on \
             their way",
            self.now_ns as f64 / 1e6,
            plan.step,
            spans.collect::<Vec<_>>().join(" "),
            plan.copies.len(),
            plan.saves.len(),
            plan.loads.len(),
            scheduler.running(),
            scheduler.waiting(),
            scheduler.pool.available(),
            scheduler.pool.quarantined()
        );
    }

    fn check(&mut self) {
        self.events += 1;
        if self.events.is_multiple_of(self.events_per_check) {
            self.scheduler.check_invariants();
        }
    }

    fn wipe_free(&mut self) {
        let pool = &self.scheduler.pool;
        self.executor.shard.wipe_free(|block| pool.state(block) == PageState::Free);
    }
}
