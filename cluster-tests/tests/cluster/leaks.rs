//! Ten thousand requests, most of them abandoned somewhere, over real shards with a tiny model.

use std::{sync::Arc, time::Duration};

use consort_actors::{
    CacheSpec, Ensemble, EnsembleSpec, ModelExecutor, ProgressReporter, RankShare, Request, SchedulerConfig,
    ShardError, ShardExecutor, ShardFactory, SubmitError,
};
use consort_kernels::{DType, device::Device, sampling::SamplingParams};
use consort_parallel::{
    checkpoint::Checkpoint,
    collective::Collective,
    ids::Rank,
    kv::KvStore,
    model::{AllReduce, LoadOptions, STEP_LIMIT, kv_layout, load},
    partition::Partition,
};

use crate::harness::root;

const RANKS: usize = 3;
pub(crate) const BLOCKS: usize = 24;
pub(crate) const OPTIONS: LoadOptions = LoadOptions {
    dtype: DType::F32,
    max_batch_tokens: 32,
    block_size: 16,
    max_num_seqs: 32,
    max_model_len: 4096,
    num_blocks: 4096,
    step_limit: STEP_LIMIT,
    deterministic: true,
    separate_processes: false,
    all_reduce: AllReduce::Auto,
};

/// Builds ranks of the tiny model, with [`BLOCKS`] blocks.
pub(crate) struct TinyFactory {
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) partition: Partition,
}

impl ShardFactory for TinyFactory {
    fn build(
        &self,
        rank: Rank,
        comm: Box<dyn Collective>,
        _progress: &ProgressReporter,
    ) -> Result<Box<dyn ShardExecutor>, ShardError> {
        let device = Device::cpu(1).unwrap();
        let model = load(&device, &self.checkpoint, &self.partition, rank, &OPTIONS, &|_, _| {}).unwrap();
        let share = self.partition.share(rank);
        let layout = kv_layout(self.checkpoint.config(), share, OPTIONS.dtype, OPTIONS.block_size).unwrap();
        let kv = KvStore::new(&device, layout, BLOCKS).unwrap();
        Ok(Box::new(ModelExecutor::new(model, kv, comm)))
    }

    fn describe(&self, rank: Rank) -> RankShare {
        let share = self.partition.share(rank);
        RankShare { query_heads: share.query_heads.clone(), kv_heads: share.kv_heads.clone() }
    }
}

/// splitmix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_random_submits_and_aborts_leak_nothing() {
    let checkpoint = Checkpoint::open(&root().join("parallel/fixtures/tiny_llama_odd")).unwrap();
    let partition = Partition::new(checkpoint.config(), RANKS, None).unwrap();
    let vocab_size = checkpoint.config().vocab_size;
    let spec = EnsembleSpec {
        ranks: RANKS,
        vocab_size,
        cache: CacheSpec::new(OPTIONS.block_size, BLOCKS),
        scheduler: SchedulerConfig {
            max_num_seqs: 16,
            max_num_batched_tokens: OPTIONS.max_batch_tokens,
            max_model_len: 128,
            max_waiting_requests: 64,
            priority_aging_ms: 1000,
        },
        factories: vec![Arc::new(TinyFactory { checkpoint, partition })],
    };
    let ensemble = Ensemble::start(spec, None).await.unwrap();
    let mut dice = Dice(20_261_129);
    let mut open = Vec::new();
    let (mut submitted, mut refused, mut finished, mut dropped) = (0, 0, 0, 0);
    while submitted < 10_000 {
        let prompt = (0..1 + dice.below(60)).map(|_| dice.below(vocab_size as u64) as u32).collect();
        let sampling = SamplingParams { seed: dice.below(u64::MAX), ..SamplingParams::default() };
        let max_tokens = 1 + dice.below(40) as usize;
        let request = Request {
            prompt,
            sampling,
            max_tokens,
            stop_token_ids: vec![2],
            logprobs: None,
            prompt_logprobs: None,
            priority: 0,
            cache_salt: None,
            awaits_tokens: false,
        };
        match ensemble.submit(request) {
            Ok(stream) => {
                submitted += 1;
                open.push(stream);
            }
            Err(SubmitError::Overloaded { .. }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
        // Streams are abandoned at any age, or read to their end.
        while open.len() > dice.below(48) as usize {
            let mut stream = open.swap_remove(dice.below(open.len() as u64) as usize);
            if dice.below(8) == 0 {
                while stream.next().await.is_some() {}
                finished += 1;
            } else {
                for _ in 0..dice.below(3) {
                    stream.next().await;
                }
                dropped += 1;
            }
        }
    }
    drop(open);
    let begin = std::time::Instant::now();
    loop {
        let status = ensemble.status();
        if status.running == 0 && status.waiting == 0 && status.used_blocks == 0 {
            println!(
                "{submitted} submitted, {refused} refused, {finished} read to the end, {dropped} abandoned, {} steps, \
                 {} preemptions",
                status.steps, status.preemptions
            );
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "leaked: {status:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(finished > 500 && dropped > 5000);
    ensemble.shutdown(Duration::from_secs(5)).await;
}
