//! What a rank does that was started by a test.

use std::{
    fmt, fs,
    io::IoSliceMut,
    mem::MaybeUninit,
    os::{fd::AsFd, unix::fs::FileExt},
    thread,
    time::{Duration, Instant},
};

use consort_parallel::{
    collective::{Collective, CollectiveError, MAILBOX_RANKS_MAX, SharedMemory, SharedMemoryGroup},
    ids::Rank,
};
use rustix::{
    fs::MemfdFlags,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
};

/// The name of the environment's variable.
pub(crate) const ROLE: &str = "CONSORT_TEST_RANK";

/// A role, and how it stands in the environment.
pub(crate) enum Role {
    /// Sums so often, or until an abort.
    Sum { rank: u16, sums: usize },
    /// Sums a few times, then aborts.
    Abort { rank: u16 },
    /// Sends files to everybody so often, or until an abort.
    Exchange { rank: u16, rounds: usize },
    /// Meets the others where they exchange descriptors.
    Meet { rank: u16 },
    /// Forms whole groups, one after another.
    Live { lives: usize },
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Role::Sum { rank, sums } => write!(f, "sum {rank} {sums}"),
            Role::Abort { rank } => write!(f, "abort {rank} 0"),
            Role::Exchange { rank, rounds } => write!(f, "exchange {rank} {rounds}"),
            Role::Meet { rank } => write!(f, "meet {rank} 0"),
            Role::Live { lives } => write!(f, "live 0 {lives}"),
        }
    }
}

/// Plays the role of this process; false where it has none and is the test.
pub(crate) fn play() -> bool {
    let Ok(role) = std::env::var(ROLE) else { return false };
    let words: Vec<&str> = role.split(' ').collect();
    let [role, rank, count] = words[..] else { panic!("no role: {words:?}") };
    let (rank, count) = (Rank(rank.parse().unwrap()), count.parse().unwrap());
    match role {
        "sum" => match sum(&mut attach(rank), count) {
            Ok(digest) => eprintln!("digest {digest:016x}"),
            Err(CollectiveError::Aborted { reason, .. }) => eprintln!("aborted {reason}"),
            Err(error) => panic!("{error}"),
        },
        "abort" => {
            let mut comm = attach(rank);
            let _ = sum_some(&mut comm, 10, &mut |_| {});
            comm.abort_handle().abort(&format!("{rank} has had enough"));
        }
        "exchange" => exchange(&mut attach(rank), count),
        "meet" => {
            let mut comm = attach(rank);
            comm.barrier().unwrap();
            // Nobody leaves before the others have looked.
            let _ = comm.barrier();
        }
        "live" => live(count),
        _ => panic!("no role: {role}"),
    }
    true
}

/// What came with this process: the group's memory, and the rank's mailbox where there is one.
fn attach(rank: Rank) -> SharedMemory {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAILBOX_RANKS_MAX + 1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    recvmsg(std::io::stdin(), &mut [IoSliceMut::new(&mut [0])], &mut ancillary, flags).unwrap();
    let mut descriptors = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let memory = descriptors.next().expect("the test sends it");
    SharedMemory::attach(memory, rank).unwrap().with_mailbox(descriptors.collect()).unwrap()
}

