//! Whole engines on CUDA devices, over a software driver: what is shipped, from a prompt to its answer.

pub(crate) mod overlap;

use std::time::{Duration, Instant};

use consort_actors::GenerationError;
use consort_kernels::cuda::device::CudaError;
use consort_software_driver::{Report, in_child, in_child_reported};
use futures_util::future::join_all;
use tempfile::TempDir;

use super::{Engine, FinishReason, GenerateOptions, TextEvent};
use crate::{
    AllReduce, EngineBuilder,
    error::{DeviceError, EngineError, RequestError},
    plan::Shortfall,
    testing,
    topology::Environment,
};

pub(crate) const THREE: (&str, &str) = ("CONSORT_SOFTWARE_DRIVER_DEVICES", "3");

pub(crate) fn checkpoint() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    folder
}

/// The tiny model in bfloat16, on CPUs or on cards; steps of few tokens, so that prompts come in parts.
pub(crate) fn tiny(folder: &TempDir, devices: &str) -> EngineBuilder {
    let devices = devices.to_owned();
    Engine::builder()
        .model(folder.path())
        .environment(Environment::empty())
        .dtype("bfloat16")
        .max_model_len(192)
        .max_num_seqs(16)
        .max_num_batched_tokens(24)
        .with_overrides(move |overrides| overrides.devices = Some(devices))
}

pub(crate) fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens: Some(max_tokens),
        temperature: Some(0.0),
        ignore_eos: true,
        logprobs: Some(2),
        ..GenerateOptions::default()
    }
}

pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Runtime::new().expect("a runtime").block_on(future)
}

pub(crate) async fn answer(engine: &Engine, prompt: &str, options: GenerateOptions) -> Vec<u32> {
    let stream = engine.generate(prompt, options).expect("admitted");
    let done = stream.collect().await.expect("it ends well");
    assert_eq!(done.finish.reason, FinishReason::Length);
    done.tokens
}

/// Greedy tokens and, of each, how far the runner-up is behind.
pub(crate) async fn with_margins(engine: &Engine, prompt: &str, tokens: usize) -> Vec<(u32, f32)> {
    let mut stream = engine.generate(prompt, greedy(tokens)).expect("admitted");
    let mut found = Vec::new();
    while let Some(event) = stream.next().await {
        if let TextEvent::Delta(delta) = event.expect("no failure") {
            for (token, logprobs) in delta.tokens.iter().zip(&delta.logprobs) {
                let top: Vec<f32> = logprobs.top.iter().map(|(_, logprob)| *logprob).collect();
                found.push((*token, top[0] - top[1]));
            }
        }
    }
    assert_eq!(found.len(), tokens);
    found
}

/// The same tokens as another engine's that rounds the same inputs of the same products to BF16: only near ties may go
/// the other way, and then what follows is another text.
pub(crate) fn assert_near(got: &[(u32, f32)], expected: &[(u32, f32)], what: &str) {
    let differs = got.iter().zip(expected).position(|((token, _), (theirs, _))| token != theirs);
    if let Some(at) = differs {
        let ((token, _), (theirs, margin)) = (got[at], expected[at]);
        assert!(at >= 6, "{what}: too few tokens are compared");
        assert!(margin < 0.05, "{what}: {token} instead of {theirs}, {margin} ahead");
    }
}

