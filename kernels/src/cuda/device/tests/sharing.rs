//! Memory that several processes use.
#![allow(unsafe_code)]

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::{Child, Command, Stdio},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
};

use super::*;
use crate::cuda::{DeviceSlice, DeviceSliceMut};

const LEN: usize = 5000;
const ROLE: &str = "CONSORT_TEST_ROLE";
const TWO: (&str, &str) = ("CONSORT_SOFTWARE_DRIVER_DEVICES", "2");

/// Calls of pairs of functions, of which each undoes what the other did.
fn assert_undone(report: &Report) {
    let calls = |name: &str| report.calls.get(name).copied().unwrap_or(0);
    assert_eq!(calls("cuMemMap"), calls("cuMemUnmap"), "{report:#?}");
    assert_eq!(calls("cuMemAddressReserve"), calls("cuMemAddressFree"), "{report:#?}");
    let held = calls("cuMemCreate") + calls("cuMemImportFromShareableHandle");
    assert_eq!(held, calls("cuMemRelease"), "{report:#?}");
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:#?}");
}

/// A shared arena of `LEN` numbers behind a gap.
fn shared(device: &Arc<CudaDevice>) -> (Arena, DeviceBuffer<u32>) {
    let mut plan = ArenaPlan::new();
    let _gap = plan.reserve::<f32>(7, "a gap");
    let numbers = plan.reserve::<u32>(LEN, "numbers");
    assert_eq!(plan.shared_bytes(), SHARED_GRANULARITY);
    let arena = plan.allocate_shared(device).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(arena.bytes(), SHARED_GRANULARITY, "whole pages are taken, and told");
    let numbers = arena.buffer(numbers);
    assert_eq!(numbers.address(), arena.address() + 256);
    (arena, numbers)
}

/// The numbers, as `device` finds them in a peer's memory.
fn read_peer(device: &CudaDevice, peer: &PeerMemory) -> Vec<u32> {
    let mut values = vec![0; LEN];
    // SAFETY: a part of what is mapped, to which nobody writes meanwhile.
    let numbers = unsafe { DeviceSlice::<u32>::new(peer.address() + 256, LEN) };
    device.download(numbers, &mut values, LIMIT).expect("the device works");
    values
}

fn write_peer(device: &CudaDevice, peer: &PeerMemory, values: &[u32]) {
    // SAFETY: a part of what is mapped, which nobody uses meanwhile.
    let numbers = unsafe { DeviceSliceMut::<u32>::new(peer.address() + 256, LEN) };
    device.upload(values, numbers).expect("the device works");
    device.synchronize("write to a peer", LIMIT).expect("the device works");
}

fn pattern(seed: u32) -> Vec<u32> {
    (0..LEN as u32).map(|at| at.wrapping_mul(2_654_435_761) ^ seed).collect()
}

#[test]
fn software_driver_shared_memory_is_zeroed_and_another_device_reads_and_writes_it() {
    let test = "software_driver_shared_memory_is_zeroed_and_another_device_reads_and_writes_it";
    let report = report_of(module_path!(), test, &[TWO], |settings| {
        let (first, second) = (open(settings, "cuda:0"), open(settings, "cuda:1"));
        let free = first.memory().unwrap().0;
        let (arena, mut numbers) = shared(&first);
        assert_eq!(free - first.memory().unwrap().0, SHARED_GRANULARITY);
        assert_eq!(read(&first, &numbers), [0; LEN]);
        second.check_reaches(first.facts().uuid).unwrap();
        let descriptor = arena.export().unwrap();
        let flags = rustix::io::fcntl_getfd(&descriptor).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "{flags:?}");
        let peer = PeerMemory::map(&second, descriptor.as_fd(), arena.bytes(), "rank 0").unwrap();
        drop(descriptor);
        first.upload(&pattern(1), numbers.all_mut()).unwrap();
        first.synchronize("write", LIMIT).unwrap();
        assert_eq!(read_peer(&second, &peer), pattern(1));
        write_peer(&second, &peer, &pattern(2));
        assert_eq!(read(&first, &numbers), pattern(2));
        // Whoever mapped it keeps it when whoever made it gives it back.
        drop((arena, numbers));
        assert_eq!(read_peer(&second, &peer), pattern(2));
        drop(peer);
        assert_eq!(first.memory().unwrap().0, free);
    });
    if let Some(report) = report {
        assert_undone(&report);
    }
}

