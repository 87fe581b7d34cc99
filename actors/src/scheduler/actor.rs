//! The scheduler actor: a switchboard between the router, the pure [`Scheduler`] and the shard group.

use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::{
    Event, Scheduler, SchedulerCounters,
    message::{SchedulerMessage, Submission},
    streams::{Delivery, Streams},
};
use crate::{
    ensemble::Home,
    group::GroupMessage,
    ids::{Epoch, SequenceId},
    plan::StepResult,
    request::{FinishReason, GenerationError, GenerationEvent},
    router::RouterMessage,
    status::{FinishedCounts, ReplicaStatus},
};

/// What the actor starts from.
pub(crate) struct SchedulerArguments {
    pub(crate) home: Home,
}

/// The actor. All state is in [`SchedulerState`].
pub(crate) struct SchedulerActor;

/// The pure scheduler, the open streams, and the group that executes.
pub(crate) struct SchedulerState {
    home: Home,
    scheduler: Scheduler,
    streams: Streams,
    /// Totals of this scheduler's predecessors.
    before: SchedulerCounters,
    /// Totals of the replica.
    finished: FinishedCounts,
    group: GroupLink,
    /// Whether requests that have not started may go to another replica.
    has_peers: bool,
    #[cfg(test)]
    fails_after: Option<fn(&SchedulerMessage) -> bool>,
}

/// Where plans go.
enum GroupLink {
    Formed(ActorRef<GroupMessage>),
    /// No group: the reason is told to requests that arrive meanwhile.
    Lost(String),
}

impl Actor for SchedulerActor {
    type Msg = SchedulerMessage;
    type State = SchedulerState;
    type Arguments = SchedulerArguments;

    async fn pre_start(
        &self,
        _myself: ActorRef<SchedulerMessage>,
        arguments: SchedulerArguments,
    ) -> Result<SchedulerState, ActorProcessingErr> {
        let SchedulerArguments { home } = arguments;
        let (before, finished) = inherited(&home.status());
        let spec = home.spec();
        let scheduler = Scheduler::new(spec.scheduler, spec.cache, spec.vocab_size, Epoch(0));
        let state = SchedulerState {
            has_peers: spec.replicas() > 1,
            home,
            scheduler,
            streams: Streams::default(),
            before,
            finished,
            group: GroupLink::Lost("the group is starting".into()),
            #[cfg(test)]
            fails_after: None,
        };
        state.publish();
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<SchedulerMessage>,
        message: SchedulerMessage,
        state: &mut SchedulerState,
    ) -> Result<(), ActorProcessingErr> {
        #[cfg(test)]
        let fails = state.fails_after.is_some_and(|is_fatal| is_fatal(&message));
        match message {
            SchedulerMessage::Submit(group) => state.submit_all(group),
            SchedulerMessage::Cancel(sequence) => state.cancel(sequence),
            SchedulerMessage::GroupFormed { epoch, group } => {
                state.scheduler.restart(epoch);
                state.group = GroupLink::Formed(group);
            }
            SchedulerMessage::GroupLost { epoch, reason } => state.lose_group(epoch, reason),
            SchedulerMessage::StepExecuted(result) => state.absorb(result),
            SchedulerMessage::GiveBack(sequences) => state.give_back(&sequences),
            SchedulerMessage::RouterStarted => state.meet_router(myself),
            #[cfg(test)]
            SchedulerMessage::FailPlanAfter(is_fatal) => state.fails_after = Some(is_fatal),
        }
        // Should the plan fail, what is open is counted by what was said last.
        state.publish();
        #[cfg(test)]
        assert!(!fails, "injected: the plan fails");
        state.plan();
        state.publish();
        // After what it will look at.
        state.report();
        Ok(())
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<SchedulerMessage>,
        state: &mut SchedulerState,
    ) -> Result<(), ActorProcessingErr> {
        state.end_all(&GenerationError::ShuttingDown);
        state.publish();
        Ok(())
    }
}

