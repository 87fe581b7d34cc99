//! Processes of ranks: how they begin, and that none outlives its use.
//!
//! The operating system ends a process with its parent where it is asked to (`PR_SET_PDEATHSIG`, before the child runs
//! its program), and means by the parent the *thread* that spawned it. So one thread spawns all processes of an engine
//! and lives as long as they do. A process is held by a descriptor (pidfd), never by a number that another may have
//! since, and is always waited for.

use std::{
    ffi::OsString,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use consort_parallel::ids::Rank;
use rustix::{
    event::PollFlags,
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid},
};

use super::{log::ErrorLines, parent::ends_with_parent, socket::poll, worker::VARIABLE};

/// What is run for a rank.
#[derive(Clone, Debug)]
pub(super) struct ShardCommand {
    pub(super) executable: PathBuf,
    pub(super) arguments: Vec<OsString>,
}

impl ShardCommand {
    /// The program that runs already: the very file, even if another one has taken its place on the disk since.
    pub(super) fn of_this_program() -> Self {
        Self { executable: PathBuf::from("/proc/self/exe"), arguments: vec!["shard".into()] }
    }

    pub(super) fn of(executable: PathBuf) -> Self {
        Self { executable, arguments: vec!["shard".into()] }
    }

    /// As a message names it.
    pub(super) fn shown(&self) -> String {
        let path = std::fs::read_link(&self.executable).unwrap_or_else(|_| self.executable.clone());
        path.display().to_string()
    }
}

struct Order {
    command: Command,
    reply: SyncSender<io::Result<Child>>,
}

/// The thread that spawns. Ends, and all its processes with it, when nobody holds it any more.
pub(super) struct Spawner {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Spawner {
    pub(super) fn new() -> io::Result<Arc<Self>> {
        let (orders, received): (_, Receiver<Order>) = channel();
        let body = move || {
            for Order { mut command, reply } in received {
                // Whoever ordered it waits for the answer.
                let _ = reply.send(command.spawn());
            }
        };
        let thread = std::thread::Builder::new().name("consort-spawner".into()).spawn(body)?;
        Ok(Arc::new(Self { orders: Some(orders), thread: Some(thread) }))
    }

    fn spawn(&self, command: Command) -> io::Result<Child> {
        let gone = || io::Error::other("the thread that spawns processes has ended");
        let (reply, answer) = sync_channel(1);
        let orders = self.orders.as_ref().ok_or_else(gone)?;
        orders.send(Order { command, reply }).map_err(|_| gone())?;
        answer.recv().map_err(|_| gone())?
    }
}

impl Drop for Spawner {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that spawns processes panicked");
        }
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Exited(i32),
    Killed(i32),
    /// Somebody else in this process has waited for it.
    Unknown,
}

/// The process of a rank. Killed and waited for when dropped.
pub(super) struct ShardProcess {
    pid: Pid,
    handle: Arc<OwnedFd>,
    errors: ErrorLines,
    ending: Option<Ending>,
    /// How long it may take to be gone once it is killed.
    kill_max: Duration,
    /// Without it the process would be killed.
    _spawner: Arc<Spawner>,
}

impl ShardProcess {
    /// Starts a process, and returns the socket to speak with it. It becomes the leader of a group of its own: a
    /// terminal's signals are for the engine, which decides when its ranks end.
    pub(super) fn start(
        spawner: &Arc<Spawner>,
        command: &ShardCommand,
        rank: Rank,
        kill_max: Duration,
    ) -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let mut process = Command::new(&command.executable);
        process
            .arg0("consort")
            .args(&command.arguments)
            .env(VARIABLE, format!("{}:{}", std::process::id(), rank.0))
            // The one descriptor that is inherited without a moment in which other children could inherit it too.
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0);
        ends_with_parent(&mut process);
        let mut child = spawner.spawn(process)?;
        let pid = Pid::from_child(&child);
        let handle = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(handle) => Arc::new(handle),
            Err(error) => {
                // Nobody has waited for it yet, so the number is still its own.
                let _ = child.kill();
                let _ = child.wait();
                return Err(error.into());
            }
        };
        let stderr = child.stderr.take().map(OwnedFd::from);
        let errors = ErrorLines::new(rank, pid.as_raw_nonzero().get(), stderr)?;
        let process = Self { pid, handle, errors, ending: None, kill_max, _spawner: Arc::clone(spawner) };
        Ok((process, ours))
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// What it writes to standard error.
    pub(super) fn errors(&mut self) -> &mut ErrorLines {
        &mut self.errors
    }

    /// The descriptors to wait for: the process's end, and its standard error while it is open.
    pub(super) fn waitable(&self) -> (&OwnedFd, &OwnedFd) {
        (&self.handle, self.errors.source().unwrap_or(&self.handle))
    }

    /// Whether it has ended, and how. Takes it off the system's list if so.
    pub(super) fn ending(&mut self) -> Option<Ending> {
        if self.ending.is_none() {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            self.ending = match waitid(WaitId::PidFd(self.handle.as_fd()), options) {
                Ok(status) => {
                    status.map(|status| match (status.exit_status(), status.terminating_signal()) {
                        (Some(code), _) => Ending::Exited(code),
                        (_, Some(signal)) => Ending::Killed(signal),
                        _ => Ending::Unknown,
                    })
                }
                Err(rustix::io::Errno::INTR) => None,
                Err(_) => Some(Ending::Unknown),
            };
        }
        self.ending
    }

    /// Waits until it has ended, for `limit` at most.
    pub(super) fn ends_within(&mut self, limit: Duration) -> Option<Ending> {
        let deadline = Instant::now() + limit;
        loop {
            // A process that writes much must not wait for a reader while it ends.
            self.errors.read();
            if let Some(ending) = self.ending() {
                self.errors.read();
                return Some(ending);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let (handle, errors) = self.waitable();
            let _ = poll([(handle, PollFlags::IN), (errors, PollFlags::IN)], left);
        }
    }

    /// Ends it at once, stopped or not; it may take a while to be gone.
    pub(super) fn strike(&mut self) {
        if self.ending().is_none()
            && let Err(error) = pidfd_send_signal(&self.handle, Signal::KILL)
        {
            tracing::debug!(pid = self.pid(), %error, "a process could not be killed");
        }
    }

    /// Tells of its end, for those who wait for that elsewhere.
    pub(super) fn handle(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.handle)
    }
}

impl Drop for ShardProcess {
    fn drop(&mut self) {
        self.strike();
        if self.ends_within(self.kill_max).is_none() {
            tracing::error!(pid = self.pid(), "a killed process does not end; it is left behind");
        }
    }
}

/// A signal as people know it.
pub(super) fn signal_name(signal: i32) -> String {
    let known = [
        (Signal::KILL, "SIGKILL"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::ABORT, "SIGABRT"),
        (Signal::BUS, "SIGBUS"),
        (Signal::FPE, "SIGFPE"),
        (Signal::ILL, "SIGILL"),
        (Signal::TERM, "SIGTERM"),
        (Signal::INT, "SIGINT"),
        (Signal::HUP, "SIGHUP"),
        (Signal::QUIT, "SIGQUIT"),
        (Signal::TRAP, "SIGTRAP"),
        (Signal::SYS, "SIGSYS"),
        (Signal::XCPU, "SIGXCPU"),
    ];
    let found = known.iter().find(|(of, _)| of.as_raw() == signal);
    found.map_or_else(|| format!("signal {signal}"), |(_, name)| (*name).to_owned())
}
