//! Measurements of one engine under vLLM's metric names, so that existing dashboards work unchanged.
//!
//! Each engine owns its recorder: nothing is installed globally, and several engines of one process do not mix.
//! Request histograms are recorded where a stream is read ([`RequestTimer`]); gauges and the scheduler's counters are
//! copied from the ensemble's status when [`EngineMetrics::render`] is called. Of these there is one for each replica,
//! which the label `engine` numbers. A request may be moved from one replica to another before it starts, so what is
//! measured where its stream is read stands under `engine="0"` for all replicas together.
//!
//! Of the metrics that a vLLM server exports by default, there are (all under `vllm:`):
//!
//! * gauges `num_requests_running`, `num_requests_waiting`, `kv_cache_usage_perc` (cached blocks that nobody uses are
//!   free in it), `cache_config_info` (its labels `block_size`, `num_gpu_blocks` and `enable_prefix_caching` only);
//! * counters `prompt_tokens`, `generation_tokens`, `num_preemptions`, `request_success`, `prefix_cache_queries` and
//!   `prefix_cache_hits` (in tokens of prompts);
//! * histograms `time_to_first_token_seconds`, `inter_token_latency_seconds`, `request_time_per_output_token_seconds`,
//!   `e2e_request_latency_seconds`, `request_decode_time_seconds`, `request_prompt_tokens`,
//!   `request_generation_tokens`, `request_max_num_generation_tokens`, `request_params_max_tokens`,
//!   `request_params_n`.
//!
//! Of our own there is `consort:kv_cache_blocks`: blocks that are `used`, that nobody uses but whose content is
//! `cached`, and that are `free` without content, by the label `state`.
//!
//! Absent are those that need to know when a request was scheduled (`request_queue_time_seconds`,
//! `request_prefill_time_seconds`, `request_inference_time_seconds`) or what a single step held
//! (`iteration_tokens_total`): the scheduler does not tell. And what belongs to functions that do not exist here: LoRA
//! (`lora_requests_info`), multimodal caches (`mm_cache_*`), speculative decoding (`spec_decode_*`), sleeping
//! (`engine_sleep_state`), KV transfer (`external_prefix_cache_*`).

#[cfg(test)]
mod tests;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Instant,
};

use consort_actors::{CacheSpec, ReplicaStatus, Status};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};

/// Buckets of the time to the first token, in seconds.
const TTFT_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// Buckets of the time between two tokens, in seconds.
const ITL_BUCKETS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// Buckets of whole requests, in seconds.
const LATENCY_BUCKETS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
/// Buckets of token counts.
const TOKEN_BUCKETS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0,
    50_000.0, 100_000.0,
];
/// Buckets of the number of choices.
const CHOICES_BUCKETS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
/// Samples between two drains of the recorder's raw samples into buckets: bounds its memory when nobody scrapes.
const SAMPLES_PER_UPKEEP: u32 = 4096;

/// How a request ended, as the label `finished_reason` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Stop,
    Length,
    Abort,
    Error,
}

/// What the status of one replica is told by: vLLM calls it an engine.
struct ReplicaInstruments {
    running: Gauge,
    waiting: Gauge,
    kv_usage: Gauge,
    kv_used: Gauge,
    kv_cached: Gauge,
    kv_free: Gauge,
    prefix_queries: Counter,
    prefix_hits: Counter,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    preemptions: Counter,
}

