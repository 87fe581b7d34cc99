//! Runs a scenario in virtual time, as the scheduler's actor would: whatever happens, the scheduler is told and then
//! plans as many steps as it may.

use super::{
    oracle::Seen,
    rig::Simulation,
    scenario::{Action, CHOICES_MAX, Event, Scenario, sequence_of},
};
use crate::scheduler::{PREEMPTIONS_MAX, SchedulerCounters};

/// What a run came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) steps: u64,
    pub(super) end_ns: u64,
    pub(super) lost_groups: u64,
    pub(super) relearned: u64,
    pub(super) counters: SchedulerCounters,
    pub(super) seen: Seen,
}

impl Report {
    /// Both together; times and counters add up.
    pub(super) fn add(&mut self, other: &Report) {
        self.steps += other.steps;
        self.end_ns += other.end_ns;
        self.lost_groups += other.lost_groups;
        self.relearned += other.relearned;
        let (to, from) = (&mut self.counters, &other.counters);
        to.steps += from.steps;
        to.preemptions += from.preemptions;
        to.prompt_tokens += from.prompt_tokens;
        to.prefix_cache_queries += from.prefix_cache_queries;
        to.prefix_cache_hits += from.prefix_cache_hits;
        to.computed_tokens += from.computed_tokens;
        to.generated_tokens += from.generated_tokens;
        to.host_saves += from.host_saves;
        to.host_loads += from.host_loads;
        to.host_hits += from.host_hits;
        self.seen.add(&other.seen);
    }
}

pub(super) struct World {
    pub(super) simulation: Simulation,
    /// When the group forms anew, while there is none.
    forms_at_ns: Option<u64>,
    /// How long the group is absent once the next result has turned out wrong.
    garble: Option<u64>,
    /// A fresh shard waits for the steps under way to end.
    relearns: bool,
    relearned: u64,
    /// Most tokens that may be computed, if nothing is lost.
    tokens: u64,
}

/// Runs a scenario to its end. Panics where anything is not as it must be.
pub(super) fn run(scenario: &Scenario) -> Report {
    World::new(scenario).run(scenario)
}

/// The same, and prints every plan and result.
pub(super) fn run_aloud(scenario: &Scenario) -> Report {
    let mut world = World::new(scenario);
    world.simulation.is_told = true;
    world.run(scenario)
}

impl World {
    fn run(mut self, scenario: &Scenario) -> Report {
        scenario.events.iter().for_each(|event| self.happen(event));
        self.finish()
    }

    pub(super) fn new(scenario: &Scenario) -> Self {
        let setup = &scenario.setup;
        let mut simulation = Simulation::timed(setup.config, setup.cache, setup.cost, setup.depth);
        simulation.events_per_check = setup.events_per_check;
        if let Some(seed) = setup.late_transfers {
            simulation.executor.shard.host.is_late(seed);
        }
        Self {
            simulation,
            forms_at_ns: None,
            garble: None,
            relearns: false,
            relearned: 0,
            tokens: scenario.tokens(),
        }
    }

    /// Lets time pass until an event, and then the event happen.
    pub(super) fn happen(&mut self, event: &Event) {
        self.pass_until(event.at_ns);
        self.simulation.now_ns = self.simulation.now_ns.max(event.at_ns);
        match &event.action {
            Action::Submit(ask) => {
                for choice in 0..ask.choices {
                    let leader = (choice > 0).then_some(sequence_of(event.number, 0));
                    let sequence = sequence_of(event.number, choice);
                    // A refusal is held against what is due to be refused.
                    let _ = self.simulation.submit_choice(sequence, ask, leader);
                    self.plan();
                }
            }
            Action::Cancel { submit, choice } => {
                let choices = choice.map_or(0..CHOICES_MAX as usize, |choice| choice..choice + 1);
                for choice in choices {
                    self.simulation.cancel(sequence_of(*submit, choice));
                    self.plan();
                }
            }
            Action::Lose { absent_ns } => self.lose(*absent_ns),
            Action::Garble { absent_ns } => self.garble = Some(*absent_ns),
            Action::Relearn => self.relearns = true,
        }
        self.plan();
    }

    /// Lets time pass until nobody is left.
    pub(super) fn finish(mut self) -> Report {
        self.pass_until(u64::MAX);
        self.simulation.check_settled();
        Report {
            steps: self.simulation.steps,
            end_ns: self.simulation.now_ns,
            lost_groups: self.simulation.lost_groups,
            relearned: self.relearned,
            counters: self.simulation.scheduler.counters(),
            seen: self.simulation.oracle.seen,
        }
    }

    pub(super) fn pass_until(&mut self, until_ns: u64) {
        loop {
            let done_ns = self.simulation.executor.next_done_ns();
            let Some(next_ns) = done_ns.or(self.forms_at_ns).filter(|&next_ns| next_ns <= until_ns) else {
                return;
            };
            self.simulation.now_ns = self.simulation.now_ns.max(next_ns);
            match (done_ns, self.garble) {
                (None, _) => {
                    self.forms_at_ns = None;
                    self.simulation.form();
                }
                (Some(_), None) => drop(self.simulation.absorb()),
                (Some(_), Some(absent_ns)) => {
                    self.garble = None;
                    self.simulation.absorb_garbled();
                    self.lose(absent_ns);
                }
            }
            self.plan();
        }
    }

    fn lose(&mut self, absent_ns: u64) {
        self.simulation.lose();
        self.relearns = false;
        self.forms_at_ns = Some(self.simulation.now_ns + absent_ns);
    }

    fn plan(&mut self) {
        if self.relearns && self.simulation.executor.is_formed() && self.simulation.executor.under_way() == 0
        {
            self.relearned += u64::from(self.simulation.relearn());
            self.relearns = false;
        }
        if self.relearns || !self.simulation.executor.is_formed() {
            return;
        }
        while self.simulation.plan() {}
        assert!(
            self.simulation.is_at_work(),
            "sequences are left, and nothing is under way nor can be planned"
        );
        // Each life of each request computes each of its tokens at most once.
        let lives = u64::from(PREEMPTIONS_MAX) + 1 + self.simulation.lost_groups;
        let computed = self.simulation.scheduler.counters().computed_tokens;
        assert!(computed <= lives * self.tokens, "{computed} tokens were computed, of {}", self.tokens);
    }
}
