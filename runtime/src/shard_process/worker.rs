//! The process of a rank: runs what a rank's thread would run, and answers over its socket.
//!
//! The main thread computes and reads what it is to do next, so that a step costs no hop between threads. A second one
//! says every half second that the process lives, and ends it at once when the engine is gone.

use std::{
    any::Any,
    env, io,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use consort_actors::{
    Epoch, LoadProgress, ProgressReporter, Rejoined, ShardError, ShardExecutor, ShardFactory,
    plan::{StepPlan, StepResult},
};
use consort_kernels::progress;
use consort_parallel::{
    collective::{AbortHandle, Collective as _, SharedMemory, SharedMemoryError},
    ids::Rank,
};
use rustix::{
    event::PollFlags,
    fs::{Mode, OFlags},
    process::{Signal, getpid, getppid, kill_process, set_parent_process_death_signal},
};

use tokio::{
    runtime::{self, Runtime},
    signal::unix::{SignalKind, signal},
};

use super::{
    frame::{Build, FrameError, Hello, ToParent, ToShard},
    log,
    pulse::{Pulse, Pulsing},
    socket::{FrameReader, FrameWriter, Received, Wait, poll},
};
use crate::engine::ModelFactory;

/// Says to a process that it is a shard: the engine's process and the rank. The engine sets it for its own children.
pub(super) const VARIABLE: &str = "CONSORT_SHARD";

/// How often the process says that it lives.
const BEAT_PERIOD: Duration = Duration::from_millis(500);

/// The shortest time between two reports of progress.
const PROGRESS_PERIOD: Duration = Duration::from_millis(50);

/// How long to wait for a step while no other can begin.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long where another may.
const LOOK: Duration = Duration::from_micros(20);

const FAILED: u8 = 1;

/// Why a process gives up.
#[derive(Debug, thiserror::Error)]
enum WorkerError {
    #[error("{0}")]
    Shard(#[from] ShardError),
    #[error("the engine sent {0}")]
    Frame(#[from] FrameError),
    #[error("the rank's place in its group cannot be taken: {0}")]
    Segment(#[from] SharedMemoryError),
    #[error("the engine's descriptors of the rank's place in its group have not all come")]
    NoPlace,
    #[error("the engine asked for {0} before anything was loaded")]
    Order(&'static str),
    #[error("the engine does not begin as engines do")]
    Stranger,
    #[error("this program is another build than the engine's")]
    OtherBuild,
    #[error("the process could not be set up: {0}")]
    System(#[from] io::Error),
    #[error("the rank panicked: {0}")]
    Panicked(String),
}

/// Runs one rank of an engine, if this process was started for that; else returns at once.
///
/// Programs that run engines whose ranks are processes (`isolation = "process"`) call it before anything else in
/// `main`, because the engine starts the program itself for each rank:
///
/// ```no_run
/// use std::process::ExitCode;
///
/// fn main() -> ExitCode {
///     if let Some(code) = consort::shard_main() {
///         return code;
///     }
///     // The program.
///     ExitCode::SUCCESS
/// }
/// ```
pub fn shard_main() -> Option<ExitCode> {
    Some(ExitCode::from(shard_status()?))
}

/// [`shard_main`], with the exit status as a number.
pub(super) fn shard_status() -> Option<u8> {
    let (engine, rank) = meant_for()?;
    let name = format!("consort-shard-{}", rank.0);
    if let Ok(name) = std::ffi::CString::new(name) {
        let _ = rustix::thread::set_name(&name);
    }
    Some(match run(engine) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{}", whole(&error));
            FAILED
        }
    })
}

/// Whether this process was started as a shard, and its program has not called [`shard_main`] first.
pub(crate) fn is_misplaced() -> bool {
    meant_for().is_some()
}

/// Engine's process and rank that this process was started for. A shard starts no programs that could inherit it.
fn meant_for() -> Option<(i32, Rank)> {
    let value = env::var(VARIABLE).ok()?;
    let (engine, rank) = value.split_once(':')?;
    Some((engine.parse().ok()?, Rank(rank.parse().ok()?)))
}

fn run(engine: i32) -> Result<(), WorkerError> {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from)?;
    if getppid().is_none_or(|parent| parent.as_raw_nonzero().get() != engine) {
        // It ended before it could take this process along.
        return Ok(());
    }
    let _signals = leave_signals_to_the_engine()?;
    let socket = Arc::new(take_socket()?);
    let mut worker = Worker {
        reader: FrameReader::new(Arc::clone(&socket)),
        outbox: Arc::new(Outbox {
            writer: Mutex::new(FrameWriter::new(Arc::clone(&socket))),
            finished: AtomicU64::new(0),
            pulse: Arc::default(),
        }),
        rank: None,
        group: None,
        under_way: 0,
        epoch: Epoch(0),
    };
    if !worker.greet()? {
        return Ok(());
    }
    let outbox = Arc::clone(&worker.outbox);
    thread::Builder::new().name("consort-beat".into()).spawn(move || beat(&socket, &outbox))?;
    let outcome = catch_unwind(AssertUnwindSafe(|| worker.serve()))
        .unwrap_or_else(|panic| Err(WorkerError::Panicked(panic_message(panic.as_ref()))));
    if let Err(error) = &outcome {
        // First of all: survivors are to hear of the cause, and not that this rank is gone.
        if let Some((rank, group)) = &worker.group {
            let pid = std::process::id();
            group.abort(&format!("{rank}: its process {pid} failed: {}", whole(error)));
        }
        // The engine may be gone, which was then the reason.
        let _ = worker.outbox.say(&ToParent::Failed { error: whole(error) });
    }
    outcome
}

/// Service managers signal all processes of a service at once: a server that is to finish its open requests still needs
/// its ranks then, and ends them itself.
fn leave_signals_to_the_engine() -> io::Result<Runtime> {
    let runtime = runtime::Builder::new_current_thread().enable_io().build()?;
    let within = runtime.enter();
    for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
        // The handler stays, and what it tells nobody hears.
        drop(signal(kind)?);
    }
    drop(within);
    Ok(runtime)
}

/// The socket that is inherited as standard input, in whose place nothing is left to read.
fn take_socket() -> io::Result<OwnedFd> {
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let nothing = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&nothing)?;
    // What libraries print there, as NCCL does, is carried with the rank's log.
    rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
    Ok(socket)
}

/// Says that the process lives, and ends it when the engine is gone: the main thread may compute, or wait for others.
fn beat(socket: &OwnedFd, outbox: &Outbox) {
    let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    loop {
        let polled = poll([(socket, PollFlags::RDHUP)], BEAT_PERIOD);
        if polled.is_ok_and(|[flags]| flags.intersects(gone)) {
            // Nobody is left to whom anything could be given back.
            let _ = kill_process(getpid(), Signal::KILL);
            return;
        }
        let finished = outbox.finished.load(Ordering::Relaxed);
        let (moves, waits) = outbox.pulse.read();
        let moves = moves.wrapping_add(progress::noted());
        if outbox.say(&ToParent::Beat { finished, moves, waits }).is_err() {
            return;
        }
    }
}

/// What goes to the engine, from any thread.
struct Outbox {
    writer: Mutex<FrameWriter>,
    finished: AtomicU64,
    pulse: Arc<Pulse>,
}

impl Outbox {
    fn say(&self, message: &ToParent) -> Result<(), FrameError> {
        self.push(|writer| writer.push(message, Vec::new()))
    }

    fn push(&self, push: impl FnOnce(&mut FrameWriter) -> Result<(), FrameError>) -> Result<(), FrameError> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        push(&mut writer)?;
        match writer.flush(Wait::Forever)? {
            true => Ok(()),
            false => Err(FrameError::Framing(io::ErrorKind::BrokenPipe.into())),
        }
    }
}