impl SchedulerState {
    fn submit_all(&mut self, group: Vec<Submission>) {
        if let (GroupLink::Lost(reason), true) = (&self.group, self.has_peers) {
            // Sent before the router heard of the loss.
            let (groups, reason) = (vec![group], reason.clone());
            return self.home.tell_router(RouterMessage::GivenBack { groups, reason });
        }
        group.into_iter().for_each(|submission| self.submit(submission));
    }

    fn submit(&mut self, submission: Submission) {
        let lost = match &self.group {
            GroupLink::Formed(_) => None,
            GroupLink::Lost(reason) => Some(reason.clone()),
        };
        let (arrived_ms, leader) = (submission.arrived_ms, submission.leader);
        let (sequence, request) = self.streams.insert(submission, self.has_peers);
        if let Some(reason) = lost {
            self.finished.failed += 1;
            self.streams.deliver(sequence, GenerationEvent::Failed(GenerationError::ShardLost { reason }));
            return;
        }
        tracing::debug!(sequence = sequence.0, prompt_tokens = request.prompt.len(), "request taken in");
        if let Err(error) = self.scheduler.submit(arrived_ms, sequence, request, leader) {
            // The handle applied the same checks and the same bound before sending.
            tracing::error!(sequence = sequence.0, %error, "a request passed admission and was refused by the scheduler");
            self.finished.failed += 1;
            let error = GenerationError::ShardLost { reason: error.to_string() };
            self.streams.deliver(sequence, GenerationEvent::Failed(error));
        }
    }

    fn cancel(&mut self, sequence: SequenceId) {
        self.streams.remove(sequence);
        if self.scheduler.cancel(sequence) {
            tracing::debug!(sequence = sequence.0, "request cancelled");
            self.finished.cancelled += 1;
        }
    }

    fn give_back(&mut self, sequences: &[SequenceId]) {
        // Those that stay are told of as kept; those that have ended, as ended.
        let group = self.streams.give_back(sequences);
        if group.is_empty() {
            return;
        }
        for submission in &group {
            self.scheduler.cancel(submission.sequence);
        }
        let (groups, reason) = (vec![group], "it was asked back".to_owned());
        self.home.tell_router(RouterMessage::GivenBack { groups, reason });
    }

    /// Who sent the open requests here is gone, and nobody can cancel them any more.
    fn meet_router(&mut self, myself: ActorRef<SchedulerMessage>) {
        let open = self.end_all(&GenerationError::ShardLost { reason: "the router ended".into() });
        tracing::info!(open, "open requests ended: the router was lost");
        // None of the new router's.
        drop(self.streams.take_progress());
        if let GroupLink::Formed(_) = self.group {
            self.home
                .tell_router(RouterMessage::ReplicaReady { replica: self.home.replica, scheduler: myself });
        }
    }

    /// Tells the router how its requests went.
    fn report(&mut self) {
        let progress = self.streams.take_progress();
        if !progress.is_empty() {
            self.home.tell_router(RouterMessage::Progressed { replica: self.home.replica, progress });
        }
    }

    /// What has not started goes to another replica, if one is ready; what has, ends.
    fn lose_group(&mut self, epoch: Epoch, reason: String) {
        let groups = self.streams.give_back_all();
        for submission in groups.iter().flatten() {
            self.scheduler.cancel(submission.sequence);
        }
        if !groups.is_empty() {
            self.home.tell_router(RouterMessage::GivenBack { groups, reason: reason.clone() });
        }
        let open = self.end_all(&GenerationError::ShardLost { reason: reason.clone() });
        tracing::info!(epoch = epoch.0, open, reason, "open requests ended: the group was lost");
        self.group = GroupLink::Lost(reason);
        self.scheduler.restart(epoch);
    }

    fn absorb(&mut self, result: StepResult) {
        let GroupLink::Formed(group) = &self.group else { return };
        if result.epoch < self.scheduler.epoch() {
            return; // A result that was on its way when the epoch changed.
        }
        let step = result.step;
        match self.scheduler.absorb(result) {
            Ok(events) => {
                tracing::debug!(step = step.0, events = events.len(), "step absorbed");
                events.into_iter().for_each(|event| self.deliver(event));
            }
            Err(error) => {
                let refused =
                    GroupMessage::ResultRefused { epoch: self.scheduler.epoch(), reason: error.to_string() };
                // A group that is gone is a supervision event of its own.
                let _ = group.cast(refused);
            }
        }
    }

