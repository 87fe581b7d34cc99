//! Planted mistakes: each is reported, and the same program without it is clean.
#![allow(unsafe_code)]

use std::{panic::catch_unwind, sync::Arc};

use consort_software_driver::{Report, in_child, in_child_reported};
use cudarc::driver::{CudaContext, result, sys};

use crate::support::*;

/// Runs `program(mistaken)` both ways in every order; the mistake's report must hold one of `told`.
fn shows(test: &str, told: &[&str], program: impl Fn(bool)) {
    for order in ORDERS {
        for mistaken in ["0", "1"] {
            let environment = [(ORDER, order), LENIENT, ("MISTAKEN", mistaken), (DEVICES, "2")];
            let body = || program(std::env::var("MISTAKEN").is_ok_and(|value| value == "1"));
            let Some(report) = in_child_reported(test, &environment, body) else { return };
            let found = report.messages.iter().any(|message| told.iter().any(|told| message.contains(told)));
            assert_eq!(found, mistaken == "1", "{order}: {report:?}");
            assert!(mistaken == "1" || report.violations == 0, "{order}: {report:?}");
        }
    }
}

#[test]
fn software_driver_reports_a_missing_stream_wait() {
    shows("mistakes::software_driver_reports_a_missing_stream_wait", &["no order: "], |mistaken| {
        let context = device(0);
        let (one, two) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
        let swiglu = Swiglu::new(64, 2);
        let (from, to) = (allocate(swiglu.input_bytes()), allocate(swiglu.output_bytes()));
        let host = pinned(swiglu.input_bytes() / 4);
        copy_to_device(&one, from, host);
        if !mistaken {
            two.wait(&one.record_event(None).expect("an event")).expect("a wait");
        }
        swiglu.launch(&two, from, to).expect("a launch");
        context.synchronize().expect("done");
    });
}

#[test]
fn software_driver_tells_buffers_of_one_arena_apart() {
    shows("mistakes::software_driver_tells_buffers_of_one_arena_apart", &["no order: "], |mistaken| {
        let context = device(0);
        let (one, two) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
        let swiglu = Swiglu::new(8, 1);
        let arena = allocate(4096);
        upload(arena, &[0f32; 1024]);
        let host = pinned(4);
        // The kernel reads 64 bytes and writes 16 behind them; the copy is to the next 16, or to the kernel's last.
        let beside = if mistaken { 64 + 15 } else { 64 + 16 };
        swiglu.launch(&one, arena, arena + 64).expect("a launch");
        copy_to_device(&two, arena + beside, &host[..4]);
        context.synchronize().expect("done");
    });
}

#[test]
fn software_driver_reports_memory_freed_while_in_flight() {
    let test = "mistakes::software_driver_reports_memory_freed_while_in_flight";
    shows(test, &["cuMemFree of memory that is in use: "], |mistaken| {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let swiglu = Swiglu::new(64, 2);
        let (from, to) = (allocate(swiglu.input_bytes()), allocate(swiglu.output_bytes()));
        upload(from, &swiglu.input(0));
        swiglu.launch(&stream, from, to).expect("a launch");
        if !mistaken {
            stream.synchronize().expect("done");
        }
        free(from);
        // Which the kernel may have found without its input by now.
        let _ = stream.synchronize();
    });
}

#[test]
fn software_driver_reports_memory_freed_in_the_wrong_stream() {
    shows(
        "mistakes::software_driver_reports_memory_freed_in_the_wrong_stream",
        &["cuMemFreeAsync", "freed memory"],
        |mistaken| {
            let context = device(0);
            let (one, two) =
                (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
            let swiglu = Swiglu::new(64, 2);
            let (from, to) = (allocate(swiglu.input_bytes()), allocate(swiglu.output_bytes()));
            upload(from, &swiglu.input(0));
            swiglu.launch(&one, from, to).expect("a launch");
            let wrong = if mistaken { &two } else { &one };
            // SAFETY: the driver checks the address.
            unsafe { result::free_async(from, wrong.cu_stream()) }.expect("it was allocated");
            let _ = context.synchronize();
        },
    );
}

#[test]
fn software_driver_reports_a_stale_pointer_in_a_captured_graph() {
    let test = "mistakes::software_driver_reports_a_stale_pointer_in_a_captured_graph";
    shows(test, &["is given a pointer to freed memory"], |mistaken| {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let swiglu = Swiglu::new(64, 2);
        let (from, to) = (allocate(swiglu.input_bytes()), allocate(swiglu.output_bytes()));
        upload(from, &swiglu.input(0));
        stream
            .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .expect("a capture");
        swiglu.launch(&stream, from, to).expect("a launch");
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).expect("captured").expect("a graph");
        graph.launch().expect("a launch");
        stream.synchronize().expect("done");
        if mistaken {
            free(from);
            let other = allocate(swiglu.input_bytes());
            assert_ne!(other, from, "addresses are never used again");
        }
        graph.launch().expect("a launch");
        assert_eq!(code(stream.synchronize()), if mistaken { 700 } else { 0 });
    });
}

