//! Two replicas of a real, tiny model: shared prefixes stay together, and one replica is lost while the other serves.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use consort_actors::{
    CacheSpec, Ensemble, EnsembleSpec, EnsembleState, Epoch, FinishReason, Generation, GenerationError,
    GenerationEvent, ProgressReporter, RankShare, Rejoined, Request, SchedulerConfig, ShardError,
    ShardExecutor, ShardFactory,
    plan::{StepPlan, StepResult},
};
use consort_kernels::sampling::SamplingParams;
use consort_parallel::{checkpoint::Checkpoint, collective::Collective, ids::Rank, partition::Partition};

use crate::{
    harness::root,
    leaks::{BLOCKS, OPTIONS, TinyFactory},
};

const RANKS: usize = 2;
/// Makes generations last long enough to be looked at.
const STEP_TIME: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(60);

/// What a test does to the ranks of one replica.
#[derive(Default)]
struct Strike {
    /// Rank 1 panics in its next step, once.
    kill: AtomicBool,
    /// Ranks that are built wait for its end.
    hold: AtomicBool,
}

struct Struck {
    inner: TinyFactory,
    strike: Arc<Strike>,
}

impl ShardFactory for Struck {
    fn build(
        &self,
        rank: Rank,
        comm: Box<dyn Collective>,
        progress: &ProgressReporter,
    ) -> Result<Box<dyn ShardExecutor>, ShardError> {
        let limit = Instant::now() + PATIENCE;
        while self.strike.hold.load(Ordering::SeqCst) && Instant::now() < limit {
            thread::sleep(Duration::from_millis(1));
        }
        let inner = self.inner.build(rank, comm, progress)?;
        Ok(Box::new(StruckExecutor { inner, rank, strike: Arc::clone(&self.strike) }))
    }

    fn describe(&self, rank: Rank) -> RankShare {
        self.inner.describe(rank)
    }
}

struct StruckExecutor {
    inner: Box<dyn ShardExecutor>,
    rank: Rank,
    strike: Arc<Strike>,
}

