use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use super::*;

/// Runs `f` on every rank of a group and returns the results in rank order.
fn on_all<R: Send>(size: usize, f: impl Fn(&mut Local) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> =
            LocalGroup::new(size).into_iter().map(|mut rank| scope.spawn(move || f(&mut rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers whose sum depends on the order of addition.
fn part(rank: usize, len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| ((i * 37 + rank * 1001) % 8191) as f32 * (10.0f32).powi(rank as i32 % 5 - 2) - 3.0)
        .collect()
}

#[test]
fn sums_are_in_rank_order_and_the_same_bits_on_every_rank_at_every_size() {
    for size in 1..=8 {
        for len in [0, 1, 7, 576, 8192, 8193, 50_000, 65_537, 200_000] {
            let mut expected = part(0, len);
            for rank in 1..size {
                expected.iter_mut().zip(part(rank, len)).for_each(|(sum, x)| *sum += x);
            }
            let results = on_all(size, |comm| {
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

#[test]
fn gathers_keep_uneven_parts_in_rank_order_and_broadcasts_reach_everyone() {
    for size in 1..=5 {
        let results = on_all(size, |comm| {
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

#[test]
fn an_abort_frees_ranks_that_wait_for_one_who_never_comes() {
    let begin = Instant::now();
    let results = on_all(3, |comm| {
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

#[test]
fn an_aborted_group_refuses_every_later_call() {
    let results = on_all(2, |comm| {
        comm.barrier().unwrap();
        comm.abort_handle().abort("over");
        comm.barrier().is_err() && comm.all_gather(&[1.0], &mut [0.0; 2]).is_err()
    });
    assert_eq!(results, [true, true]);
}

#[test]
fn long_gathers_and_broadcasts_go_through_in_pieces() {
    let results = on_all(3, |comm| {
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

#[test]
fn a_rank_that_ends_frees_those_that_wait_for_it() {
    let results = on_all(3, |comm| {
        if comm.rank() == Rank(2) {
            // As on unwinding from a panic: the rank is dropped without another word.
            drop(std::mem::replace(comm, LocalGroup::new(1).remove(0)));
            return None;
        }
        Some(comm.all_reduce_sum(&mut [1.0; 4]).unwrap_err().to_string())
    });
    assert_eq!(results[0].as_deref(), Some("collective aborted on rank 0: rank 2 left the group"));
}

#[test]
fn what_a_rank_does_after_an_abort_never_reaches_an_exchange_that_was_met() {
    for _ in 0..300 {
        let results = on_all(2, |comm| {
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

#[test]
fn ranks_that_call_different_operations_get_an_error() {
    let results = on_all(2, |comm| {
        let result = if comm.rank() == Rank(0) { comm.all_reduce_sum(&mut [1.0; 4]) } else { comm.barrier() };
        result.unwrap_err().to_string()
    });
    assert!(results[0].contains("called all_reduce_sum while rank 1 called barrier"), "{results:?}");
}

#[test]
fn ranks_that_disagree_about_sizes_all_get_an_error_instead_of_hanging() {
    let results = on_all(3, |comm| {
        let len = if comm.rank() == Rank(2) { 5 } else { 4 };
        let first = comm.all_reduce_sum(&mut vec![1.0; len]);
        first.is_err() || comm.barrier().is_err()
    });
    assert_eq!(results, [true, true, true]);
}

#[test]
fn exchanges_bring_every_rank_everybodys_bytes_at_many_sizes() {
    for size in [1, 2, 3, 8, 33] {
        let results = on_all(size, |comm| {
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

#[test]
fn an_exchange_of_too_much_is_refused_and_frees_those_that_wait_for_it() {
    let results = on_all(3, |comm| {
        let len = if comm.rank() == Rank(1) { EXCHANGE_BYTES_MAX + 1 } else { 4 };
        comm.exchange(&vec![0; len]).unwrap_err()
    });
    assert_eq!(results[1], CollectiveError::TooLong { rank: Rank(1), bytes: EXCHANGE_BYTES_MAX + 1 });
    let told = "rank 1 called exchange with 65537 bytes";
    assert!(matches!(&results[2], CollectiveError::Aborted { reason, .. } if reason.starts_with(told)));
}

#[test]
fn an_exchange_is_not_taken_for_another_operation() {
    let results = on_all(2, |comm| {
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

#[test]
fn every_notice_of_every_rank_is_called_once_by_an_abort_and_at_once_after_it() {
    let group = LocalGroup::new(9);
    let mut calls = Vec::new();
    for comm in group.iter().chain(&group) {
        let (count, notify) = counter();
        comm.on_abort(notify);
        calls.push(count);
    }
    assert!(calls.iter().all(|count| count.load(SeqCst) == 0));
    group[4].abort_handle().abort("over");
    group[5].abort_handle().abort("and over");
    assert!(calls.iter().all(|count| count.load(SeqCst) == 1));
    assert!(calls.iter().all(|count| Arc::strong_count(count) == 1), "what was called is dropped");

    let (late, notify) = counter();
    group[0].on_abort(notify);
    assert_eq!((late.load(SeqCst), Arc::strong_count(&late)), (1, 1));
    drop(group);
    assert_eq!(late.load(SeqCst), 1);
}

#[test]
fn a_membership_dropped_before_the_abort_takes_its_notices_with_it_and_tells_the_others() {
    let mut group = LocalGroup::new(3);
    let (own, notify) = counter();
    let (others, other_notify) = counter();
    group[1].on_abort(notify);
    group[2].on_abort(other_notify);
    let handle = group[1].abort_handle();
    drop(group.remove(1));
    assert_eq!((own.load(SeqCst), Arc::strong_count(&own)), (0, 1), "its own end is no news to it");
    assert_eq!(others.load(SeqCst), 1, "a rank that leaves ends the group");
    handle.abort("again");
    assert_eq!((own.load(SeqCst), others.load(SeqCst)), (0, 1));
}

#[test]
fn notices_that_race_with_aborts_are_called_exactly_once() {
    for round in 0..400 {
        let (group, calls) = (LocalGroup::new(4), Mutex::new(Vec::new()));
        thread::scope(|scope| {
            for comm in &group {
                let handle = comm.abort_handle();
                scope.spawn(move || {
                    (0..round % 7 * 50).for_each(|_| std::hint::spin_loop());
                    handle.abort("a race");
                });
            }
            // `Local` is not shared: the registrations of all ranks come from this thread, amidst the aborts.
            for comm in group.iter().cycle().take(40) {
                let (count, notify) = counter();
                comm.on_abort(notify);
                calls.lock().unwrap().push(count);
            }
        });
        assert!(calls.lock().unwrap().iter().all(|count| count.load(SeqCst) == 1), "round {round}");
    }
}

#[test]
fn notices_of_ranks_that_leave_while_the_group_is_aborted_are_called_at_most_once() {
    for _ in 0..200 {
        let group = LocalGroup::new(6);
        let (calls, notices): (Vec<_>, Vec<_>) = (0..6).map(|_| counter()).unzip();
        group.iter().zip(notices).for_each(|(comm, notify)| comm.on_abort(notify));
        let handle = group[0].abort_handle();
        thread::scope(|scope| {
            scope.spawn(move || handle.abort("over"));
            for comm in group {
                scope.spawn(move || drop(comm));
            }
        });
        for count in &calls {
            assert!(count.load(SeqCst) <= 1);
            assert_eq!(Arc::strong_count(count), 1, "called or forgotten, it is dropped");
        }
    }
}

#[test]
fn a_notice_may_call_its_group_and_wait_for_a_thread_that_does() {
    let group = LocalGroup::new(2);
    let (handle, (calls, inner)) = (group[0].abort_handle(), counter());
    let inner = Mutex::new(Some(inner));
    let mut other = LocalGroup::new(2);
    let other = Mutex::new(Some(other.remove(0)));
    group[0].on_abort(Box::new(move || {
        let again = handle.clone();
        thread::spawn(move || again.abort("from within")).join().unwrap();
        // A rank of another group ends with its notice here.
        let comm = other.lock().unwrap().take().unwrap();
        comm.on_abort(inner.lock().unwrap().take().unwrap());
        comm.abort_handle().abort("likewise");
    }));
    let (last, notify) = counter();
    group[1].on_abort(notify);
    group[1].abort_handle().abort("over");
    assert_eq!((calls.load(SeqCst), last.load(SeqCst)), (1, 1));
}

#[test]
fn a_notice_that_panics_keeps_no_other_from_being_called() {
    let group = LocalGroup::new(3);
    let (first, notify) = counter();
    group[0].on_abort(notify);
    group[1].on_abort(Box::new(|| panic!("injected")));
    let (last, notify) = counter();
    group[2].on_abort(notify);
    // As where a rank's thread unwinds.
    drop(group);
    assert_eq!(
        first.load(SeqCst) + last.load(SeqCst),
        1,
        "rank 0 left first, and ended the group for rank 2"
    );
}

#[test]
fn ranks_see_the_abort_before_a_notice_is_called() {
    let mut group = LocalGroup::new(2);
    let (mut late, comm) = (group.remove(1), group.remove(0));
    let (tell, told) = std::sync::mpsc::sync_channel::<()>(0);
    comm.on_abort(Box::new(move || tell.send(()).unwrap()));
    let handle = comm.abort_handle();
    let aborting = thread::spawn(move || handle.abort("over"));
    while late.barrier().is_ok() {}
    told.recv_timeout(Duration::from_secs(5)).unwrap();
    aborting.join().unwrap();
}
