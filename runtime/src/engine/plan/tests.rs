use std::num::NonZeroUsize;

use consort_actors::{
    CacheSpec, Epoch, LayerGroups, Request, SchedulerConfig, SequenceId,
    plan::{Output, Sampled, SpanOutput, StepPlan, StepResult, Tokens},
    scheduler::Scheduler,
};
use consort_kernels::sampling::SamplingParams;
use consort_parallel::{
    kv::KvGroups,
    plan::{CacheShape, Policy},
};

/// Windows of the layers, 0 for none.
const PATTERNS: [&[usize]; 6] =
    [&[0], &[128], &[128, 0], &[0, 17, 0, 17], &[1, 0, 2, 4096], &[33, 33, 33, 0]];

/// The planner's and the scheduler's view of one cache.
fn both(pattern: &[usize], block_size: usize, chunk: usize) -> (CacheShape, CacheSpec) {
    let layers: Vec<_> = pattern.iter().map(|&window| NonZeroUsize::new(window)).collect();
    let groups = KvGroups::of_windows(&layers);
    let windows: Vec<Option<usize>> = groups.windows().collect();
    let spec = CacheSpec {
        groups: LayerGroups::new(&windows).expect("few groups"),
        prefix_caching: false,
        ..CacheSpec::new(block_size, 1)
    };
    (CacheShape { block_size, groups, chunk }, spec)
}

#[test]
fn the_planner_counts_pages_as_the_scheduler_does() {
    for pattern in PATTERNS {
        for block_size in [1, 2, 15, 16, 32, 256] {
            let (shape, spec) = both(pattern, block_size, 512);
            for tokens in (0..300).chain([511, 512, 513, 4095, 4096, 4097, 131_072]) {
                let planned = shape.pages(tokens, Policy::WindowsFreed);
                assert_eq!(planned, spec.pages_for(tokens) as u64, "{pattern:?}, {block_size}, {tokens}");
                if tokens > 0 {
                    let across = spec.blocks_across(tokens);
                    assert_eq!(shape.pages_of_window(tokens), across, "{block_size}, {tokens}");
                }
            }
        }
    }
}

/// Tokens that a lone sequence generates; the last is drawn and never written.
const GENERATED: usize = 5;

/// What became of a sequence that has the scheduler to itself.
#[derive(Debug, PartialEq)]
struct Lone {
    /// Rows of each step of its prompt.
    chunks: Vec<usize>,
    tokens: usize,
    /// Most pages that were held while its prompt was computed, and afterwards.
    pages: [usize; 2],
}

/// Runs a sequence that comes to hold `tokens` tokens, some of them generated, one step after the other.
fn lone(spec: CacheSpec, pages: u64, chunk: usize, tokens: usize) -> Lone {
    let spec = CacheSpec { num_blocks: pages as usize, ..spec };
    let config = SchedulerConfig {
        max_num_seqs: 1,
        max_num_batched_tokens: chunk,
        max_model_len: tokens + 1,
        max_waiting_requests: 1,
        priority_aging_ms: 0,
    };
    let mut scheduler = Scheduler::new(config, spec, 8, Epoch(0));
    let request = Request {
        prompt: vec![1; tokens + 1 - GENERATED],
        sampling: SamplingParams::default(),
        max_tokens: GENERATED,
        stop_token_ids: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    };
    scheduler.submit(0, SequenceId(0), request, None).expect("it fits");
    let mut lone = Lone { chunks: Vec::new(), tokens: 0, pages: [0; 2] };
    while let Some(plan) = scheduler.plan() {
        let (rows, is_prompt) = match &plan.run[0].tokens {
            Tokens::Given(tokens) => (tokens.len(), true),
            Tokens::LastSampled => (1, false),
        };
        if is_prompt {
            lone.chunks.push(rows);
        }
        let held = &mut lone.pages[usize::from(!is_prompt)];
        *held = scheduler.used_blocks().max(*held);
        lone.tokens += rows;
        scheduler.absorb(executed(&plan)).expect("in order");
    }
    assert!(scheduler.is_idle());
    lone
}

fn executed(plan: &StepPlan) -> StepResult {
    let sampled = || Sampled { token: 1, logprobs: None };
    let drawing = plan.run.iter().filter(|span| span.output == Output::Sample);
    let outputs = drawing.map(|span| SpanOutput {
        sequence: span.sequence,
        sampled: vec![sampled()],
        prompt_logprobs: Vec::new(),
        broken: false,
    });
    let (epoch, step) = (plan.epoch, plan.step);
    StepResult { epoch, step, outputs: outputs.collect(), transferred: Some(step), digest: 0 }
}

#[test]
fn the_pages_without_which_nothing_fits_are_those_that_a_lone_sequence_takes() {
    for pattern in PATTERNS {
        for (block_size, chunk) in [(16, 512), (16, 64), (16, 100), (32, 512), (2, 7)] {
            let window = pattern.iter().max().copied().unwrap_or(0);
            let full_parts = window.next_multiple_of(chunk) + 3 * chunk + GENERATED - 1;
            for tokens in [6, 17, 130, 200, 513, 700, 5000, full_parts] {
                let (shape, spec) = both(pattern, block_size, chunk.min(tokens));
                let needed = shape.pages_needed(tokens, Policy::WindowsFreed);
                let place = format!("{pattern:?}, pages of {block_size}, chunks of {chunk}, {tokens} tokens");
                let ample = lone(spec, 10 * needed + 1000, chunk, tokens);
                assert_eq!(ample.tokens, tokens, "{place}");
                let [in_prompt, afterwards] = ample.pages.map(|pages| pages as u64);
                let kept = shape.pages(tokens, Policy::WindowsFreed);
                assert!(in_prompt <= needed && afterwards <= kept, "{place}: {ample:?}, {needed}, {kept}");
                // With so many pages its prompt goes as fast as with any number.
                assert_eq!(lone(spec, needed, chunk, tokens), ample, "{place}: {needed}");
                // Nor is that more than a page for each window above what a full part behind a full window takes: where
                // a window begins in a page is chance. Parts that end within pages leave one more, and so does what is
                // generated, in groups without a window.
                if tokens != full_parts {
                    continue;
                }
                let windows = shape.groups.windows().flatten().count() as u64;
                let full = shape.groups.count() as u64 - windows;
                let generated = full * GENERATED.div_ceil(block_size) as u64;
                let slack = generated + windows * if chunk.is_multiple_of(block_size) { 1 } else { 2 };
                assert!(needed <= in_prompt.max(afterwards) + slack, "{place}: {ample:?}, {needed}");
            }
        }
    }
}
