//! Scheduler, executors and real (small) models: a request's tokens are the same, and its log-probabilities to the
//! last bit, however it was scheduled, how often it was preempted, how many steps were planned ahead, and on which
//! instruction set. (Logits themselves are compared where models are tested.)

use std::{collections::VecDeque, path::Path, sync::Arc};

use consort_kernels::{
    DType,
    device::{Device, Isa},
    sampling::{Adjustments, SamplingParams},
};
use consort_parallel::{
    checkpoint::Checkpoint,
    collective::{Collective, LocalGroup},
    kv::KvStore,
    model::{LoadOptions, STEP_LIMIT, kv_layout, load},
    partition::Partition,
};

use super::{ModelExecutor, ShardExecutor};
use crate::{
    config::{CacheSpec, SchedulerConfig},
    ids::{Epoch, SequenceId},
    plan::{Sampled, StepPlan, StepResult, TokenLogprobs},
    request::{FinishReason, GenerationEvent, Request},
    scheduler::Scheduler,
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
}

/// Everything that a request's stream yields.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    prompt: Vec<TokenLogprobs>,
    tokens: Vec<Sampled>,
    finish: Option<FinishReason>,
}

fn executors(checkpoint: &Checkpoint, setup: Setup) -> Vec<ModelExecutor> {
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
            ModelExecutor::new(model, kv, Box::new(comm))
        })
        .collect()
}

/// One step on all ranks at once.
fn execute(executors: &mut [ModelExecutor], plan: &StepPlan) -> StepResult {
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            executors.iter_mut().map(|rank| scope.spawn(move || rank.execute(plan).unwrap())).collect();
        let mut results: Vec<StepResult> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(
            results.iter().all(|result| result.digest == results[0].digest),
            "ranks drew different tokens"
        );
        results.swap_remove(0)
    })
}

/// Serves `requests`, which arrive at random steps, and returns their answers and how often any was preempted.
fn serve(checkpoint: &Checkpoint, setup: Setup, seed: u64, requests: &[Request]) -> (Vec<Answer>, u64) {
    let mut random = Random(seed);
    let mut executors = executors(checkpoint, setup);
    let config = SchedulerConfig {
        max_num_seqs: setup.max_num_seqs,
        max_num_batched_tokens: setup.budget,
        max_model_len: MAX_MODEL_LEN,
        max_waiting_requests: requests.len(),
        priority_aging_ms: 1000,
    };
    let cache = CacheSpec::new(BLOCK_SIZE, setup.num_blocks);
    let mut scheduler = Scheduler::new(config, cache, checkpoint.config().vocab_size, Epoch(0));
    let mut answers = vec![Answer::default(); requests.len()];
    let (mut arrived, mut results) = (0, VecDeque::new());
    while arrived < requests.len() || !scheduler.is_idle() {
        while arrived < requests.len() && (scheduler.is_idle() || random.below(2) == 0) {
            scheduler.submit(0, SequenceId(arrived as u64), requests[arrived].clone(), None).unwrap();
            arrived += 1;
        }
        while results.len() < setup.depth {
            let Some(plan) = scheduler.plan() else { break };
            results.push_back(execute(&mut executors, &plan));
        }
        for event in scheduler.absorb(results.pop_front().expect("a step is always possible")).unwrap() {
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
    (answers, scheduler.counters().preemptions)
}

fn requests(random: &mut Random, vocabulary: usize) -> Vec<Request> {
    let request = |random: &mut Random| {
        let prompt: Vec<u32> = (0..random.below(60) + 1).map(|_| random.below(vocabulary) as u32).collect();
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
            prompt,
        }
    };
    (0..10).map(|_| request(random)).collect()
}

#[test]
fn random_schedules_yield_the_bits_of_requests_served_alone() {
    // The second has a sliding window and heads wide enough for attention on tiles.
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../parallel/fixtures");
    let checkpoints = ["tiny_llama", "tiny_wide"].map(|name| Checkpoint::open(&fixtures.join(name)).unwrap());
    let isas: Vec<Isa> = Isa::available().collect();
    let mut preemptions = 0;
    for seed in 0..24 {
        let mut random = Random(seed);
        let checkpoint: &Arc<Checkpoint> = &checkpoints[seed as usize / 2 % 2];
        let requests = requests(&mut random, checkpoint.config().vocab_size);
        let dtype = [DType::F32, DType::BF16][seed as usize % 2];
        // The order of sums over ranks belongs to the width: it stays while everything else changes.
        let width = [1, 1, 3, 2][random.below(4)];
        let roomy = Setup {
            width,
            dtype,
            isa: Isa::detect(),
            threads: 1,
            max_num_seqs: 1,
            budget: MAX_MODEL_LEN,
            num_blocks: MAX_MODEL_LEN / BLOCK_SIZE,
            depth: 1,
        };
        let (alone, undisturbed) = serve(checkpoint, roomy, seed, &requests);
        assert_eq!(undisturbed, 0);
        for depth in [1, 2] {
            let crowded = Setup {
                isa: isas[random.below(isas.len())],
                threads: random.below(2) + 1,
                max_num_seqs: random.below(9) + 2,
                budget: random.below(60) + 10,
                num_blocks: MAX_MODEL_LEN / BLOCK_SIZE + random.below(8),
                depth,
                ..roomy
            };
            let (together, preempted) = serve(checkpoint, crowded, seed, &requests);
            preemptions += preempted;
            for (at, (got, expected)) in together.iter().zip(&alone).enumerate() {
                assert_eq!(got, expected, "seed {seed} request {at}: {crowded:?}");
            }
        }
    }
    assert!(preemptions > 50, "the pools are meant to be too small: {preemptions} preemptions");
}
