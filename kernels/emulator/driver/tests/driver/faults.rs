//! Errors on demand, and those of kernels.
#![allow(unsafe_code)]

use consort_software_driver::{in_child, in_child_reported};
use cudarc::driver::{CudaContext, result, sys};

use crate::support::*;

#[test]
fn software_driver_fails_the_nth_call_once() {
    let environment = [(FAULTS, "cuMemAlloc_v2:2=2,cuMemcpyHtoD_v2:1=1")];
    in_child("faults::software_driver_fails_the_nth_call_once", &environment, || {
        let _context = device(0);
        // SAFETY: any size may be asked for.
        let allocate = || code(unsafe { result::malloc_sync(16) }.map(drop));
        assert_eq!([allocate(), allocate(), allocate()], [0, 2, 0]);
        let memory = crate::support::allocate(16);
        // SAFETY: memory of that size.
        let copy = || code(unsafe { result::memcpy_htod_sync(memory, &[0u8; 16]) });
        assert_eq!([copy(), copy()], [1, 0]);
    });
}

#[test]
fn software_driver_keeps_a_sticky_error_on_its_context_alone() {
    let environment = [(FAULTS, "cuStreamSynchronize:2=719"), (DEVICES, "2")];
    in_child("faults::software_driver_keeps_a_sticky_error_on_its_context_alone", &environment, || {
        let (other, context) = (device(1), device(0));
        let stream = context.new_stream().expect("a stream");
        let memory = allocate(16);
        stream.synchronize().expect("the first");
        assert_eq!(code(stream.synchronize()), 719, "CUDA_ERROR_LAUNCH_FAILED");
        assert_eq!(code(stream.synchronize()), 719);
        // SAFETY: the driver checks the address.
        assert_eq!(code(unsafe { result::free_sync(memory) }), 719);
        // SAFETY: a stream.
        assert_eq!(unsafe { sys::cuStreamQuery(stream.cu_stream()) } as u32, 719);
        other.bind_to_thread().expect("another context");
        let memory = allocate(16);
        upload(memory, &[1u32; 4]);
        assert_eq!(download::<u32>(memory, 4), [1; 4], "another device goes on");
        free(memory);
    });
}

#[test]
fn software_driver_ends_a_context_whose_kernel_goes_astray() {
    for order in ORDERS {
        let test = "faults::software_driver_ends_a_context_whose_kernel_goes_astray";
        let report = in_child_reported(test, &[(ORDER, order)], || {
            let context = device(0);
            let stream = context.new_stream().expect("a stream");
            let swiglu = Swiglu::new(1024, 4);
            // A row too few.
            let from = allocate(swiglu.input_bytes() - 8192);
            let to = allocate(swiglu.output_bytes());
            swiglu.launch(&stream, from, to).expect("launches do not wait");
            assert_eq!(code(stream.synchronize()), 700, "CUDA_ERROR_ILLEGAL_ADDRESS");
            assert_eq!(code(swiglu.launch(&stream, from, to)), 700, "for ever");
            drop((stream, context));
            // Another context of the device, when nobody holds the broken one any more.
            let again = CudaContext::new(0).expect("a fresh context");
            let memory = allocate(16);
            upload(memory, &[1u32; 4]);
            assert_eq!(download::<u32>(memory, 4), [1; 4]);
            free(memory);
            drop(again);
        });
        let Some(report) = report else { return };
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{order}: {report:?}");
        let fault = &report.faults[0];
        assert!(
            fault.contains("kernel swiglu_silu, rank 0, block (") && fault.contains(", 3, 0), thread"),
            "{fault}"
        );
    }
}

#[test]
fn software_driver_keeps_a_broken_context_until_its_last_holder_leaves_or_resets_it() {
    for faults in ["cuMemAlloc_v2:2=700", "cuMemAlloc_v2:2=719"] {
        let test = "faults::software_driver_keeps_a_broken_context_until_its_last_holder_leaves_or_resets_it";
        let report = in_child_reported(test, &[(FAULTS, faults)], || {
            let (context, held) = (device(0), device(0));
            let memory = allocate(1 << 20);
            // SAFETY: any size may be asked for.
            let broken = unsafe { result::malloc_sync(16) }.expect_err("a fault").0 as u32;
            // SAFETY: an address that is not touched.
            assert_eq!(code(unsafe { result::free_sync(memory) }), broken, "nothing is given back");
            drop(context);
            let retained = CudaContext::new(0).and_then(|context| context.mem_get_info());
            assert_eq!(code(retained.map(drop)), broken, "it is still the same context");
            if broken == 719 {
                // SAFETY: a device.
                assert_eq!(unsafe { sys::cuDevicePrimaryCtxReset_v2(0) } as u32, 0);
            } else {
                drop(held);
            }
            let again = CudaContext::new(0).expect("a fresh context");
            let (free_bytes, total) = again.mem_get_info().expect("it works");
            assert_eq!(free_bytes, total, "what the broken one held went with it");
        });
        let Some(report) = report else { return };
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    }
}

#[test]
fn software_driver_ends_a_context_whose_kernel_is_misaligned() {
    in_child("faults::software_driver_ends_a_context_whose_kernel_is_misaligned", &[], || {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let swiglu = Swiglu::new(64, 1);
        let (from, to) = (allocate(swiglu.input_bytes() + 8), allocate(swiglu.output_bytes()));
        swiglu.launch(&stream, from + 8, to).expect("launches do not wait");
        assert_eq!(code(stream.synchronize()), 719, "CUDA_ERROR_LAUNCH_FAILED");
    });
}

#[test]
fn software_driver_hangs_one_stream_and_nothing_else() {
    for order in ORDERS {
        let environment = [(FAULTS, "cuLaunchKernel:2=hang"), (DEVICES, "2"), (ORDER, order)];
        in_child("faults::software_driver_hangs_one_stream_and_nothing_else", &environment, || {
            let context = device(0);
            let stream = context.new_stream().expect("a stream");
            let swiglu = Swiglu::new(64, 1);
            let (from, to) = (allocate(swiglu.input_bytes()), allocate(swiglu.output_bytes()));
            upload(from, &swiglu.input(0));
            swiglu.launch(&stream, from, to).expect("the first ends");
            stream.synchronize().expect("done");
            swiglu.launch(&stream, from, to).expect("the second does not");
            let end = stream.record_event(None).expect("an event");
            for _ in 0..50 {
                assert!(!end.is_complete());
                // SAFETY: a stream.
                assert_eq!(unsafe { sys::cuStreamQuery(stream.cu_stream()) } as u32, 600, "NOT_READY");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let other = device(1);
            let stream = other.new_stream().expect("a stream");
            let swiglu = Swiglu::new(64, 1);
            let (from, to) = (allocate(swiglu.input_bytes()), allocate(swiglu.output_bytes()));
            upload(from, &swiglu.input(1));
            swiglu.launch(&stream, from, to).expect("a launch");
            stream.synchronize().expect("another device goes on");
            swiglu.check(&swiglu.input(1), &download(to, 64));
        });
    }
}

#[test]
fn software_driver_has_no_devices_where_none_are_wanted() {
    in_child("faults::software_driver_has_no_devices_where_none_are_wanted", &[(DEVICES, "0")], || {
        load();
        let found = CudaContext::new(0).map(drop);
        assert_eq!(code(found), 100, "CUDA_ERROR_NO_DEVICE");
    });
}
