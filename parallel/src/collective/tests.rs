use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use super::*;

/// How a group is made.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Threads that share a group.
    Local,
    /// Members that attach to one segment each for itself, as processes do.
    #[cfg(target_os = "linux")]
    SharedMemory,
    /// The sides of ranks that are elsewhere.
    #[cfg(target_os = "linux")]
    Seats,
}

type Member = Box<dyn Collective>;

/// A group of one kind.
struct Group {
    members: Vec<Member>,
    /// Their other sides, where they have any: these too end the group when they end.
    #[cfg(target_os = "linux")]
    _seats: Vec<Seat>,
}

impl Kind {
    fn group(self, size: usize) -> Group {
        fn boxed<C: Collective>(members: impl IntoIterator<Item = C>) -> Vec<Member> {
            members.into_iter().map(|member| Box::new(member) as Member).collect()
        }
        #[cfg(target_os = "linux")]
        {
            let seats = || SharedMemoryGroup::create(size).unwrap();
            let attach = |seat: &Seat| {
                let descriptor = seat.descriptor().try_clone_to_owned().unwrap();
                SharedMemory::attach(descriptor, seat.rank()).unwrap()
            };
            match self {
                Kind::Local => Group { members: boxed(LocalGroup::new(size)), _seats: Vec::new() },
                Kind::Seats => Group { members: boxed(seats()), _seats: Vec::new() },
                Kind::SharedMemory => {
                    let seats = seats();
                    Group { members: boxed(seats.iter().map(attach)), _seats: seats }
                }
            }
        }
        #[cfg(not(target_os = "linux"))]
        Group { members: boxed(LocalGroup::new(size)) }
    }

    /// Whether something is so once all that an abort brings about is over. Only members that know nothing of each
    /// other are told later than the call returns.
    fn settles(self, is_so: impl Fn() -> bool) -> bool {
        #[cfg(target_os = "linux")]
        if self == Kind::SharedMemory {
            let begin = Instant::now();
            while !is_so() && begin.elapsed() < Duration::from_secs(10) {
                thread::sleep(Duration::from_micros(50));
            }
        }
        is_so()
    }
}