/// Exchanges files whose contents are known, so often or until an abort, and says what it has open before and after.
fn exchange(comm: &mut SharedMemory, rounds: usize) {
    let before = open();
    let brought = |rank: usize, round: usize| format!("{rank} brings {round}");
    let mut outcome = Ok(());
    for round in 0..rounds {
        let mine = fs::File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        mine.write_all_at(brought(comm.rank().index(), round).as_bytes(), 0).unwrap();
        match comm.exchange_descriptors(&[mine.as_fd()]) {
            Ok(all) => {
                for (rank, descriptors) in all.into_iter().enumerate() {
                    assert_eq!(descriptors.len(), usize::from(rank != comm.rank().index()));
                    for descriptor in descriptors {
                        let expected = brought(rank, round);
                        let mut bytes = vec![0; expected.len()];
                        fs::File::from(descriptor).read_exact_at(&mut bytes, 0).unwrap();
                        assert_eq!(String::from_utf8(bytes).unwrap(), expected);
                    }
                }
            }
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
        if round.is_multiple_of(20) {
            eprintln!("exchanged {}", round + 1);
        }
    }
    assert_eq!(open(), before, "nothing stays open");
    match outcome {
        Ok(()) => {
            comm.barrier().unwrap();
            eprintln!("done");
        }
        Err(CollectiveError::Aborted { reason, .. }) => eprintln!("aborted {reason}"),
        Err(error) => eprintln!("aborted {error}"),
    }
}

/// Sums of many sizes, each compared with what it should be; a digest of all bits.
pub(crate) fn sum(comm: &mut dyn Collective, sums: usize) -> Result<u64, CollectiveError> {
    let digest = sum_some(comm, sums, &mut |sums| {
        if sums % 20 == 1 {
            eprintln!("sums {sums}");
        }
    })?;
    // Whoever ends takes the group along: nobody does before all have their last sum.
    comm.barrier()?;
    Ok(digest)
}

fn sum_some(
    comm: &mut dyn Collective,
    sums: usize,
    after: &mut dyn FnMut(usize),
) -> Result<u64, CollectiveError> {
    let mut digest = 0xcbf2_9ce4_8422_2325u64;
    for round in 0..sums {
        let len = [1, 576, 4096, 8193, 20_000, 66_000][round % 6];
        let number = |rank: usize, i: usize| {
            ((i * 37 + rank * 1001 + round * 13) % 8191) as f32 * 10f32.powi(rank as i32 - 1) - 3.0
        };
        let mut data: Vec<f32> = (0..len).map(|i| number(comm.rank().index(), i)).collect();
        comm.all_reduce_sum(&mut data)?;
        for (i, sum) in data.iter().enumerate() {
            let expected = (1..comm.size()).fold(number(0, i), |sum, rank| sum + number(rank, i));
            assert_eq!(sum.to_bits(), expected.to_bits(), "{} sum {round}, element {i}", comm.rank());
            digest = (digest ^ u64::from(sum.to_bits())).wrapping_mul(0x100_0000_01b3);
        }
        after(round + 1);
    }
    Ok(digest)
}

/// Forms groups that sum and end in one way or another, and says what this process has open before and after.
fn live(lives: usize) {
    // What the runtime itself opens once comes first.
    one_life(0);
    let before = settled(None);
    eprintln!("before {before}");
    (0..lives).for_each(one_life);
    eprintln!("after {}", settled(Some(&before)));
}

fn one_life(life: usize) {
    let seats = SharedMemoryGroup::create(3).unwrap();
    let handle = seats[0].abort_handle();
    seats.iter().for_each(|seat| seat.on_abort(Box::new(|| {})));
    let members = seats.iter().map(|seat| {
        let memory = seat.descriptor().try_clone_to_owned().unwrap();
        SharedMemory::attach(memory, seat.rank()).unwrap()
    });
    let threads: Vec<_> = members
        .map(|mut comm| {
            thread::spawn(move || {
                comm.on_abort(Box::new(|| {}));
                let _ = comm.shared_work();
                let sums = if life.is_multiple_of(3) { 4 } else { usize::MAX };
                sum_some(&mut comm, sums, &mut |_| {}).is_ok()
            })
        })
        .collect();
    match life % 3 {
        1 => {
            thread::sleep(Duration::from_millis(3));
            handle.abort("over");
        }
        2 => drop(seats),
        _ => {}
    }
    threads.into_iter().for_each(|thread| _ = thread.join().unwrap());
    // Attempts that fail leave nothing either.
    assert!(SharedMemory::attach(fs::File::open("/dev/null").unwrap().into(), Rank(0)).is_err());
}

/// What this process has open, once threads that are about to end have ended.
fn settled(expected: Option<&str>) -> String {
    let begin = Instant::now();
    loop {
        let now = open();
        let is_settled =
            expected.map_or(now.contains("0 segments mapped, 0 watchers"), |before| now == before);
        if is_settled || begin.elapsed() > Duration::from_secs(10) {
            return now;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

fn open() -> String {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let segments = maps.lines().filter(|line| line.contains("memfd:consort-collective")).count();
    let names = fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        // One that ends meanwhile has no name any more.
        fs::read_to_string(task.ok()?.path().join("comm")).ok()
    });
    let names: Vec<_> = names.collect();
    let watchers = names.iter().filter(|name| name.starts_with("collective-abor")).count();
    format!(
        "{descriptors} descriptors, {segments} segments mapped, {watchers} watchers, {} threads",
        names.len()
    )
}
