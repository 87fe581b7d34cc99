//! The scheduler actor: a switchboard between callers, the pure [`Scheduler`] and the shard group.

use std::{sync::Arc, time::Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};

use super::{
    Event, Scheduler, SchedulerCounters,
    message::{SchedulerMessage, Submission},
    streams::{Delivery, Streams},
};
use crate::{
    ensemble::Shared,
    group::GroupMessage,
    ids::{Epoch, SequenceId},
    plan::StepResult,
    request::{FinishReason, GenerationError, GenerationEvent},
    status::{FinishedCounts, Status},
};

/// What the actor starts from.
pub(crate) struct SchedulerArguments {
    pub(crate) shared: Arc<Shared>,
}

/// The actor. All state is in [`SchedulerState`].
pub(crate) struct SchedulerActor;

/// The pure scheduler, the open streams, and the group that executes.
pub(crate) struct SchedulerState {
    shared: Arc<Shared>,
    scheduler: Scheduler,
    streams: Streams,
    /// The moment from which the scheduler's time counts.
    started: Instant,
    /// Totals of this scheduler's predecessors.
    before: SchedulerCounters,
    /// Totals of the ensemble.
    finished: FinishedCounts,
    group: GroupLink,
    /// Who waits for the last open request to end.
    drained: Vec<RpcReplyPort<()>>,
    draining: bool,
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
        let spec = &arguments.shared.spec;
        let (before, finished) = inherited(&arguments.shared.board.snapshot());
        let mut state = SchedulerState {
            scheduler: Scheduler::new(spec.scheduler, spec.cache, spec.vocab_size, Epoch(0)),
            shared: arguments.shared,
            streams: Streams::default(),
            started: Instant::now(),
            before,
            finished,
            group: GroupLink::Lost("the group is starting".into()),
            drained: Vec::new(),
            draining: false,
        };
        state.publish();
        Ok(state)
    }

    async fn handle(
        &self,
        _myself: ActorRef<SchedulerMessage>,
        message: SchedulerMessage,
        state: &mut SchedulerState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            SchedulerMessage::Submit(submission) => state.submit(submission),
            SchedulerMessage::Cancel(sequence) => state.cancel(sequence),
            SchedulerMessage::GroupFormed { epoch, group } => {
                state.scheduler.restart(epoch);
                state.group = GroupLink::Formed(group);
            }
            SchedulerMessage::GroupLost { epoch, reason } => state.lose_group(epoch, reason),
            SchedulerMessage::StepExecuted(result) => state.absorb(result),
            SchedulerMessage::Drain(reply) => {
                state.draining = true;
                state.drained.push(reply);
            }
            SchedulerMessage::EndAll(error) => {
                state.draining = true;
                state.end_all(&error);
            }
        }
        state.plan();
        state.publish();
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
    fn submit(&mut self, submission: Submission) {
        let Submission { sequence, request, leader, events, slot } = submission;
        self.streams.insert(sequence, events, slot);
        let refusal = match &self.group {
            _ if self.draining => Some(GenerationError::ShuttingDown),
            GroupLink::Lost(reason) => Some(GenerationError::ShardLost { reason: reason.clone() }),
            GroupLink::Formed(_) => None,
        };
        if let Some(error) = refusal {
            self.finished.failed += 1;
            self.streams.deliver(sequence, GenerationEvent::Failed(error));
            return;
        }
        let now_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::debug!(sequence = sequence.0, prompt_tokens = request.prompt.len(), "request taken in");
        if let Err(error) = self.scheduler.submit(now_ms, sequence, request, leader) {
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

    fn lose_group(&mut self, epoch: Epoch, reason: String) {
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

    fn publish(&mut self) {
        if self.streams.is_empty() {
            for reply in self.drained.drain(..) {
                let _ = reply.send(()); // Whoever waited may have given up.
            }
        }
        let (scheduler, before, finished) = (&self.scheduler, self.before, self.finished);
        self.shared.board.update(|status| {
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
    }
}

/// What a scheduler that died left behind: counters of an ensemble only grow. What was open then has failed, and
/// nobody has counted it; one that was stopped in good order has ended its requests itself.
fn inherited(last: &Status) -> (SchedulerCounters, FinishedCounts) {
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
    let lost = (last.running + last.waiting) as u64;
    (before, FinishedCounts { failed: last.finished.failed + lost, ..last.finished })
}
