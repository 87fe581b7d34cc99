//! A rank's place in the engine, for a rank that is computed by a process: what the rank's thread asks is asked of the
//! process, and nothing is waited for longer than the process shows that it lives.

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use consort_actors::{
    Epoch, Pipeline, ProgressReporter, Rejoined, ShardError, ShardExecutor, Step,
    plan::{StepPlan, StepResult},
    scheduler::STEPS_IN_FLIGHT_MAX,
};
use consort_parallel::{
    collective::{Collective, Seat},
    ids::Rank,
};
use rustix::event::PollFlags;

use super::{
    Processes, WorkSettings,
    blueprint::Blueprint,
    error::{Doing, ProcessError},
    frame::{Build, Hello, ToParent, ToShard},
    left_behind::LeftBehind,
    log,
    place::Place,
    signs::{Limits, Signs, Verdict, Waited},
    socket::{FrameReader, FrameWriter, Received, Wait, poll},
    spawn::ShardProcess,
};

/// How often an idle process is looked after.
const CHECK_PERIOD: Duration = Duration::from_millis(200);

/// How often the engine says that it is there, to a process that has nothing to do.
const BEAT_PERIOD: Duration = Duration::from_millis(500);

/// The shortest wait for a step. What else may begin meanwhile gains nothing by a shorter one, because it waits behind
/// the step in any case, and every look takes time from the processes that compute.
const LOOK_MIN: Duration = Duration::from_micros(500);

/// The longest wait between two looks at what else may have happened.
const LOOK_MAX: Duration = Duration::from_millis(100);

/// How long a process that ended its side of the socket may take to end and be told of with its status. The others wait
/// for this before they hear of it.
const END_MAX: Duration = Duration::from_millis(300);

/// A rank that another process computes.
pub(super) struct RemoteExecutor {
    process: ShardProcess,
    socket: Arc<OwnedFd>,
    reader: FrameReader,
    writer: FrameWriter,
    settings: WorkSettings,
    place: Place,
    progress: ProgressReporter,
    doing: Doing,
    signs: Signs,
    under_way: VecDeque<(Epoch, Step)>,
    /// The epoch that was cut short, and why: what else was under way in it is answered likewise.
    cut_short: Option<(Epoch, String)>,
    absorbed: u64,
    told: Instant,
    weight_bytes: u64,
    kv_bytes: u64,
    is_lost: bool,
    left_behind: Arc<LeftBehind>,
}

impl RemoteExecutor {
    /// Starts a process and has it load.
    pub(super) fn build(
        (processes, left_behind): (&Processes, Arc<LeftBehind>),
        rank: Rank,
        seat: Box<Seat>,
        blueprint: Blueprint,
        progress: &ProgressReporter,
    ) -> Result<Self, ShardError> {
        let begin = |source| ProcessError::Start { executable: processes.command.shown(), source };
        let started =
            ShardProcess::start(&processes.spawner, &processes.command, rank, processes.settings.kill_max);
        let (process, socket) = started.map_err(begin)?;
        let socket = Arc::new(socket);
        let settings = &processes.settings;
        let limits = Limits {
            silence: settings.silence_max,
            answer: match blueprint.is_on_cpu() {
                true => settings.answer_max,
                false => settings.device_answer_max,
            },
            standstill: match blueprint.is_on_cpu() {
                true => settings.standstill_max,
                false => settings.device_standstill_max,
            },
            loading_standstill: settings.loading_standstill_max,
        };
        let mut executor = Self {
            process,
            reader: FrameReader::new(Arc::clone(&socket)),
            writer: FrameWriter::new(Arc::clone(&socket)),
            socket,
            settings: settings.clone(),
            place: Place::new(seat),
            progress: progress.clone(),
            doing: Doing::Greeting,
            signs: Signs::new(limits, Instant::now()),
            under_way: VecDeque::with_capacity(STEPS_IN_FLIGHT_MAX),
            cut_short: None,
            absorbed: 0,
            told: Instant::now(),
            weight_bytes: 0,
            kv_bytes: 0,
            is_lost: false,
            left_behind,
        };
        executor.greet(processes)?;
        let log_level = log::wanted_level();
        let place = executor.descriptors()?;
        let descriptors = place.len() as u8;
        executor.doing = Doing::Loading;
        let build = Box::new(Build { rank, blueprint, descriptors, log_level });
        executor.tell(&ToShard::Build(build), place)?;
        match executor.answer()? {
            ToParent::Built { weight_bytes, kv_bytes } => {
                (executor.weight_bytes, executor.kv_bytes) = (weight_bytes, kv_bytes);
            }
            other => return Err(executor.confused(&other)),
        }
        executor.doing = Doing::Nothing;
        Ok(executor)
    }

