//! How communicators end that do not end in order, and what is left then.

use std::{collections::BTreeSet, fs, sync::Mutex, time::Instant};

use super::*;
use crate::{
    KernelError,
    cuda::{Launcher, device::CudaError},
};

const FAULTS: &str = "CONSORT_SOFTWARE_DRIVER_FAULTS";
const LEN: usize = 2000;

/// Sums once, and waits for it as a rank does that must not wait for ever. Whoever has an error tells it before its
/// memory is given back, which waits for the sum to end.
fn sum_once(member: &Member, round: usize, tell: impl Fn(&NcclError)) -> Result<Vec<f32>, NcclError> {
    let Member { device, communicator, .. } = member;
    let (from, mut to) = buffers(device, &part(communicator.rank(), round, LEN), LEN);
    // SAFETY: buffers that outlive the work, which ends when the communicator does.
    match unsafe { communicator.all_reduce(&**device, from.all(), to.all_mut()) } {
        Ok(()) => {}
        Err(KernelError::Nccl(error)) => return Err(*error).inspect_err(tell),
        Err(other) => panic!("{other}"),
    }
    loop {
        match device.synchronize("sum", Duration::from_millis(20)) {
            Ok(()) => break,
            Err(CudaError::Timeout { .. }) => communicator.check().inspect_err(&tell)?,
            Err(other) => panic!("{other}"),
        }
    }
    communicator.check().inspect_err(&tell)?;
    Ok(read(device, &to))
}

/// A group of a process, as its control plane sees it.
#[derive(Default)]
struct Plane {
    communicators: Mutex<Vec<Arc<NcclCommunicator>>>,
}

impl Plane {
    fn enters(&self, member: &Member) {
        self.communicators.lock().unwrap().push(member.communicator.clone());
        member.together.wait();
    }

    fn abort(&self, reason: &str) {
        for communicator in self.communicators.lock().unwrap().iter() {
            communicator.abort(reason);
        }
    }
}

#[test]
fn software_driver_a_rank_that_hangs_or_never_comes_is_named_at_the_deadline() {
    let test = "software_driver_a_rank_that_hangs_or_never_comes_is_named_at_the_deadline";
    let hang = [(FAULTS, "ncclCommInitRankConfig@1:1=hang")];
    over_devices(module_path!(), test, "3", &hang, |settings| {
        let library = Nccl::open(settings).unwrap();
        let limit = Duration::from_millis(300);
        // Whoever has come, and who has not.
        for comes in [[true, true, true], [true, true, false]] {
            let (id, here) = (library.unique_id().unwrap(), Mutex::new(BTreeSet::new()));
            let together = Barrier::new(3);
            let missing = || (0..3).filter(|rank| !here.lock().unwrap().contains(rank)).collect::<Vec<_>>();
            thread::scope(|scope| {
                for rank in 0..3 {
                    let (library, id, here, together, missing) = (&library, &id, &here, &together, &missing);
                    scope.spawn(move || {
                        let device = open(settings, rank);
                        if !comes[rank] {
                            together.wait();
                            return;
                        }
                        let communicator = NcclCommunicator::begin(library, &device, id, rank, 3).unwrap();
                        here.lock().unwrap().insert(rank);
                        together.wait();
                        let started = Instant::now();
                        let error = communicator.wait_until_ready(limit, missing).unwrap_err();
                        assert!((300..20_000).contains(&started.elapsed().as_millis()));
                        let who = if comes[2] { "one hangs" } else { "rank 2 has not come" };
                        assert!(error.to_string().contains(who), "{error}");
                        assert!(matches!(error, NcclError::JoinTimeout { .. }), "{error:?}");
                        communicator.abort("the deadline has passed");
                        // What it would have been for still works.
                        let (from, _) = buffers(&device, &[1.0f32; 4], 4);
                        assert_eq!(read(&device, &from), [1.0; 4]);
                    });
                }
            });
        }
        // And the next group meets.
        let sums = with_ranks(settings, 3, |member| sum_once(member, 0, |_| {}).unwrap());
        assert!(sums.iter().all(|got| *got == sum(3, 0, LEN)));
        assert_eq!(left_over(), 0);
    });
}

