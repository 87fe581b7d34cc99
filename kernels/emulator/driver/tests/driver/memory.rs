//! Memory of devices and pinned memory.
#![allow(unsafe_code)]

use consort_software_driver::{in_child, in_child_reported};
use cudarc::driver::{result, sys};

use crate::support::*;

const MEMORY: &str = "CONSORT_SOFTWARE_DRIVER_MEMORY";

#[test]
fn software_driver_keeps_what_is_copied_to_a_device() {
    in_child("memory::software_driver_keeps_what_is_copied_to_a_device", &[], || {
        let context = device(0);
        let values: Vec<u32> = (0..100_000).collect();
        let stream = context.new_stream().expect("a stream");
        let (first, second) = (allocate(400_000), allocate(400_000));
        assert_eq!(first % 256, 0, "aligned as a device's");
        assert_eq!(download::<u32>(second, 4), [u32::MAX; 4], "new memory holds NaN");
        upload(first, &values);
        copy(&stream, second, first, 400_000);
        stream.synchronize().expect("done");
        assert_eq!(download::<u32>(second, 100_000), values);
        // SAFETY: the driver checks the extent.
        unsafe { result::memset_d8_async(second + 4, 0, 8, stream.cu_stream()) }.expect("a fill");
        stream.synchronize().expect("done");
        assert_eq!(download::<u32>(second, 4), [0, 0, 0, 3]);
    });
}

#[test]
fn software_driver_has_no_more_memory_than_its_devices() {
    let environment = [(MEMORY, "1048576"), (DEVICES, "2")];
    let report = in_child_reported(
        "memory::software_driver_has_no_more_memory_than_its_devices",
        &environment,
        || {
            let first = device(0);
            let half = allocate(512 << 10);
            assert_eq!(first.mem_get_info().expect("a context"), (512 << 10, 1 << 20));
            // SAFETY: any size may be asked for.
            let more = unsafe { result::malloc_sync((512 << 10) + 1) };
            assert_eq!(code(more.map(drop)), 2, "CUDA_ERROR_OUT_OF_MEMORY");
            let _second = device(1);
            let other = allocate(1 << 20);
            free(other);
            free(half);
        },
    );
    let Some(report) = report else { return };
    assert_eq!(report.leaked_bytes(), 0);
    assert_eq!(report.devices[0].bytes_max, 512 << 10);
    assert_eq!(report.devices[1].bytes_max, 1 << 20);
}

#[test]
fn software_driver_counts_what_is_not_freed() {
    let report = in_child_reported("memory::software_driver_counts_what_is_not_freed", &[], || {
        let context = device(0);
        let _kept = allocate(1000);
        let _pinned = pinned(256);
        let stream = context.new_stream().expect("a stream");
        // Freed in order, by the stream.
        drop(stream.clone_htod(&[1u32; 100]).expect("memory"));
    });
    let Some(report) = report else { return };
    assert_eq!(report.devices[0].bytes + report.devices[0].left_in_contexts, 1024);
    assert_eq!(report.pinned_bytes + report.pinned_left_in_contexts, 1024);
    assert_eq!(report.leaked_bytes(), 2048);
    assert_eq!(report.calls["cuMemAlloc_v2"], 1);
}

#[test]
fn software_driver_reuses_memory_that_streams_give_back() {
    in_child("memory::software_driver_reuses_memory_that_streams_give_back", &[(MEMORY, "1048576")], || {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        for round in 0..10u32 {
            let slice = stream.clone_htod(&vec![round; 200_000]).expect("800,000 bytes are free again");
            assert_eq!(stream.clone_dtoh(&slice).expect("a copy")[199_999], round);
        }
    });
}

#[test]
fn software_driver_ends_memory_where_it_ends() {
    in_child("memory::software_driver_ends_memory_where_it_ends", &[], || {
        let _context = device(0);
        let memory = allocate(1000);
        // SAFETY: the driver checks the extent.
        let beyond = unsafe { result::memcpy_htod_sync(memory, &[0u8; 1001]) };
        assert_eq!(code(beyond), 1, "CUDA_ERROR_INVALID_VALUE");
        free(memory);
        // SAFETY: the driver checks the address.
        assert_eq!(code(unsafe { result::free_sync(memory) }), 1, "freed twice");
        // SAFETY: as above.
        let freed = unsafe { result::memcpy_htod_sync(memory, &[0u8; 4]) };
        assert_eq!(code(freed), 1, "freed");
    });
}

#[test]
fn software_driver_pins_the_programs_own_memory() {
    in_child("memory::software_driver_pins_the_programs_own_memory", &[], || {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let own = vec![7u32; 1024].leak();
        let start = own.as_mut_ptr().cast();
        // SAFETY: the memory is never freed.
        unsafe {
            assert_eq!(sys::cuMemHostRegister_v2(start, 4096, 0) as u32, 0);
            assert_eq!(sys::cuMemHostRegister_v2(start, 4096, 0) as u32, 712, "it is registered already");
            let mut seen = 0;
            assert_eq!(sys::cuMemHostGetDevicePointer_v2(&mut seen, start, 0) as u32, 0);
            assert_eq!(seen, start as u64);
        }
        let memory = allocate(4096);
        copy_to_device(&stream, memory, own);
        // Not staged: the copy is still to come.
        own[5] = 8;
        stream.synchronize().expect("done");
        assert_eq!(download::<u32>(memory, 6), [7, 7, 7, 7, 7, 8]);
        // SAFETY: as registered.
        assert_eq!(unsafe { sys::cuMemHostUnregister(start) } as u32, 0);
    });
}
