//! The compute thread of a shard, and the ledger of all such threads of an ensemble.

use std::{
    any::Any,
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use consort_parallel::{collective::Collective, ids::Rank};
use ractor::ActorRef;

use super::{ProgressReporter, Rejoined, ShardExecutor, ShardFactory, ShardMessage};
use crate::{
    error::ShardError,
    group::{GroupMessage, RESTARTS_MAX},
    ids::Epoch,
    plan::{StepPlan, StepResult},
    scheduler::STEPS_IN_FLIGHT_MAX,
};

/// Commands that may wait for a compute thread in a group of `ranks`: the steps in flight, and the rejoins that can
/// pile up while the thread is busy (loading, say): one per restart that is tolerated, and one per rank that is lost
/// with another in one incident. The protocol never fills the queue; a full one is a failure.
fn compute_queue_commands(ranks: usize) -> usize {
    STEPS_IN_FLIGHT_MAX + RESTARTS_MAX as usize + ranks
}

/// Stack of a compute thread. Model layers keep their tiles on it.
const STACK_BYTES: usize = 8 << 20;

/// How often a wait for threads looks again.
const JOIN_POLL: Duration = Duration::from_millis(2);

/// How long a thread waits for the step under way before it looks whether another can begin beside it.
const LOOK: Duration = Duration::from_micros(20);

/// And where none can.
const PATIENCE: Duration = Duration::from_millis(100);

/// What a compute thread is told.
enum ComputeCommand {
    Execute(Arc<StepPlan>),
    Rejoin { epoch: Epoch, comm: Box<dyn Collective>, rebuild: bool },
}

/// All that a compute thread starts from.
pub(super) struct ComputeArguments {
    pub(super) rank: Rank,
    pub(super) epoch: Epoch,
    pub(super) comm: Box<dyn Collective>,
    pub(super) factory: Arc<dyn ShardFactory>,
    pub(super) progress: ProgressReporter,
    pub(super) group: ActorRef<GroupMessage>,
    pub(super) shard: ActorRef<ShardMessage>,
}

/// The sending side of a compute thread. Dropping it ends the thread after its present command.
pub(super) struct ComputeThread {
    commands: SyncSender<ComputeCommand>,
    capacity: usize,
}

impl ComputeThread {
    pub(super) fn spawn(arguments: ComputeArguments, ledger: &ThreadLedger) -> Result<Self, ShardError> {
        let capacity = compute_queue_commands(arguments.comm.size());
        let (commands, receiver) = sync_channel(capacity);
        let name = format!("consort-shard-{}", arguments.rank.0);
        let body = move || run(arguments, &receiver);
        ledger.spawn(name, body).map_err(|source| ShardError::Spawn { source })?;
        Ok(Self { commands, capacity })
    }

    pub(super) fn execute(&self, plan: Arc<StepPlan>) -> Result<(), ShardError> {
        self.send(ComputeCommand::Execute(plan))
    }

    pub(super) fn rejoin(
        &self,
        epoch: Epoch,
        comm: Box<dyn Collective>,
        rebuild: bool,
    ) -> Result<(), ShardError> {
        self.send(ComputeCommand::Rejoin { epoch, comm, rebuild })
    }

    fn send(&self, command: ComputeCommand) -> Result<(), ShardError> {
        self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => ShardError::Stuck { queued: self.capacity },
            TrySendError::Disconnected(_) => ShardError::ThreadEnded,
        })
    }
}

/// Body of the thread. A failure is told before the executor is dropped: open requests need not wait until a device
/// that hangs gives its memory back, and the other ranks learn why the membership ends. The end is told after, so that
/// a successor finds the memory free.
fn run(arguments: ComputeArguments, commands: &Receiver<ComputeCommand>) {
    let rank = arguments.rank;
    let (group, shard) = (arguments.group.clone(), arguments.shard.clone());
    let (mut epoch, mut executor) = (arguments.epoch, None);
    let outcome = catch_unwind(AssertUnwindSafe(|| compute(arguments, commands, &mut epoch, &mut executor)))
        .unwrap_or_else(|panic| Err(ShardError::Panicked { message: panic_message(panic.as_ref()) }));
    if let Err(error) = &outcome {
        let _ = group.cast(GroupMessage::ShardFailing { rank, epoch, reason: error.to_string() });
    }
    if catch_unwind(AssertUnwindSafe(|| drop(executor))).is_err() {
        tracing::error!(rank = rank.0, "the executor panicked while it was dropped");
    }
    match outcome {
        Ok(()) => tracing::debug!(rank = rank.0, "compute thread ended"),
        Err(error) => {
            tracing::debug!(rank = rank.0, %error, "compute thread failed");
            // When the actor is gone too, its supervisor already knows.
            let _ = shard.cast(ShardMessage::ComputeEnded(error));
        }
    }
}