#[test]
fn software_driver_devices_that_share_no_memory_say_so_and_what_to_do() {
    let test = "software_driver_devices_that_share_no_memory_say_so_and_what_to_do";
    let refusals =
        [("CONSORT_SOFTWARE_DRIVER_SHARES", "0"), ("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuMemCreate:1=801")];
    for variable in each(&refusals) {
        let report = report_of(module_path!(), test, &[*variable], |settings| {
            let device = open(settings, "cuda:0");
            let mut plan = ArenaPlan::new();
            plan.reserve::<u32>(LEN, "numbers");
            let error = plan.allocate_shared(&device).unwrap_err();
            assert!(matches!(&error, CudaError::Unshared { device, .. } if device == "cuda:0"), "{error:?}");
            // Which of the two it is, only the child's environment tells.
            let expected = match env::var_os("CONSORT_SOFTWARE_DRIVER_SHARES") {
                Some(_) => "its driver gives no descriptors for memory",
                None => "cuMemCreate says CUDA_ERROR_NOT_SUPPORTED",
            };
            assert!(error.to_string().contains(expected), "{error}");
            assert!(error.to_string().contains("use isolation = \"thread\""), "{error}");
            // Memory of its own it has.
            let mut plan = ArenaPlan::new();
            plan.reserve::<u32>(LEN, "numbers");
            let own = plan.allocate(&device).unwrap();
            let error = own.export().unwrap_err().to_string();
            assert!(error.contains("was not allocated to be shared"), "{error}");
        });
        if let Some(report) = report {
            assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:#?}");
        }
    }
}

#[test]
fn software_driver_shared_memory_that_cannot_be_had_leaves_nothing_behind() {
    let test = "software_driver_shared_memory_that_cannot_be_had_leaves_nothing_behind";
    // At each call in turn, of the memory made here (1) and of what is mapped (2).
    let faults = [
        "cuMemAddressReserve:1=2",
        "cuMemMap:1=1",
        "cuMemSetAccess:1=1",
        "cuMemExportToShareableHandle:1=1",
        "cuMemImportFromShareableHandle:1=1",
        "cuMemAddressReserve:2=2",
        "cuMemMap:2=1",
        "cuMemSetAccess:2=1",
    ];
    for fault in each(&faults) {
        let variables = [TWO, ("CONSORT_SOFTWARE_DRIVER_FAULTS", *fault)];
        let report = report_of(module_path!(), test, &variables, |settings| {
            let (first, second) = (open(settings, "cuda:0"), open(settings, "cuda:1"));
            let free = first.memory().unwrap().0;
            let attempt = || {
                let mut plan = ArenaPlan::new();
                plan.reserve::<u32>(LEN, "numbers");
                let arena = plan.allocate_shared(&first)?;
                let descriptor = arena.export()?;
                PeerMemory::map(&second, descriptor.as_fd(), arena.bytes(), "rank 0").map(drop)
            };
            let error = attempt().unwrap_err();
            println!("{error}");
            assert_eq!(first.memory().unwrap().0, free, "{error}");
            attempt().unwrap_or_else(|error| panic!("the fault was one call's: {error}"));
            assert_eq!(first.memory().unwrap().0, free);
        });
        if let Some(report) = report {
            assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{fault}: {report:#?}");
            let calls = |name: &str| report.calls.get(name).copied().unwrap_or(0);
            let function = &fault[..fault.find(':').unwrap_or(0)];
            // Of a call that fails nothing is to be undone.
            let failed = |name: &str| u64::from(name == function);
            let (mapped, reserved) = (calls("cuMemMap"), calls("cuMemAddressReserve"));
            assert_eq!(mapped - failed("cuMemMap"), calls("cuMemUnmap"), "{fault}");
            assert_eq!(reserved - failed("cuMemAddressReserve"), calls("cuMemAddressFree"), "{fault}");
            let import = "cuMemImportFromShareableHandle";
            assert_eq!(
                calls("cuMemCreate") + calls(import) - failed(import),
                calls("cuMemRelease"),
                "{fault}"
            );
        }
    }
}

#[test]
fn software_driver_descriptors_of_other_things_and_lengths_are_refused() {
    let test = "software_driver_descriptors_of_other_things_and_lengths_are_refused";
    over_driver(module_path!(), test, &[TWO], |settings| {
        let (first, second) = (open(settings, "cuda:0"), open(settings, "cuda:1"));
        let (arena, _numbers) = shared(&first);
        let nothing = std::fs::File::open("/dev/null").unwrap();
        let error =
            PeerMemory::map(&second, nothing.as_fd(), arena.bytes(), "rank 7").unwrap_err().to_string();
        assert!(error.contains("cuda:1: could not map the memory of rank 7: cuMemImport"), "{error}");
        let descriptor = arena.export().unwrap();
        for bytes in [0, 1, arena.bytes() * 2, u64::MAX] {
            let error = PeerMemory::map(&second, descriptor.as_fd(), bytes, "rank 7").unwrap_err();
            assert!(error.to_string().contains("map the memory of rank 7"), "{error}");
        }
        let stranger = Uuid([7; 16]);
        let error = second.check_reaches(stranger).unwrap_err().to_string();
        assert!(error.contains("is not among the devices of this process"), "{error}");
        let error = second.reach(stranger).unwrap_err().to_string();
        assert!(error.contains(&stranger.to_string()), "{error}");
        // The device is as good as before.
        PeerMemory::map(&second, descriptor.as_fd(), arena.bytes(), "rank 0").unwrap();
    });
}

#[test]
fn software_driver_more_shared_memory_than_there_is_names_its_parts() {
    let test = "software_driver_more_shared_memory_than_there_is_names_its_parts";
    let memory = [("CONSORT_SOFTWARE_DRIVER_MEMORY", "16777216")];
    over_driver(module_path!(), test, &memory, |settings| {
        let device = open(settings, "cuda:0");
        for (len, bytes) in [(4_200_000, 18 << 20), (usize::MAX, u64::MAX)] {
            let mut plan = ArenaPlan::new();
            plan.reserve::<f32>(len, "what ranks exchange");
            assert!(plan.shared_bytes() == bytes, "{}", plan.shared_bytes());
            let error = plan.allocate_shared(&device).unwrap_err();
            let CudaError::OutOfMemory { wanted, parts, .. } = &error else { panic!("{error}") };
            assert_eq!((*wanted, parts[0].0.as_str()), (Some(bytes), "what ranks exchange"));
        }
    });
}

/// This test once more as the process that makes the memory, with one end of a socket pair as its standard input.
fn start_exporter(test: &str) -> (Child, OwnedFd) {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let module = module_path!().split_once("::").map_or(module_path!(), |(_, module)| module);
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([&format!("{module}::{test}"), "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, "exporter").env_remove("CONSORT_SOFTWARE_DRIVER_REPORT").stdin(Stdio::from(theirs));
    (command.spawn().expect("the test program starts again"), ours)
}

fn tell(socket: BorrowedFd<'_>, word: &[u8], descriptor: Option<BorrowedFd<'_>>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if let Some(descriptor) = &descriptor {
        ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(descriptor)));
    }
    sendmsg(socket, &[IoSlice::new(word)], &mut ancillary, SendFlags::NOSIGNAL).expect("the other is there");
}

fn hear(socket: BorrowedFd<'_>, expected: &[u8]) -> Option<OwnedFd> {
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    let ready = rustix::event::poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&limit)).unwrap();
    assert_eq!(ready, 1, "nothing was said for {LIMIT:?}");
    let mut word = [0; 32];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut word)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
    let bytes = got.expect("the other is there").bytes;
    assert_eq!(&word[..bytes], expected);
    ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    })
}

