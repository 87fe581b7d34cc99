use std::sync::Arc;

use consort_actors::{CacheSpec, EnsembleState, ReplicaId, ReplicaStatus, Status};

use super::{EngineMetrics, Outcome, RequestTimer, Siblings};

fn replica(number: u16) -> ReplicaStatus {
    ReplicaStatus {
        replica: ReplicaId(number),
        state: EnsembleState::Ready,
        epoch: 0,
        ranks: Vec::new(),
        running: 2,
        waiting: 1,
        total_blocks: 8,
        used_blocks: 2,
        cached_blocks: 5,
        host_blocks: 0,
        host_used_blocks: 0,
        steps: 5,
        preemptions: 3,
        prompt_tokens: 40,
        prefix_cache_queries: 38,
        prefix_cache_hits: 32,
        computed_tokens: 8,
        generated_tokens: 7,
        host_saves: 0,
        host_loads: 0,
        host_hits: 0,
        finished: Default::default(),
    }
}

fn status_of(replicas: Vec<ReplicaStatus>) -> Status {
    Status {
        state: EnsembleState::Ready,
        epoch: 0,
        ranks: Vec::new(),
        replicas,
        moved_requests: 0,
        running: 2,
        waiting: 1,
        total_blocks: 8,
        used_blocks: 2,
        cached_blocks: 5,
        host_blocks: 0,
        host_used_blocks: 0,
        block_size: 16,
        steps: 5,
        preemptions: 3,
        prompt_tokens: 40,
        prefix_cache_queries: 38,
        prefix_cache_hits: 32,
        computed_tokens: 0,
        generated_tokens: 7,
        host_saves: 0,
        host_loads: 0,
        host_hits: 0,
        finished: Default::default(),
    }
}

fn status() -> Status {
    status_of(vec![replica(0)])
}

fn metrics(model: &str) -> Arc<EngineMetrics> {
    Arc::new(EngineMetrics::new(model, 1, &CacheSpec::new(16, 8)).expect("buckets are valid"))
}

fn alone() -> Arc<Siblings> {
    Arc::new(Siblings::new(1))
}

fn has(text: &str, line: &str) -> bool {
    text.lines().any(|candidate| candidate == line)
}

#[test]
fn gauges_and_counters_carry_vllms_names_and_labels() {
    let text = metrics("tiny").render(&status());
    for line in [
        "vllm:num_requests_running{model_name=\"tiny\",engine=\"0\"} 2",
        "vllm:num_requests_waiting{model_name=\"tiny\",engine=\"0\"} 1",
        "vllm:kv_cache_usage_perc{model_name=\"tiny\",engine=\"0\"} 0.25",
        "vllm:prompt_tokens_total{model_name=\"tiny\",engine=\"0\"} 40",
        "vllm:generation_tokens_total{model_name=\"tiny\",engine=\"0\"} 7",
        "vllm:num_preemptions_total{model_name=\"tiny\",engine=\"0\"} 3",
        "vllm:prefix_cache_queries_total{model_name=\"tiny\",engine=\"0\"} 38",
        "vllm:prefix_cache_hits_total{model_name=\"tiny\",engine=\"0\"} 32",
        "consort:kv_cache_blocks{model_name=\"tiny\",engine=\"0\",state=\"used\"} 2",
        "consort:kv_cache_blocks{model_name=\"tiny\",engine=\"0\",state=\"cached\"} 5",
        "consort:kv_cache_blocks{model_name=\"tiny\",engine=\"0\",state=\"free\"} 1",
        "vllm:cache_config_info{model_name=\"tiny\",engine=\"0\",block_size=\"16\",num_gpu_blocks=\"8\",\
         enable_prefix_caching=\"True\"} 1",
    ] {
        assert!(has(&text, line), "{line} is missing in\n{text}");
    }
    assert!(has(&text, "# TYPE vllm:prompt_tokens_total counter"), "{text}");
}

#[test]
fn each_replica_is_an_engine_of_its_own() {
    let metrics = EngineMetrics::new("tiny", 2, &CacheSpec::new(16, 8)).expect("buckets are valid");
    let second = ReplicaStatus { running: 5, used_blocks: 8, prompt_tokens: 9, ..replica(1) };
    let text = metrics.render(&status_of(vec![replica(0), second]));
    for line in [
        "vllm:num_requests_running{model_name=\"tiny\",engine=\"0\"} 2",
        "vllm:num_requests_running{model_name=\"tiny\",engine=\"1\"} 5",
        "vllm:kv_cache_usage_perc{model_name=\"tiny\",engine=\"1\"} 1",
        "vllm:prompt_tokens_total{model_name=\"tiny\",engine=\"0\"} 40",
        "vllm:prompt_tokens_total{model_name=\"tiny\",engine=\"1\"} 9",
    ] {
        assert!(has(&text, line), "{line} is missing in\n{text}");
    }
    assert_eq!(text.matches("vllm:cache_config_info{").count(), 2, "{text}");
}

