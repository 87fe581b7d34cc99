//! What a step costs around the model: an ensemble of one rank whose executor takes no time, and streams that are read.
//!
//! `cargo bench -p consort-actors --bench ensemble`. While all sequences decode, the time of a step (from one to the
//! next, thread hops included) and the processor time that this process spends in it, all threads together; then both
//! without what they are for one sequence, which is nearly all hops. `--test` runs a short pass.

use std::{
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use consort_actors::{
    CacheSpec, Ensemble, EnsembleSpec, GenerationEvent, ProgressReporter, RankShare, Request,
    SchedulerConfig, ShardError, ShardExecutor, ShardFactory,
    plan::{Output, Sampled, SpanOutput, StepPlan, StepResult},
};
use consort_kernels::sampling::SamplingParams;
use consort_parallel::{collective::Collective, ids::Rank};

const VOCAB: usize = 1000;
const BLOCK_SIZE: usize = 16;

/// Counts its steps, and answers each at once.
#[derive(Clone, Default)]
struct Null {
    steps: Arc<AtomicU64>,
}

impl ShardFactory for Null {
    fn build(
        &self,
        _rank: Rank,
        _comm: Box<dyn Collective>,
        _progress: &ProgressReporter,
    ) -> Result<Box<dyn ShardExecutor>, ShardError> {
        Ok(Box::new(self.clone()))
    }

    fn describe(&self, _rank: Rank) -> RankShare {
        RankShare { query_heads: 0..1, kv_heads: 0..1 }
    }
}

impl ShardExecutor for Null {
    fn execute(&mut self, plan: &StepPlan) -> Result<StepResult, ShardError> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        let draws = plan.run.iter().filter(|span| span.output == Output::Sample);
        let output = |sequence| SpanOutput {
            sequence,
            sampled: vec![Sampled { token: 1, logprobs: None }],
            prompt_logprobs: Vec::new(),
            broken: false,
        };
        let outputs = draws.map(|span| output(span.sequence)).collect();
        Ok(StepResult {
            epoch: plan.epoch,
            step: plan.step,
            outputs,
            transferred: Some(plan.step),
            digest: 0,
        })
    }

    fn weight_bytes(&self) -> u64 {
        0
    }

    fn kv_bytes(&self) -> u64 {
        0
    }
}

fn request(seed: usize, prompt_len: usize, max_tokens: usize) -> Request {
    Request {
        prompt: (0..prompt_len).map(|at| ((at * 7 + seed * 31) % VOCAB) as u32).collect(),
        sampling: SamplingParams::default(),
        max_tokens,
        stop_token_ids: vec![VOCAB as u32],
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    }
}

/// Time and processor time of a step, in microseconds.
type PerStep = (f64, f64);

/// Of steps in which `running` sequences behind prompts of `context` tokens decode, while their streams are read.
async fn measure(running: usize, context: usize, steps: u64) -> Result<PerStep, Box<dyn std::error::Error>> {
    let tokens = context + steps as usize + 1000;
    let null = Null::default();
    let spec = EnsembleSpec {
        ranks: 1,
        vocab_size: VOCAB,
        cache: CacheSpec::new(BLOCK_SIZE, (running + 1) * tokens.div_ceil(BLOCK_SIZE)),
        scheduler: SchedulerConfig {
            max_num_seqs: running,
            max_num_batched_tokens: 8192,
            max_model_len: tokens + 1,
            max_waiting_requests: running,
            priority_aging_ms: 10_000,
        },
        factories: vec![Arc::new(null.clone())],
    };
    let ensemble = Ensemble::start(spec, None).await?;
    let requests = (0..running).map(|seed| request(seed, context, tokens - context)).collect();
    let first = Arc::new(AtomicU64::new(0));
    let mut readers = Vec::new();
    for mut stream in ensemble.submit_all(requests)? {
        let first = Arc::clone(&first);
        readers.push(tokio::spawn(async move {
            let mut read = 0u64;
            while let Some(event) = stream.next().await {
                if let GenerationEvent::Token(_) = event {
                    first.fetch_add(u64::from(read == 0), Ordering::Relaxed);
                    read += 1;
                }
            }
            read
        }));
    }
    while first.load(Ordering::Relaxed) < running as u64 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (begun, cpu, step) = (Instant::now(), cpu_time()?, null.steps.load(Ordering::Relaxed));
    while null.steps.load(Ordering::Relaxed) < step + steps {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (took, cpu) = (begun.elapsed(), cpu_time()? - cpu);
    let done = (null.steps.load(Ordering::Relaxed) - step) as f64;
    ensemble.shutdown(Duration::ZERO).await;
    for reader in readers {
        assert!(reader.await? >= steps, "every stream has a token of every step");
    }
    Ok((took.as_secs_f64() * 1e6 / done, cpu.as_secs_f64() * 1e6 / done))
}

/// Processor time of all threads of this process, as Linux counts it.
fn cpu_time() -> std::io::Result<Duration> {
    let mut total = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        total += text.split_whitespace().next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(Duration::from_nanos(total))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let is_test = std::env::args().any(|argument| argument == "--test");
    let (steps, rounds) = if is_test { (20, 1) } else { (2000, 5) };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut out = std::io::stdout();
    writeln!(out, "| sequences | context | step | of a processor | beyond one sequence |")?;
    writeln!(out, "|--:|--:|--:|--:|--:|")?;
    let mut alone: Option<PerStep> = None;
    for (running, context) in [(1, 128), (32, 128), (32, 4096), (256, 128), (256, 4096)] {
        let mut all = Vec::new();
        for _ in 0..rounds {
            all.push(runtime.block_on(measure(running, context, steps))?);
        }
        let median = |of: fn(&PerStep) -> f64| {
            let mut numbers: Vec<f64> = all.iter().map(of).collect();
            numbers.sort_by(f64::total_cmp);
            numbers[numbers.len() / 2]
        };
        let (step, cpu) = (median(|round| round.0), median(|round| round.1));
        let (step_alone, cpu_alone) = *alone.get_or_insert((step, cpu));
        writeln!(
            out,
            "| {running} | {context} | {step:.1} us | {cpu:.1} us | {:.1} us, {:.1} us of a processor |",
            step - step_alone,
            cpu - cpu_alone
        )?;
    }
    Ok(())
}