/// The rank that was loaded.
struct Loaded {
    rank: Rank,
    factory: ModelFactory,
    executor: Box<dyn ShardExecutor>,
    progress: ProgressReporter,
}

struct Worker {
    reader: FrameReader,
    outbox: Arc<Outbox>,
    rank: Option<Loaded>,
    /// Its place in a group, and how to end that; of the last one.
    group: Option<(Rank, AbortHandle)>,
    /// Steps that were begun and not answered.
    under_way: usize,
    /// Epoch of the last of them.
    epoch: Epoch,
}

/// What the main thread turns to.
enum Next {
    Message(ToShard),
    /// Steps are under way, and no further one can begin, or none has come.
    Step,
    /// The engine is gone.
    End,
}

impl Worker {
    /// False if the engine is gone already.
    fn greet(&mut self) -> Result<bool, WorkerError> {
        let ours = Hello::of(super::build());
        self.outbox.push(|writer| writer.push(&ours, Vec::new()))?;
        let theirs = loop {
            if let Some(hello) = self.reader.message::<Hello>()? {
                break hello;
            }
            if self.reader.fill(Wait::Forever)? == Received::End {
                return Ok(false);
            }
        };
        if !theirs.is_ours() {
            return Err(WorkerError::Stranger);
        }
        if theirs != ours {
            return Err(WorkerError::OtherBuild);
        }
        Ok(true)
    }

