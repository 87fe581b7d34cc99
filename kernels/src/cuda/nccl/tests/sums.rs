//! Sums, gathers and broadcasts.

use super::*;

/// Several turns of the software library, and no whole number of them.
const LONG: usize = 600_001;

#[test]
fn software_driver_sums_of_two_and_three_ranks_are_those_in_rank_order() {
    for (devices, order) in each(&[("2", "lazy"), ("3", "eager"), ("3", "random:5")]) {
        let test = "software_driver_sums_of_two_and_three_ranks_are_those_in_rank_order";
        let order = [("CONSORT_SOFTWARE_DRIVER_ORDER", *order)];
        over_devices(module_path!(), test, devices, &order, |settings| {
            // A child takes the first of all items, whichever it was made for.
            let ranks = devices_of(settings);
            with_ranks(settings, ranks, |member| {
                let Member { device, communicator, .. } = member;
                for (round, len) in [1, 5, 4096, LONG].into_iter().enumerate() {
                    let values = part(communicator.rank(), round, len);
                    let (from, mut to) = buffers(device, &values, len);
                    // SAFETY: buffers that outlive the work, which `read` waits for; all ranks do the same.
                    unsafe { communicator.all_reduce(&**device, from.all(), to.all_mut()) }.unwrap();
                    assert_eq!(read(device, &to), sum(ranks, round, len), "{len} of f32");
                    let (from, mut to) = buffers(device, &rounded(&values), len);
                    // SAFETY: as above.
                    unsafe { communicator.all_reduce(&**device, from.all(), to.all_mut()) }.unwrap();
                    assert_eq!(read(device, &to), rounded_sum(ranks, round, len), "{len} of BF16");
                }
                communicator.finish(LIMIT).unwrap();
            });
        });
    }
}

#[test]
fn software_driver_sums_in_a_graph_replay_over_changed_numbers() {
    const REPLAYS: usize = 100;
    const LEN: usize = 3000;
    let test = "software_driver_sums_in_a_graph_replay_over_changed_numbers";
    let report = report_of(module_path!(), test, "3", &[], |settings| {
        with_ranks(settings, 3, |member| {
            let Member { device, communicator, .. } = member;
            let rank = communicator.rank();
            let (mut wide, mut sums) = buffers(device, &part(rank, 0, LEN), LEN);
            let (mut narrow, mut rounded_sums) = buffers(device, &rounded(&part(rank, 0, LEN)), LEN);
            let graph = device
                .capture(|launcher| {
                    // SAFETY: the buffers outlive the graph; all ranks record the same.
                    unsafe {
                        communicator.all_reduce(launcher, wide.all(), sums.all_mut())?;
                        communicator.all_reduce(launcher, narrow.all(), rounded_sums.all_mut())
                    }
                })
                .unwrap();
            assert_eq!(graph.launches(), 2);
            assert!(read(device, &sums).iter().all(|&x| x == 0.0), "recording runs nothing");
            for round in 0..REPLAYS {
                let values = part(rank, round, LEN);
                device.upload(&values, wide.all_mut()).unwrap();
                device.upload(&rounded(&values), narrow.all_mut()).unwrap();
                device.launch_graph(&graph).unwrap();
                assert_eq!(read(device, &sums), sum(3, round, LEN), "replay {round}");
                assert_eq!(read(device, &rounded_sums), rounded_sum(3, round, LEN), "replay {round}");
            }
            drop(graph);
            communicator.finish(LIMIT).unwrap();
        });
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:#?}");
    for rank in 0..3 {
        assert_eq!(report.calls[&format!("ncclAllReduce@{rank}")], 2 * REPLAYS as u64, "rank {rank}");
    }
}

#[test]
fn software_driver_parts_of_different_lengths_are_gathered_by_broadcasts_at_once() {
    const LENGTHS: [usize; 3] = [700, 0, 1300];
    let test = "software_driver_parts_of_different_lengths_are_gathered_by_broadcasts_at_once";
    over_devices(module_path!(), test, "3", &[], |settings| {
        with_ranks(settings, 3, |member| {
            let Member { device, communicator, .. } = member;
            let rank = communicator.rank();
            let (from, mut to) = buffers(device, &part(rank, 0, 500), 1500);
            // SAFETY: buffers that outlive the work; all ranks do the same.
            unsafe { communicator.all_gather(&**device, from.all(), to.all_mut()) }.unwrap();
            let all: Vec<f32> = (0..3).flat_map(|rank| part(rank, 0, 500)).collect();
            assert_eq!(read(device, &to), all);
            let (from, mut to) = buffers(device, &part(rank, 1, 1300), 2000);
            communicator
                .grouped(&**device, |group| {
                    let mut start = 0;
                    for (root, len) in LENGTHS.into_iter().enumerate() {
                        // SAFETY: as above.
                        unsafe {
                            group.broadcast(root, from.slice(0..len), to.slice_mut(start..start + len))?
                        };
                        start += len;
                    }
                    Ok(())
                })
                .unwrap();
            let expected: Vec<f32> =
                (0..3).flat_map(|rank| part(rank, 1, 1300)[..LENGTHS[rank]].to_vec()).collect();
            assert_eq!(read(device, &to), expected);
        });
    });
}

#[test]
fn software_driver_what_cannot_be_asked_for_is_refused_before_nccl_sees_it() {
    let test = "software_driver_what_cannot_be_asked_for_is_refused_before_nccl_sees_it";
    over_devices(module_path!(), test, "2", &[], |settings| {
        let library = Nccl::open(settings).unwrap();
        let id = library.unique_id().unwrap();
        let (device, other) = (open(settings, 0), open(settings, 1));
        let nobody = NcclCommunicator::begin(&library, &device, &id, 2, 2).unwrap_err();
        assert_eq!(nobody.to_string(), "rank 2 of 2: there is no such rank");
        let communicator = NcclCommunicator::begin(&library, &device, &id, 0, 1).unwrap();
        let (from, mut to) = buffers(&device, &[1.0f32; 8], 8);
        // SAFETY (all of them): nothing that is refused is enqueued, and the last sum is waited for.
        let early = unsafe { communicator.all_reduce(&*device, from.all(), to.all_mut()) };
        assert!(early.unwrap_err().to_string().contains("wait_until_ready comes first"));
        communicator.wait_until_ready(LIMIT, &Vec::new).unwrap();
        let elsewhere = unsafe { communicator.all_reduce(&*other, from.all(), to.all_mut()) };
        assert_eq!(
            elsewhere.unwrap_err().to_string(),
            "rank 0 of 1: its communicator is of cuda:0, the stream of cuda:1"
        );
        let short = unsafe { communicator.all_reduce(&*device, from.all(), to.slice_mut(0..7)) };
        assert_eq!(short.unwrap_err().to_string(), "ncclAllReduce: to holds 7 elements, 8 expected");
        let root = unsafe { communicator.broadcast(&*device, 1, from.all(), to.all_mut()) };
        assert_eq!(root.unwrap_err().to_string(), "ncclBroadcast: root 1 is outside 0..1");
        unsafe { communicator.all_reduce(&*device, from.all(), to.all_mut()) }.unwrap();
        assert_eq!(read(&device, &to), [1.0; 8]);
    });
}

/// All items, for a process each; a child, whose environment is of one of them, takes one turn.
fn each<T>(items: &[T]) -> &[T] {
    let in_child = std::env::var_os("CONSORT_SOFTWARE_DRIVER_CHILD").is_some();
    if in_child { &items[..1] } else { items }
}

fn devices_of(settings: &Settings) -> usize {
    crate::cuda::device::devices(settings).unwrap().len()
}
