//! A scenario: a scheduler's surroundings, and what happens from outside at which time.

use std::fmt;

use super::{cost::CostModel, rig::Ask};
use crate::config::{CacheSpec, SchedulerConfig};

/// Most choices of one request: sequences of one are numbered from a multiple of this.
pub(super) const CHOICES_MAX: u64 = 64;

/// What does not change while a scenario runs.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) config: SchedulerConfig,
    pub(super) cache: CacheSpec,
    pub(super) cost: CostModel,
    /// Steps that may be under way.
    pub(super) depth: usize,
    /// Seed of how late transfers between device and host are reported; none where each step carries out its own.
    pub(super) late_transfers: Option<u64>,
    /// Events from one look at everything to the next.
    pub(super) events_per_check: u64,
}

/// Something that happens from outside.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are submissions")]
pub(super) enum Action {
    Submit(Ask),
    /// Ends one choice of the request that the event of this number submitted, or all.
    Cancel {
        submit: usize,
        choice: Option<usize>,
    },
    /// The group is lost, and formed anew after this time.
    Lose {
        absent_ns: u64,
    },
    /// The next result does not answer its plan, which costs the group its life.
    Garble {
        absent_ns: u64,
    },
    /// A fresh shard that has the pages is told the whole state as soon as nothing is under way.
    Relearn,
}

/// An action at its time. The number stays when others are left out.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) number: usize,
    pub(super) at_ns: u64,
    pub(super) action: Action,
}

#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) setup: Setup,
    /// In order of time.
    pub(super) events: Vec<Event>,
}

impl Scenario {
    /// Puts actions in order of time and numbers them. What refers to another action must refer to its place in
    /// `actions`.
    pub(super) fn new(setup: Setup, mut actions: Vec<(u64, Action)>) -> Self {
        let mut order: Vec<usize> = (0..actions.len()).collect();
        order.sort_by_key(|&at| actions[at].0);
        let mut number = vec![0; actions.len()];
        order.iter().enumerate().for_each(|(to, &from)| number[from] = to);
        for (_, action) in &mut actions {
            if let Action::Cancel { submit, .. } = action {
                *submit = number[*submit];
            }
        }
        let mut actions: Vec<_> = actions.into_iter().map(Some).collect();
        let events = order.into_iter().enumerate().filter_map(|(number, from)| {
            let (at_ns, action) = actions[from].take()?;
            Some(Event { number, at_ns, action })
        });
        Self { setup, events: events.collect() }
    }

    /// The same with the events of these numbers alone.
    pub(super) fn only(&self, numbers: &[usize]) -> Self {
        let kept = self.events.iter().filter(|event| numbers.contains(&event.number));
        Self { setup: self.setup.clone(), events: kept.cloned().collect() }
    }

    pub(super) fn numbers(&self) -> Vec<usize> {
        self.events.iter().map(|event| event.number).collect()
    }

    /// Most tokens that can come to be computed if nobody is ever replayed.
    pub(super) fn tokens(&self) -> u64 {
        let tokens = |event: &Event| match &event.action {
            // At depth two a token beyond the end may be computed in vain.
            Action::Submit(ask) => ask.choices * (ask.request.prompt.len() + ask.request.max_tokens + 1),
            _ => 0,
        };
        self.events.iter().map(|event| tokens(event) as u64).sum()
    }
}

/// The sequence of one choice of the request that an event submits.
pub(super) fn sequence_of(submit: usize, choice: usize) -> u64 {
    submit as u64 * CHOICES_MAX + choice as u64
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setup { config, cache, depth, late_transfers, .. } = &self.setup;
        writeln!(f, "{config:?}")?;
        let windows: Vec<Option<usize>> = cache.groups.windows().collect();
        writeln!(
            f,
            "{} pages of {} tokens, windows {windows:?}, prefix caching {}, {depth} steps in flight, {} pages of the \
             host, late: {late_transfers:?}",
            cache.num_blocks, cache.block_size, cache.prefix_caching, cache.host_blocks
        )?;
        for Event { number, at_ns, action } in &self.events {
            write!(f, "{number:>5} at {:>9.3} ms: ", *at_ns as f64 / 1e6)?;
            match action {
                Action::Submit(Ask { request, choices, breaks_after }) => writeln!(
                    f,
                    "submit {} + {} tokens, choices {choices}, priority {}, salted {}, awaits tokens {}, stops {:?}, \
                     logprobs {:?}/{:?}, breaks after {breaks_after:?}, prompt {:?}",
                    request.prompt.len(),
                    request.max_tokens,
                    request.priority,
                    request.cache_salt.is_some(),
                    request.awaits_tokens,
                    request.stop_token_ids,
                    request.logprobs,
                    request.prompt_logprobs,
                    request.prompt
                )?,
                other => writeln!(f, "{other:?}")?,
            }
        }
        Ok(())
    }
}