    fn deliver(&mut self, event: Event) {
        match event.event {
            GenerationEvent::Finished(FinishReason::Stop { .. }) => self.finished.stop += 1,
            GenerationEvent::Finished(FinishReason::Length) => self.finished.length += 1,
            GenerationEvent::Failed(_) => self.finished.failed += 1,
            GenerationEvent::PromptLogprobs(_)
            | GenerationEvent::Prefilled { .. }
            | GenerationEvent::Token(_) => {}
        }
        let cancelled = match self.streams.deliver(event.sequence, event.event) {
            Delivery::Sent => return,
            Delivery::ReaderGone => &mut self.finished.cancelled,
            Delivery::ReaderSlow => &mut self.finished.slow_reader,
        };
        // False when the event was the last one: the sequence has ended by itself.
        if self.scheduler.cancel(event.sequence) {
            *cancelled += 1;
        }
    }

    /// Ends every open request and says how many there were.
    fn end_all(&mut self, error: &GenerationError) -> usize {
        let ended = self.streams.fail_all(error);
        ended.iter().for_each(|&sequence| {
            self.scheduler.cancel(sequence);
        });
        self.finished.failed += ended.len() as u64;
        ended.len()
    }

    /// Keeps the group busy: as many steps in flight as are allowed.
    fn plan(&mut self) {
        let GroupLink::Formed(group) = &self.group else { return };
        while let Some(plan) = self.scheduler.plan() {
            tracing::debug!(step = plan.step.0, spans = plan.run.len(), "step planned");
            plan.begin.iter().for_each(|new| self.streams.started(new.sequence));
            if group.cast(GroupMessage::Execute(Arc::new(plan))).is_err() {
                return; // The group ended; its supervisor will say so.
            }
        }
    }

    fn publish(&self) {
        let (scheduler, before, finished) = (&self.scheduler, self.before, self.finished);
        self.home.update(|status| {
            let counters = scheduler.counters();
            status.running = scheduler.running();
            status.waiting = scheduler.waiting();
            status.used_blocks = scheduler.used_blocks();
            status.cached_blocks = scheduler.cached_blocks();
            status.steps = before.steps + counters.steps;
            status.preemptions = before.preemptions + counters.preemptions;
            status.prompt_tokens = before.prompt_tokens + counters.prompt_tokens;
            status.prefix_cache_queries = before.prefix_cache_queries + counters.prefix_cache_queries;
            status.prefix_cache_hits = before.prefix_cache_hits + counters.prefix_cache_hits;
            status.computed_tokens = before.computed_tokens + counters.computed_tokens;
            status.generated_tokens = before.generated_tokens + counters.generated_tokens;
            status.host_used_blocks = scheduler.host_used_blocks();
            status.host_saves = before.host_saves + counters.host_saves;
            status.host_loads = before.host_loads + counters.host_loads;
            status.host_hits = before.host_hits + counters.host_hits;
            status.finished = finished;
        });
        self.home.set_free_blocks(scheduler.free_for_newcomers());
    }
}

/// What the schedulers before left behind: counters of a replica only grow. What was open when one died is counted
/// already, see [`ReplicaStatus::end_open`].
fn inherited(last: &ReplicaStatus) -> (SchedulerCounters, FinishedCounts) {
    let before = SchedulerCounters {
        steps: last.steps,
        preemptions: last.preemptions,
        prompt_tokens: last.prompt_tokens,
        prefix_cache_queries: last.prefix_cache_queries,
        prefix_cache_hits: last.prefix_cache_hits,
        computed_tokens: last.computed_tokens,
        generated_tokens: last.generated_tokens,
        host_saves: last.host_saves,
        host_loads: last.host_loads,
        host_hits: last.host_hits,
    };
    (before, last.finished)
}