    /// Finds out whether the process is a shard of the same build.
    fn greet(&mut self, processes: &Processes) -> Result<(), ShardError> {
        let ours = self.settings.build;
        self.writer.push(&Hello::of(ours), Vec::new()).map_err(|source| self.frame(source))?;
        let mut waited = Waited::new(Instant::now());
        let executable = || processes.command.shown();
        let hello = loop {
            let has_ended = self.look(LOOK_MAX)?;
            let pid = self.process.pid();
            match self.reader.message::<Hello>() {
                Ok(Some(hello)) if hello.is_ours() => break hello,
                Ok(None) => {}
                _ => {
                    return Err(self.lose(|_| ProcessError::Mute {
                        pid,
                        limit: waited.time,
                        executable: executable(),
                    }));
                }
            }
            if has_ended {
                return Err(self.lose(|lost| {
                    let (ending, last) = lost.last_words();
                    ProcessError::NoShard { pid, ending, doing: lost.doing, executable: executable(), last }
                }));
            }
            let limit = self.settings.greeting_max;
            if waited.longer_than(limit, Instant::now()) {
                return Err(self.lose(|_| ProcessError::Mute { pid, limit, executable: executable() }));
            }
        };
        if hello.build != ours {
            return Err(self.lose(|lost| ProcessError::OtherBuild {
                pid: lost.process.pid(),
                executable: executable(),
                theirs: hex(hello.build),
                ours: hex(ours),
            }));
        }
        self.signs.heard(Instant::now());
        Ok(())
    }

    /// No more than a message may have, so their number fits any.
    fn descriptors(&mut self) -> Result<Vec<OwnedFd>, ShardError> {
        let (pid, doing) = (self.process.pid(), self.doing);
        self.place.descriptors().map_err(|source| ProcessError::Socket { pid, doing, source }.into())
    }

    fn tell(&mut self, message: &ToShard, descriptors: Vec<OwnedFd>) -> Result<(), ShardError> {
        self.writer.push(message, descriptors).map_err(|source| self.frame(source))?;
        self.told = Instant::now();
        // If the other side is gone, the next look finds its last words.
        self.writer.flush(Wait::Never).map_err(|source| self.frame(source))?;
        Ok(())
    }

    /// Waits for an answer other than signs of life. While the group is whole, as long as the process gets on, or waits
    /// for other ranks.
    fn answer(&mut self) -> Result<ToParent, ShardError> {
        self.signs.asked(Instant::now());
        loop {
            if let Some(message) = self.receive(LOOK_MAX)? {
                return Ok(message);
            }
        }
    }

    /// The next message that somebody must act on, if one comes within `wait`.
    fn receive(&mut self, wait: Duration) -> Result<Option<ToParent>, ShardError> {
        if let Some(message) = self.next_message()? {
            return Ok(Some(message));
        }
        let has_ended = self.look(wait)?;
        if let Some(message) = self.next_message()? {
            return Ok(Some(message));
        }
        if has_ended {
            return Err(self.lose(|lost| {
                let (ending, last) = lost.last_words();
                ProcessError::Ended { pid: lost.process.pid(), ending, doing: lost.doing, last }
            }));
        }
        self.judge()?;
        Ok(None)
    }

    fn next_message(&mut self) -> Result<Option<ToParent>, ShardError> {
        loop {
            let message = self.reader.message::<ToParent>();
            let message = message.map_err(|error| {
                let what = error.to_string();
                self.lose(|lost| ProcessError::Confused { pid: lost.process.pid(), doing: lost.doing, what })
            })?;
            let Some(message) = message else { return Ok(None) };
            self.signs.heard(Instant::now());
            match message {
                ToParent::Beat { finished, moves, waits } => {
                    let pid = self.process.pid();
                    tracing::trace!(pid, finished, moves, waits, "a shard's process lives");
                    self.signs.pulse(moves, waits, Instant::now());
                }
                ToParent::Progress { loaded_bytes, total_bytes } => {
                    self.signs.asked(Instant::now());
                    self.progress.report(loaded_bytes, total_bytes);
                }
                ToParent::Failed { error } => {
                    return Err(self.lose(|lost| ProcessError::Failed {
                        pid: lost.process.pid(),
                        doing: lost.doing,
                        error,
                    }));
                }
                message => return Ok(Some(message)),
            }
        }
    }

