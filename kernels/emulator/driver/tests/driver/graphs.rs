//! Capture and replay.
#![allow(unsafe_code)]

use consort_software_driver::{in_child, in_child_reported};
use cudarc::driver::{CudaGraph, CudaStream, result, sys};

use crate::support::*;

const LOCAL: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const PLAIN: sys::CUgraphInstantiate_flags = sys::CUgraphInstantiate_flags(0);

/// What is enqueued meanwhile, as a graph.
fn capture(stream: &std::sync::Arc<CudaStream>, enqueue: impl FnOnce()) -> CudaGraph {
    stream.begin_capture(LOCAL).expect("a capture");
    enqueue();
    stream.end_capture(PLAIN).expect("captured").expect("a graph")
}

#[test]
fn software_driver_replays_a_graph_of_two_streams_over_changed_buffers() {
    for order in ORDERS {
        let test = "graphs::software_driver_replays_a_graph_of_two_streams_over_changed_buffers";
        let report = in_child_reported(test, &[(ORDER, order)], || {
            let context = device(0);
            let (one, two) =
                (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
            let swiglu = Swiglu::new(64, 2);
            let bytes = swiglu.output_bytes();
            let (left, right) = (allocate(swiglu.input_bytes()), allocate(swiglu.input_bytes()));
            let (left_out, both_out) = (allocate(bytes), allocate(2 * bytes));
            // The kernels of both streams, then the left half beside the right one.
            let graph = capture(&one, || {
                two.wait(&one.record_event(None).expect("an event")).expect("a fork");
                swiglu.launch(&one, left, left_out).expect("a launch");
                swiglu.launch(&two, right, both_out + bytes as u64).expect("a launch");
                one.wait(&two.record_event(None).expect("an event")).expect("a join");
                copy(&one, both_out, left_out, bytes);
            });
            let mut nodes = 0;
            // SAFETY: a graph; no place for nodes.
            let counted = unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &mut nodes) };
            assert_eq!((counted as u32, nodes), (0, 3));
            for seed in 0..4 {
                let inputs = [swiglu.input(seed), swiglu.input(seed + 50)];
                upload(left, &inputs[0]);
                upload(right, &inputs[1]);
                graph.launch().expect("a launch");
                one.synchronize().expect("done");
                let out = download::<u16>(both_out, bytes);
                swiglu.check(&inputs.concat(), &out);
            }
        });
        let Some(report) = report else { return };
        assert_eq!(report.messages, Vec::<String>::new(), "{order}");
        assert_eq!((report.graph_launches, report.launches), (4, 0));
    }
}