#[test]
fn software_driver_reports_kernels_that_reach_other_devices_unasked() {
    let test = "mistakes::software_driver_reports_kernels_that_reach_other_devices_unasked";
    shows(test, &["touches memory that was not opened to it"], |mistaken| {
        let other = device(1);
        let swiglu_bytes = Swiglu::new(64, 1).input_bytes();
        let from = allocate(swiglu_bytes);
        upload(from, &Swiglu::new(64, 1).input(0));
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        if !mistaken {
            // SAFETY: a context.
            assert_eq!(unsafe { sys::cuCtxEnablePeerAccess(other.cu_ctx(), 0) } as u32, 0);
        }
        let swiglu = Swiglu::new(64, 1);
        let to = allocate(swiglu.output_bytes());
        swiglu.launch(&stream, from, to).expect("a launch");
        assert_eq!(code(stream.synchronize()), if mistaken { 700 } else { 0 });
    });
}

/// Adds a device's one primary context to those whose memory the current context's kernels may touch.
fn enable_peer(other: &CudaContext) -> u32 {
    // SAFETY: a context.
    unsafe { sys::cuCtxEnablePeerAccess(other.cu_ctx(), 0) as u32 }
}

/// The first device's kernels read the second's memory, after one of the two contexts was made anew; unless `mistaken`,
/// this was allowed again since.
fn read_from_a_peer(mistaken: bool, renew: impl Fn([Arc<CudaContext>; 2]) -> [Arc<CudaContext>; 2]) {
    let contexts = [device(0), device(1)];
    contexts[0].bind_to_thread().expect("a context");
    assert_eq!(enable_peer(&contexts[1]), 0);
    assert_eq!(enable_peer(&contexts[1]), 704, "ALREADY_ENABLED");
    let [reader, peer] = renew(contexts);
    peer.bind_to_thread().expect("a context");
    let swiglu = Swiglu::new(64, 1);
    let from = allocate(swiglu.input_bytes());
    upload(from, &swiglu.input(0));
    reader.bind_to_thread().expect("a context");
    if !mistaken {
        assert_eq!(enable_peer(&peer), 0, "access is from one context to another: it went with the old one");
    }
    let stream = reader.new_stream().expect("a stream");
    let swiglu = Swiglu::new(64, 1);
    let to = allocate(swiglu.output_bytes());
    swiglu.launch(&stream, from, to).expect("a launch");
    assert_eq!(code(stream.synchronize()), if mistaken { 700 } else { 0 });
}

#[test]
fn software_driver_reports_a_peer_whose_new_context_was_not_opened_again() {
    let test = "mistakes::software_driver_reports_a_peer_whose_new_context_was_not_opened_again";
    shows(test, &["touches memory that was not opened to it"], |mistaken| {
        read_from_a_peer(mistaken, |[reader, peer]| {
            drop(peer);
            [reader, device(1)]
        });
    });
}

#[test]
fn software_driver_reports_a_new_context_that_was_not_given_its_peer_again() {
    let test = "mistakes::software_driver_reports_a_new_context_that_was_not_given_its_peer_again";
    shows(test, &["touches memory that was not opened to it"], |mistaken| {
        read_from_a_peer(mistaken, |[reader, peer]| {
            drop(reader);
            [device(0), peer]
        });
    });
}

#[test]
fn software_driver_reports_writes_beyond_the_end() {
    let test = "mistakes::software_driver_reports_writes_beyond_the_end";
    shows(test, &["beyond the end"], |mistaken| {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let swiglu = Swiglu::new(8, 1);
        let from = allocate(swiglu.input_bytes());
        upload(from, &swiglu.input(0));
        // No page ends there: the allocation is 256 bytes, of which so many were asked for.
        let to = allocate(if mistaken { 12 } else { 16 });
        swiglu.launch(&stream, from, to).expect("a launch");
        stream.synchronize().expect("done");
        free(to);
    });
}

#[test]
fn software_driver_ends_a_process_that_is_strict() {
    const TEST: &str = "mistakes::software_driver_ends_a_process_that_is_strict";
    let ended = catch_unwind(|| {
        in_child(TEST, &[], || {
            let context = device(0);
            let stream = context.new_stream().expect("a stream");
            let (one, two) = (allocate(64), allocate(64));
            copy(&stream, one, two, 64);
            free(two);
        });
    });
    let Err(payload) = ended else { panic!("the violation was not reported") };
    let text = payload.downcast_ref::<String>().expect("a message");
    assert!(text.contains("VIOLATION: cuMemFree of memory that is in use"), "{text}");
}

#[test]
fn software_driver_reports_pinned_memory_freed_while_in_flight() {
    let test = "mistakes::software_driver_reports_pinned_memory_freed_while_in_flight";
    shows(test, &["cuMemFreeHost of memory that is in use"], |mistaken| {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let (memory, host) = (allocate(64), pinned(16));
        copy_to_device(&stream, memory, host);
        if !mistaken {
            stream.synchronize().expect("done");
        }
        // SAFETY: nobody uses it any more.
        unsafe { result::free_host(host.as_mut_ptr().cast()) }.expect("it was allocated");
        let _ = stream.synchronize();
    });
}

/// That the report itself can be read is what all of these rely on.
#[test]
fn software_driver_reports_are_read_as_they_are_written() {
    let test = "mistakes::software_driver_reports_are_read_as_they_are_written";
    let report: Option<Report> = in_child_reported(test, &[], || drop(device(0)));
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.devices.len(), report.leaked_bytes()), (0, 1, 0));
    assert_eq!(report.calls["cuInit"], 1);
}
