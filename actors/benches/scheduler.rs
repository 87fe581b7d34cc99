//! What one step costs the scheduler alone: `plan` and `absorb`, with an executor that takes no time.
//!
//! `cargo bench -p consort-actors --bench scheduler`. Every figure is the median over steps, in microseconds; steps
//! whose sequences cross a block boundary are among them. Arguments are ignored but `--test`, which runs a short pass.

use std::{
    collections::VecDeque,
    io::Write,
    time::{Duration, Instant},
};

use consort_actors::{
    CacheSpec, Epoch, LayerGroups, Request, SchedulerConfig, SequenceId,
    plan::{Output, Sampled, SpanOutput, StepPlan, StepResult, Tokens},
    scheduler::{Scheduler, SchedulerCounters},
};
use consort_kernels::sampling::SamplingParams;

const VOCAB: usize = 1000;
const BLOCK_SIZE: usize = 16;

/// What runs, and what waits behind it.
#[derive(Clone, Copy)]
struct Load {
    running: usize,
    context: usize,
    waiting: usize,
    windows: &'static [Option<usize>],
    prefix_caching: bool,
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

/// A result with a token for whoever draws one.
fn execute(plan: &StepPlan) -> StepResult {
    let draws = plan.run.iter().filter(|span| span.output == Output::Sample);
    let output = |sequence| SpanOutput {
        sequence,
        sampled: vec![Sampled { token: 1, logprobs: None }],
        prompt_logprobs: Vec::new(),
        broken: false,
    };
    let outputs = draws.map(|span| output(span.sequence)).collect();
    StepResult { epoch: plan.epoch, step: plan.step, outputs, transferred: Some(plan.step), digest: 0 }
}

/// Median time of `plan` and `absorb` of a step while everything decodes.
fn measure(load: Load, steps: usize) -> (Duration, Duration, SchedulerCounters) {
    let Load { running, context, waiting, windows, prefix_caching } = load;
    let groups = LayerGroups::new(windows).expect("one or more groups");
    // While the last are prefilled, the first decode.
    let generated = steps + 64 + 2 * running * context / 4096;
    let tokens = context + generated;
    let config = SchedulerConfig {
        max_num_seqs: running,
        max_num_batched_tokens: 8192,
        max_model_len: tokens + 1,
        max_waiting_requests: waiting.max(running),
        priority_aging_ms: 10_000,
    };
    let blocks = tokens.div_ceil(BLOCK_SIZE) * groups.count();
    let cache = CacheSpec { groups, prefix_caching, ..CacheSpec::new(BLOCK_SIZE, (running + 1) * blocks) };
    let mut scheduler = Scheduler::new(config, cache, VOCAB, Epoch(0));
    for id in 0..running {
        let request = request(id, context, generated);
        scheduler.submit(0, SequenceId(id as u64), request, None).expect("it fits");
    }
    let mut results = VecDeque::new();
    let mut decoding = false;
    while !decoding {
        while let Some(plan) = scheduler.plan() {
            let decodes = plan.run.iter().filter(|span| span.tokens == Tokens::LastSampled).count();
            decoding = decodes == running;
            results.push_back(execute(&plan));
        }
        scheduler.absorb(results.pop_front().expect("prompts are prefilled")).expect("it answers its plan");
    }
    for id in running..running + waiting {
        scheduler.submit(1, SequenceId(id as u64), request(id, 512, 16), None).expect("there is room");
    }
    let (mut plans, mut absorbs) = (Vec::new(), Vec::new());
    for _ in 0..steps {
        while results.len() < 2 {
            let begun = Instant::now();
            let plan = scheduler.plan().expect("everything decodes");
            plans.push(begun.elapsed());
            assert_eq!(plan.run.len(), running, "everything decodes");
            results.push_back(execute(&plan));
        }
        let result = results.pop_front().expect("two steps are in flight");
        let begun = Instant::now();
        let events = scheduler.absorb(result).expect("it answers its plan");
        absorbs.push(begun.elapsed());
        assert_eq!(events.len(), running);
    }
    plans.sort();
    absorbs.sort();
    (plans[plans.len() / 2], absorbs[absorbs.len() / 2], scheduler.counters())
}

fn main() {
    let (steps, rounds) =
        if std::env::args().any(|argument| argument == "--test") { (24, 1) } else { (400, 3) };
    let full: &[Option<usize>] = &[None];
    let mixed: &[Option<usize>] = &[None, Some(128)];
    let of = |running, context, waiting, windows, prefix_caching| Load {
        running,
        context,
        waiting,
        windows,
        prefix_caching,
    };
    let loads = [
        of(256, 1024, 0, full, true),
        of(256, 8192, 0, full, true),
        of(256, 32_768, 0, full, true),
        of(256, 8192, 0, full, false),
        of(256, 8192, 0, mixed, true),
        of(256, 8192, 10_000, full, true),
        of(32, 8192, 10_000, full, true),
        of(1, 8192, 0, full, true),
    ];
    let mut out = std::io::stdout().lock();
    let mut line = |text: String| writeln!(out, "{text}").expect("standard output takes lines");
    line("| running | context | waiting | groups | prefix cache | plan us | absorb us | step us |".into());
    line("|--:|--:|--:|--:|---|--:|--:|--:|".into());
    let mut best = vec![(Duration::MAX, Duration::MAX); loads.len()];
    // Interleaved, so that a busy moment of the machine does not fall on one load alone.
    for _ in 0..rounds {
        for (load, best) in loads.iter().zip(&mut best) {
            let (plan, absorb, _) = measure(*load, steps);
            if plan + absorb < best.0.saturating_add(best.1) {
                *best = (plan, absorb);
            }
        }
    }
    let micros = |duration: Duration| duration.as_nanos() as f64 / 1000.0;
    for (load, &(plan, absorb)) in loads.iter().zip(&best) {
        line(format!(
            "| {} | {} | {} | {} | {} | {:.1} | {:.1} | {:.1} |",
            load.running,
            load.context,
            load.waiting,
            load.windows.len(),
            if load.prefix_caching { "on" } else { "off" },
            micros(plan),
            micros(absorb),
            micros(plan + absorb)
        ));
    }
    // Ratios within this run, so that a slow machine is no failure.
    let step = |at: usize| micros(best[at].0 + best[at].1);
    assert!(step(2) <= 2.0 * step(0), "a step at 32k costs more than at 1k");
    assert!(step(5) <= 1.5 * step(1), "10,000 waiting requests slow a step");
}
