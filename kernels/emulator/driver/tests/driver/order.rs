//! Streams, events and the host: what waits for what.
#![allow(unsafe_code)]

use std::{
    ffi::c_void,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use consort_software_driver::{in_child, in_child_reported};
use cudarc::driver::{CudaContext, result, sys};

use crate::support::*;

const LAG: &str = "CONSORT_SOFTWARE_DRIVER_LAG_MS";
const FOR_EVER: &str = "3600000";

#[test]
fn software_driver_orders_two_streams_by_an_event() {
    for order in ORDERS {
        let test = "order::software_driver_orders_two_streams_by_an_event";
        let report = in_child_reported(test, &[(ORDER, order)], || {
            let context = device(0);
            let (one, two) =
                (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
            let swiglu = Swiglu::new(64, 5);
            let (from, staged, to) = (
                allocate(swiglu.input_bytes()),
                allocate(swiglu.input_bytes()),
                allocate(swiglu.output_bytes()),
            );
            let out = pinned(swiglu.output_bytes() / 4);
            for seed in 0..3 {
                let input = swiglu.input(seed);
                upload(from, &input);
                copy(&one, staged, from, swiglu.input_bytes());
                two.wait(&one.record_event(None).expect("an event")).expect("a wait");
                swiglu.launch(&two, staged, to).expect("a launch");
                copy_to_host(&two, out, to);
                let end = two.record_event(None).expect("an event");
                end.synchronize().expect("done");
                let bits: Vec<u16> = out.iter().flat_map(|two| [*two as u16, (*two >> 16) as u16]).collect();
                swiglu.check(&input, &bits);
            }
        });
        let Some(report) = report else { return };
        assert_eq!(report.messages, Vec::<String>::new(), "{order}");
    }
}

#[test]
fn software_driver_shows_who_reads_a_copy_early() {
    let environment = [(ORDER, "lazy"), (LAG, FOR_EVER)];
    in_child("order::software_driver_shows_who_reads_a_copy_early", &environment, || {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let (memory, host) = (allocate(16), pinned(4));
        upload(memory, &[5u32; 4]);
        copy_to_host(&stream, host, memory);
        assert_eq!(host, [u32::MAX; 4], "neither what was there before nor what will be");
        stream.synchronize().expect("done");
        assert_eq!(host, [5; 4]);
        // And who writes to the source of a copy.
        copy_to_device(&stream, memory, host);
        host[0] = 6;
        stream.synchronize().expect("done");
        assert_eq!(download::<u32>(memory, 4), [6, 5, 5, 5], "the copy had not happened yet");
    });
}

#[test]
fn software_driver_runs_what_nobody_waits_for_after_a_while() {
    in_child("order::software_driver_runs_what_nobody_waits_for_after_a_while", &[(LAG, "5")], || {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let (memory, host) = (allocate(16), pinned(4));
        upload(memory, &[5u32; 4]);
        copy_to_host(&stream, host, memory);
        let word = &raw const host[0];
        // SAFETY: pinned memory, written by the driver's thread.
        assert!(becomes(|| unsafe { word.read_volatile() } == 5));
    });
}

#[test]
fn software_driver_tells_when_an_event_is_done() {
    in_child("order::software_driver_tells_when_an_event_is_done", &[(LAG, FOR_EVER)], || {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let (one, two) = (allocate(1 << 20), allocate(1 << 20));
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let start = stream.record_event(timed).expect("an event");
        copy(&stream, one, two, 1 << 20);
        let end = stream.record_event(timed).expect("an event");
        assert!(!end.is_complete(), "nobody has waited");
        // Who asks again and again is answered some time.
        assert!(becomes(|| end.is_complete()));
        let milliseconds = start.elapsed_ms(&end).expect("both are done");
        assert!((0.0..60_000.0).contains(&milliseconds), "{milliseconds}");
        // SAFETY: a stream.
        assert_eq!(code(unsafe { sys::cuStreamQuery(stream.cu_stream()).result() }), 0);
    });
}

#[test]
fn software_driver_orders_the_default_stream_with_blocking_ones() {
    in_child("order::software_driver_orders_the_default_stream_with_blocking_ones", &[], || {
        let context = device(0);
        let mut blocking = std::ptr::null_mut();
        // SAFETY: a place for a stream.
        assert_eq!(unsafe { sys::cuStreamCreate(&mut blocking, 0) } as u32, 0);
        let default = context.default_stream();
        let (one, two) = (allocate(16), allocate(16));
        upload(one, &[1u32; 4]);
        for round in 2..5u32 {
            // SAFETY: memory of that size.
            unsafe {
                result::memset_d8_async(one, round as u8, 16, blocking).expect("a fill");
                result::memcpy_dtod_async(two, one, 16, default.cu_stream()).expect("a copy");
                result::memset_d8_async(one, 0, 16, blocking).expect("a fill");
            }
            assert_eq!(download::<u8>(two, 16), [round as u8; 16]);
        }
    });
}

#[test]
fn software_driver_calls_host_functions_in_order() {
    for order in ORDERS {
        in_child("order::software_driver_calls_host_functions_in_order", &[(ORDER, order)], || {
            let context = device(0);
            let stream = context.new_stream().expect("a stream");
            let (memory, host) = (allocate(16), pinned(4));
            upload(memory, &[5u32; 4]);
            copy_to_host(&stream, host, memory);
            let seen = AtomicU32::new(0);
            let told = (host.as_ptr(), &raw const seen);
            // SAFETY: what it is given is there until the stream is done.
            let called =
                unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(look), (&raw const told) as _) };
            assert_eq!(called as u32, 0);
            stream.synchronize().expect("done");
            assert_eq!(seen.load(Ordering::Acquire), 5);
        });
    }
}

#[test]
fn software_driver_serves_threads_and_devices_at_once() {
    for order in ORDERS {
        let environment = [(DEVICES, "3"), (ORDER, order)];
        in_child("order::software_driver_serves_threads_and_devices_at_once", &environment, || {
            load();
            std::thread::scope(|scope| {
                for ordinal in 0..3 {
                    scope.spawn(move || work_on(&device(ordinal), ordinal as u32));
                }
            });
        });
    }
}

/// Tells what the host sees when it is called.
unsafe extern "C" fn look(told: *mut c_void) {
    // SAFETY: pinned memory, the copy to which is done, and a number that is there.
    unsafe {
        let (word, seen) = *told.cast::<(*const u32, *const AtomicU32)>();
        (*seen).store(word.read_volatile(), Ordering::Release);
    }
}

fn work_on(context: &Arc<CudaContext>, seed: u32) {
    let stream = context.new_stream().expect("a stream");
    let swiglu = Swiglu::new(128, 2);
    let (from, to) = (allocate(swiglu.input_bytes()), allocate(swiglu.output_bytes()));
    for round in 0..20 {
        let input = swiglu.input(seed * 100 + round);
        upload(from, &input);
        swiglu.launch(&stream, from, to).expect("a launch");
        stream.synchronize().expect("done");
        swiglu.check(&input, &download(to, 2 * 128));
    }
    free(from);
    free(to);
}
