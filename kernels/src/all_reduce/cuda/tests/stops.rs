//! Ranks whose peers never come, and ranks that are told to stop.
use super::*;

/// Runs all ranks but `missing`; returns how each stopped, and the outputs.
fn run_without(
    group: &Group,
    missing: usize,
    sum: Sum,
    polls_max: u32,
    settings: Settings,
) -> Vec<Option<Stopped>> {
    let len = group.buffers[0].len();
    let mut outs = poisoned(group.ranks(), len);
    for (rank, out) in outs.iter_mut().enumerate().filter(|(rank, _)| *rank != missing) {
        let peers = group.peers(rank).with_polls_max(polls_max);
        sum(&group.streams[rank], &peers, device_slice_mut(out)).unwrap();
    }
    // SAFETY: the group and `outs` are still there.
    unsafe { run_together(&group.streams, settings) }
        .unwrap_or_else(|fault| panic!("{fault} ({settings:?})"));
    for out in &outs {
        assert!(
            out.to_vec().iter().all(|x| x.is_nan()),
            "nothing was written, for the first barrier was not passed"
        );
    }
    group.areas.iter().map(|area| Stopped::read(&area.to_vec())).collect()
}

const SUMS: [Sum; 2] = [all_reduce_one_shot, all_reduce_two_shot];

/// More polls than a rank makes in any of these tests, and fewer than the emulator takes for a deadlock.
const POLLS: u32 = 200;

#[test]
fn emulator_a_peer_that_never_comes_ends_the_wait_and_is_named() {
    for (sum, settings) in SUMS.into_iter().flat_map(|sum| ways().map(move |way| (sum, way))) {
        let mut group = Group::new(3, 1000);
        group.fill(&numbers(1, 3, 1000));
        let stopped = run_without(&group, 1, sum, POLLS, settings);
        for rank in [0, 2] {
            let Stopped { why, barrier, peer, .. } = stopped[rank].unwrap();
            assert_eq!((why, barrier, peer), (Why::PeerLate, 1, 1), "rank {rank}, {settings:?}");
        }
        assert_eq!(stopped[1], None);
    }
}

#[test]
fn emulator_an_abort_word_ends_the_wait_of_its_rank_and_of_all_its_later_launches() {
    for (sum, settings) in SUMS.into_iter().flat_map(|sum| ways().map(move |way| (sum, way))) {
        let mut group = Group::new(4, 500);
        group.fill(&numbers(1, 4, 500));
        group.aborts.iter_mut().for_each(|abort| abort.write(&[1]));
        let stopped = run_without(&group, 3, sum, u32::MAX, settings);
        for rank in [0, 1, 2] {
            let Stopped { why, barrier, peer, .. } = stopped[rank].unwrap();
            assert_eq!((why, barrier, peer), (Why::Aborted, 1, 3), "rank {rank}, {settings:?}");
        }
        // The word is clear again, but the rank is not: with the missing peer back, nobody waits, nobody writes.
        group.aborts.iter_mut().for_each(|abort| abort.write(&[0]));
        assert_eq!(run_without(&group, 3, sum, u32::MAX, settings), stopped);
        // Once all areas are zeroed, the group works.
        group.areas.iter_mut().for_each(|area| area.write(&[0; AREA_WORDS]));
        let values = numbers(2, 4, 500);
        group.fill(&values);
        let mut outs = poisoned(4, 500);
        launch_sum(&group, sum, &mut outs);
        group.run(settings);
        assert_same_bits(&outs[3].to_vec(), &all_reduce_reference(&values), "after all was zeroed");
    }
}

#[test]
fn emulator_an_abort_that_comes_while_ranks_wait_ends_them() {
    for settings in ways() {
        let group = Group::new(3, 100);
        let mut outs = poisoned(2, 100);
        for (rank, out) in outs.iter_mut().enumerate() {
            let peers = group.peers(rank).with_polls_max(u32::MAX);
            all_reduce_one_shot(&group.streams[rank], &peers, device_slice_mut(out)).unwrap();
        }
        // The third rank never comes. Instead its stream runs a group whose other members' "areas" are the abort words:
        // their first word, where block 0 of rank 0 is told to have arrived, is where the kernel writes its barrier.
        let own = Memory::from_slice(&[0; AREA_WORDS]);
        let buffer = group.buffers[2].address();
        let addresses = [own.address(), group.aborts[0].address(), group.aborts[1].address()]
            .map(|area| PeerAddresses { buffer, area });
        // SAFETY: one block (four elements) touches only its own rows of areas; nobody reads more of the others'.
        let killer = unsafe { Peers::new(0, &addresses, 100, group.aborts[2].address(), MULTIPROCESSORS) };
        let killer = killer.unwrap().with_polls_max(POLLS);
        let mut out = Memory::poisoned(4);
        all_reduce_one_shot(&group.streams[2], &killer, device_slice_mut(&mut out)).unwrap();
        // SAFETY: all memory is still there.
        unsafe { run_together(&group.streams, settings) }
            .unwrap_or_else(|fault| panic!("{fault} ({settings:?})"));
        for rank in [0, 1] {
            let stopped = Stopped::read(&group.areas[rank].to_vec()).unwrap();
            assert_eq!((stopped.why, stopped.peer), (Why::Aborted, 2), "rank {rank}, {settings:?}");
        }
    }
}
