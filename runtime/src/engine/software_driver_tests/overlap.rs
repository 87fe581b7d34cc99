//! Steps that are enqueued while a device computes another: answers are what they are without.

use super::*;
use crate::engine::Completion;

const REQUESTS: usize = 16;
const TOKENS: usize = 20;

/// The engine that is asked, with or without overlap: tokens do not depend on company, and prompts come in parts.
async fn engine(folder: &TempDir, devices: &str, overlaps: bool) -> Engine {
    let engine = tiny(folder, devices).batch_invariant(true).async_scheduling(overlaps);
    engine.max_model_len(96).start().await.expect("it starts")
}

/// Requests of all kinds: with penalties, with log-probabilities, and those that await their tokens.
pub(crate) fn mixture() -> Vec<(String, GenerateOptions)> {
    let mut requests = requests(REQUESTS, TOKENS);
    for (at, (_, options)) in requests.iter_mut().enumerate() {
        options.awaits_tokens = at % 4 == 1;
        if at % 5 == 2 {
            (options.repetition_penalty, options.frequency_penalty) = (Some(1.3), Some(0.4));
        }
        // Few, which come late: a step with one of them goes alone.
        options.logprobs = (at == 15).then_some(2);
        options.max_tokens = Some(if at == 15 { 4 } else { TOKENS });
    }
    requests
}

pub(crate) async fn complete(engine: &Engine, (prompt, options): &(String, GenerateOptions)) -> Completion {
    let stream = engine.generate(prompt.as_str(), options.clone()).expect("admitted");
    stream.collect().await.expect("it ends well")
}

pub(crate) async fn together(engine: &Engine, requests: &[(String, GenerateOptions)]) -> Vec<Completion> {
    join_all(requests.iter().map(|request| complete(engine, request))).await
}

/// The same requests, most of which now end somewhere in the middle of what they said: by a token, or by a string. What
/// was computed beyond that is nobody's.
pub(crate) fn that_stop(
    requests: &[(String, GenerateOptions)],
    said: &[Completion],
) -> Vec<(String, GenerateOptions)> {
    let mut requests = requests.to_vec();
    for (at, ((_, options), said)) in requests.iter_mut().zip(said).enumerate() {
        let middle = 3 + at % 10;
        let text: Vec<char> = said.text.chars().collect();
        match at % 3 {
            0 => options.stop_token_ids.extend(said.tokens.get(middle)),
            1 if text.len() > middle + 2 => options.stop = vec![text[middle..middle + 2].iter().collect()],
            _ => {}
        }
    }
    requests
}

/// What a reader sees, but for the cache's part of it.
pub(crate) fn seen(all: &[Completion]) -> Vec<(Vec<u32>, &str, FinishReason)> {
    all.iter().map(|one| (one.tokens.clone(), one.text.as_str(), one.finish.reason)).collect()
}

fn same_with_and_without(test: &str, environment: &[(&str, &str)], devices: &'static str) {
    let test = format!("engine::software_driver_tests::overlap::{test}");
    let report = in_child_reported(&test, environment, || {
        block_on(async {
            let folder = checkpoint();
            let requests = mixture();
            let without = engine(&folder, devices, false).await;
            let expected = together(&without, &requests).await;
            let stopping = that_stop(&requests, &expected);
            let expected_stops = together(&without, &stopping).await;
            without.shutdown(Duration::from_secs(5)).await;
            let stopped = expected_stops.iter().filter(|one| one.finish.reason == FinishReason::Stop).count();
            assert!(stopped >= 6, "many are meant to end in the middle: {stopped}");
            let shorter =
                expected_stops.iter().zip(&expected).filter(|(one, all)| one.tokens.len() < all.tokens.len());
            assert!(shorter.count() >= 6);
            let with = engine(&folder, devices, true).await;
            assert_eq!(seen(&together(&with, &requests).await), seen(&expected));
            assert_eq!(seen(&together(&with, &stopping).await), seen(&expected_stops));
            for (request, expected) in stopping.iter().zip(&expected_stops) {
                let alone = complete(&with, request).await;
                assert_eq!(seen(&[alone]), seen(std::slice::from_ref(expected)));
            }
            with.shutdown(Duration::from_secs(5)).await;
        });
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    let Report { graph_launches, graphs_behind, .. } = report;
    println!(
        "{graph_launches} decodes by graphs, {graphs_behind} launched before the last of their kind had ended"
    );
    assert!(graphs_behind > 30, "steps are meant to overlap: {graphs_behind} of {graph_launches} did");
}

#[test]
fn software_driver_one_device_says_the_same_with_and_without_overlap() {
    let test = "software_driver_one_device_says_the_same_with_and_without_overlap";
    same_with_and_without(test, &[], "cuda:0");
}

#[test]
fn software_driver_three_devices_say_the_same_with_and_without_overlap() {
    let test = "software_driver_three_devices_say_the_same_with_and_without_overlap";
    same_with_and_without(test, &[THREE], "cuda:0,cuda:1,cuda:2");
}

#[test]
fn software_driver_steps_do_not_overlap_where_that_is_off_or_a_request_awaits_its_tokens() {
    let test = "engine::software_driver_tests::overlap::\
                software_driver_steps_do_not_overlap_where_that_is_off_or_a_request_awaits_its_tokens";
    let report = in_child_reported(test, &[], || {
        block_on(async {
            let folder = checkpoint();
            let options = GenerateOptions { logprobs: None, ..greedy(12) };
            let off = engine(&folder, "cuda:0", false).await;
            let expected = answer(&off, "a prompt", options.clone()).await;
            off.shutdown(Duration::from_secs(5)).await;
            let on = engine(&folder, "cuda:0", true).await;
            let awaiting = GenerateOptions { awaits_tokens: true, ..options };
            assert_eq!(answer(&on, "a prompt", awaiting).await, expected);
            on.shutdown(Duration::from_secs(5)).await;
        });
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    assert!(report.graph_launches >= 22 && report.graphs_behind == 0, "{report:?}");
}
