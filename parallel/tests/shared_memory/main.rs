//! Ranks that are real processes: they sum as threads do, and one that is killed or stopped anywhere costs the others
//! an error and nothing else.
//!
//! Each test starts this program again for the test itself, with a role in its environment and a socket that holds the
//! group's memory as standard input; what a rank has to say goes to its standard error, a line at a time.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod roles;

use std::{
    io::{BufRead, BufReader, IoSlice},
    mem::MaybeUninit,
    os::fd::OwnedFd,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use consort_parallel::collective::{Collective, LocalGroup, MAILBOX_RANKS_MAX, Seat, SharedMemoryGroup};
use roles::{ROLE, Role};
use rustix::{
    net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
        sendmsg, socketpair,
    },
    process::{Pid, Signal, kill_process},
};

/// Longer than anything takes on a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(120);

/// A socket in which what a rank needs lies as descriptors: the group's memory, and its mailbox where there is one.
fn socket_with_descriptors(seat: &Seat) -> OwnedFd {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("sockets");
    let descriptors: Vec<_> = std::iter::once(seat.descriptor()).chain(seat.mailbox()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAILBOX_RANKS_MAX + 1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(ours, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL).expect("there is room");
    theirs
}

/// A rank that is a process.
struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    fn start(test: &str, seat: &Seat, role: Role) -> Self {
        let program = std::env::current_exe().expect("the test program has a path");
        let mut command = Command::new(program);
        command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
        command
            .env(ROLE, role.to_string())
            .stdin(socket_with_descriptors(seat))
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("the test program starts again");
        let stderr = BufReader::new(child.stderr.take().expect("it is piped"));
        let (tell, lines) = channel();
        thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        Process { child, lines }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it is there");
    }

    /// Waits for a line that begins so, and returns the rest of it.
    fn wait_for(&self, start: &str, patience: Duration) -> String {
        let deadline = Instant::now() + patience;
        let mut others = Vec::new();
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => match line.strip_prefix(start) {
                    Some(rest) => return rest.trim().to_owned(),
                    None => others.push(line),
                },
                Err(RecvTimeoutError::Timeout) => panic!("no {start:?} after {patience:?}, but {others:?}"),
                Err(RecvTimeoutError::Disconnected) => panic!("it ended without {start:?}: {others:?}"),
            }
        }
    }

    /// Waits until it has summed so often.
    fn wait_for_sums(&self, sums: usize) {
        while self.wait_for("sums ", PATIENCE).parse::<usize>().expect("a number") < sums {}
    }

    fn end_well(mut self) {
        assert!(self.child.wait().expect("it is ours").success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start_all(test: &str, seats: &[Seat], role: impl Fn(u16) -> Role) -> Vec<Process> {
    seats.iter().map(|seat| Process::start(test, seat, role(seat.rank().0))).collect()
}

#[test]
fn three_processes_sum_a_thousand_times_and_get_the_bits_of_three_threads() {
    const TEST: &str = "three_processes_sum_a_thousand_times_and_get_the_bits_of_three_threads";
    if roles::play() {
        return;
    }
    let seats = SharedMemoryGroup::create(3).unwrap();
    let processes = start_all(TEST, &seats, |rank| Role::Sum { rank, sums: 1000 });
    let threads: Vec<_> = LocalGroup::new(3)
        .into_iter()
        .map(|mut comm| thread::spawn(move || roles::sum(&mut comm, 1000).unwrap()))
        .collect();
    let expected: Vec<String> =
        threads.into_iter().map(|thread| format!("{:016x}", thread.join().unwrap())).collect();
    assert!(expected.iter().all(|digest| *digest == expected[0]));
    for (process, expected) in processes.iter().zip(expected) {
        assert_eq!(process.wait_for("digest ", PATIENCE), expected);
    }
    processes.into_iter().for_each(Process::end_well);
}

#[test]
fn ranks_that_wait_for_a_killed_one_are_freed_by_an_abort_with_its_reason() {
    const TEST: &str = "ranks_that_wait_for_a_killed_one_are_freed_by_an_abort_with_its_reason";
    if roles::play() {
        return;
    }
    let seats = SharedMemoryGroup::create(3).unwrap();
    let mut processes = start_all(TEST, &seats, |rank| Role::Sum { rank, sums: usize::MAX });
    processes[1].wait_for_sums(300);
    let killed = processes.remove(1);
    killed.signal(Signal::KILL);
    drop(killed);
    // Asleep by now.
    thread::sleep(Duration::from_millis(100));
    seats[1].abort_handle().abort("rank 1 was killed by SIGKILL");
    let begin = Instant::now();
    for process in &processes {
        assert_eq!(process.wait_for("aborted ", PATIENCE), "rank 1 was killed by SIGKILL");
    }
    let elapsed = begin.elapsed();
    assert!(elapsed < Duration::from_secs(1), "{elapsed:?}");
    processes.into_iter().for_each(Process::end_well);
}

#[test]
fn a_process_that_is_killed_at_any_moment_keeps_nobody_beyond_the_abort() {
    const TEST: &str = "a_process_that_is_killed_at_any_moment_keeps_nobody_beyond_the_abort";
    if roles::play() {
        return;
    }
    for round in 0..20u64 {
        let seats = SharedMemoryGroup::create(2).unwrap();
        let mut processes = start_all(TEST, &seats, |rank| Role::Sum { rank, sums: usize::MAX });
        processes[0].wait_for_sums(1);
        thread::sleep(Duration::from_micros(round * 977 % 5000));
        let killed = processes.remove((round % 2) as usize);
        killed.signal(Signal::KILL);
        drop(killed);
        seats[0].abort_handle().abort("over");
        assert_eq!(processes[0].wait_for("aborted ", Duration::from_secs(10)), "over", "round {round}");
    }
}

#[test]
fn a_stopped_process_goes_on_after_the_abort_and_disturbs_no_later_life_of_the_group() {
    const TEST: &str = "a_stopped_process_goes_on_after_the_abort_and_disturbs_no_later_life_of_the_group";
    if roles::play() {
        return;
    }
    let seats = SharedMemoryGroup::create(3).unwrap();
    let mut processes = start_all(TEST, &seats, |rank| Role::Sum { rank, sums: usize::MAX });
    processes[2].wait_for_sums(200);
    let stopped = processes.remove(2);
    stopped.signal(Signal::STOP);
    thread::sleep(Duration::from_millis(50));
    seats[2].abort_handle().abort("rank 2 was silent");
    for process in &processes {
        assert_eq!(process.wait_for("aborted ", PATIENCE), "rank 2 was silent");
    }
    drop(seats);
    processes.into_iter().for_each(Process::end_well);

    let seats = SharedMemoryGroup::create(3).unwrap();
    let processes = start_all(TEST, &seats, |rank| Role::Sum { rank, sums: 1000 });
    processes[0].wait_for_sums(200);
    stopped.signal(Signal::CONT);
    assert_eq!(stopped.wait_for("aborted ", PATIENCE), "rank 2 was silent");
    stopped.end_well();
    let digests: Vec<_> = processes.iter().map(|process| process.wait_for("digest ", PATIENCE)).collect();
    assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
    processes.into_iter().for_each(Process::end_well);
}

#[test]
fn an_abort_in_a_child_is_told_in_the_parent_and_to_its_peers() {
    const TEST: &str = "an_abort_in_a_child_is_told_in_the_parent_and_to_its_peers";
    if roles::play() {
        return;
    }
    let seats = SharedMemoryGroup::create(2).unwrap();
    let (tell, told) = channel();
    seats[1].on_abort(Box::new(move || tell.send(()).unwrap()));
    let processes = start_all(TEST, &seats, |rank| match rank {
        0 => Role::Abort { rank },
        _ => Role::Sum { rank, sums: usize::MAX },
    });
    told.recv_timeout(PATIENCE).unwrap();
    assert_eq!(processes[1].wait_for("aborted ", PATIENCE), "rank 0 has had enough");
    processes.into_iter().for_each(Process::end_well);
}

#[test]
fn fifty_lives_of_a_group_leave_no_descriptor_map_or_thread_behind() {
    const TEST: &str = "fifty_lives_of_a_group_leave_no_descriptor_map_or_thread_behind";
    if roles::play() {
        return;
    }
    // In a process of its own, where nobody else opens anything.
    let seats = SharedMemoryGroup::create(1).unwrap();
    let process = Process::start(TEST, &seats[0], Role::Live { lives: 50 });
    let (before, after) = (process.wait_for("before ", PATIENCE), process.wait_for("after ", PATIENCE));
    assert_eq!(before, after);
    process.end_well();
}

#[test]
fn three_processes_send_each_other_descriptors_hundreds_of_times() {
    const TEST: &str = "three_processes_send_each_other_descriptors_hundreds_of_times";
    if roles::play() {
        return;
    }
    let seats = SharedMemoryGroup::create_with_mailboxes(3).unwrap();
    let processes = start_all(TEST, &seats, |rank| Role::Exchange { rank, rounds: 300 });
    processes.iter().for_each(|process| _ = process.wait_for("done", PATIENCE));
    processes.into_iter().for_each(Process::end_well);
}

#[test]
fn a_process_killed_among_descriptors_costs_the_others_an_abort_and_no_descriptor() {
    const TEST: &str = "a_process_killed_among_descriptors_costs_the_others_an_abort_and_no_descriptor";
    if roles::play() {
        return;
    }
    for round in 0..6u64 {
        let seats = SharedMemoryGroup::create_with_mailboxes(3).unwrap();
        let mut processes = start_all(TEST, &seats, |rank| Role::Exchange { rank, rounds: usize::MAX });
        processes[0].wait_for("exchanged 41", PATIENCE);
        thread::sleep(Duration::from_micros(round * 977));
        let killed = processes.remove((round % 3) as usize);
        killed.signal(Signal::KILL);
        drop(killed);
        seats[0].abort_handle().abort("a rank was killed");
        for process in &processes {
            assert_eq!(process.wait_for("aborted ", PATIENCE), "a rank was killed", "round {round}");
        }
        processes.into_iter().for_each(Process::end_well);
    }
}

#[test]
fn a_process_that_sends_no_descriptor_is_named_by_the_others() {
    const TEST: &str = "a_process_that_sends_no_descriptor_is_named_by_the_others";
    if roles::play() {
        return;
    }
    let seats = SharedMemoryGroup::create_with_mailboxes(3).unwrap();
    let processes = start_all(TEST, &seats, |rank| match rank {
        2 => Role::Meet { rank },
        _ => Role::Exchange { rank, rounds: 1 },
    });
    for process in &processes[..2] {
        let told = process.wait_for("aborted ", PATIENCE);
        assert!(told.contains("nothing has come from rank 2"), "{told}");
    }
    processes.into_iter().for_each(Process::end_well);
}
