//! Scheduler, executors and real (small) models: a request's tokens are the same, and its log-probabilities to the
//! last bit, however it was scheduled, how often it was preempted, how many steps were planned ahead, and on which
//! instruction set. (Logits themselves are compared where models are tested.)

use std::{
    collections::VecDeque,
    path::Path,
    sync::{Arc, atomic::Ordering::SeqCst},
};

use consort_kernels::{
    DType,
    device::{Device, Isa},
    sampling::{Adjustments, SamplingParams},
};
use consort_parallel::{
    checkpoint::Checkpoint,
    collective::{Collective, LocalGroup},
    kv::{KvGroups, KvStore},
    model::{AllReduce, LoadOptions, STEP_LIMIT, kv_layout, load},
    partition::Partition,
};

use super::{
    ModelExecutor, ShardExecutor,
    beside::{Beside, Seen},
};
use crate::{
    config::{CacheSpec, LayerGroups, SchedulerConfig},
    ids::{Epoch, SequenceId},
    plan::{Sampled, StepPlan, StepResult, TokenLogprobs},
    request::{FinishReason, GenerationEvent, Request},
    scheduler::{Scheduler, SchedulerCounters},
};

const BLOCK_SIZE: usize = 16;
const MAX_MODEL_LEN: usize = 96;

/// A small generator (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

/// How requests are scheduled and computed.
#[derive(Clone, Copy, Debug)]
struct Setup {
    width: usize,
    dtype: DType,
    isa: Isa,
    threads: usize,
    max_num_seqs: usize,
    budget: usize,
    num_blocks: usize,
    /// Steps planned before the first of them is absorbed.
    depth: usize,
    /// Pages of the host's pool.
    host_blocks: usize,
    /// Whether steps are under way together.
    beside: bool,
    /// Whether requests find the prefixes of others, and choices share their prompt.
    shares: bool,
}

/// Everything that a request's stream yields.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    prompt: Vec<TokenLogprobs>,
    tokens: Vec<Sampled>,
    finish: Option<FinishReason>,
}

fn executors(checkpoint: &Checkpoint, setup: Setup, seen: &Arc<Seen>) -> Vec<ModelExecutor> {
    let partition = &Partition::new(checkpoint.config(), setup.width, None).unwrap();
    let options = &LoadOptions {
        dtype: setup.dtype,
        max_batch_tokens: setup.budget,
        block_size: BLOCK_SIZE,
        max_num_seqs: setup.budget,
        max_model_len: 4096,
        num_blocks: 4096,
        step_limit: STEP_LIMIT,
        deterministic: true,
        separate_processes: false,
        all_reduce: AllReduce::Auto,
    };
    LocalGroup::new(setup.width)
        .into_iter()
        .map(|comm| {
            let rank = comm.rank();
            let device = Device::cpu_with(setup.threads, setup.isa).unwrap();
            let model = load(&device, checkpoint, partition, rank, options, &|_, _| {}).unwrap();
            let share = partition.share(rank);
            let layout = kv_layout(checkpoint.config(), share, setup.dtype, BLOCK_SIZE).unwrap();
            let kv = KvStore::new(&device, layout, setup.num_blocks).unwrap();
            let kv = kv.with_host_pool(&device, setup.host_blocks).unwrap();
            let model = if setup.beside { Box::new(Beside::new(model, seen)) } else { model };
            ModelExecutor::new(model, kv, Box::new(comm))
        })
        .collect()
}

