//! Ranks in processes of their own. Rank 0's process starts the others', and tells them what a control plane would.

use std::{
    env,
    io::{BufRead, Write},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
};

use super::*;
use crate::{KernelError, cuda::device::CudaError};

const RANK: &str = "CONSORT_TEST_RANK";
const ID: &str = "CONSORT_TEST_ID";
const LEN: usize = 5000;

/// This test once more, as another rank.
fn start(module: &str, test: &str, rank: usize, id: &UniqueId) -> Child {
    let module = module.split_once("::").map_or(module, |(_, module)| module);
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([&format!("{module}::{test}"), "--exact", "--nocapture", "--test-threads=1"]);
    command.env(RANK, rank.to_string()).env(ID, hex(id)).env_remove("CONSORT_SOFTWARE_DRIVER_REPORT");
    command.stdin(Stdio::piped()).spawn().expect("the test program starts again")
}

fn hex(id: &UniqueId) -> String {
    id.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn of_hex(text: &str) -> UniqueId {
    let mut bytes = [0; 128];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("an id in hexadecimal");
    }
    UniqueId::of_bytes(bytes)
}

fn join(
    settings: &Settings,
    device: &Arc<CudaDevice>,
    id: &UniqueId,
    (rank, ranks): (usize, usize),
) -> Arc<NcclCommunicator> {
    let library = Nccl::open(settings).unwrap();
    let communicator = NcclCommunicator::begin(&library, device, id, rank, ranks).unwrap();
    communicator.wait_until_ready(LIMIT, &Vec::new).unwrap();
    communicator
}

/// Which rank this process is, and the id, if it was told; rank 0 makes it.
fn told(settings: &Settings) -> (usize, UniqueId) {
    match (env::var(RANK), env::var(ID)) {
        (Ok(rank), Ok(id)) => (rank.parse().unwrap(), of_hex(&id)),
        _ => (0, Nccl::open(settings).unwrap().unique_id().unwrap()),
    }
}

#[test]
fn software_driver_three_processes_sum_in_rank_order_and_in_a_replayed_graph() {
    let test = "software_driver_three_processes_sum_in_rank_order_and_in_a_replayed_graph";
    over_devices(module_path!(), test, "3", &[], |settings| {
        let device_zero = open(settings, 0);
        let (rank, id) = told(settings);
        let others: Vec<Child> = if rank == 0 {
            (1..3).map(|rank| start(module_path!(), test, rank, &id)).collect()
        } else {
            Vec::new()
        };
        let device = if rank == 0 { device_zero } else { open(settings, rank) };
        let communicator = join(settings, &device, &id, (rank, 3));
        let (mut wide, mut sums) = buffers(&device, &part(rank, 0, LEN), LEN);
        let (mut narrow, mut rounded_sums) = buffers(&device, &rounded(&part(rank, 0, LEN)), LEN);
        // SAFETY (both): the buffers outlive the graph and what is enqueued; all ranks do the same.
        let mut both = |launcher: &dyn crate::cuda::Launcher| unsafe {
            communicator.all_reduce(launcher, wide.all(), sums.all_mut())?;
            communicator.all_reduce(launcher, narrow.all(), rounded_sums.all_mut())
        };
        both(&*device).unwrap();
        let graph = device.capture(|launcher| both(launcher)).unwrap();
        assert_eq!(read(&device, &sums), sum(3, 0, LEN));
        assert_eq!(read(&device, &rounded_sums), rounded_sum(3, 0, LEN));
        for round in 0..100 {
            let values = part(rank, round, LEN);
            device.upload(&values, wide.all_mut()).unwrap();
            device.upload(&rounded(&values), narrow.all_mut()).unwrap();
            device.launch_graph(&graph).unwrap();
            assert_eq!(read(&device, &sums), sum(3, round, LEN), "rank {rank}, replay {round}");
            assert_eq!(
                read(&device, &rounded_sums),
                rounded_sum(3, round, LEN),
                "rank {rank}, replay {round}"
            );
        }
        drop(graph);
        communicator.finish(LIMIT).unwrap();
        for mut other in others {
            assert!(other.wait().unwrap().success());
        }
    });
}