/// Makes memory, hands it on, and waits to be killed.
fn export(settings: &Settings) {
    let socket = rustix::stdio::stdin();
    let device = open(settings, "cuda:1");
    let (arena, mut numbers) = shared(&device);
    device.upload(&pattern(3), numbers.all_mut()).unwrap();
    device.synchronize("write", LIMIT).unwrap();
    tell(socket, b"made", Some(arena.export().unwrap().as_fd()));
    hear(socket, b"changed");
    assert_eq!(read(&device, &numbers), pattern(4), "the other process wrote");
    tell(socket, b"seen", None);
    hear(socket, b"never said");
}

#[test]
fn software_driver_memory_of_a_process_that_was_killed_stays_with_whoever_maps_it() {
    let test = "software_driver_memory_of_a_process_that_was_killed_stays_with_whoever_maps_it";
    let report = report_of(module_path!(), test, &[TWO], |settings| {
        if env::var_os(ROLE).is_some() {
            return export(settings);
        }
        let (mut exporter, socket) = start_exporter(test);
        let device = open(settings, "cuda:0");
        let descriptor = hear(socket.as_fd(), b"made").expect("it hands memory on");
        let peer = PeerMemory::map(&device, descriptor.as_fd(), SHARED_GRANULARITY, "rank 1").unwrap();
        drop(descriptor);
        assert_eq!(read_peer(&device, &peer), pattern(3));
        write_peer(&device, &peer, &pattern(4));
        tell(socket.as_fd(), b"changed", None);
        hear(socket.as_fd(), b"seen");
        exporter.kill().unwrap();
        exporter.wait().unwrap();
        assert_eq!(read_peer(&device, &peer), pattern(4), "its end takes nothing away");
        write_peer(&device, &peer, &pattern(5));
        assert_eq!(read_peer(&device, &peer), pattern(5));
    });
    if let Some(report) = report {
        assert_undone(&report);
    }
}