#[test]
fn software_driver_an_abort_from_another_thread_ends_a_wait_for_the_others() {
    let test = "software_driver_an_abort_from_another_thread_ends_a_wait_for_the_others";
    over_devices(module_path!(), test, "1", &[], |settings| {
        let library = Nccl::open(settings).unwrap();
        let (device, id) = (open(settings, 0), library.unique_id().unwrap());
        let communicator = NcclCommunicator::begin(&library, &device, &id, 0, 2).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                communicator.abort("rank 1 has died");
                communicator.abort("too late to be the reason");
            });
            let started = Instant::now();
            let error = communicator.wait_until_ready(LIMIT, &|| vec![1]).unwrap_err();
            assert!(started.elapsed() < LIMIT / 2);
            assert_eq!(error.to_string(), "rank 0 of 2 takes part in nothing any more: rank 1 has died");
        });
        assert_eq!(left_over(), 0);
    });
}

#[test]
fn software_driver_an_error_of_one_rank_s_third_sum_reaches_every_rank_as_an_error() {
    let test = "software_driver_an_error_of_one_rank_s_third_sum_reaches_every_rank_as_an_error";
    let fault = [(FAULTS, "ncclAllReduce@1:3=2")];
    over_devices(module_path!(), test, "3", &fault, |settings| {
        let plane = Plane::default();
        let errors = with_ranks(settings, 3, |member| {
            plane.enters(member);
            for round in 0..2 {
                assert_eq!(sum_once(member, round, |_| {}).unwrap(), sum(3, round, LEN));
            }
            let error = sum_once(member, 2, |error| plane.abort(&error.to_string())).unwrap_err();
            // Whatever the stream held is over, and the device takes other work.
            member.device.synchronize("leave the sum", LIMIT).unwrap();
            let again = member.communicator.check().unwrap_err();
            assert!(matches!(again, NcclError::Ended { .. }), "{again:?}");
            let (from, _) = buffers(&member.device, &[2.0f32; 4], 4);
            assert_eq!(read(&member.device, &from), [2.0; 4]);
            error
        });
        let NcclError::Call { rank: 1, ranks: 3, code: 2, .. } = &errors[1] else {
            panic!("{:?}", errors[1])
        };
        let told = errors[1].to_string();
        assert!(told.starts_with("rank 1 of 3 (cuda:1) could not"), "{told}");
        assert!(told.contains("ncclAllReduce fails because the environment asks for it"), "{told}");
        for (rank, error) in [0, 2].into_iter().map(|rank| (rank, &errors[rank])) {
            let expected = NcclError::Ended { rank, ranks: 3, reason: told.clone() };
            assert_eq!(*error, expected);
        }
        drop(plane);
        assert_eq!(left_over(), 0);
    });
}

#[test]
fn software_driver_a_dropped_communicator_ends_a_sum_to_which_nobody_else_comes() {
    let test = "software_driver_a_dropped_communicator_ends_a_sum_to_which_nobody_else_comes";
    over_devices(module_path!(), test, "2", &[], |settings| {
        with_ranks(settings, 2, |member| {
            let Member { device, communicator, .. } = member;
            if communicator.rank() == 1 {
                member.together.wait();
                return;
            }
            let (from, mut to) = buffers(device, &[1.0f32; LEN], LEN);
            // SAFETY: buffers that outlive the work, which ends when the communicator does.
            unsafe { communicator.all_reduce(&**device, from.all(), to.all_mut()) }.unwrap();
            let waited = device.synchronize("sum", Duration::from_millis(50)).unwrap_err();
            assert!(matches!(waited, CudaError::Timeout { .. }), "{waited}");
            communicator.abort("nobody comes");
            device.synchronize("leave the sum", LIMIT).unwrap();
            member.together.wait();
        });
        assert_eq!(left_over(), 0);
    });
}