#[test]
fn software_driver_engines_on_one_and_three_devices_say_what_the_cpu_says() {
    let test = "engine::software_driver_tests::\
                software_driver_engines_on_one_and_three_devices_say_what_the_cpu_says";
    let report = in_child_reported(test, &[THREE], || {
        block_on(async {
            let folder = checkpoint();
            let prompt = "the same prompt for all, longer than a step takes";
            let cpu = tiny(&folder, "cpu").start().await.expect("it starts");
            let expected = with_margins(&cpu, prompt, 24).await;
            cpu.shutdown(Duration::from_secs(5)).await;
            for devices in ["cuda:0", "cuda:2,cuda:0,cuda:1"] {
                let engine = tiny(&folder, devices).start().await.expect("it starts");
                let got = with_margins(&engine, prompt, 24).await;
                engine.shutdown(Duration::from_secs(5)).await;
                assert_near(&got, &expected, devices);
            }
        });
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    assert!(report.graph_launches > 40, "{report:?}");
}

/// Answers `requests` at once, one of which is given up, and then each alone; asserts that they are the same. Returns
/// how often a sequence had to give way.
pub(crate) async fn together_and_alone(engine: &Engine, requests: &[(String, GenerateOptions)]) -> u64 {
    let given_up = async {
        let mut stream = engine.generate("this one is given up", greedy(40)).expect("admitted");
        stream.next().await.expect("it begins").expect("well");
    };
    let together = join_all(requests.iter().map(|(prompt, options)| answer(engine, prompt, options.clone())));
    let (together, ()) = tokio::join!(together, given_up);
    let preemptions = engine.status().ensemble.preemptions;
    for ((prompt, options), tokens) in requests.iter().zip(&together) {
        assert_eq!(&answer(engine, prompt, options.clone()).await, tokens, "{prompt}");
    }
    preemptions
}

/// Prompts of several lengths, drawn in several ways.
pub(crate) fn requests(count: usize, tokens: usize) -> Vec<(String, GenerateOptions)> {
    (0..count)
        .map(|at| {
            let options = GenerateOptions {
                temperature: Some(if at % 3 == 0 { 0.0 } else { 0.9 }),
                top_p: Some(if at % 4 == 1 { 0.9 } else { 1.0 }),
                seed: Some(at as i64),
                logprobs: None,
                ..greedy(tokens)
            };
            ("a few words. ".repeat(1 + at % 4) + &at.to_string(), options)
        })
        .collect()
}

#[test]
fn software_driver_sixteen_requests_at_once_get_what_each_gets_alone() {
    let test =
        "engine::software_driver_tests::software_driver_sixteen_requests_at_once_get_what_each_gets_alone";
    let report = in_child_reported(test, &[], || {
        block_on(async {
            let folder = checkpoint();
            // Far less memory than sixteen sequences fill: some are preempted and filled in again.
            let engine = tiny(&folder, "cuda:0").batch_invariant(true).kv_cache_memory_bytes(160_000);
            let engine = engine.start().await.expect("it starts");
            let preemptions = together_and_alone(&engine, &requests(16, 44)).await;
            assert!(preemptions > 0, "the pool was to be too small");
            engine.shutdown(Duration::from_secs(5)).await;
        });
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    assert!(report.graph_launches > 100, "{report:?}");
}

#[test]
fn software_driver_requests_over_three_devices_get_together_what_each_gets_alone() {
    let test = "engine::software_driver_tests::\
                software_driver_requests_over_three_devices_get_together_what_each_gets_alone";
    let report = in_child_reported(test, &[THREE], || {
        block_on(async {
            let folder = checkpoint();
            // Memory for a few of the sixteen.
            let engine = tiny(&folder, "cuda:0,cuda:1,cuda:2").batch_invariant(true);
            let engine = engine.max_model_len(96).kv_cache_memory_bytes(50_000);
            let engine = engine.start().await.expect("it starts");
            let preemptions = together_and_alone(&engine, &requests(16, 30)).await;
            assert!(preemptions > 0, "the pool was to be too small");
            engine.shutdown(Duration::from_secs(5)).await;
        });
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    assert!(report.graph_launches > 100, "{report:?}");
}

/// What a fault may cost: how long a step may take, how soon the engine is to answer again, and ranks built anew.
pub(super) struct Price {
    pub(super) step_limit: Duration,
    pub(super) answered: Duration,
    pub(super) restarts: [u32; 2],
}

/// An engine over three devices, one of which the environment strikes: the request at hand ends with a typed error, and
/// later ones are answered. Returns the report, in the parent process.
fn one_rank_is_lost(test: &str, fault: &str, price: &Price) -> Option<Report> {
    let test = format!("engine::software_driver_tests::{test}");
    let environment = [THREE, ("CONSORT_SOFTWARE_DRIVER_FAULTS", fault)];
    in_child_reported(&test, &environment, || {
        // Only their launches are counted.
        block_on(fail_and_answer(price, AllReduce::Kernels));
    })
}

/// Returns why the request failed.
pub(super) async fn fail_and_answer(price: &Price, all_reduce: AllReduce) -> String {
    let folder = checkpoint();
    let engine = tiny(&folder, "cuda:0,cuda:1,cuda:2").step_limit(price.step_limit).all_reduce(all_reduce);
    let engine = engine.start().await.expect("it starts");
    let started = Instant::now();
    let stream = engine.generate("a prompt", greedy(60)).expect("admitted");
    let error = stream.collect().await.expect_err("a rank is lost");
    println!("after {:?}: {error}", started.elapsed());
    let RequestError::Generation(GenerationError::ShardLost { reason }) = error else { panic!("{error:?}") };
    assert!(reason.contains("rank "), "{reason}");
    // Sooner than a rank that leaves would give up waiting for one that waits for it.
    loop {
        assert!(started.elapsed() < price.answered, "{:?}", engine.status());
        if let Ok(stream) = engine.generate("a prompt", greedy(8))
            && stream.collect().await.is_ok()
        {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("answers again after {:?}", started.elapsed());
    let restarts: Vec<u32> = engine.status().ensemble.ranks.iter().map(|rank| rank.restarts).collect();
    let [least, most] = price.restarts;
    assert!((least..=most).contains(&restarts.iter().sum()), "{restarts:?}");
    engine.shutdown(Duration::from_secs(5)).await;
    reason
}

/// The others keep their weights.
const ONE_RANK: Price =
    Price { step_limit: Duration::from_secs(120), answered: Duration::from_secs(50), restarts: [1, 1] };

/// Everything that was taken was given back, contexts and the library's handles included.
pub(super) fn assert_given_back(fault: &str, report: &Report) {
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{fault}: {report:?}");
    for (taken, given_back) in
        [("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"), ("cublasLtCreate", "cublasLtDestroy")]
    {
        assert_eq!(report.calls.get(taken), report.calls.get(given_back), "{fault}: {taken}");
    }
}

#[test]
fn software_driver_a_lost_context_ends_its_requests_and_is_replaced_by_a_new_one() {
    let test = "software_driver_a_lost_context_ends_its_requests_and_is_replaced_by_a_new_one";
    // In a step that all have begun; and while a graph is made, when the others have not begun theirs. What the context
    // held goes with it, once nothing of it is held: a device whose context was kept would fail for ever.
    for fault in ["cuGraphLaunch:20=719", "cuGraphInstantiateWithFlags:2=700"] {
        let Some(report) = one_rank_is_lost(test, fault, &ONE_RANK) else { return };
        assert_given_back(fault, &report);
    }
}

#[test]
fn software_driver_a_launch_that_is_refused_ends_its_requests_and_later_ones_are_answered() {
    let test = "software_driver_a_launch_that_is_refused_ends_its_requests_and_later_ones_are_answered";
    // Not sticky: invalid value, and out of resources; in the middle of a prompt's first step.
    for fault in ["cuLaunchKernel:30=1", "cuLaunchKernel:41=701"] {
        let Some(report) = one_rank_is_lost(test, fault, &ONE_RANK) else { return };
        assert_given_back(fault, &report);
    }
}

#[test]
fn software_driver_a_device_that_hangs_ends_its_requests_in_time_and_keeps_what_it_may_touch() {
    let test = "software_driver_a_device_that_hangs_ends_its_requests_in_time_and_keeps_what_it_may_touch";
    // All are built anew: when it goes on, it does so in the memory of all.
    let (step_limit, answered) = (Duration::from_secs(5), Duration::from_secs(50));
    let price = Price { step_limit, answered, restarts: [3, 5] };
    for fault in ["cuLaunchKernel:30=hang", "cuGraphLaunch:20=hang"] {
        let Some(report) = one_rank_is_lost(test, fault, &price) else { return };
        assert_eq!(report.violations, 0, "{fault}: {report:?}");
        // It may use for ever what its ranks had, which is less than half of what there was with their successors'.
        for device in &report.devices {
            assert!(device.bytes > 0 && 2 * device.bytes <= device.bytes_max, "{fault}: {report:?}");
            assert_eq!(device.left_in_contexts, 0, "{fault}: {report:?}");
        }
    }
}

#[test]
fn software_driver_only_wanted_cards_are_opened_to_be_looked_at() {
    let test = "engine::software_driver_tests::software_driver_only_wanted_cards_are_opened_to_be_looked_at";
    let report = in_child_reported(test, &[THREE], || {
        let folder = checkpoint();
        let text = tiny(&folder, "cuda:1").effective_config().expect("it fits");
        assert!(text.contains("cuda:1"), "{text}");
    });
    let Some(report) = report else { return };
    assert_eq!(report.calls["cuDevicePrimaryCtxRetain"], 1, "{report:?}");
    assert_given_back("none", &report);
}

#[test]
fn software_driver_cards_too_small_or_absent_are_refused_before_anything_is_loaded() {
    let test = "engine::software_driver_tests::\
                software_driver_cards_too_small_or_absent_are_refused_before_anything_is_loaded";
    in_child(test, &[("CONSORT_SOFTWARE_DRIVER_MEMORY", "2000000")], || {
        block_on(async {
            let folder = checkpoint();
            let small = tiny(&folder, "cuda:0").start().await.expect_err("too small");
            let text = small.to_string();
            let EngineError::DoesNotFit { plan } = small else { panic!("{text}") };
            assert!(matches!(plan.shortfall(), Some(Shortfall::Model { rank: 0, .. })), "{text}");
            assert!(text.contains("rank 0 on cuda:0 lacks 2.0 MB: its weights take"), "{text}");
            match tiny(&folder, "cuda:1").start().await.expect_err("one card only") {
                EngineError::Device(DeviceError(CudaError::NoDevice { wanted, reason })) => {
                    assert!(wanted == "cuda:1" && reason.contains("cuda:0"), "{wanted}: {reason}");
                }
                other => panic!("{other:?}"),
            }
            let float = tiny(&folder, "cuda:0").dtype("float32").start().await.expect_err("not on cards");
            assert!(float.to_string().contains("bfloat16"), "{float}");
        });
    });
}

/// Asks for long prompts in turn, more than the cache holds, and then for all of them again, some at once; asserts that
/// the answers are the same and that pages came back from the host.
async fn again_from_the_host(engine: &Engine) {
    let prompt = |at: usize| format!("{at} ") + &"a few words. ".repeat(8);
    let mut first = Vec::new();
    for at in 0..12 {
        first.push(answer(engine, &prompt(at), greedy(6)).await);
    }
    let before = engine.status().ensemble;
    assert!(before.host_saves > 12 && before.host_used_blocks > 12, "{before:?}");
    for trio in [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]] {
        let prompts = trio.map(prompt);
        let answers = join_all(prompts.iter().map(|prompt| answer(engine, prompt, greedy(6)))).await;
        trio.into_iter().zip(answers).for_each(|(at, tokens)| assert_eq!(tokens, first[at], "prompt {at}"));
    }
    let after = engine.status().ensemble;
    assert!(after.host_loads > 12, "{after:?}");
    let computed = after.computed_tokens - before.computed_tokens;
    println!("{computed} tokens computed the second time, {} in all", after.computed_tokens);
    assert!(after.host_hits > 200 && computed * 2 < before.computed_tokens, "{after:?}");
}

#[test]
fn software_driver_pages_that_three_devices_gave_up_come_back_from_the_host() {
    let test = "engine::software_driver_tests::\
                software_driver_pages_that_three_devices_gave_up_come_back_from_the_host";
    let report = in_child_reported(test, &[THREE], || {
        block_on(async {
            let folder = checkpoint();
            for devices in ["cuda:0", "cuda:0,cuda:1,cuda:2"] {
                let engine = tiny(&folder, devices).batch_invariant(true).kv_cache_memory_bytes(160_000);
                let engine = engine.kv_offloading_bytes(1 << 20).start().await.expect("it starts");
                again_from_the_host(&engine).await;
                engine.shutdown(Duration::from_secs(5)).await;
            }
        });
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
}

#[test]
fn pages_that_cpu_ranks_gave_up_come_back_from_the_host() {
    block_on(async {
        let folder = checkpoint();
        for devices in ["cpu", "cpu,cpu,cpu"] {
            let engine = tiny(&folder, devices).kv_cache_memory_bytes(160_000);
            let engine = engine.kv_offloading_bytes(1 << 20).start().await.expect("it starts");
            again_from_the_host(&engine).await;
            engine.shutdown(Duration::from_secs(5)).await;
        }
    });
}