fn compute(
    arguments: ComputeArguments,
    commands: &Receiver<ComputeCommand>,
    joined: &mut Epoch,
    present: &mut Option<Box<dyn ShardExecutor>>,
) -> Result<(), ShardError> {
    let ComputeArguments { rank, epoch, comm, factory, progress, group, shard: _ } = arguments;
    let mut executor = present.insert(factory.build(rank, comm, &progress)?);
    join(&group, rank, epoch, executor.as_mut())?;
    // Epochs of the steps under way, oldest first.
    let mut under_way = VecDeque::new();
    // The queue closes when the actor ends.
    while let Some(command) = next(commands, executor.as_mut(), under_way.len())? {
        match command {
            Next::Command(ComputeCommand::Execute(plan)) => {
                under_way.push_back(plan.epoch);
                let outcome = match executor.pipeline() {
                    Some(pipeline) => pipeline.begin(&plan).map(|()| None),
                    None => executor.execute(&plan).map(Some),
                };
                report(&group, rank, outcome, &mut under_way)?;
            }
            Next::Nothing => {
                let pipeline = executor.pipeline().expect("steps are under way only in a pipeline");
                let patience = if under_way.len() < pipeline.depth() { LOOK } else { PATIENCE };
                report(&group, rank, pipeline.finish(patience), &mut under_way)?;
            }
            Next::Command(ComputeCommand::Rejoin { epoch, comm, rebuild }) => {
                *joined = epoch;
                // Nobody asks for what is under way any more.
                under_way.clear();
                let rejoined =
                    if rebuild { Rejoined::Rebuild(comm) } else { executor.rejoin(epoch, comm)? };
                if let Rejoined::Rebuild(comm) = rejoined {
                    // First out with the old one: two of them may not fit the device.
                    *present = None;
                    executor = present.insert(factory.build(rank, comm, &progress)?);
                }
                join(&group, rank, epoch, executor.as_mut())?;
            }
        }
    }
    Ok(())
}

/// What a thread turns to.
enum Next {
    Command(ComputeCommand),
    /// Steps are under way, and no further one can begin, or none has come in.
    Nothing,
}

/// What comes next; `None` once nobody can send commands any more.
fn next(
    commands: &Receiver<ComputeCommand>,
    executor: &mut dyn ShardExecutor,
    under_way: usize,
) -> Result<Option<Next>, ShardError> {
    if under_way == 0 {
        return Ok(wait(commands, executor)?.map(Next::Command));
    }
    let depth = executor.pipeline().map_or(1, |pipeline| pipeline.depth());
    if under_way >= depth {
        return Ok(Some(Next::Nothing));
    }
    Ok(match commands.try_recv() {
        Ok(command) => Some(Next::Command(command)),
        Err(TryRecvError::Empty) => Some(Next::Nothing),
        Err(TryRecvError::Disconnected) => None,
    })
}

/// Waits for a command, and has the executor look after itself meanwhile.
fn wait(
    commands: &Receiver<ComputeCommand>,
    executor: &mut dyn ShardExecutor,
) -> Result<Option<ComputeCommand>, ShardError> {
    while let Some(period) = executor.check()? {
        match commands.recv_timeout(period) {
            Ok(command) => return Ok(Some(command)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
    Ok(commands.recv().ok())
}

/// Tells the group what came of a step: of the oldest under way, or of all where the epoch was cut short.
fn report(
    group: &ActorRef<GroupMessage>,
    rank: Rank,
    outcome: Result<Option<StepResult>, ShardError>,
    under_way: &mut VecDeque<Epoch>,
) -> Result<(), ShardError> {
    match outcome {
        Ok(None) => {}
        Ok(Some(result)) => {
            under_way.pop_front();
            let _ = group.cast(GroupMessage::ShardExecuted { rank, result });
        }
        Err(ShardError::Aborted { reason }) => {
            for epoch in under_way.drain(..) {
                let reason = reason.clone();
                let _ = group.cast(GroupMessage::ShardAborted { rank, epoch, reason });
            }
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Has the executor meet its peers, and tells the group when it comes to that and what came of it.
fn join(
    group: &ActorRef<GroupMessage>,
    rank: Rank,
    epoch: Epoch,
    executor: &mut dyn ShardExecutor,
) -> Result<(), ShardError> {
    let _ = group.cast(GroupMessage::ShardBuilt { rank, epoch });
    let outcome = match executor.join() {
        Ok(()) => {
            let (weight_bytes, kv_bytes) = (executor.weight_bytes(), executor.kv_bytes());
            GroupMessage::ShardLoaded { rank, epoch, weight_bytes, kv_bytes }
        }
        Err(ShardError::Aborted { reason }) => GroupMessage::ShardAborted { rank, epoch, reason },
        Err(error) => return Err(error),
    };
    let _ = group.cast(outcome);
    Ok(())
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// Every compute thread of an ensemble that was not joined yet.
#[derive(Default)]
pub(crate) struct ThreadLedger {
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Spawns still to be refused, as an operating system out of threads would.
    #[cfg(test)]
    pub(crate) refusals: std::sync::atomic::AtomicU32,
}

impl ThreadLedger {
    fn spawn(&self, name: String, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
        #[cfg(test)]
        if self.refuses() {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "injected: no more threads"));
        }
        let thread = std::thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(body)?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    #[cfg(test)]
    fn refuses(&self) -> bool {
        use std::sync::atomic::Ordering::SeqCst;
        self.refusals.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
    }

    /// Joins threads that have ended; returns how many still run.
    pub(crate) fn reap(&self) -> usize {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let (ended, alive): (Vec<_>, Vec<_>) = threads.drain(..).partition(JoinHandle::is_finished);
        *threads = alive;
        for thread in ended {
            // `run` catches panics; should one escape, it was printed by the panic hook.
            let _ = thread.join();
        }
        threads.len()
    }

    /// Waits until all threads have ended, for `limit` at most. Returns how many still run: a thread cannot be
    /// killed, so one that hangs in a kernel stays.
    pub(crate) async fn join_all(&self, limit: Duration) -> usize {
        let deadline = Instant::now() + limit;
        loop {
            let alive = self.reap();
            if alive == 0 || Instant::now() >= deadline {
                return alive;
            }
            tokio::time::sleep(JOIN_POLL).await;
        }
    }
}