#[test]
fn software_driver_a_graph_is_not_replayed_once_its_communicator_has_ended() {
    let test = "software_driver_a_graph_is_not_replayed_once_its_communicator_has_ended";
    over_devices(module_path!(), test, "1", &[], |settings| {
        with_ranks(settings, 1, |member| {
            let Member { device, communicator, .. } = member;
            let (from, mut to) = buffers(device, &[1.0f32; 4], 4);
            // SAFETY: the buffers outlive the graph, which is gone before the communicator.
            let record = |launcher: &dyn Launcher| unsafe {
                communicator.all_reduce(launcher, from.all(), to.all_mut())
            };
            let graph = device.capture(record).unwrap();
            let replay = || communicator.while_it_lasts(|| Ok(device.launch_graph(&graph)?));
            replay().unwrap();
            device.synchronize("sum", LIMIT).unwrap();
            communicator.abort("the epoch has ended");
            let mut is_replayed = false;
            let refused = communicator.while_it_lasts(|| {
                is_replayed = true;
                Ok(())
            });
            let KernelError::Nccl(error) = refused.unwrap_err() else { panic!("another error") };
            assert!(matches!(*error, NcclError::Ended { .. }) && !is_replayed, "{error}");
        });
    });
}

#[test]
fn software_driver_fifty_groups_leave_neither_memory_nor_descriptors() {
    let test = "software_driver_fifty_groups_leave_neither_memory_nor_descriptors";
    over_devices(module_path!(), test, "2", &[], |settings| {
        let library = Nccl::open(settings).unwrap();
        let devices = [open(settings, 0), open(settings, 1)];
        let one_life = |turn: usize| {
            let id = library.unique_id().unwrap();
            thread::scope(|scope| {
                for (rank, device) in devices.iter().enumerate() {
                    let (library, id) = (&library, &id);
                    scope.spawn(move || {
                        let communicator = NcclCommunicator::begin(library, device, id, rank, 2).unwrap();
                        if turn % 5 == 4 {
                            // Without having met.
                            return;
                        }
                        communicator.wait_until_ready(LIMIT, &Vec::new).unwrap();
                        let (from, mut to) = buffers(device, &part(rank, turn, LEN), LEN);
                        // SAFETY: buffers that outlive the work, which is waited for.
                        unsafe { communicator.all_reduce(&**device, from.all(), to.all_mut()) }.unwrap();
                        assert_eq!(read(device, &to), sum(2, turn, LEN));
                        match turn % 3 {
                            0 => communicator.finish(LIMIT).unwrap(),
                            1 => communicator.abort("the epoch has ended"),
                            _ => drop(communicator),
                        }
                    });
                }
            });
        };
        let measure = || {
            let free: Vec<u64> = devices.iter().map(|device| device.memory().unwrap().0).collect();
            (free, descriptors(), left_over())
        };
        one_life(0);
        let (before, threads_before) = (measure(), threads());
        (0..50).for_each(one_life);
        assert_eq!(measure(), before);
        // A thread that has ended is still seen for a moment.
        let started = Instant::now();
        while threads() > threads_before && started.elapsed() < LIMIT {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(threads() <= threads_before);
        assert_eq!(before.2, 0);
    });
}

/// Open files of this process.
fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Threads of this process.
fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

/// What the software library has mapped, and names that it has left in the system.
fn left_over() -> usize {
    let mine = format!("consort-software-nccl-{}-", std::process::id());
    let mapped =
        fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains(&mine)).count();
    let names = fs::read_dir("/dev/shm").unwrap().flatten();
    mapped + names.filter(|entry| entry.file_name().to_string_lossy().starts_with(&mine)).count()
}