    /// Waits until something happens, for `wait` at most, and takes all that there is. True once nothing more can come.
    fn look(&mut self, wait: Duration) -> Result<bool, ShardError> {
        let (pid, doing) = (self.process.pid(), self.doing);
        let socket_failed = |source| ProcessError::Socket { pid, doing, source };
        self.writer.flush(Wait::Never).map_err(|source| self.frame(source))?;
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, !self.writer.is_empty());
        let (handle, errors) = self.process.waitable();
        let polled = [(&*self.socket, wanted), (handle, PollFlags::IN), (errors, PollFlags::IN)];
        let [socket, ended, errors] = poll(polled, wait).map_err(|error| socket_failed(error.into()))?;
        if !errors.is_empty() {
            self.process.errors().read();
        }
        if socket.contains(PollFlags::OUT) {
            self.writer.flush(Wait::Never).map_err(|source| self.frame(source))?;
        }
        let mut is_over = false;
        if !socket.is_empty() || !ended.is_empty() {
            // Of a process that has ended, all that it has said is there, and is to be taken.
            loop {
                match self.reader.fill(Wait::Never).map_err(|source| self.frame(source))? {
                    Received::End => break is_over = true,
                    Received::Bytes if !ended.is_empty() => {}
                    Received::Bytes => break,
                    Received::Nothing => break is_over = !ended.is_empty(),
                }
            }
        }
        Ok(is_over)
    }

    fn judge(&mut self) -> Result<(), ShardError> {
        match self.signs.judge(self.doing, self.place.is_aborted(), Instant::now()) {
            None => Ok(()),
            Some(verdict) => Err(self.lose(|lost| {
                let (pid, doing) = (lost.process.pid(), lost.doing);
                match verdict {
                    Verdict::Silent(limit) => ProcessError::Silent { pid, limit, doing },
                    Verdict::Deaf(limit) => ProcessError::Deaf { pid, limit, doing },
                    Verdict::Stuck(limit) => ProcessError::Stuck { pid, limit, doing },
                }
            })),
        }
    }

    /// How the process ended, if that is known soon, and what it last wrote.
    fn last_words(&mut self) -> (super::spawn::Ending, String) {
        let ending = self.process.ends_within(END_MAX).unwrap_or(super::spawn::Ending::Unknown);
        (ending, self.process.errors().last().to_owned())
    }

    /// Gives the process up. That it is gone is waited for by whoever drops this, and by its successor: the others and
    /// all streams need not.
    fn lose(&mut self, why: impl FnOnce(&mut Self) -> ProcessError) -> ShardError {
        let error = why(self);
        self.is_lost = true;
        self.place.abort(&error);
        self.put_an_end();
        error.into()
    }

    fn put_an_end(&mut self) {
        self.process.strike();
        self.left_behind.add(self.place.rank(), self.process.pid(), self.process.handle());
    }

    fn frame(&mut self, source: super::frame::FrameError) -> ShardError {
        self.lose(|lost| ProcessError::Frame { pid: lost.process.pid(), doing: lost.doing, source })
    }

    fn confused(&mut self, message: &ToParent) -> ShardError {
        let what = match message {
            ToParent::Result(result) => format!("the result of {} of {}", result.step, result.epoch),
            other => format!("{other:?}"),
        };
        self.lose(|lost| ProcessError::Confused { pid: lost.process.pid(), doing: lost.doing, what })
    }

    /// What the process now does, by what it was last told.
    fn turn(&mut self) {
        self.doing = self.under_way.front().map_or(Doing::Nothing, |(_, step)| Doing::Step(*step));
    }

    /// Nothing of this epoch is under way any more.
    fn cut_short(&mut self, epoch: Epoch, reason: String) -> ShardError {
        self.under_way.clear();
        self.turn();
        self.cut_short = Some((epoch, reason.clone()));
        ShardError::Aborted { reason }
    }
}

