use std::{
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
