use std::{
    fs::File,
    io::{PipeReader, Read, Write},
    thread,
};

use super::*;
use crate::collective::{
    Collective, CollectiveError, LocalGroup, SharedMemory, SharedMemoryGroup, shared_memory::Seat,
};

fn attach(seat: &Seat) -> SharedMemory {
    let member = SharedMemory::attach(seat.descriptor().try_clone_to_owned().unwrap(), seat.rank()).unwrap();
    let mailbox = seat.mailbox().into_iter().map(|one| one.try_clone_to_owned().unwrap());
    member.with_mailbox(mailbox.collect()).unwrap()
}

/// Runs `f` on every rank of a group with mailboxes, and returns the results in rank order.
fn on_all<R: Send>(ranks: usize, f: impl Fn(&mut SharedMemory) -> R + Sync) -> Vec<R> {
    let seats = SharedMemoryGroup::create_with_mailboxes(ranks).unwrap();
    let f = &f;
    thread::scope(|scope| {
        let threads: Vec<_> = seats
            .iter()
            .map(|seat| {
                let mut member = attach(seat);
                scope.spawn(move || {
                    let result = f(&mut member);
                    // Nobody leaves before all are through.
                    let _ = member.barrier();
                    result
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A file without a name that holds this.
fn file(text: &str) -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::memfd_create("test", flags).unwrap());
    file.write_all(text.as_bytes()).unwrap();
    file.into()
}

fn text(descriptor: &OwnedFd) -> String {
    let mut bytes = [0; 100];
    let got = rustix::io::pread(descriptor, &mut bytes, 0).unwrap();
    String::from_utf8(bytes[..got].to_vec()).unwrap()
}

#[test]
fn everybody_gets_what_everybody_brings_round_after_round() {
    for ranks in [1, 2, 3, MAILBOX_RANKS_MAX] {
        let got = on_all(ranks, |member| {
            for round in 0..20 {
                let rank = Collective::rank(member).index();
                let brought = |rank: usize| (rank + round) % (EXCHANGED_DESCRIPTORS_MAX + 1);
                let files: Vec<_> =
                    (0..brought(rank)).map(|at| file(&format!("{at} of {rank} in {round}"))).collect();
                let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                let all = member.exchange_descriptors(&files).unwrap();
                assert_eq!(all.len(), ranks);
                for (peer, descriptors) in all.iter().enumerate() {
                    let expected: Vec<_> = match peer == rank {
                        true => Vec::new(),
                        false => (0..brought(peer)).map(|at| format!("{at} of {peer} in {round}")).collect(),
                    };
                    assert_eq!(descriptors.iter().map(text).collect::<Vec<_>>(), expected);
                }
                for descriptor in all.iter().flatten() {
                    let flags = rustix::io::fcntl_getfd(descriptor).unwrap();
                    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
                }
            }
            true
        });
        assert_eq!(got, vec![true; ranks]);
    }
}

/// A pipe whose writing end tells, by the reader's end of file, that nobody holds it any more.
fn canary() -> (PipeReader, OwnedFd) {
    let (read, write) = std::io::pipe().unwrap();
    (read, write.into())
}

fn is_closed_everywhere(mut read: PipeReader) -> bool {
    // Threads of other tests may be starting programs, which hold everything for a moment.
    rustix::io::ioctl_fionbio(&read, true).unwrap();
    (0..500).any(|_| {
        thread::sleep(std::time::Duration::from_millis(10));
        matches!(read.read(&mut [0]), Ok(0))
    })
}

#[test]
fn a_rank_that_brings_none_where_others_do_is_named_and_nothing_stays_open() {
    let (read, write) = canary();
    let outcomes = on_all(3, |member| {
        if Collective::rank(member) == Rank(1) {
            return member.barrier().map(|()| Vec::new());
        }
        member.exchange_descriptors(&[write.as_fd()])
    });
    for rank in [0, 2] {
        match &outcomes[rank] {
            Err(CollectiveError::Descriptors { problem, .. }) => {
                assert_eq!(problem, "nothing has come from rank 1");
            }
            // Who sees it first ends the group.
            Err(CollectiveError::Aborted { reason, .. }) => {
                assert!(reason.contains("nothing has come from rank 1"), "{reason}");
            }
            other => panic!("rank {rank}: {other:?}"),
        }
    }
    drop((outcomes, write));
    assert!(is_closed_everywhere(read));
}

#[test]
fn an_abort_frees_those_who_wait_for_a_rank_that_does_not_come_and_nothing_stays_open() {
    let (read, write) = canary();
    let seats = SharedMemoryGroup::create_with_mailboxes(3).unwrap();
    let members: Vec<_> = seats.iter().take(2).map(attach).collect();
    let waiting: Vec<_> = members
        .into_iter()
        .map(|mut member| {
            let write = write.try_clone().unwrap();
            thread::spawn(move || {
                let outcome = member.exchange_descriptors(&[write.as_fd()]);
                assert!(member.barrier().is_err(), "the group has ended");
                (outcome, member)
            })
        })
        .collect();
    thread::sleep(std::time::Duration::from_millis(50));
    seats[2].abort_handle().abort("rank 2 was killed");
    for rank in waiting {
        let (outcome, member) = rank.join().unwrap();
        let reason = "rank 2 was killed".into();
        assert_eq!(
            outcome.unwrap_err(),
            CollectiveError::Aborted { rank: Collective::rank(&member), reason }
        );
    }
    drop((seats, write));
    assert!(is_closed_everywhere(read));
}

#[test]
fn too_many_descriptors_or_ranks_are_refused_and_so_is_who_has_no_mailbox() {
    let outcomes = on_all(1, |member| {
        let file = file("one");
        member.exchange_descriptors(&[file.as_fd(); EXCHANGED_DESCRIPTORS_MAX + 1])
    });
    let error = outcomes[0].as_ref().unwrap_err().to_string();
    assert_eq!(error, "rank 0 could not exchange descriptors: 5 are more than 4");
    let error = SharedMemoryGroup::create_with_mailboxes(MAILBOX_RANKS_MAX + 1).err().unwrap().to_string();
    assert!(error.starts_with("17 ranks cannot send descriptors"), "{error}");
    let mut seats = SharedMemoryGroup::create(1).unwrap();
    assert!(seats[0].mailbox().is_empty());
    let mut member = attach(&seats[0]);
    let error = member.exchange_descriptors(&[]).unwrap_err().to_string();
    assert_eq!(error, "rank 0 could not exchange descriptors: its group was made without mailboxes");
    assert!(member.barrier().is_err(), "the group has ended");
    let error = seats[0].exchange_descriptors(&[]).unwrap_err().to_string();
    assert!(error.ends_with("its seat here takes no part in exchange_descriptors"), "{error}");
    let mut local = LocalGroup::new(1);
    let error = local[0].exchange_descriptors(&[]).unwrap_err().to_string();
    assert_eq!(
        error,
        "rank 0 could not exchange descriptors: its group has no way for them (0 were brought)"
    );
    assert!(local[0].barrier().is_err(), "the group has ended");
}

#[test]
fn descriptors_that_are_no_mailbox_are_refused() {
    let seats = SharedMemoryGroup::create_with_mailboxes(2).unwrap();
    let own =
        || seats[0].mailbox().into_iter().map(|one| one.try_clone_to_owned().unwrap()).collect::<Vec<_>>();
    let problem = |descriptors| Mailbox::new(Rank(0), 2, descriptors).err().unwrap().to_string();
    assert!(
        problem(own()[..1].iter().map(|one| one.try_clone().unwrap()).collect())
            .contains("1 descriptors for 2")
    );
    let mut with_file = own();
    with_file[1] = file("none");
    assert!(problem(with_file).contains("no socket"));
    let mut with_stream = own();
    let (stream, _other) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    with_stream[0] = stream;
    assert!(problem(with_stream).contains("a socket of another kind"));
    Mailbox::new(Rank(0), 2, own()).unwrap();
}

#[test]
fn messages_that_nobody_should_have_sent_are_told_and_closed() {
    let mailbox = |pairs: &[Pair]| {
        let own = descriptors(pairs, Rank(0)).into_iter().map(|one| one.try_clone_to_owned().unwrap());
        Mailbox::new(Rank(0), 3, own.collect()).unwrap()
    };
    let of = |rank: u8, count: u8| vec![rank, 0, count, !count];
    for (messages, expected) in [
        (vec![of(1, 1), of(1, 1)], "a message of rank 1 has come that should not"),
        (vec![of(0, 1)], "a message of rank 0 has come that should not"),
        (vec![of(3, 1)], "a message of rank 3 has come that should not"),
        (vec![vec![1, 0, 1]], "a message of another kind has come"),
        (vec![[of(1, 1), vec![0]].concat()], "a message of another kind has come"),
        (vec![vec![1, 0, 1, 1]], "a message of another kind has come"),
        (vec![of(2, 1)], "nothing has come from rank 1"),
        (vec![of(1, 2)], "1 of 2 descriptors have come from rank 1"),
    ] {
        let (read, write) = canary();
        let pairs = pairs(3).unwrap();
        let mailbox = mailbox(&pairs);
        for message in &messages {
            put(&pairs[0].slot, message, &[write.as_fd()]).unwrap();
        }
        let error = mailbox.take().unwrap_err();
        assert!(error.starts_with(expected), "{error}");
        drop(write);
        assert!(is_closed_everywhere(read), "{expected}");
        assert!(mailbox.take().is_err(), "nothing is left in it");
    }
}

#[test]
fn a_full_mailbox_is_an_error_of_whoever_sends_and_no_wait() {
    let pairs = pairs(2).unwrap();
    let sender = {
        let own = descriptors(&pairs, Rank(1)).into_iter().map(|one| one.try_clone_to_owned().unwrap());
        Mailbox::new(Rank(1), 2, own.collect()).unwrap()
    };
    let full = (0..100_000).find_map(|sent| sender.send(&[]).err().map(|error| (sent, error)));
    let (sent, error) = full.expect("no socket takes so many");
    assert!(sent >= 2 * MAILBOX_RANKS_MAX, "there is room for two messages of each, but {sent}");
    assert_eq!(error, "the mailbox of rank 0 is full");
}