/// Runs `f` on every rank of a group and returns the results in rank order.
fn on_all<R: Send>(kind: Kind, size: usize, f: impl Fn(&mut Member) -> R + Sync) -> Vec<R> {
    let mut group = kind.group(size);
    let members = std::mem::take(&mut group.members);
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> =
            members.into_iter().map(|mut member| scope.spawn(move || f(&mut member))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Names the tests that hold of a kind.
macro_rules! tests_of {
    ($module:ident, $kind:expr, $($name:ident)*) => {
        mod $module {
            use super::*;
            $(
                #[test]
                fn $name() {
                    super::$name($kind)
                }
            )*
        }
    };
}

/// Tests of members, and those of notices.
macro_rules! suite {
    ($($name:ident)* ; $($notice:ident)*) => {
        tests_of!(local, Kind::Local, $($name)* $($notice)*);
        #[cfg(target_os = "linux")]
        tests_of!(shared_memory, Kind::SharedMemory, $($name)* $($notice)*);
        #[cfg(target_os = "linux")]
        tests_of!(seats, Kind::Seats, $($notice)*);
    };
}

suite! {
    sums_are_in_rank_order_and_the_same_bits_on_every_rank_at_every_size
    gathers_keep_uneven_parts_in_rank_order_and_broadcasts_reach_everyone
    an_abort_frees_ranks_that_wait_for_one_who_never_comes
    an_aborted_group_refuses_every_later_call
    long_gathers_and_broadcasts_go_through_in_pieces
    a_rank_that_ends_frees_those_that_wait_for_it
    what_a_rank_does_after_an_abort_never_reaches_an_exchange_that_was_met
    ranks_that_call_different_operations_get_an_error
    ranks_that_disagree_about_sizes_all_get_an_error_instead_of_hanging
    exchanges_bring_every_rank_everybodys_bytes_at_many_sizes
    an_exchange_of_too_much_is_refused_and_frees_those_that_wait_for_it
    an_exchange_is_not_taken_for_another_operation
    ranks_that_are_late_are_waited_for
    ranks_see_the_abort_before_a_notice_is_called
    ;
    every_notice_of_every_rank_is_called_once_by_an_abort_and_at_once_after_it
    a_membership_dropped_before_the_abort_takes_its_notices_with_it_and_tells_the_others
    notices_that_race_with_aborts_are_called_exactly_once
    notices_of_ranks_that_leave_while_the_group_is_aborted_are_called_at_most_once
    a_notice_may_call_its_group_and_wait_for_a_thread_that_does
    a_notice_that_panics_keeps_no_other_from_being_called
    an_abort_closes_the_shared_work_of_every_rank
}

/// Numbers whose sum depends on the order of addition.
fn part(rank: usize, len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| ((i * 37 + rank * 1001) % 8191) as f32 * (10.0f32).powi(rank as i32 % 5 - 2) - 3.0)
        .collect()
}

fn sums_are_in_rank_order_and_the_same_bits_on_every_rank_at_every_size(kind: Kind) {
    for size in 1..=8 {
        for len in [0, 1, 7, 576, 8191, 8192, 8193, 50_000, 65_535, 65_536, 65_537, 200_000] {
            let mut expected = part(0, len);
            for rank in 1..size {
                expected.iter_mut().zip(part(rank, len)).for_each(|(sum, x)| *sum += x);
            }
            let results = on_all(kind, size, |comm| {
                let mut last = Vec::new();
                for _ in 0..4 {
                    last = part(comm.rank().index(), len);
                    comm.all_reduce_sum(&mut last).unwrap();
                }
                last
            });
            for result in results {
                assert!(
                    result.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{size} x {len}"
                );
            }
        }
    }
}

fn gathers_keep_uneven_parts_in_rank_order_and_broadcasts_reach_everyone(kind: Kind) {
    for size in 1..=5 {
        let results = on_all(kind, size, |comm| {
            let rank = comm.rank().index();
            let mine = vec![rank as f32; rank * 3];
            let mut all = vec![-1.0; 3 * size * (size - 1) / 2];
            comm.all_gather(&mine, &mut all).unwrap();
            let mut word = vec![rank as f32; 2];
            comm.broadcast(&mut word, Rank(size as u16 - 1)).unwrap();
            comm.barrier().unwrap();
            (all, word)
        });
        let expected: Vec<f32> = (0..size).flat_map(|rank| vec![rank as f32; rank * 3]).collect();
        for (all, word) in results {
            assert_eq!(all, expected);
            assert_eq!(word, vec![size as f32 - 1.0; 2]);
        }
    }
}

fn an_abort_frees_ranks_that_wait_for_one_who_never_comes(kind: Kind) {
    let begin = Instant::now();
    let results = on_all(kind, 3, |comm| {
        if comm.rank() == Rank(1) {
            thread::sleep(Duration::from_millis(80));
            comm.abort_handle().abort("rank 1 is lost");
            comm.abort_handle().abort("a later reason does not matter");
            return None;
        }
        Some(comm.all_reduce_sum(&mut [1.0; 10]).unwrap_err().to_string())
    });
    assert_eq!(results[0].as_deref(), Some("collective aborted on rank 0: rank 1 is lost"));
    assert_eq!(results[2].as_deref(), Some("collective aborted on rank 2: rank 1 is lost"));
    assert!(begin.elapsed() < Duration::from_secs(5));
}

fn an_aborted_group_refuses_every_later_call(kind: Kind) {
    let results = on_all(kind, 2, |comm| {
        comm.barrier().unwrap();
        comm.abort_handle().abort("over");
        comm.barrier().is_err() && comm.all_gather(&[1.0], &mut [0.0; 2]).is_err()
    });
    assert_eq!(results, [true, true]);
}

fn long_gathers_and_broadcasts_go_through_in_pieces(kind: Kind) {
    let results = on_all(kind, 3, |comm| {
        let rank = comm.rank().index();
        let mine = part(rank, [150_000, 10, 65_536][rank]);
        let mut all = vec![0.0; 150_000 + 10 + 65_536];
        comm.all_gather(&mine, &mut all).unwrap();
        let mut word = part(rank, 130_000);
        comm.broadcast(&mut word, Rank(1)).unwrap();
        comm.broadcast(&mut [], Rank(0)).unwrap();
        (all, word)
    });
    let expected = [part(0, 150_000), part(1, 10), part(2, 65_536)].concat();
    for (all, word) in results {
        assert!(all == expected && word == part(1, 130_000));
    }
}

fn a_rank_that_ends_frees_those_that_wait_for_it(kind: Kind) {
    let results = on_all(kind, 3, |comm| {
        if comm.rank() == Rank(2) {
            // As on unwinding from a panic: the rank is dropped without another word.
            drop(std::mem::replace(comm, Box::new(LocalGroup::new(1).remove(0))));
            return None;
        }
        Some(comm.all_reduce_sum(&mut [1.0; 4]).unwrap_err().to_string())
    });
    assert_eq!(results[0].as_deref(), Some("collective aborted on rank 0: rank 2 left the group"));
}

fn what_a_rank_does_after_an_abort_never_reaches_an_exchange_that_was_met(kind: Kind) {
    for _ in 0..300 {
        let results = on_all(kind, 2, |comm| {
            let mut data = vec![1.0 + comm.rank().index() as f32; 20_000];
            let met = comm.all_reduce_sum(&mut data);
            comm.abort_handle().abort("over");
            for _ in 0..4 {
                assert!(comm.all_reduce_sum(&mut vec![100.0; 20_000]).is_err());
                assert!(comm.all_gather(&[100.0; 7], &mut [0.0; 14]).is_err());
            }
            met.map(|()| data)
        });
        // A slow rank may be told of the abort instead of its sum, but never gets another's later numbers.
        for sum in results.into_iter().flatten() {
            assert!(sum.iter().all(|x| *x == 3.0));
        }
    }
}

fn ranks_that_call_different_operations_get_an_error(kind: Kind) {
    let results = on_all(kind, 2, |comm| {
        let result = if comm.rank() == Rank(0) { comm.all_reduce_sum(&mut [1.0; 4]) } else { comm.barrier() };
        result.unwrap_err().to_string()
    });
    assert!(results[0].contains("called all_reduce_sum while rank 1 called barrier"), "{results:?}");
}

fn ranks_that_disagree_about_sizes_all_get_an_error_instead_of_hanging(kind: Kind) {
    let results = on_all(kind, 3, |comm| {
        let len = if comm.rank() == Rank(2) { 5 } else { 4 };
        let first = comm.all_reduce_sum(&mut vec![1.0; len]);
        first.is_err() || comm.barrier().is_err()
    });
    assert_eq!(results, [true, true, true]);
}

fn exchanges_bring_every_rank_everybodys_bytes_at_many_sizes(kind: Kind) {
    for size in [1, 2, 3, 8, 33] {
        let results = on_all(kind, size, |comm| {
            let rank = comm.rank().index();
            let mut rounds = Vec::new();
            for round in 0..5 {
                // Uneven, empty and of the largest size; other calls between, whose slots these are too.
                let len = if rank == round { EXCHANGE_BYTES_MAX } else { rank * 7 % 5 * round };
                rounds.push(comm.exchange(&vec![(rank * 5 + round) as u8; len]).unwrap());
                comm.all_reduce_sum(&mut [1.0; 9]).unwrap();
            }
            rounds
        });
        for of_rank in &results {
            for (round, all) in of_rank.iter().enumerate() {
                assert_eq!(all.len(), size);
                for (rank, bytes) in all.iter().enumerate() {
                    let len = if rank == round { EXCHANGE_BYTES_MAX } else { rank * 7 % 5 * round };
                    assert_eq!(*bytes, vec![(rank * 5 + round) as u8; len], "{size} ranks, round {round}");
                }
            }
        }
    }
}

fn an_exchange_of_too_much_is_refused_and_frees_those_that_wait_for_it(kind: Kind) {
    let results = on_all(kind, 3, |comm| {
        let len = if comm.rank() == Rank(1) { EXCHANGE_BYTES_MAX + 1 } else { 4 };
        comm.exchange(&vec![0; len]).unwrap_err()
    });
    assert_eq!(results[1], CollectiveError::TooLong { rank: Rank(1), bytes: EXCHANGE_BYTES_MAX + 1 });
    let told = "rank 1 called exchange with 65537 bytes";
    assert!(matches!(&results[2], CollectiveError::Aborted { reason, .. } if reason.starts_with(told)));
}

fn an_exchange_is_not_taken_for_another_operation(kind: Kind) {
    let results = on_all(kind, 2, |comm| {
        let result = if comm.rank() == Rank(0) { comm.exchange(&[1]).map(drop) } else { comm.barrier() };
        result.unwrap_err().to_string()
    });
    assert!(
        results.iter().any(|text| text.contains("called exchange while rank 1 called barrier")),
        "{results:?}"
    );
}

/// A notice that counts its calls.
fn counter() -> (Arc<AtomicUsize>, AbortNotice) {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    (calls, Box::new(move || _ = count.fetch_add(1, SeqCst)))
}

fn every_notice_of_every_rank_is_called_once_by_an_abort_and_at_once_after_it(kind: Kind) {
    let group = kind.group(9);
    let members = &group.members;
    let mut calls = Vec::new();
    for comm in members.iter().chain(members) {
        let (count, notify) = counter();
        comm.on_abort(notify);
        calls.push(count);
    }
    assert!(calls.iter().all(|count| count.load(SeqCst) == 0));
    members[4].abort_handle().abort("over");
    members[5].abort_handle().abort("and over");
    assert!(kind.settles(|| calls.iter().all(|count| count.load(SeqCst) == 1)));
    let are_dropped = || calls.iter().all(|count| Arc::strong_count(count) == 1);
    assert!(kind.settles(are_dropped), "what was called is dropped");

    let (late, notify) = counter();
    members[0].on_abort(notify);
    assert_eq!((late.load(SeqCst), Arc::strong_count(&late)), (1, 1));
    drop(group);
    assert_eq!(late.load(SeqCst), 1);
    assert!(calls.iter().all(|count| count.load(SeqCst) == 1));
}

fn a_membership_dropped_before_the_abort_takes_its_notices_with_it_and_tells_the_others(kind: Kind) {
    let mut group = kind.group(3);
    let (own, notify) = counter();
    let (others, other_notify) = counter();
    group.members[1].on_abort(notify);
    group.members[2].on_abort(other_notify);
    let handle = group.members[1].abort_handle();
    drop(group.members.remove(1));
    assert_eq!((own.load(SeqCst), Arc::strong_count(&own)), (0, 1), "its own end is no news to it");
    assert!(kind.settles(|| others.load(SeqCst) == 1), "a rank that leaves ends the group");
    handle.abort("again");
    assert_eq!((own.load(SeqCst), others.load(SeqCst)), (0, 1));
}

fn notices_that_race_with_aborts_are_called_exactly_once(kind: Kind) {
    for round in 0..400 {
        let (group, mut calls) = (kind.group(4), Vec::new());
        thread::scope(|scope| {
            for comm in &group.members {
                let handle = comm.abort_handle();
                scope.spawn(move || {
                    (0..round % 7 * 50).for_each(|_| std::hint::spin_loop());
                    handle.abort("a race");
                });
            }
            // Members are not shared: the registrations of all ranks come from this thread, amidst the aborts.
            for comm in group.members.iter().cycle().take(40) {
                let (count, notify) = counter();
                comm.on_abort(notify);
                calls.push(count);
            }
        });
        assert!(kind.settles(|| calls.iter().all(|count| Arc::strong_count(count) == 1)));
        assert!(calls.iter().all(|count| count.load(SeqCst) == 1), "round {round}");
    }
}

fn notices_of_ranks_that_leave_while_the_group_is_aborted_are_called_at_most_once(kind: Kind) {
    for _ in 0..200 {
        let mut group = kind.group(6);
        let (calls, notices): (Vec<_>, Vec<_>) = (0..6).map(|_| counter()).unzip();
        group.members.iter().zip(notices).for_each(|(comm, notify)| comm.on_abort(notify));
        let handle = group.members[0].abort_handle();
        thread::scope(|scope| {
            scope.spawn(move || handle.abort("over"));
            for comm in group.members.drain(..) {
                scope.spawn(move || drop(comm));
            }
        });
        for count in &calls {
            assert!(kind.settles(|| Arc::strong_count(count) == 1), "called or forgotten, it is dropped");
            assert!(count.load(SeqCst) <= 1);
        }
    }
}

fn a_notice_may_call_its_group_and_wait_for_a_thread_that_does(kind: Kind) {
    let group = kind.group(2);
    let (handle, (calls, inner)) = (group.members[0].abort_handle(), counter());
    let inner = Mutex::new(Some(inner));
    let mut other = kind.group(2);
    let other_member = Mutex::new(Some(other.members.remove(0)));
    group.members[0].on_abort(Box::new(move || {
        let again = handle.clone();
        thread::spawn(move || again.abort("from within")).join().unwrap();
        // A rank of another group ends with its notice here.
        let comm = other_member.lock().unwrap().take().unwrap();
        comm.on_abort(inner.lock().unwrap().take().unwrap());
        comm.abort_handle().abort("likewise");
    }));
    let (last, notify) = counter();
    group.members[1].on_abort(notify);
    group.members[1].abort_handle().abort("over");
    assert!(kind.settles(|| (calls.load(SeqCst), last.load(SeqCst)) == (1, 1)));
}

fn a_notice_that_panics_keeps_no_other_from_being_called(kind: Kind) {
    let mut group = kind.group(3);
    let (first, notify) = counter();
    group.members[0].on_abort(notify);
    group.members[1].on_abort(Box::new(|| panic!("injected")));
    let (last, notify) = counter();
    group.members[2].on_abort(notify);
    let (behind, notify) = counter();
    group.members[1].on_abort(notify);
    // As where a rank's thread unwinds.
    drop(group.members.remove(0));
    assert!(kind.settles(|| last.load(SeqCst) + behind.load(SeqCst) == 2), "rank 0 ended the group for them");
    assert_eq!(first.load(SeqCst), 0, "and knew of it");
}

fn an_abort_closes_the_shared_work_of_every_rank(kind: Kind) {
    let group = kind.group(3);
    let work: Vec<_> = group.members.iter().map(|comm| comm.shared_work()).collect();
    assert!(work.iter().all(|work| work.begin().is_some()));
    group.members[1].abort_handle().abort("over");
    assert!(kind.settles(|| work.iter().all(|work| work.begin().is_none())));
    assert!(group.members[0].shared_work().begin().is_none(), "asked for after the abort");
}

fn ranks_that_are_late_are_waited_for(kind: Kind) {
    // Long enough for the others to be asleep.
    let results = on_all(kind, 3, |comm| {
        let mut sums = Vec::new();
        for round in 0..6 {
            if comm.rank() == Rank(round % 3) {
                thread::sleep(Duration::from_millis(15));
            }
            let mut data = vec![f32::from(round); 10_000];
            comm.all_reduce_sum(&mut data).unwrap();
            sums.push(data[9_999]);
        }
        sums
    });
    assert_eq!(results, vec![vec![0.0, 3.0, 6.0, 9.0, 12.0, 15.0]; 3]);
}

fn ranks_see_the_abort_before_a_notice_is_called(kind: Kind) {
    let mut group = kind.group(2);
    let (mut late, comm) = (group.members.remove(1), group.members.remove(0));
    let (tell, told) = std::sync::mpsc::sync_channel::<()>(0);
    comm.on_abort(Box::new(move || tell.send(()).unwrap()));
    let handle = comm.abort_handle();
    let aborting = thread::spawn(move || handle.abort("over"));
    while late.barrier().is_ok() {}
    told.recv_timeout(Duration::from_secs(5)).unwrap();
    aborting.join().unwrap();
}
