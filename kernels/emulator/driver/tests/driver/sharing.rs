//! Devices, streams and processes that wait for each other and share memory.
#![allow(unsafe_code)]

use std::{ffi::c_void, process::Command, sync::Arc};

use consort_software_driver::{in_child, in_child_reported};
use cudarc::driver::{CudaContext, CudaStream, result, sys};

use crate::support::*;

const RANKS: usize = 3;
const LEN: usize = 2500;
const BLOCKS: u32 = 3;

/// `Peers` of `kernels/src/all_reduce/kernel.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Peers {
    buffers: [u64; 16],
    areas: [u64; 16],
    abort: u64,
    rank: u32,
    count: u32,
    polls_max: u32,
    last_barrier: u32,
}

const AREA_BYTES: usize = 4 * (64 * 17 + 4);

/// The word in an area that says why the rank has stopped, and that of an abort.
const STOPPED: u64 = 4 * 64 * 17;
const ABORTED: u32 = 1;

struct Rank {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    function: sys::CUfunction,
    buffer: u64,
    area: u64,
    out: u64,
}

impl Rank {
    fn new(ordinal: usize) -> Rank {
        let context = device(ordinal);
        let stream = context.new_stream().expect("a stream");
        let function = function("all_reduce_one_shot_f32");
        let (buffer, area, out) = (allocate(4 * LEN), allocate(AREA_BYTES), allocate(4 * LEN));
        upload(area, &[0u8; AREA_BYTES]);
        Rank { context, stream, function, buffer, area, out }
    }

    fn peers(ranks: &[Rank], abort: u64) -> Peers {
        let mut peers = Peers { abort, count: ranks.len() as u32, polls_max: u32::MAX, ..Peers::default() };
        peers.last_barrier = 1;
        for (at, rank) in ranks.iter().enumerate() {
            (peers.buffers[at], peers.areas[at]) = (rank.buffer, rank.area);
        }
        peers
    }

    fn launch(&self, rank: usize, peers: Peers) {
        let mut peers = Peers { rank: rank as u32, ..peers };
        let (mut len, mut out) = (LEN as u32, self.out);
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut peers).cast(), (&raw mut len).cast(), (&raw mut out).cast()];
        // SAFETY: the parameters of the kernel.
        unsafe { launch(&self.stream, self.function, ((BLOCKS, 1), 256), &mut arguments) }.expect("a launch");
    }
}

/// Ranks on devices of their own that may touch each other's memory.
fn group(ranks: usize) -> Vec<Rank> {
    let group: Vec<Rank> = (0..ranks).map(Rank::new).collect();
    for one in &group {
        one.context.bind_to_thread().expect("its context");
        for other in &group {
            if one.context.ordinal() != other.context.ordinal() {
                // SAFETY: a context.
                assert_eq!(unsafe { sys::cuCtxEnablePeerAccess(other.context.cu_ctx(), 0) } as u32, 0);
            }
        }
    }
    group
}

fn part(rank: usize, round: usize) -> Vec<f32> {
    (0..LEN).map(|at| ((at * 3 + rank * 7 + round * 11) % 101) as f32).collect()
}

#[test]
fn software_driver_lets_grids_of_three_devices_wait_for_each_other() {
    for order in ORDERS {
        let test = "sharing::software_driver_lets_grids_of_three_devices_wait_for_each_other";
        let report = in_child_reported(test, &[(ORDER, order), (DEVICES, "3")], || {
            let ranks = group(RANKS);
            let host: Vec<&mut [u32]> = ranks.iter().map(|_| pinned(LEN)).collect();
            let abort = pinned(1).as_ptr() as u64;
            let peers = Rank::peers(&ranks, abort);
            for (round, order) in [[0, 1, 2], [2, 0, 1], [1, 2, 0]].into_iter().enumerate() {
                // Nobody waits before all have launched; whoever is first spins for the others.
                for rank in order {
                    let own = &ranks[rank];
                    own.context.bind_to_thread().expect("its context");
                    let bits: Vec<u32> = part(rank, round).into_iter().map(f32::to_bits).collect();
                    // SAFETY: pinned memory, whose last copy was waited for.
                    let source =
                        unsafe { std::slice::from_raw_parts_mut(host[rank].as_ptr().cast_mut(), LEN) };
                    source.copy_from_slice(&bits);
                    copy_to_device(&own.stream, own.buffer, source);
                    own.launch(rank, peers);
                }
                let expected: Vec<f32> =
                    (0..LEN).map(|at| (0..RANKS).map(|rank| part(rank, round)[at]).sum()).collect();
                for rank in order {
                    let own = &ranks[rank];
                    own.context.bind_to_thread().expect("its context");
                    own.stream.synchronize().expect("the group meets");
                    assert_eq!(download::<f32>(own.out, LEN), expected, "rank {rank}");
                }
            }
        });
        let Some(report) = report else { return };
        assert_eq!(report.messages, Vec::<String>::new(), "{order}");
    }
}