/// Lines that rank 0 writes: a reason to abort at once, and ids.
fn listen(communicator: &Arc<NcclCommunicator>) -> Receiver<UniqueId> {
    let (send, receive) = mpsc::channel();
    let communicator = communicator.clone();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            match line.split_once(' ') {
                Some(("abort", reason)) => communicator.abort(reason),
                Some(("id", id)) => drop(send.send(of_hex(id))),
                _ => panic!("{line}"),
            }
        }
    });
    receive
}

/// Sums until that fails; how often it did not.
fn sum_until_it_fails(device: &Arc<CudaDevice>, communicator: &NcclCommunicator) -> (usize, NcclError) {
    let rank = communicator.rank();
    for round in 0.. {
        let (from, mut to) = buffers(device, &part(rank, round, LEN), LEN);
        // SAFETY: buffers that outlive the work, which ends when the communicator does.
        match unsafe { communicator.all_reduce(&**device, from.all(), to.all_mut()) } {
            Ok(()) => {}
            Err(KernelError::Nccl(error)) => return (round, *error),
            Err(other) => panic!("{other}"),
        }
        while let Err(error) = device.synchronize("sum", Duration::from_millis(20)) {
            assert!(matches!(error, CudaError::Timeout { .. }), "{error}");
        }
        if let Err(error) = communicator.check() {
            return (round, error);
        }
        assert_eq!(read(device, &to), sum(3, round, LEN), "rank {rank}, round {round}");
    }
    unreachable!("rounds do not end")
}

#[test]
fn software_driver_survivors_of_a_rank_killed_in_a_sum_abort_and_meet_anew() {
    let test = "software_driver_survivors_of_a_rank_killed_in_a_sum_abort_and_meet_anew";
    let fault = [("CONSORT_SOFTWARE_DRIVER_FAULTS", "ncclAllReduce@1:5=die")];
    over_devices(module_path!(), test, "3", &fault, |settings| {
        let device_zero = open(settings, 0);
        let (rank, id) = told(settings);
        let mut others: Vec<Child> = if rank == 0 {
            (1..3).map(|rank| start(module_path!(), test, rank, &id)).collect()
        } else {
            Vec::new()
        };
        let device = if rank == 0 { device_zero } else { open(settings, rank) };
        let communicator = join(settings, &device, &id, (rank, 3));
        let reason = "rank 1 ended by signal 9";
        let next = if rank == 0 {
            let (mut third, mut second) = (others.pop().unwrap(), others.pop().unwrap());
            let own = communicator.clone();
            let watch = thread::spawn(move || {
                assert_eq!(second.wait().unwrap().signal(), Some(9));
                own.abort(reason);
                writeln!(third.stdin.as_mut().unwrap(), "abort {reason}").unwrap();
                third
            });
            let (rounds, error) = sum_until_it_fails(&device, &communicator);
            // The abort may come before a survivor has looked whether its fourth sum counts.
            assert!((3..=4).contains(&rounds), "{rounds}");
            assert_eq!(error, ended(0, reason));
            let mut third = watch.join().unwrap();
            let id = Nccl::open(settings).unwrap().unique_id().unwrap();
            writeln!(third.stdin.as_mut().unwrap(), "id {}", hex(&id)).unwrap();
            others.push(third);
            id
        } else {
            let ids = listen(&communicator);
            let (rounds, error) = sum_until_it_fails(&device, &communicator);
            assert!((3..=4).contains(&rounds), "{rounds}");
            assert_eq!(error, ended(rank, reason));
            ids.recv().unwrap()
        };
        // The same devices, in the next epoch's group.
        let place = (rank.min(1), 2);
        let communicator = join(settings, &device, &next, place);
        let (from, mut to) = buffers(&device, &part(place.0, 9, LEN), LEN);
        // SAFETY: buffers that outlive the work, which is waited for.
        unsafe { communicator.all_gather(&*device, from.slice(0..100), to.slice_mut(0..200)) }.unwrap();
        let both: Vec<f32> = (0..2).flat_map(|rank| part(rank, 9, LEN)[..100].to_vec()).collect();
        assert_eq!(read(&device, &to)[..200], both);
        communicator.finish(LIMIT).unwrap();
        for mut other in others {
            assert!(other.wait().unwrap().success());
        }
    });
}

fn ended(rank: usize, reason: &str) -> NcclError {
    NcclError::Ended { rank, ranks: 3, reason: reason.to_owned() }
}