#[test]
fn software_driver_reports_nodes_without_an_order() {
    for order in ORDERS {
        let test = "graphs::software_driver_reports_nodes_without_an_order";
        let report = in_child_reported(test, &[(ORDER, order), LENIENT], || {
            let context = device(0);
            let (one, two) =
                (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
            let swiglu = Swiglu::new(64, 2);
            let (from, to) = (allocate(swiglu.input_bytes()), allocate(swiglu.output_bytes()));
            let other = allocate(swiglu.input_bytes());
            upload(other, &swiglu.input(0));
            let graph = capture(&one, || {
                two.wait(&one.record_event(None).expect("an event")).expect("a fork");
                copy(&one, from, other, swiglu.input_bytes());
                swiglu.launch(&two, from, to).expect("a launch");
                one.wait(&two.record_event(None).expect("an event")).expect("a join");
            });
            graph.launch().expect("a launch");
            one.synchronize().expect("done");
        });
        let Some(report) = report else { return };
        assert!(report.messages.iter().any(|message| message.contains("no order: ")), "{report:?}");
    }
}

#[test]
fn software_driver_refuses_what_cannot_be_captured() {
    in_child("graphs::software_driver_refuses_what_cannot_be_captured", &[], || {
        let context = device(0);
        let (one, two) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
        let before = two.record_event(None).expect("an event");
        let end = |stream: &std::sync::Arc<CudaStream>| code(stream.end_capture(PLAIN).map(drop));

        one.begin_capture(LOCAL).expect("a capture");
        assert_eq!(code(one.synchronize()), 900, "who waits for what is captured waits for ever");
        assert_eq!(end(&one), 901);

        one.begin_capture(LOCAL).expect("a capture");
        assert_eq!(code(one.wait(&before)), 905, "an event from outside");
        assert_eq!(end(&one), 901);

        one.begin_capture(LOCAL).expect("a capture");
        // SAFETY: any size may be asked for.
        assert_eq!(code(unsafe { result::malloc_sync(16) }.map(drop)), 900, "memory");
        assert_eq!(end(&one), 901);

        one.begin_capture(LOCAL).expect("a capture");
        two.wait(&one.record_event(None).expect("an event")).expect("a fork");
        let memory = std::thread::spawn(move || {
            let _context = device(0);
            allocate(16)
        });
        let memory = memory.join().expect("other threads go on");
        // SAFETY: memory of that size.
        unsafe { result::memset_d8_async(memory, 0, 16, two.cu_stream()) }.expect("a fill");
        assert_eq!(end(&two), 903, "it was not begun there");
        assert_eq!(end(&one), 904, "nobody waits for the fill");

        let graph = capture(&one, || {
            // SAFETY: memory of that size.
            unsafe { result::memset_d8_async(memory, 7, 16, one.cu_stream()) }.expect("a fill");
        });
        assert_eq!(download::<u8>(memory, 1), [255], "captured, and not done");
        graph.upload().expect("an upload");
        graph.launch().expect("a launch");
        one.synchronize().expect("done");
        assert_eq!(download::<u8>(memory, 1), [7]);
    });
}

#[test]
fn software_driver_updates_a_graph_of_the_same_form() {
    in_child("graphs::software_driver_updates_a_graph_of_the_same_form", &[], || {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let memory = allocate(16);
        let fill = |value: u8| {
            // SAFETY: memory of that size.
            unsafe { result::memset_d8_async(memory, value, 16, stream.cu_stream()) }.expect("a fill");
        };
        let graph = capture(&stream, || fill(1));
        let newer = capture(&stream, || fill(2));
        let longer = capture(&stream, || (fill(3), fill(4)).0);
        // SAFETY: a place for what differs, and live graphs.
        let update = |with: &CudaGraph| unsafe {
            let mut info = std::mem::zeroed();
            sys::cuGraphExecUpdate_v2(graph.cu_graph_exec(), with.cu_graph(), &mut info) as u32
        };
        assert_eq!(update(&longer), 910);
        assert_eq!(update(&newer), 0);
        graph.launch().expect("a launch");
        stream.synchronize().expect("done");
        assert_eq!(download::<u8>(memory, 1), [2]);
    });
}

#[test]
fn software_driver_a_graph_takes_its_time_on_the_device_and_not_its_launches() {
    let test = "graphs::software_driver_a_graph_takes_its_time_on_the_device_and_not_its_launches";
    let environment = [(ORDER, "eager"), ("CONSORT_SOFTWARE_DRIVER_GRAPH_MS", "300")];
    let report = in_child_reported(test, &environment, || {
        let context = device(0);
        let stream = context.new_stream().expect("a stream");
        let swiglu = Swiglu::new(64, 2);
        let (from, to) = (allocate(swiglu.input_bytes()), allocate(swiglu.output_bytes()));
        upload(from, &swiglu.input(0));
        let graph = capture(&stream, || swiglu.launch(&stream, from, to).expect("a launch"));
        let started = std::time::Instant::now();
        graph.launch().expect("a launch");
        graph.launch().expect("a launch behind it");
        let launched = started.elapsed();
        stream.synchronize().expect("done");
        let done = started.elapsed();
        assert!(launched.as_millis() < 300 && done.as_millis() >= 600, "{launched:?}, {done:?}");
    });
    let Some(report) = report else { return };
    assert_eq!(report.messages, Vec::<String>::new());
    assert_eq!((report.graph_launches, report.graphs_behind), (2, 1));
}
