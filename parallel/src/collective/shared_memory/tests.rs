use std::{
    fs::File,
    io::{Seek, Write},
    os::{fd::OwnedFd, unix::fs::FileExt},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{MemfdFlags, SealFlags};

use super::{
    layout::{self, HEADER_BYTES, LINE_BYTES, Layout, REASON_BYTES_MAX},
    *,
};
use crate::collective::{Collective, CollectiveError, LocalGroup};

fn descriptor(seat: &Seat) -> OwnedFd {
    seat.descriptor().try_clone_to_owned().unwrap()
}

fn attach(seat: &Seat) -> SharedMemory {
    SharedMemory::attach(descriptor(seat), seat.rank()).unwrap()
}

fn problem(fd: OwnedFd) -> String {
    match SharedMemory::attach(fd, Rank(0)) {
        Ok(_) => panic!("it was taken for a segment"),
        Err(error) => error.to_string(),
    }
}

/// A memory file of that many bytes, with what seals it may have.
fn memory_file(bytes: u64, seals: SealFlags) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("damaged", flags).unwrap());
    file.set_len(bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

const ALL_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

#[test]
fn places_of_a_segment_neither_overlap_nor_leave_it() {
    for ranks in [1, 2, 3, 7, 33, 255, RANKS_MAX] {
        let layout = Layout::of(ranks);
        let mut places = vec![(0, HEADER_BYTES)];
        places.extend((0..ranks).map(|rank| (layout.claim(rank), 4)));
        places.extend((0..=ranks).map(|speaker| (layout.reason(speaker), LINE_BYTES + REASON_BYTES_MAX)));
        for (rank, parity) in (0..ranks).flat_map(|rank| [(rank, 0), (rank, 1)]) {
            places.push((layout.head(rank, parity), 16));
            places.push((layout.numbers(rank, parity), 4 * 65_536));
            // The longest share of the longest piece.
            let share = (0..ranks).map(|r| 65_536 * (r + 1) / ranks - 65_536 * r / ranks).max().unwrap();
            places.push((layout.segment(rank, parity), 4 * share));
            assert!(share <= layout.segment_len_max());
        }
        places.sort_unstable();
        assert!(places.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "{ranks} ranks");
        assert!(places.iter().all(|place| place.0 % LINE_BYTES == 0));
        assert!(places.last().is_some_and(|last| last.0 + last.1 <= layout.bytes));
    }
}

#[test]
fn groups_of_no_or_too_many_ranks_are_refused() {
    for ranks in [0, RANKS_MAX + 1, usize::MAX] {
        let error = SharedMemoryGroup::create(ranks).err().unwrap().to_string();
        assert_eq!(error, format!("a group in shared memory has 1 to 256 ranks, not {ranks}"));
    }
}

#[test]
fn every_rank_of_a_group_joins_once() {
    let seats = SharedMemoryGroup::create(2).unwrap();
    let member = attach(&seats[1]);
    let again = SharedMemory::attach(descriptor(&seats[0]), Rank(1));
    assert!(matches!(again, Err(SharedMemoryError::Taken { rank: Rank(1) })));
    let beyond = SharedMemory::attach(descriptor(&seats[0]), Rank(2)).err().unwrap();
    assert_eq!(beyond.to_string(), "rank 2 cannot join a group of 2 ranks");
    drop(member);
    let after = SharedMemory::attach(descriptor(&seats[0]), Rank(1));
    assert!(
        matches!(after, Err(SharedMemoryError::Taken { .. })),
        "its rank is spent for this life of the group"
    );
}

#[test]
fn seats_exchange_nothing_and_disturb_nobody_who_does() {
    let mut seats = SharedMemoryGroup::create(1).unwrap();
    let mut member = attach(&seats[0]);
    let seat = &mut seats[0];
    let errors = [
        seat.all_reduce_sum(&mut [1.0]).unwrap_err(),
        seat.all_gather(&[1.0], &mut [0.0]).unwrap_err(),
        seat.broadcast(&mut [1.0], Rank(0)).unwrap_err(),
        seat.barrier().unwrap_err(),
        seat.exchange(&[1]).unwrap_err(),
    ];
    for (error, name) in
        errors.iter().zip(["all_reduce_sum", "all_gather", "broadcast", "barrier", "exchange"])
    {
        let text = "rank 0 is computed by another process: its seat here takes no part in ";
        assert_eq!(error.to_string(), format!("{text}{name}"));
    }
    member.barrier().unwrap();
    assert_eq!(member.exchange(&[7, 8]).unwrap(), [[7, 8]]);
}

#[test]
fn sums_of_special_values_have_the_bits_of_threads() {
    let special =
        [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40, -1e-40, f32::MAX, f32::MIN, 1.0];
    for (size, len) in [(2, 100), (3, 1000), (5, 20_000)] {
        let part = |rank: usize| -> Vec<f32> {
            (0..len).map(|i| special[(i * (rank + 1) + i / 10 * rank) % special.len()]).collect()
        };
        let sum = |members: Vec<Box<dyn Collective>>| {
            let threads = members.into_iter().map(|mut member| {
                let mut data = part(member.rank().index());
                thread::spawn(move || {
                    member.all_reduce_sum(&mut data).unwrap();
                    // Nobody leaves before all have read.
                    member.barrier().unwrap();
                    // Of two NaNs added the bits of either may come out.
                    data.into_iter()
                        .map(|x| if x.is_nan() { f32::NAN } else { x }.to_bits())
                        .collect::<Vec<_>>()
                })
            });
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        };
        let local = sum(LocalGroup::new(size).into_iter().map(|member| Box::new(member) as _).collect());
        let seats = SharedMemoryGroup::create(size).unwrap();
        let shared = sum(seats.iter().map(|seat| Box::new(attach(seat)) as _).collect());
        assert_eq!(shared, local, "{size} x {len}");
    }
}

#[test]
fn reasons_cross_from_any_side_to_any_other_and_the_first_stays() {
    for first in 0..3 {
        let seats = SharedMemoryGroup::create(2).unwrap();
        let mut members: Vec<_> = seats.iter().map(attach).collect();
        let (tell, told) = mpsc::channel();
        seats[0].on_abort(Box::new(move || tell.send(()).unwrap()));
        let mut handles = vec![seats[0].abort_handle()];
        handles.extend(members.iter().map(|member| member.abort_handle()));
        handles[first].abort("the first");
        handles.iter().for_each(|handle| handle.abort("a later one"));
        told.recv_timeout(Duration::from_secs(10)).unwrap();
        for member in &mut members {
            let reason = "the first".into();
            assert_eq!(member.barrier(), Err(CollectiveError::Aborted { rank: member.rank(), reason }));
        }
    }
}

#[test]
fn long_reasons_are_cut_at_a_whole_character() {
    for (reason, kept) in [
        (String::new(), 0),
        ("x".repeat(REASON_BYTES_MAX), REASON_BYTES_MAX),
        ("x".repeat(100_000), REASON_BYTES_MAX),
        // Three bytes each: 85 of them are 255.
        ("\u{20ac}".repeat(200), 255),
        ("x".to_owned() + &"\u{1f980}".repeat(100), 253),
    ] {
        let seats = SharedMemoryGroup::create(1).unwrap();
        let mut member = attach(&seats[0]);
        seats[0].abort_handle().abort(&reason);
        let CollectiveError::Aborted { reason: got, .. } = member.barrier().unwrap_err() else { panic!() };
        assert_eq!(*got, reason[..kept]);
    }
}

#[test]
fn descriptors_of_other_things_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = File::create_new(dir.path().join("file")).unwrap();
    file.write_all(&vec![0; Layout::of(1).bytes]).unwrap();
    file.rewind().unwrap();
    let (read, write) = std::io::pipe().unwrap();
    let others: [OwnedFd; 5] = [
        File::open("/dev/null").unwrap().into(),
        File::open(dir.path()).unwrap().into(),
        file.into(),
        read.into(),
        write.into(),
    ];
    for fd in others {
        let text = problem(fd);
        assert!(text.contains("not the shared memory of a group of this build: it"), "{text}");
    }
    let whole = Layout::of(2).bytes as u64;
    for (file, expected) in [
        (memory_file(whole, SealFlags::SHRINK), "its size is not sealed"),
        (memory_file(0, ALL_SEALS), "it has 0 bytes"),
        (memory_file(HEADER_BYTES as u64 - 1, ALL_SEALS), "it has 639 bytes"),
        (memory_file(1 << 50, ALL_SEALS), "it has 1125899906842624 bytes"),
        (memory_file(HEADER_BYTES as u64, ALL_SEALS), "its number of ranks is out of range"),
        (memory_file(whole, ALL_SEALS), "its number of ranks is out of range"),
    ] {
        let text = problem(file.into());
        assert!(text.ends_with(expected), "{text}");
    }
}