impl ShardExecutor for RemoteExecutor {
    fn join(&mut self) -> Result<(), ShardError> {
        self.doing = Doing::Joining;
        self.tell(&ToShard::Join, Vec::new())?;
        let answer = self.answer()?;
        let outcome = match answer {
            ToParent::Joined => Ok(()),
            ToParent::NotJoined { reason } => Err(ShardError::Aborted { reason }),
            other => return Err(self.confused(&other)),
        };
        self.doing = Doing::Nothing;
        outcome
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepResult, ShardError> {
        self.begin(&Arc::new(plan.clone()))?;
        loop {
            if let Some(result) = self.finish(LOOK_MAX)? {
                return Ok(result);
            }
        }
    }

    fn check(&mut self) -> Result<Option<Duration>, ShardError> {
        while let Some(message) = self.receive(Duration::ZERO)? {
            match message {
                // Of a step behind the one that was cut short.
                ToParent::Aborted { epoch, .. }
                    if self.cut_short.as_ref().is_some_and(|(of, _)| *of == epoch) => {}
                other => return Err(self.confused(&other)),
            }
        }
        if self.told.elapsed() >= BEAT_PERIOD && self.writer.is_empty() {
            self.tell(&ToShard::Beat { absorbed: self.absorbed }, Vec::new())?;
        }
        Ok(Some(CHECK_PERIOD))
    }

    fn pipeline(&mut self) -> Option<&mut dyn Pipeline> {
        Some(self)
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    fn kv_bytes(&self) -> u64 {
        self.kv_bytes
    }

    fn rejoin(&mut self, epoch: Epoch, comm: Box<dyn Collective>) -> Result<Rejoined, ShardError> {
        let seat = super::factory::seat(comm)?;
        self.under_way.clear();
        self.cut_short = None;
        self.doing = Doing::Rejoining;
        self.place = Place::new(seat);
        let place = self.descriptors()?;
        self.tell(&ToShard::Rejoin { epoch, descriptors: place.len() as u8 }, place)?;
        loop {
            match self.answer()? {
                ToParent::Rejoined { epoch: entered, weight_bytes, kv_bytes } if entered == epoch => {
                    (self.weight_bytes, self.kv_bytes) = (weight_bytes, kv_bytes);
                    break;
                }
                // What was under way in the last epoch.
                ToParent::Result(_) | ToParent::Aborted { .. } => {}
                other => return Err(self.confused(&other)),
            }
        }
        self.doing = Doing::Nothing;
        Ok(Rejoined::Kept)
    }
}

impl Pipeline for RemoteExecutor {
    fn depth(&self) -> usize {
        STEPS_IN_FLIGHT_MAX
    }

    fn begin(&mut self, plan: &Arc<StepPlan>) -> Result<(), ShardError> {
        if let Some((epoch, reason)) = &self.cut_short
            && *epoch == plan.epoch
        {
            return Err(ShardError::Aborted { reason: reason.clone() });
        }
        if self.under_way.is_empty() {
            self.signs.asked(Instant::now());
        }
        self.under_way.push_back((plan.epoch, plan.step));
        self.turn();
        self.tell(&ToShard::Begin(Arc::clone(plan)), Vec::new())
    }

    fn finish(&mut self, patience: Duration) -> Result<Option<StepResult>, ShardError> {
        let Some(message) = self.receive(patience.clamp(LOOK_MIN, LOOK_MAX))? else { return Ok(None) };
        let due = self.under_way.front().copied();
        match message {
            ToParent::Result(result) if due == Some((result.epoch, result.step)) => {
                self.under_way.pop_front();
                self.signs.asked(Instant::now());
                self.absorbed += 1;
                self.turn();
                Ok(Some(result))
            }
            ToParent::Aborted { epoch, reason } if due.is_some_and(|(of, _)| of == epoch) => {
                Err(self.cut_short(epoch, reason))
            }
            other => Err(self.confused(&other)),
        }
    }
}

impl Drop for RemoteExecutor {
    /// Lets the process give back what it holds in order, if it does so soon.
    fn drop(&mut self) {
        if self.is_lost || self.tell(&ToShard::Stop, Vec::new()).is_err() {
            return;
        }
        let limit = self.settings.stop_max;
        if self.process.ends_within(limit).is_none() {
            tracing::warn!(
                pid = self.process.pid(),
                ?limit,
                "a shard's process does not stop, and is killed"
            );
            self.put_an_end();
        }
    }
}

fn hex(bytes: [u8; 16]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