    fn serve(&mut self) -> Result<(), WorkerError> {
        loop {
            match self.next()? {
                Next::End | Next::Message(ToShard::Stop) => return Ok(()),
                Next::Message(ToShard::Build(build)) => self.load(*build)?,
                Next::Message(ToShard::Join) => self.join()?,
                Next::Message(ToShard::Begin(plan)) => self.begin(&plan)?,
                Next::Message(ToShard::Rejoin { epoch, descriptors }) => self.rejoin(epoch, descriptors)?,
                Next::Message(ToShard::Beat { absorbed }) => {
                    tracing::trace!(absorbed, "the engine is there");
                }
                Next::Step => self.finish()?,
            }
        }
    }

    fn next(&mut self) -> Result<Next, WorkerError> {
        loop {
            self.outbox.pulse.moved();
            let room = match &mut self.rank {
                Some(loaded) if self.under_way > 0 => {
                    self.under_way < loaded.executor.pipeline().map_or(1, |pipeline| pipeline.depth())
                }
                _ => true,
            };
            if !room {
                return Ok(Next::Step);
            }
            if let Some(message) = self.reader.message()? {
                return Ok(Next::Message(message));
            }
            let wait = if self.under_way == 0 { Wait::Forever } else { Wait::Never };
            match self.reader.fill(wait)? {
                Received::Bytes => {}
                Received::Nothing => return Ok(Next::Step),
                Received::End => return Ok(Next::End),
            }
        }
    }

    /// The rank's place in its group, which so many descriptors stand for.
    fn place(&mut self, rank: Rank, descriptors: u8) -> Result<Box<Pulsing>, WorkerError> {
        let descriptors = self.reader.descriptors(descriptors).ok_or(WorkerError::NoPlace)?;
        let mut descriptors = descriptors.into_iter();
        let segment = descriptors.next().ok_or(WorkerError::NoPlace)?;
        let place = SharedMemory::attach(segment, rank)?.with_mailbox(descriptors.collect())?;
        self.group = Some((rank, place.abort_handle()));
        Ok(Box::new(Pulsing::new(place, Arc::clone(&self.outbox.pulse))))
    }

    fn loaded(&mut self, order: &'static str) -> Result<&mut Loaded, WorkerError> {
        self.rank.as_mut().ok_or(WorkerError::Order(order))
    }

    fn load(&mut self, build: Build) -> Result<(), WorkerError> {
        let Build { rank, blueprint, descriptors, log_level } = build;
        log::log_to_parent(log_level);
        let comm = self.place(rank, descriptors)?;
        let factory = blueprint.into_factory(rank)?;
        let progress = reporter(rank, &self.outbox);
        let executor = factory.build(rank, comm, &progress)?;
        let (weight_bytes, kv_bytes) = (executor.weight_bytes(), executor.kv_bytes());
        self.rank = Some(Loaded { rank, factory, executor, progress });
        self.outbox.say(&ToParent::Built { weight_bytes, kv_bytes })?;
        Ok(())
    }