#[test]
fn a_segment_that_may_only_be_read_is_an_error_of_the_system() {
    let seats = SharedMemoryGroup::create(1).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&seats[0].descriptor()));
    let text = problem(File::open(path).unwrap().into());
    assert!(text.starts_with("cannot map the shared memory of a group"), "{text}");
}

#[test]
fn a_header_with_any_byte_wrong_is_refused() {
    let seats = SharedMemoryGroup::create(3).unwrap();
    let file = File::from(descriptor(&seats[0]));
    for at in 0..layout::BYTES_AT as u64 + 8 {
        let mut good = [0];
        file.read_exact_at(&mut good, at).unwrap();
        for wrong in [good[0] ^ 1, good[0] ^ 0x80, !good[0]] {
            file.write_all_at(&[wrong], at).unwrap();
            problem(descriptor(&seats[0]));
        }
        file.write_all_at(&good, at).unwrap();
    }
    attach(&seats[0]);
}

/// Numbers that only look random.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

#[test]
fn damage_anywhere_costs_an_error_and_neither_a_fault_nor_a_wait_beyond_the_abort() {
    for seed in 1..=150 {
        let mut random = Random(seed * 0x9e37_79b9_7f4a_7c15);
        let seats = SharedMemoryGroup::create(2).unwrap();
        let file = File::from(descriptor(&seats[0]));
        let words = 1 + random.below(200);
        for _ in 0..words {
            // Everything but the numbers themselves, of which every bit pattern is one.
            let at = LINE_BYTES + random.below(Layout::of(2).numbers(0, 0) - LINE_BYTES);
            file.write_all_at(&random.next().to_ne_bytes()[..1 + random.below(8)], at as u64).unwrap();
        }
        let begin = Instant::now();
        let ranks: Vec<_> = seats
            .iter()
            .map(|seat| {
                let (fd, rank) = (descriptor(seat), seat.rank());
                thread::spawn(move || {
                    let Ok(mut member) = SharedMemory::attach(fd, rank) else { return };
                    let mut data = vec![1.0; 10_000];
                    while member.all_reduce_sum(&mut data).is_ok() && member.exchange(&[1; 9]).is_ok() {}
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(2));
        seats[0].abort_handle().abort("enough");
        for rank in ranks {
            rank.join().unwrap_or_else(|_| panic!("seed {seed}"));
        }
        assert!(begin.elapsed() < Duration::from_secs(10), "seed {seed}");
    }
}

#[test]
fn parts_that_a_damaged_peer_laid_out_are_found_out_before_they_are_used() {
    // A peer that is not one of ours: it writes its part's head by hand.
    let lie = |operation: u32, len: u32, call_len: u64| {
        let seats = SharedMemoryGroup::create(2).unwrap();
        let file = File::from(descriptor(&seats[0]));
        let (mut honest, liar) = (attach(&seats[0]), attach(&seats[1]));
        let head = Layout::of(2).head(1, 1) as u64;
        file.write_all_at(&operation.to_ne_bytes(), head + layout::PART_OPERATION_AT as u64).unwrap();
        file.write_all_at(&len.to_ne_bytes(), head + layout::PART_LEN_AT as u64).unwrap();
        file.write_all_at(&call_len.to_ne_bytes(), head + layout::PART_CALL_LEN_AT as u64).unwrap();
        let waiting = thread::spawn(move || honest.all_reduce_sum(&mut [1.0; 8]));
        crate::collective::board::Board::meet(&liar).unwrap();
        waiting.join().unwrap()
    };
    assert_eq!(lie(1, 8, 8), Ok(()));
    let mismatch = |got| {
        let (rank, operation) = (Rank(0), "all_reduce_sum");
        Err(CollectiveError::Mismatch { rank, operation, got: 8, expected: got })
    };
    assert_eq!(lie(1, 7, 8), mismatch(7));
    assert_eq!(lie(1, u32::MAX, 8), mismatch(65_536));
    assert_eq!(lie(1, 8, u64::MAX), mismatch(usize::MAX));
    let unknown = lie(77, 8, 8).unwrap_err().to_string();
    assert_eq!(unknown, "rank 0 called all_reduce_sum while rank 1 called an unknown operation");
}

#[test]
fn a_member_that_meets_nobody_sleeps_instead_of_spinning() {
    let seats = SharedMemoryGroup::create(2).unwrap();
    let mut member = attach(&seats[0]);
    let (tell, told) = mpsc::channel();
    let waiting = thread::spawn(move || {
        let used_ns = || -> u64 {
            let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
            schedstat.split(' ').next().unwrap().parse().unwrap()
        };
        let before = used_ns();
        let result = member.barrier();
        tell.send(used_ns() - before).unwrap();
        result
    });
    thread::sleep(Duration::from_millis(400));
    seats[1].abort_handle().abort("over");
    assert!(waiting.join().unwrap().is_err());
    let used_ns = told.recv().unwrap();
    assert!(used_ns < 100_000_000, "{used_ns} ns of processor time in 400 ms");
}

#[test]
fn a_group_that_lost_its_maker_in_the_middle_of_an_abort_is_aborted_by_whoever_looks() {
    let seats = SharedMemoryGroup::create(2).unwrap();
    let (member, other) = (attach(&seats[0]), attach(&seats[1]));
    // The watcher is asleep, or about to be.
    let (tell, told) = mpsc::channel();
    member.on_abort(Box::new(move || tell.send(()).unwrap()));
    thread::sleep(Duration::from_millis(20));
    // As far as a process comes that is killed between giving its reason and calling off the meetings; what woke the
    // watcher is a second abort.
    let segment = segment::Segment::attach(seats[0].descriptor()).unwrap();
    segment.aborted_by().store(3, std::sync::atomic::Ordering::SeqCst);
    other.abort_handle().abort("comes too late to be the reason");
    told.recv_timeout(Duration::from_secs(10)).unwrap();
    let reason = crate::collective::board::Board::check(&member).unwrap_err();
    assert_eq!(&*reason, "", "the maker's, of which nothing was written");
}