#[test]
fn a_finished_request_fills_its_histograms() {
    let metrics = metrics("tiny");
    let mut timer = RequestTimer::start(Arc::clone(&metrics), 12, Some(3), alone());
    (0..3).for_each(|_| timer.token());
    timer.finish(Outcome::Length);
    drop(timer);
    let text = metrics.render(&status());
    for line in [
        "vllm:request_success_total{model_name=\"tiny\",engine=\"0\",finished_reason=\"length\"} 1",
        "vllm:request_success_total{model_name=\"tiny\",engine=\"0\",finished_reason=\"abort\"} 0",
        "vllm:time_to_first_token_seconds_count{model_name=\"tiny\",engine=\"0\"} 1",
        "vllm:inter_token_latency_seconds_count{model_name=\"tiny\",engine=\"0\"} 2",
        "vllm:e2e_request_latency_seconds_count{model_name=\"tiny\",engine=\"0\"} 1",
        "vllm:request_prompt_tokens_bucket{model_name=\"tiny\",engine=\"0\",le=\"10\"} 0",
        "vllm:request_prompt_tokens_bucket{model_name=\"tiny\",engine=\"0\",le=\"20\"} 1",
        "vllm:request_generation_tokens_sum{model_name=\"tiny\",engine=\"0\"} 3",
        "vllm:request_max_num_generation_tokens_sum{model_name=\"tiny\",engine=\"0\"} 3",
        "vllm:request_params_max_tokens_sum{model_name=\"tiny\",engine=\"0\"} 3",
        "vllm:request_params_n_bucket{model_name=\"tiny\",engine=\"0\",le=\"1\"} 1",
    ] {
        assert!(has(&text, line), "{line} is missing in\n{text}");
    }
    assert!(
        text.contains(
            "vllm:time_to_first_token_seconds_bucket{model_name=\"tiny\",engine=\"0\",le=\"2560\"}"
        )
    );
    assert!(
        text.contains(
            "vllm:inter_token_latency_seconds_bucket{model_name=\"tiny\",engine=\"0\",le=\"0.025\"}"
        )
    );
}

#[test]
fn choices_of_one_prompt_are_one_request_with_the_longest_choice() {
    let metrics = metrics("tiny");
    let siblings = Arc::new(Siblings::new(3));
    let start = || RequestTimer::start(Arc::clone(&metrics), 4, None, Arc::clone(&siblings));
    for (mut timer, tokens) in [start(), start(), start()].into_iter().zip([2, 7, 5]) {
        (0..tokens).for_each(|_| timer.token());
        assert!(
            !metrics
                .render(&status())
                .contains("vllm:request_params_n_sum{model_name=\"tiny\",engine=\"0\"} 3")
        );
        timer.finish(Outcome::Length);
    }
    let text = metrics.render(&status());
    for line in [
        "vllm:request_success_total{model_name=\"tiny\",engine=\"0\",finished_reason=\"length\"} 3",
        "vllm:request_generation_tokens_sum{model_name=\"tiny\",engine=\"0\"} 14",
        "vllm:request_max_num_generation_tokens_sum{model_name=\"tiny\",engine=\"0\"} 7",
        "vllm:request_max_num_generation_tokens_count{model_name=\"tiny\",engine=\"0\"} 1",
        "vllm:request_params_n_sum{model_name=\"tiny\",engine=\"0\"} 3",
    ] {
        assert!(has(&text, line), "{line} is missing in\n{text}");
    }
}

#[test]
fn a_dropped_request_counts_as_aborted() {
    let metrics = metrics("tiny");
    drop(RequestTimer::start(Arc::clone(&metrics), 1, None, alone()));
    let line = "vllm:request_success_total{model_name=\"tiny\",engine=\"0\",finished_reason=\"abort\"} 1";
    assert!(has(&metrics.render(&status()), line));
}

#[test]
fn two_engines_do_not_mix() {
    let (one, two) = (metrics("one"), metrics("two"));
    RequestTimer::start(Arc::clone(&one), 1, None, alone()).finish(Outcome::Stop);
    let text = two.render(&status());
    assert!(!text.contains("model_name=\"one\""));
    let line = "vllm:request_success_total{model_name=\"two\",engine=\"0\",finished_reason=\"stop\"} 0";
    assert!(has(&text, line), "{text}");
}

#[test]
fn names_of_models_are_escaped() {
    let text = metrics("a\"b\\c").render(&status());
    assert!(text.contains("model_name=\"a\\\"b\\\\c\""), "{text}");
}

#[test]
fn every_metric_that_the_module_promises_is_there() {
    const LABELS: [&str; 4] = ["vllm:", "block_size", "num_gpu_blocks", "enable_prefix_caching"];
    let metrics = metrics("tiny");
    let mut timer = RequestTimer::start(Arc::clone(&metrics), 1, Some(2), alone());
    (0..2).for_each(|_| timer.token());
    timer.finish(Outcome::Length);
    let text = metrics.render(&status());
    let (promised, absent) = include_str!("mod.rs").split_once("//! Of our own").expect("both lists");
    let promised = promised.split_once("there are").expect("the first list").1;
    let names: Vec<&str> = promised.split('`').skip(1).step_by(2).collect();
    assert!(names.len() > 15, "{names:?}");
    for name in names.into_iter().filter(|name| !LABELS.contains(name)) {
        let known = text.lines().any(|line| line.starts_with(&format!("# TYPE vllm:{name}")));
        assert!(known, "{name} is promised and missing in\n{text}");
    }
    assert!(absent.contains("iteration_tokens_total") && !text.contains("iteration_tokens"));
}