#[test]
fn software_driver_reports_a_buffer_overwritten_before_its_peers_have_read() {
    let test = "sharing::software_driver_reports_a_buffer_overwritten_before_its_peers_have_read";
    let report = in_child_reported(test, &[LENIENT, (DEVICES, "2")], || {
        let ranks = group(2);
        let abort = pinned(1).as_ptr() as u64;
        let peers = Rank::peers(&ranks, abort);
        let host = pinned(LEN);
        for (rank, own) in ranks.iter().enumerate() {
            own.context.bind_to_thread().expect("its context");
            copy_to_device(&own.stream, own.buffer, host);
            own.launch(rank, peers);
        }
        // In a stream that has met nobody.
        let own = &ranks[1];
        let beside = own.context.new_stream().expect("a stream");
        copy_to_device(&beside, own.buffer, host);
        own.context.synchronize().expect("done");
    });
    let Some(report) = report else { return };
    assert!(report.messages.iter().any(|message| message.contains("no order: ")), "{report:?}");
}

#[test]
fn software_driver_lets_the_host_end_a_grid_that_waits_in_vain() {
    for order in ORDERS {
        let environment = [(ORDER, order), (DEVICES, "2")];
        in_child(
            "sharing::software_driver_lets_the_host_end_a_grid_that_waits_in_vain",
            &environment,
            || {
                let ranks = group(2);
                let abort = pinned(1);
                let peers = Rank::peers(&ranks, abort.as_ptr() as u64);
                let alone = &ranks[0];
                alone.context.bind_to_thread().expect("its context");
                upload(alone.buffer, &[1f32; LEN]);
                alone.launch(0, peers);
                let end = alone.stream.record_event(None).expect("an event");
                for _ in 0..50 {
                    assert!(!end.is_complete(), "nobody else has come");
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                // Its other streams, and other devices, go on.
                let beside = alone.context.new_stream().expect("a stream");
                let swiglu = Swiglu::new(64, 1);
                let (from, to) = (allocate(swiglu.input_bytes()), allocate(swiglu.output_bytes()));
                upload(from, &swiglu.input(3));
                swiglu.launch(&beside, from, to).expect("a launch");
                beside.synchronize().expect("done");
                swiglu.check(&swiglu.input(3), &download(to, 64));
                // SAFETY: pinned memory that the kernel polls.
                unsafe { (&raw mut abort[0]).write_volatile(1) };
                assert!(becomes(|| end.is_complete()), "the kernel sees the word");
                assert_eq!(download::<u32>(alone.area + STOPPED, 1), [ABORTED]);
            },
        );
    }
}

/// 2 MiB that processes share, mapped and open to device 0.
fn map(handle: sys::CUmemGenericAllocationHandle) -> u64 {
    let mut start = 0;
    let location = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
    let access =
        sys::CUmemAccessDesc { location, flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    // SAFETY: the driver checks addresses and handles.
    unsafe {
        assert_eq!(sys::cuMemAddressReserve(&mut start, SHARED_BYTES, 0, 0, 0) as u32, 0);
        assert_eq!(sys::cuMemMap(start, SHARED_BYTES, 0, handle, 0) as u32, 0);
        assert_eq!(sys::cuMemSetAccess(start, SHARED_BYTES, &access, 1) as u32, 0);
    }
    start
}

fn unmap(start: u64, handle: sys::CUmemGenericAllocationHandle) {
    // SAFETY: as mapped.
    unsafe {
        assert_eq!(sys::cuMemUnmap(start, SHARED_BYTES) as u32, 0);
        assert_eq!(sys::cuMemAddressFree(start, SHARED_BYTES) as u32, 0);
        assert_eq!(sys::cuMemRelease(handle) as u32, 0);
    }
}

const SHARED_BYTES: usize = 2 << 20;
const FILE: &str = "SHARED_FILE";
const POSIX: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Rank `rank` of two, whose memory is all in the shared piece.
fn shared_rank(context: &Arc<CudaContext>, start: u64, rank: usize) -> (Rank, Peers) {
    let place = |rank: usize| (start + (rank as u64) * 65536, start + (1 << 20) + (rank as u64) * 65536);
    let mut peers = Peers { count: 2, polls_max: u32::MAX, last_barrier: 1, ..Peers::default() };
    for each in 0..2 {
        (peers.buffers[each], peers.areas[each]) = place(each);
    }
    peers.abort = pinned(1).as_ptr() as u64;
    let stream = context.new_stream().expect("a stream");
    let function = function("all_reduce_one_shot_f32");
    let (buffer, area) = place(rank);
    (Rank { context: context.clone(), stream, function, buffer, area, out: allocate(4 * LEN) }, peers)
}

fn sum_with_the_other_process(context: &Arc<CudaContext>, start: u64, rank: usize) {
    let (own, peers) = shared_rank(context, start, rank);
    upload(own.buffer, &part(rank, 0));
    own.launch(rank, peers);
    own.stream.synchronize().expect("both come");
    let expected: Vec<f32> = part(0, 0).iter().zip(part(1, 0)).map(|(a, b)| a + b).collect();
    assert_eq!(download::<f32>(own.out, LEN), expected);
    free(own.out);
}

#[test]
fn software_driver_shares_memory_and_flags_with_a_second_process() {
    const TEST: &str = "sharing::software_driver_shares_memory_and_flags_with_a_second_process";
    let report = in_child_reported(TEST, &[], || {
        let context = device(0);
        if let Ok(file) = std::env::var(FILE) {
            return second_process(&context, file.parse().expect("a number"));
        }
        let properties = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: POSIX,
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: 0,
            },
            // SAFETY: numbers and a pointer that is not used.
            ..unsafe { std::mem::zeroed() }
        };
        let (mut handle, mut file, mut granularity) = (0, -1i32, 0);
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: places for what is asked.
        unsafe {
            let asked = sys::cuMemGetAllocationGranularity(&mut granularity, &properties, minimum);
            assert_eq!((asked as u32, granularity), (0, SHARED_BYTES));
            assert_eq!(sys::cuMemCreate(&mut handle, 1000, &properties, 0) as u32, 1, "not whole");
            assert_eq!(sys::cuMemCreate(&mut handle, SHARED_BYTES, &properties, 0) as u32, 0);
            let exported = sys::cuMemExportToShareableHandle((&raw mut file).cast(), handle, POSIX, 0);
            assert_eq!(exported as u32, 0);
        }
        let (free_bytes, total) = context.mem_get_info().expect("a context");
        assert_eq!(total - free_bytes, SHARED_BYTES, "it counts where it was made");
        let start = map(handle);
        upload(start + (1 << 20), &[0u8; 1 << 17]);
        let program = std::env::current_exe().expect("the test program has a path");
        let mut other = Command::new(program);
        other.args([TEST, "--exact", "--nocapture"]).env(FILE, file.to_string());
        other.env_remove("CONSORT_SOFTWARE_DRIVER_REPORT");
        let mut other = other.spawn().expect("the test program starts again");
        sum_with_the_other_process(&context, start, 0);
        assert!(other.wait().expect("it ends").success(), "the other process");
        assert_eq!(download::<u8>(start + SHARED_BYTES as u64 - 1, 1), [42], "what it left");
        unmap(start, handle);
        let (free_bytes, total) = context.mem_get_info().expect("a context");
        assert_eq!(total, free_bytes);
    });
    let Some(report) = report else { return };
    assert_eq!(report.messages, Vec::<String>::new());
}

fn second_process(context: &Arc<CudaContext>, file: i32) {
    let mut handle = 0;
    let os_handle = std::ptr::without_provenance_mut(file as usize);
    // SAFETY: a file that was inherited.
    let imported = unsafe { sys::cuMemImportFromShareableHandle(&mut handle, os_handle, POSIX) };
    assert_eq!(imported as u32, 0);
    let (free_bytes, total) = context.mem_get_info().expect("a context");
    assert_eq!(total, free_bytes, "it counts where it was made, not here");
    let start = map(handle);
    sum_with_the_other_process(context, start, 1);
    // SAFETY: memory of that size.
    unsafe { result::memset_d8_sync(start + SHARED_BYTES as u64 - 1, 42, 1) }.expect("a fill");
    unmap(start, handle);
}
