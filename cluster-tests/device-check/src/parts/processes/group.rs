//! The processes of a group, as the one that started them sees them: what they say, until when, and their end.

use std::{
    env,
    io::{BufRead, BufReader, IoSlice},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use consort_parallel::collective::{Collective as _, MAILBOX_RANKS_MAX, Seat, SharedMemoryGroup};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg,
    socketpair,
};

use super::rank::{Message, Role};
use crate::{parts::tokens::WIDTH, session::Session};

/// Longest wait for a process that has said all that it has to say.
const END_LIMIT: Duration = Duration::from_secs(5);
/// The same after it was killed: its driver takes the context down first, on a card that others keep at work.
const KILL_LIMIT: Duration = Duration::from_secs(3);

/// All of them. They are killed when this is dropped, and by the system when this process ends.
pub(super) struct Group {
    // Dropped after the processes have ended: a seat that is left ends the group.
    seats: Vec<Seat>,
    processes: Vec<Child>,
    said: Receiver<(usize, Said)>,
}

/// What comes of a process.
enum Said {
    Message(Message),
    /// Nothing any more.
    End,
}

impl Group {
    /// Starts a process for each rank, of this very program, to run a model or, without one, to add.
    pub(super) fn start(
        session: &Session,
        model: Option<&Path>,
        role: impl Fn(usize) -> Role,
    ) -> Result<Group> {
        let (say, said) = channel();
        let seats = SharedMemoryGroup::create_with_mailboxes(WIDTH)?;
        let mut group = Group { seats, processes: Vec::with_capacity(WIDTH), said };
        for (rank, seat) in group.seats.iter().enumerate() {
            let (ours, theirs) =
                socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            send(&ours, seat)?;
            let role = role(rank).to_possible_value().context("a role without a name")?;
            let size = session.size.to_possible_value().context("a size without a name")?;
            let mut command = Command::new(env::current_exe()?);
            command.arg("--folder").arg(session.folder.path()).args(["--size", size.get_name()]);
            command.args(["rank", "--role", role.get_name()]);
            command.args(["--rank", &rank.to_string(), "--parent", &std::process::id().to_string()]);
            if let Some(model) = model {
                command.arg("--model").arg(model);
            }
            // In this process's group of processes, so that whoever ends that ends them.
            command.stdin(Stdio::from(theirs)).stdout(Stdio::piped()).stderr(Stdio::inherit());
            let mut process = command.spawn().context("cannot start the process of a rank")?;
            let output = process.stdout.take();
            group.processes.push(process);
            let (output, say) = (output.context("a process without output")?, say.clone());
            thread::spawn(move || pass_on(rank, output, &say));
        }
        Ok(group)
    }

    /// Takes a message of each of `count` ranks, which must all come within `limit`.
    pub(super) fn hear(
        &mut self,
        limit: Duration,
        count: usize,
        mut judge: impl FnMut(usize, Message) -> Result<()>,
    ) -> Result<()> {
        let deadline = Instant::now() + limit;
        let mut heard = Vec::with_capacity(count);
        while heard.len() < count {
            match self.said.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((rank, Said::Message(message))) => {
                    judge(rank, message)?;
                    heard.push(rank);
                }
                // Others may not have said it yet.
                Ok((rank, Said::End)) if heard.contains(&rank) => {}
                Ok((rank, Said::End)) => {
                    let status = self.ending(rank, KILL_LIMIT)?;
                    bail!("the process of rank {rank} ended early with {status}");
                }
                Err(_) => bail!("not all processes answered within {} s", limit.as_secs()),
            }
        }
        Ok(())
    }

    /// Kills a rank's process, after which its end is no news.
    pub(super) fn kill(&mut self, rank: usize) -> Result<()> {
        self.process(rank)?.kill()?;
        self.ending(rank, KILL_LIMIT)?;
        match self.said.recv_timeout(KILL_LIMIT) {
            Ok((of, Said::End)) if of == rank => Ok(()),
            Ok((of, Said::Message(message))) => bail!("rank {of} did not wait: {message:?}"),
            Ok((of, Said::End)) => bail!("rank {of} did not wait: it has ended"),
            Err(_) => bail!("a process that was killed has not ended"),
        }
    }

    /// Ends the group, and says when.
    pub(super) fn abort(&self, reason: &str) -> Instant {
        let now = Instant::now();
        self.seats.iter().for_each(|seat| seat.abort_handle().abort(reason));
        now
    }

    /// Waits for the end of these ranks' processes, which must be a good one.
    pub(super) fn end_well(&mut self, ranks: std::ops::Range<usize>) -> Result<()> {
        for rank in ranks {
            let status = self.ending(rank, END_LIMIT)?;
            if !status.success() {
                bail!("rank {rank} answered, and then its process ended with {status}");
            }
        }
        Ok(())
    }

    fn process(&mut self, rank: usize) -> Result<&mut Child> {
        self.processes.get_mut(rank).ok_or_else(|| anyhow!("no process of rank {rank}"))
    }

    fn ending(&mut self, rank: usize, limit: Duration) -> Result<std::process::ExitStatus> {
        let (process, started) = (self.process(rank)?, Instant::now());
        loop {
            if let Some(status) = process.try_wait()? {
                return Ok(status);
            }
            if started.elapsed() > limit {
                bail!("the process of rank {rank} does not end");
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // It may have ended long ago.
            let _ = process.kill();
        }
        let killed = Instant::now();
        for rank in 0..self.processes.len() {
            if let Err(error) = self.ending(rank, KILL_LIMIT.saturating_sub(killed.elapsed())) {
                eprintln!("{error}");
            }
        }
    }
}

/// Sends a seat's descriptors, which wait in the socket for the process.
fn send(socket: &OwnedFd, seat: &Seat) -> Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = std::iter::once(seat.descriptor()).chain(seat.mailbox()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1 + MAILBOX_RANKS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        bail!("{} descriptors are too many for one message", descriptors.len());
    }
    sendmsg(socket, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)
        .context("cannot send the place in a group")?;
    Ok(())
}

/// Passes on what a process says, until it says no more or nobody listens.
fn pass_on(rank: usize, output: ChildStdout, say: &Sender<(usize, Said)>) {
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(message) => {
                if say.send((rank, Said::Message(message))).is_err() {
                    return;
                }
            }
            // A driver or a library may talk, too.
            Err(_) => eprintln!("rank {rank}: {line}"),
        }
    }
    // Nobody may wait for it any more.
    let _ = say.send((rank, Said::End));
}