impl ReplicaInstruments {
    fn new(set: &InstrumentSet<'_>, cache: &CacheSpec) -> Self {
        let info = [
            ("block_size", cache.block_size.to_string()),
            ("num_gpu_blocks", cache.num_blocks.to_string()),
            // Dashboards know Python's words.
            ("enable_prefix_caching", if cache.prefix_caching { "True" } else { "False" }.to_owned()),
        ];
        let info: Vec<(&'static str, &str)> =
            info.iter().map(|(key, value)| (*key, value.as_str())).collect();
        set.gauge("vllm:cache_config_info", "Shape of the KV cache.", &info).set(1.0);
        let kv_blocks = |state| {
            let help = "KV blocks in use, kept for later requests only, or without content.";
            set.gauge("consort:kv_cache_blocks", help, &[("state", state)])
        };
        let counter = |name, help| set.counter(name, help, &[]);
        Self {
            running: set.gauge("vllm:num_requests_running", "Requests in execution batches.", &[]),
            waiting: set.gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.", &[]),
            kv_usage: set.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", &[]),
            kv_used: kv_blocks("used"),
            kv_cached: kv_blocks("cached"),
            kv_free: kv_blocks("free"),
            prompt_tokens: counter("vllm:prompt_tokens_total", "Prompt tokens processed."),
            generation_tokens: counter("vllm:generation_tokens_total", "Tokens generated."),
            preemptions: counter("vllm:num_preemptions_total", "Sequences preempted."),
            prefix_queries: counter(
                "vllm:prefix_cache_queries_total",
                "Prompt tokens looked up in the prefix cache.",
            ),
            prefix_hits: counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
        }
    }

    fn set(&self, status: &ReplicaStatus) {
        self.running.set(status.running as f64);
        self.waiting.set(status.waiting as f64);
        self.kv_usage.set(status.used_blocks as f64 / status.total_blocks.max(1) as f64);
        self.kv_used.set(status.used_blocks as f64);
        self.kv_cached.set(status.cached_blocks as f64);
        let kept = status.used_blocks + status.cached_blocks;
        self.kv_free.set(status.total_blocks.saturating_sub(kept) as f64);
        self.prompt_tokens.absolute(status.prompt_tokens);
        self.generation_tokens.absolute(status.generated_tokens);
        self.preemptions.absolute(status.preemptions);
        self.prefix_queries.absolute(status.prefix_cache_queries);
        self.prefix_hits.absolute(status.prefix_cache_hits);
    }
}

/// All instruments of one engine.
pub(crate) struct EngineMetrics {
    handle: PrometheusHandle,
    /// By replica.
    replicas: Vec<ReplicaInstruments>,
    success: [Counter; 4],
    ttft: Histogram,
    itl: Histogram,
    time_per_output_token: Histogram,
    e2e: Histogram,
    decode_time: Histogram,
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
    request_max_num_generation_tokens: Histogram,
    params_max_tokens: Histogram,
    params_n: Histogram,
    samples: AtomicU32,
}

impl EngineMetrics {
    /// Builds the recorder. The first one of a process calibrates a clock for some milliseconds.
    pub(crate) fn new(model_name: &str, replicas: usize, cache: &CacheSpec) -> Result<Self, BuildError> {
        let recorder = builder()?.build_recorder();
        let set = |engine| InstrumentSet { recorder: &recorder, model_name, engine };
        let replicas = (0..replicas).map(|engine| ReplicaInstruments::new(&set(engine), cache));
        let replicas = replicas.collect();
        let set = set(0);
        let success = ["stop", "length", "abort", "error"].map(|reason| {
            set.counter(
                "vllm:request_success_total",
                "Requests by how they ended.",
                &[("finished_reason", reason)],
            )
        });
        Ok(Self {
            replicas,
            success,
            ttft: set.histogram("vllm:time_to_first_token_seconds", "Admission to first token."),
            itl: set.histogram("vllm:inter_token_latency_seconds", "Time between two tokens of a request."),
            time_per_output_token: set.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time per token after the first.",
            ),
            e2e: set.histogram("vllm:e2e_request_latency_seconds", "Admission to the end of a request."),
            decode_time: set.histogram("vllm:request_decode_time_seconds", "First token to last."),
            request_prompt_tokens: set.histogram("vllm:request_prompt_tokens", "Prompt tokens of a request."),
            request_generation_tokens: set
                .histogram("vllm:request_generation_tokens", "Generated tokens of a request."),
            request_max_num_generation_tokens: set.histogram(
                "vllm:request_max_num_generation_tokens",
                "Generated tokens of a request's longest choice.",
            ),
            params_max_tokens: set
                .histogram("vllm:request_params_max_tokens", "The max_tokens that a request asked for."),
            params_n: set.histogram("vllm:request_params_n", "The choices that a request asked for."),
            samples: AtomicU32::new(0),
            handle: recorder.handle(),
        })
    }

    /// The Prometheus text of everything, with gauges and scheduler counters as `status` has them.
    pub(crate) fn render(&self, status: &Status) -> String {
        self.replicas.iter().zip(&status.replicas).for_each(|(of, replica)| of.set(replica));
        self.handle.render()
    }

    fn sampled(&self) {
        if self.samples.fetch_add(1, Ordering::Relaxed) % SAMPLES_PER_UPKEEP == SAMPLES_PER_UPKEEP - 1 {
            self.handle.run_upkeep();
        }
    }
}

fn builder() -> Result<PrometheusBuilder, BuildError> {
    let exact = |name: &str| Matcher::Full(name.to_owned());
    PrometheusBuilder::new()
        .set_buckets_for_metric(exact("vllm:time_to_first_token_seconds"), TTFT_BUCKETS)?
        .set_buckets_for_metric(exact("vllm:inter_token_latency_seconds"), ITL_BUCKETS)?
        .set_buckets_for_metric(exact("vllm:request_time_per_output_token_seconds"), ITL_BUCKETS)?
        .set_buckets_for_metric(exact("vllm:e2e_request_latency_seconds"), LATENCY_BUCKETS)?
        .set_buckets_for_metric(exact("vllm:request_decode_time_seconds"), LATENCY_BUCKETS)?
        .set_buckets_for_metric(exact("vllm:request_prompt_tokens"), TOKEN_BUCKETS)?
        .set_buckets_for_metric(exact("vllm:request_generation_tokens"), TOKEN_BUCKETS)?
        .set_buckets_for_metric(exact("vllm:request_max_num_generation_tokens"), TOKEN_BUCKETS)?
        .set_buckets_for_metric(exact("vllm:request_params_max_tokens"), TOKEN_BUCKETS)?
        .set_buckets_for_metric(exact("vllm:request_params_n"), CHOICES_BUCKETS)
}