    fn join(&mut self) -> Result<(), WorkerError> {
        let answer = match self.loaded("a meeting")?.executor.join() {
            Ok(()) => ToParent::Joined,
            Err(ShardError::Aborted { reason }) => ToParent::NotJoined { reason },
            Err(error) => return Err(error.into()),
        };
        Ok(self.outbox.say(&answer)?)
    }

    fn begin(&mut self, plan: &Arc<StepPlan>) -> Result<(), WorkerError> {
        let executor = &mut self.loaded("a step")?.executor;
        let outcome = match executor.pipeline() {
            Some(pipeline) => pipeline.begin(plan).map(|()| None),
            None => executor.execute(plan).map(Some),
        };
        self.under_way += 1;
        self.epoch = plan.epoch;
        self.report(outcome)
    }

    fn finish(&mut self) -> Result<(), WorkerError> {
        let under_way = self.under_way;
        let pipeline = self.loaded("a step")?.executor.pipeline();
        let pipeline = pipeline.ok_or(WorkerError::Order("the end of a step"))?;
        let patience = if under_way < pipeline.depth() { LOOK } else { PATIENCE };
        let outcome = pipeline.finish(patience);
        self.report(outcome)
    }

    /// Answers the oldest step under way; where the epoch was cut short, that is the answer to all of them.
    fn report(&mut self, outcome: Result<Option<StepResult>, ShardError>) -> Result<(), WorkerError> {
        let answer = match outcome {
            Ok(None) => return Ok(()),
            Ok(Some(result)) => {
                self.under_way -= 1;
                ToParent::Result(result)
            }
            Err(ShardError::Aborted { reason }) => {
                self.under_way = 0;
                ToParent::Aborted { epoch: self.epoch, reason }
            }
            Err(error) => return Err(error.into()),
        };
        self.outbox.finished.fetch_add(1, Ordering::Relaxed);
        Ok(self.outbox.say(&answer)?)
    }

    fn rejoin(&mut self, epoch: Epoch, descriptors: u8) -> Result<(), WorkerError> {
        let rank = self.loaded("a new epoch")?.rank;
        let comm = self.place(rank, descriptors)?;
        self.under_way = 0;
        let mut loaded = self.rank.take().ok_or(WorkerError::Order("a new epoch"))?;
        loaded.executor = match loaded.executor.rejoin(epoch, comm)? {
            Rejoined::Kept => loaded.executor,
            Rejoined::Rebuild(comm) => {
                // First out with the old one: two of them may not fit the device.
                drop(loaded.executor);
                loaded.factory.build(rank, comm, &loaded.progress)?
            }
        };
        let (weight_bytes, kv_bytes) = (loaded.executor.weight_bytes(), loaded.executor.kv_bytes());
        self.rank = Some(loaded);
        Ok(self.outbox.say(&ToParent::Rejoined { epoch, weight_bytes, kv_bytes })?)
    }
}

/// Tells the engine how far loading is, now and then, and when it is through.
fn reporter(rank: Rank, outbox: &Arc<Outbox>) -> ProgressReporter {
    let outbox = Arc::clone(outbox);
    let told: Mutex<Option<Instant>> = Mutex::new(None);
    let report = move |progress: LoadProgress| {
        let LoadProgress { loaded_bytes, total_bytes, .. } = progress;
        outbox.pulse.moved();
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        if loaded_bytes >= total_bytes || told.is_none_or(|told| told.elapsed() >= PROGRESS_PERIOD) {
            *told = Some(Instant::now());
            // If the engine is gone, the process ends by that.
            let _ = outbox.say(&ToParent::Progress { loaded_bytes, total_bytes });
        }
    };
    ProgressReporter::new(rank, Some(Arc::new(report)))
}

/// An error with its causes, each told once: some errors tell their cause's text as their own.
fn whole(error: &WorkerError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text.push_str(&format!(": {said}"));
        }
        cause = error.source();
    }
    text
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