impl ShardExecutor for StruckExecutor {
    fn join(&mut self) -> Result<(), ShardError> {
        self.inner.join()
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepResult, ShardError> {
        assert!(
            self.rank != Rank(1) || !self.strike.kill.swap(false, Ordering::SeqCst),
            "killed by the test"
        );
        thread::sleep(STEP_TIME);
        self.inner.execute(plan)
    }

    fn weight_bytes(&self) -> u64 {
        self.inner.weight_bytes()
    }

    fn kv_bytes(&self) -> u64 {
        self.inner.kv_bytes()
    }

    fn rejoin(&mut self, epoch: Epoch, comm: Box<dyn Collective>) -> Result<Rejoined, ShardError> {
        self.inner.rejoin(epoch, comm)
    }
}

async fn start(replicas: usize) -> (Ensemble, Vec<Arc<Strike>>) {
    let checkpoint = Checkpoint::open(&root().join("parallel/fixtures/tiny_llama_odd")).unwrap();
    let partition = Partition::new(checkpoint.config(), RANKS, None).unwrap();
    let strikes: Vec<Arc<Strike>> = (0..replicas).map(|_| Arc::default()).collect();
    let factory = |strike: &Arc<Strike>| {
        let inner = TinyFactory { checkpoint: Arc::clone(&checkpoint), partition: partition.clone() };
        Arc::new(Struck { inner, strike: Arc::clone(strike) }) as Arc<dyn ShardFactory>
    };
    let spec = EnsembleSpec {
        ranks: RANKS,
        vocab_size: checkpoint.config().vocab_size,
        cache: CacheSpec::new(OPTIONS.block_size, BLOCKS),
        scheduler: SchedulerConfig {
            max_num_seqs: 16,
            max_num_batched_tokens: OPTIONS.max_batch_tokens,
            max_model_len: 240,
            max_waiting_requests: 64,
            priority_aging_ms: 1000,
        },
        factories: strikes.iter().map(factory).collect(),
    };
    (Ensemble::start(spec, None).await.unwrap(), strikes)
}

/// A prompt that begins with 96 tokens of its family, which are worth more than one open request, and goes on with its
/// own.
fn request(family: u32, own: u32, max_tokens: usize) -> Request {
    let shared = (0..96).map(|at| (family * 17 + at * 5) % 60);
    Request {
        prompt: shared.chain([own % 60, (own * 7) % 60, 3]).collect(),
        sampling: SamplingParams { seed: u64::from(own), ..SamplingParams::default() },
        max_tokens,
        stop_token_ids: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    }
}

async fn read(mut generation: Generation) -> (Vec<u32>, GenerationEvent) {
    let mut tokens = Vec::new();
    loop {
        match tokio::time::timeout(PATIENCE, generation.next()).await.unwrap().unwrap() {
            GenerationEvent::Token(sampled) => tokens.push(sampled.token),
            last @ (GenerationEvent::Finished(_) | GenerationEvent::Failed(_)) => return (tokens, last),
            _ => {}
        }
    }
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let limit = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < limit, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Of each replica, the tokens of prompts that started there.
fn prompts(ensemble: &Ensemble) -> Vec<u64> {
    ensemble.status().replicas.iter().map(|replica| replica.prompt_tokens).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_prefixes_stay_together_and_a_killed_shard_stops_its_replica_alone() {
    // What each says where nothing happens.
    let (alone, _) = start(1).await;
    let mut said = Vec::new();
    let asked =
        [request(1, 1, 100), request(2, 2, 100), request(1, 3, 4), request(2, 4, 4), request(2, 5, 4)];
    for one in &asked {
        said.push(read(alone.submit(one.clone()).unwrap()).await.0);
    }
    alone.shutdown(Duration::ZERO).await;

    let (ensemble, strikes) = start(2).await;
    let sound = tokio::spawn(read(ensemble.submit(asked[0].clone()).unwrap()));
    until("the first runs", || prompts(&ensemble) == [99, 0]).await;
    let lost = tokio::spawn(read(ensemble.submit(asked[1].clone()).unwrap()));
    until("the second runs elsewhere", || prompts(&ensemble) == [99, 99]).await;
    for (at, expected) in [(2, [198, 99]), (3, [198, 198]), (4, [198, 297])] {
        assert_eq!(read(ensemble.submit(asked[at].clone()).unwrap()).await.0, said[at]);
        assert_eq!(prompts(&ensemble), expected, "request {at} went to where its prefix is");
    }

    strikes[1].hold.store(true, Ordering::SeqCst);
    strikes[1].kill.store(true, Ordering::SeqCst);
    let (_, last) = lost.await.unwrap();
    let GenerationEvent::Failed(GenerationError::ShardLost { reason }) = last else { panic!("{last:?}") };
    assert!(reason.contains("rank 1") && reason.contains("killed by the test"), "{reason}");
    // Replica 1 cannot come back yet; everything is served by replica 0.
    let status = ensemble.status();
    assert_eq!(status.state, EnsembleState::Ready);
    assert!(matches!(status.replicas[1].state, EnsembleState::Restarting { .. }), "{:?}", status.replicas[1]);
    for at in [4, 2] {
        assert_eq!(read(ensemble.submit(asked[at].clone()).unwrap()).await.0, said[at]);
    }
    assert_eq!(prompts(&ensemble), [396, 297]);
    let (tokens, last) = sound.await.unwrap();
    assert_eq!((tokens, last), (said[0].clone(), GenerationEvent::Finished(FinishReason::Length)));

    strikes[1].hold.store(false, Ordering::SeqCst);
    until("replica 1 is back", || ensemble.status().replicas[1].state == EnsembleState::Ready).await;
    let status = ensemble.status();
    let epochs: Vec<u64> = status.replicas.iter().map(|replica| replica.epoch).collect();
    let restarts: Vec<u32> = status.ranks.iter().map(|rank| rank.restarts).collect();
    assert_eq!((epochs, restarts), (vec![0, 1], vec![0, 0, 0, 1]));
    let both = [0, 1].map(|at| tokio::spawn(read(ensemble.submit(asked[at].clone()).unwrap())));
    for (at, task) in both.into_iter().enumerate() {
        assert_eq!(task.await.unwrap().0, said[at]);
    }
    assert_eq!(prompts(&ensemble).iter().sum::<u64>(), 693 + 198);
    ensemble.shutdown(Duration::ZERO).await;
}