/// Registers instruments with the labels that every metric of an engine carries.
struct InstrumentSet<'a> {
    recorder: &'a PrometheusRecorder,
    model_name: &'a str,
    /// Number of the replica.
    engine: usize,
}

impl InstrumentSet<'_> {
    const METADATA: Metadata<'static> = Metadata::new("consort", Level::INFO, None);

    fn key(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Key {
        let engine = Label::new("engine", self.engine.to_string());
        let mut all = vec![Label::new("model_name", self.model_name.to_owned()), engine];
        all.extend(labels.iter().map(|(key, value)| Label::new(*key, (*value).to_owned())));
        Key::from_parts(name, all)
    }

    fn counter(&self, name: &'static str, help: &'static str, labels: &[(&'static str, &str)]) -> Counter {
        self.recorder.describe_counter(KeyName::from(name), None, help.into());
        self.recorder.register_counter(&self.key(name, labels), &Self::METADATA)
    }

    fn gauge(&self, name: &'static str, help: &'static str, labels: &[(&'static str, &str)]) -> Gauge {
        self.recorder.describe_gauge(KeyName::from(name), None, help.into());
        self.recorder.register_gauge(&self.key(name, labels), &Self::METADATA)
    }

    fn histogram(&self, name: &'static str, help: &'static str) -> Histogram {
        self.recorder.describe_histogram(KeyName::from(name), None, help.into());
        self.recorder.register_histogram(&self.key(name, &[]), &Self::METADATA)
    }
}

/// The choices of one prompt, which vLLM's histograms count as one request: it is told when the last has ended.
pub(crate) struct Siblings {
    n: usize,
    open: AtomicUsize,
    /// Tokens of the longest so far.
    longest: AtomicUsize,
}

impl Siblings {
    pub(crate) fn new(n: usize) -> Self {
        Self { n, open: AtomicUsize::new(n), longest: AtomicUsize::new(0) }
    }

    /// One ended by itself; the longest's tokens, if it was the last. A choice that is aborted stays open for ever.
    fn ended(&self, generated: usize) -> Option<usize> {
        let longest = self.longest.fetch_max(generated, Ordering::AcqRel).max(generated);
        (self.open.fetch_sub(1, Ordering::AcqRel) == 1).then_some(longest)
    }
}

/// Follows one request from admission to its end. Dropped before [`RequestTimer::finish`], it counts as aborted.
pub(crate) struct RequestTimer {
    metrics: Arc<EngineMetrics>,
    siblings: Arc<Siblings>,
    prompt_tokens: usize,
    /// What the request asked for, if it said so.
    max_tokens: Option<usize>,
    started: Instant,
    first: Option<Instant>,
    last: Instant,
    generated: usize,
    finished: bool,
}

impl RequestTimer {
    pub(crate) fn start(
        metrics: Arc<EngineMetrics>,
        prompt_tokens: usize,
        max_tokens: Option<usize>,
        siblings: Arc<Siblings>,
    ) -> Self {
        let now = Instant::now();
        Self {
            metrics,
            siblings,
            prompt_tokens,
            max_tokens,
            started: now,
            first: None,
            last: now,
            generated: 0,
            finished: false,
        }
    }

    /// One more token arrived.
    pub(crate) fn token(&mut self) {
        let now = Instant::now();
        let since_last = now.duration_since(self.last).as_secs_f64();
        if self.first.is_none() {
            self.first = Some(now);
            self.metrics.ttft.record(since_last);
        } else {
            self.metrics.itl.record(since_last);
        }
        self.last = now;
        self.generated += 1;
        self.metrics.sampled();
    }

    /// The request ended; later calls change nothing.
    pub(crate) fn finish(&mut self, outcome: Outcome) {
        if std::mem::replace(&mut self.finished, true) {
            return;
        }
        self.metrics.success[outcome as usize].increment(1);
        if matches!(outcome, Outcome::Abort | Outcome::Error) {
            return;
        }
        self.metrics.e2e.record(self.started.elapsed().as_secs_f64());
        self.metrics.request_prompt_tokens.record(self.prompt_tokens as f64);
        self.metrics.request_generation_tokens.record(self.generated as f64);
        if let Some(longest) = self.siblings.ended(self.generated) {
            self.metrics.request_max_num_generation_tokens.record(longest as f64);
            self.metrics.params_n.record(self.siblings.n as f64);
        }
        if let Some(max_tokens) = self.max_tokens {
            self.metrics.params_max_tokens.record(max_tokens as f64);
        }
        if let Some(first) = self.first {
            let decode = self.last.duration_since(first).as_secs_f64();
            self.metrics.decode_time.record(decode);
            if self.generated > 1 {
                self.metrics.time_per_output_token.record(decode / (self.generated - 1) as f64);
            }
        }
        self.metrics.sampled();
    }
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        self.finish(Outcome::Abort);
    }
}