/// Does `work` on all ranks at once.
fn on_all<R: Send>(executors: &mut [ModelExecutor], work: impl Fn(&mut ModelExecutor) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = executors.iter_mut().map(|rank| scope.spawn(|| work(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Carries a step out, or begins it: then its result comes later.
fn start(executors: &mut [ModelExecutor], plan: StepPlan) -> Option<StepResult> {
    let plan = Arc::new(plan);
    let results = on_all(executors, |rank| match rank.pipeline() {
        Some(pipeline) => pipeline.begin(&plan).map(|()| None).unwrap(),
        None => Some(rank.execute(&plan).unwrap()),
    });
    results.into_iter().collect::<Option<Vec<StepResult>>>().map(agreed)
}

/// The result of the oldest step that was begun.
fn finish(executors: &mut [ModelExecutor]) -> StepResult {
    agreed(on_all(executors, |rank| {
        let pipeline = rank.pipeline().expect("it was begun");
        (0..1000).find_map(|_| pipeline.finish(STEP_LIMIT).unwrap()).expect("a step ends")
    }))
}

/// What all ranks say of a step.
fn agreed(mut results: Vec<StepResult>) -> StepResult {
    let same = results.iter().all(|result| result.digest == results[0].digest);
    assert!(same, "ranks drew different tokens");
    results.swap_remove(0)
}

/// Serves `requests`, which arrive at random steps, and returns their answers and what it took. Now and then all
/// executors forget what they know of sequences and are told anew.
fn serve(
    checkpoint: &Checkpoint,
    setup: Setup,
    seed: u64,
    requests: &[Request],
    seen: &Arc<Seen>,
) -> (Vec<Answer>, SchedulerCounters) {
    let mut random = Random(seed);
    let mut executors = executors(checkpoint, setup, seen);
    let config = SchedulerConfig {
        max_num_seqs: setup.max_num_seqs,
        max_num_batched_tokens: setup.budget,
        max_model_len: MAX_MODEL_LEN,
        max_waiting_requests: requests.len(),
        priority_aging_ms: 1000,
    };
    let windows: Vec<_> = KvGroups::of(checkpoint.config()).windows().collect();
    let cache = CacheSpec {
        groups: LayerGroups::new(&windows).unwrap(),
        prefix_caching: setup.shares,
        host_blocks: setup.host_blocks,
        ..CacheSpec::new(BLOCK_SIZE, setup.num_blocks)
    };
    let mut scheduler = Scheduler::new(config, cache, checkpoint.config().vocab_size, Epoch(0));
    let mut answers = vec![Answer::default(); requests.len()];
    let (mut arrived, mut results) = (0, VecDeque::new());
    while arrived < requests.len() || !scheduler.is_idle() {
        while arrived < requests.len() && (scheduler.is_idle() || random.below(2) == 0) {
            let request = &requests[arrived];
            let before = arrived
                .checked_sub(1)
                .filter(|&before| setup.shares && requests[before].prompt == request.prompt);
            let leader = before.map(|before| SequenceId(before as u64));
            scheduler.submit(0, SequenceId(arrived as u64), request.clone(), leader).unwrap();
            arrived += 1;
        }
        if random.below(8) == 0
            && let Some(image) = scheduler.image()
        {
            executors.iter_mut().for_each(|executor| executor.learn(&image));
        }
        while results.len() < setup.depth {
            let Some(plan) = scheduler.plan() else { break };
            results.push_back(start(&mut executors, plan));
        }
        let result = results.pop_front().expect("a step is always possible");
        let result = result.unwrap_or_else(|| finish(&mut executors));
        for event in scheduler.absorb(result).unwrap() {
            let answer = &mut answers[event.sequence.0 as usize];
            match event.event {
                GenerationEvent::PromptLogprobs(part) => answer.prompt.extend(part),
                GenerationEvent::Prefilled { .. } => {}
                GenerationEvent::Token(token) => answer.tokens.push(token),
                GenerationEvent::Finished(reason) => answer.finish = Some(reason),
                GenerationEvent::Failed(error) => panic!("{setup:?}: {error}"),
            }
        }
        scheduler.check_invariants();
    }
    (answers, scheduler.counters())
}

fn ids(answer: &Answer) -> Vec<u32> {
    answer.tokens.iter().map(|sampled| sampled.token).collect()
}

/// Requests of three families of prompts, some of them the same prompt several times in a row.
fn requests(random: &mut Random, vocabulary: usize) -> Vec<Request> {
    let families: Vec<Vec<u32>> =
        (0..3).map(|_| (0..60).map(|_| random.below(vocabulary) as u32).collect()).collect();
    let request = |random: &mut Random| {
        let mut prompt = families[random.below(3)].clone();
        prompt.truncate(random.below(60));
        prompt.extend((0..random.below(60 - prompt.len()) + 1).map(|_| random.below(vocabulary) as u32));
        let adjustments = match random.below(3) {
            0 => Adjustments { repetition_penalty: 1.3, frequency_penalty: 0.2, ..Adjustments::default() },
            1 => Adjustments { presence_penalty: 0.7, logit_bias: vec![(3, 2.5)], ..Adjustments::default() },
            _ => Adjustments::default(),
        };
        let temperature = [0.0, 0.7, 1.3][random.below(3)];
        let seed = random.below(1000) as u64;
        Request {
            sampling: SamplingParams { temperature, seed, adjustments, ..SamplingParams::default() },
            max_tokens: random.below(MAX_MODEL_LEN - prompt.len()) + 1,
            stop_token_ids: vec![5],
            logprobs: Some(20),
            prompt_logprobs: (random.below(2) == 0).then_some(1),
            priority: 0,
            cache_salt: None,
            awaits_tokens: false,
            prompt,
        }
    };
    let mut requests: Vec<Request> = Vec::new();
    while requests.len() < 12 {
        let mut next = request(random);
        if let Some(last) = requests.last()
            && random.below(3) == 0
        {
            next = Request { sampling: next.sampling, ..last.clone() };
        }
        requests.push(next);
    }
    requests
}

/// A copy of a fixture whose layers see by turns everything and a window of `window` keys.
fn with_mixed_windows(fixture: &Path, window: usize) -> (tempfile::TempDir, Arc<Checkpoint>) {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let path = folder.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    let types = (0..layers).map(|layer| ["sliding_attention", "full_attention"][layer as usize % 2]);
    config["layer_types"] = types.collect();
    config["sliding_window"] = window.into();
    std::fs::write(path, config.to_string()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

#[test]
fn random_schedules_yield_the_bits_of_requests_served_alone() {
    // The second has a sliding window and heads wide enough for attention on tiles.
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../parallel/fixtures");
    let [llama, wide] =
        ["tiny_llama", "tiny_wide"].map(|name| Checkpoint::open(&fixtures.join(name)).unwrap());
    let (_folder, mixed) = with_mixed_windows(&fixtures.join("tiny_llama"), 20);
    assert_eq!(KvGroups::of(mixed.config()).count(), 3);
    let checkpoints = [llama, wide, mixed];
    let isas: Vec<Isa> = Isa::available().collect();
    let (mut preemptions, mut hits, mut host_hits) = (0, 0, 0);
    let seen = Arc::<Seen>::default();
    for seed in 0..24 {
        let mut random = Random(seed);
        let checkpoint: &Arc<Checkpoint> = &checkpoints[seed as usize / 2 % 3];
        let requests = requests(&mut random, checkpoint.config().vocab_size);
        let dtype = [DType::F32, DType::BF16][seed as usize % 2];
        // The order of sums over ranks belongs to the width: it stays while everything else changes.
        let width = [1, 1, 3, 2][random.below(4)];
        let blocks = KvGroups::of(checkpoint.config()).count() * MAX_MODEL_LEN / BLOCK_SIZE;
        let roomy = Setup {
            width,
            dtype,
            isa: Isa::detect(),
            threads: 1,
            max_num_seqs: 1,
            budget: MAX_MODEL_LEN,
            num_blocks: blocks,
            depth: 1,
            host_blocks: 0,
            beside: false,
            shares: false,
        };
        let (alone, undisturbed) = serve(checkpoint, roomy, seed, &requests, &seen);
        assert_eq!((undisturbed.preemptions, undisturbed.prefix_cache_hits), (0, 0));
        for depth in [1, 2] {
            let crowded = Setup {
                isa: isas[random.below(isas.len())],
                threads: random.below(2) + 1,
                max_num_seqs: random.below(9) + 2,
                budget: random.below(60) + 10,
                num_blocks: blocks + random.below(3),
                depth,
                host_blocks: [0, 3, 100][random.below(3)],
                shares: depth == 2 || random.below(2) == 0,
                ..roomy
            };
            let (together, counters) = serve(checkpoint, crowded, seed, &requests, &seen);
            preemptions += counters.preemptions;
            hits += counters.prefix_cache_hits;
            host_hits += counters.host_hits;
            for (at, (got, expected)) in together.iter().zip(&alone).enumerate() {
                assert_eq!(got, expected, "seed {seed} request {at}: {crowded:?}");
            }
            // The same with both steps under way together, where hardly anybody wants log-probabilities, which come one
            // step after another; some await their tokens.
            let beside = Setup { beside: true, ..crowded };
            let plain = requests.iter().enumerate().map(|(at, request)| Request {
                logprobs: request.logprobs.filter(|_| at == 3),
                prompt_logprobs: request.prompt_logprobs.filter(|_| at == 5),
                awaits_tokens: at % 4 == 1,
                ..request.clone()
            });
            let (together, _) = serve(checkpoint, beside, seed, &plain.collect::<Vec<_>>(), &seen);
            for (at, (got, expected)) in together.iter().zip(&alone).enumerate() {
                let told = |answer: &Answer| (ids(answer), answer.finish);
                assert_eq!(told(got), told(expected), "seed {seed} request {at}: {beside:?}");
            }
        }
    }
    println!("{preemptions} preemptions, {hits} tokens found, {host_hits} of them with the host's pages");
    let (beside, named) = (seen.beside.load(SeqCst), seen.named.load(SeqCst));
    println!("{beside} steps begun beside another, {named} tokens named by the rows that draw them");
    assert!(beside > 500 && named > 500, "steps are meant to be under way together");
    assert!(host_hits > 0, "some prefixes are meant to come back from the host");
    assert!(hits > 500, "requests are meant to share: {hits} tokens found");
    assert!(preemptions > 10, "the pools are meant to be too small: {preemptions} preemptions");
}
