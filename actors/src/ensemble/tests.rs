//! The actor tree over model-free executors: every test ends with no executor and no thread left.

mod failing;
mod joining;
mod panics;
mod pipelines;
mod replicas;

use std::{
    error::Error,
    sync::{Arc, Mutex, atomic::Ordering},
    time::{Duration, Instant},
};

use consort_kernels::sampling::SamplingParams;

use super::{
    Ensemble, EnsembleSpec, Generation, Home,
    faults::{FakeFactory, Fault, SLOW_LOAD, Shared as SharedFactory, VOCAB, fake_draw},
};
use crate::{
    CacheSpec, EnsembleError, EnsembleState, FinishReason, GenerationError, GenerationEvent, ReplicaId,
    Request, SchedulerConfig, ShardState, StateWatch, SubmitError,
};

const PATIENCE: Duration = Duration::from_secs(20);

fn spec(factory: &Arc<FakeFactory>) -> EnsembleSpec {
    EnsembleSpec {
        ranks: 3,
        vocab_size: VOCAB,
        cache: CacheSpec::new(4, 256),
        scheduler: SchedulerConfig {
            max_num_seqs: 16,
            max_num_batched_tokens: 64,
            max_model_len: 1000,
            max_waiting_requests: 400,
            priority_aging_ms: 1000,
        },
        factories: vec![Arc::new(SharedFactory(Arc::clone(factory)))],
    }
}

/// What the actors of the first replica share.
fn first_home(ensemble: &Ensemble) -> Home {
    Home::new(Arc::clone(&ensemble.inner.shared), ReplicaId(0))
}

async fn start(factory: FakeFactory) -> (Ensemble, Arc<FakeFactory>) {
    let factory = Arc::new(factory);
    (Ensemble::start(spec(&factory), None).await.unwrap(), factory)
}

fn request(first: u32, prompt_len: u32, max_tokens: usize) -> Request {
    Request {
        prompt: (first..first + prompt_len).map(|token| token % VOCAB as u32).collect(),
        sampling: SamplingParams::default(),
        max_tokens,
        stop_token_ids: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        cache_salt: None,
        awaits_tokens: false,
    }
}

fn expected(request: &Request) -> Vec<u32> {
    let mut history = request.prompt.clone();
    for _ in 0..request.max_tokens {
        history.push(fake_draw(&history));
    }
    history.split_off(request.prompt.len())
}

async fn read(mut generation: Generation) -> (Vec<u32>, GenerationEvent) {
    let mut tokens = Vec::new();
    loop {
        let event = tokio::time::timeout(PATIENCE, generation.next()).await.expect("a stream always ends");
        match event.expect("a stream ends with a last event") {
            GenerationEvent::Token(sampled) => tokens.push(sampled.token),
            GenerationEvent::PromptLogprobs(_) | GenerationEvent::Prefilled { .. } => {}
            last => {
                assert_eq!(generation.next().await, None);
                return (tokens, last);
            }
        }
    }
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn until_ready(ensemble: &Ensemble) {
    until("ready", || ensemble.status().state == EnsembleState::Ready).await;
}

/// Shuts down and proves that nothing is left.
async fn finish(ensemble: Ensemble, factory: &FakeFactory) {
    ensemble.shutdown(Duration::ZERO).await;
    assert_eq!(ensemble.status().state, EnsembleState::Stopped);
    assert_eq!(ensemble.inner.shared.reap(), 0, "a compute thread survives");
    assert_eq!(factory.alive(), 0, "an executor survives");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_streams_its_tokens_and_its_end() {
    let (ensemble, factory) = start(FakeFactory::new()).await;
    let request = request(3, 70, 40);
    let (tokens, last) = read(ensemble.submit(request.clone()).unwrap()).await;
    assert_eq!(tokens, expected(&request));
    assert_eq!(last, GenerationEvent::Finished(FinishReason::Length));
    until("blocks are free", || ensemble.status().used_blocks == 0).await;
    let status = ensemble.status();
    assert_eq!((status.prompt_tokens, status.generated_tokens, status.finished.length), (70, 40, 1));
    assert!(status.steps >= 41, "70 prompt tokens take two steps, and 39 more tokens one each");
    assert_eq!((status.total_blocks, status.block_size), (256, 4));
    let rank = &status.ranks[2];
    assert_eq!((rank.query_heads.clone(), rank.kv_heads.clone()), (6..9, 2..3));
    assert_eq!((rank.weight_bytes, rank.kv_bytes, rank.kv_blocks), (1002, 500, 256));
    assert_eq!((rank.state, rank.restarts), (ShardState::Ready, 0));
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_token_ends_a_request_and_is_reported() {
    let (ensemble, factory) = start(FakeFactory::new()).await;
    let mut request = request(3, 5, 40);
    let all = expected(&request);
    let token = all[6];
    request.stop_token_ids = vec![token];
    let (tokens, last) = read(ensemble.submit(request).unwrap()).await;
    let first = all.iter().position(|&other| other == token).unwrap();
    assert_eq!(tokens, all[..=first]);
    assert_eq!(last, GenerationEvent::Finished(FinishReason::Stop { token }));
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_concurrent_requests_equal_their_solo_runs() {
    let (ensemble, factory) = start(FakeFactory::new()).await;
    let requests: Vec<Request> =
        (0..200).map(|index| request(index, 1 + index * 7 % 50, 1 + (index as usize * 13) % 60)).collect();
    let tasks: Vec<_> = requests
        .iter()
        .map(|request| {
            let (ensemble, request) = (ensemble.clone(), request.clone());
            tokio::spawn(async move { read(ensemble.submit(request).unwrap()).await })
        })
        .collect();
    for (task, request) in tasks.into_iter().zip(&requests) {
        let (tokens, last) = task.await.unwrap();
        assert_eq!(tokens, expected(request));
        assert_eq!(last, GenerationEvent::Finished(FinishReason::Length));
    }
    until("blocks are free", || ensemble.status().used_blocks == 0).await;
    println!("{:?}", ensemble.status());
    assert!(ensemble.status().steps < 3000, "requests were batched");
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_stream_frees_its_blocks_within_two_steps() {
    let factory = FakeFactory::new();
    factory.step_latch.close();
    let (ensemble, factory) = start(factory).await;
    let staying = ensemble.submit(request(0, 4, 900)).unwrap();
    let dropped = ensemble.submit(request(0, 400, 500)).unwrap();
    // 404 prompt tokens take seven steps; two steps are under way at any time, and wait at the latch.
    factory.step_latch.allow(10);
    until("ten steps are absorbed", || ensemble.status().steps == 10).await;
    let status = ensemble.status();
    assert_eq!(status.running, 2);
    assert!(status.used_blocks > 100, "{}", status.used_blocks);

    drop(dropped);
    until("the cancellation is seen", || ensemble.status().finished.cancelled == 1).await;
    let status = ensemble.status();
    assert_eq!((status.steps, status.running), (10, 1));
    assert!(status.used_blocks > 100, "steps under way may still write its blocks");

    factory.step_latch.allow(2);
    until("two more steps are absorbed", || ensemble.status().steps == 12).await;
    // What stays has its prompt, a token of each step, and those of two planned steps.
    let share = (4 + 12 + 2_usize).div_ceil(4);
    let used = ensemble.status().used_blocks;
    assert!((1..=share).contains(&used), "{used} blocks are used, {share} by the request that stays");
    factory.step_latch.open();
    drop(staying);
    until("blocks are free", || ensemble.status().used_blocks == 0).await;
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_shard_ends_open_requests_and_restarts_alone() {
    for (fault, message) in [(Fault::Panic, "injected panic"), (Fault::Error, "injected error")] {
        let (ensemble, factory) = start(FakeFactory::new().with_fault(1, 10, fault)).await;
        factory.build_latch.close();
        let (tokens, last) = read(ensemble.submit(request(0, 4, 500)).unwrap()).await;
        let GenerationEvent::Failed(GenerationError::ShardLost { reason }) = last else { panic!("{last:?}") };
        assert!(reason.contains("rank 1") && reason.contains(message), "{reason}");
        assert_eq!(tokens, expected(&request(0, 4, tokens.len())), "what was streamed before is right");

        let refusal = ensemble.submit(request(0, 4, 5)).unwrap_err();
        assert!(matches!(&refusal, SubmitError::NotReady(text) if text.contains(message)), "{refusal}");
        let status = ensemble.status();
        assert!(matches!(status.state, EnsembleState::Restarting { attempt: 1, .. }), "{:?}", status.state);

        factory.build_latch.open();
        until_ready(&ensemble).await;
        let (tokens, last) = read(ensemble.submit(request(0, 4, 30)).unwrap()).await;
        assert_eq!(tokens, expected(&request(0, 4, 30)));
        assert_eq!(last, GenerationEvent::Finished(FinishReason::Length));
        assert_eq!(factory.builds(), [1, 2, 1], "survivors keep their weights");
        let status = ensemble.status();
        assert_eq!(status.epoch, 1);
        assert_eq!(status.ranks.iter().map(|rank| rank.restarts).collect::<Vec<_>>(), [0, 1, 0]);
        finish(ensemble, &factory).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn executors_that_cannot_rejoin_are_rebuilt() {
    let mut factory = FakeFactory::new().with_fault(0, 5, Fault::Panic);
    factory.keeps_weights = false;
    let (ensemble, factory) = start(factory).await;
    read(ensemble.submit(request(0, 4, 500)).unwrap()).await;
    until_ready(&ensemble).await;
    let (tokens, _) = read(ensemble.submit(request(0, 4, 30)).unwrap()).await;
    assert_eq!(tokens, expected(&request(0, 4, 30)));
    assert_eq!(factory.builds(), [2, 2, 2]);
    assert_eq!(factory.alive(), 3);
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_draw_differently_are_all_rebuilt() {
    for (fault, rank, message) in
        [(Fault::Digest, 2, "different tokens"), (Fault::Nonsense, 0, "does not answer")]
    {
        let (ensemble, factory) = start(FakeFactory::new().with_fault(rank, 6, fault)).await;
        let (_, last) = read(ensemble.submit(request(0, 4, 500)).unwrap()).await;
        let GenerationEvent::Failed(GenerationError::ShardLost { reason }) = last else { panic!("{last:?}") };
        assert!(reason.contains(message), "{reason}");
        until_ready(&ensemble).await;
        let (tokens, _) = read(ensemble.submit(request(0, 4, 30)).unwrap()).await;
        assert_eq!(tokens, expected(&request(0, 4, 30)));
        assert_eq!(factory.builds(), [2, 2, 2]);
        finish(ensemble, &factory).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_keeps_failing_is_given_up() {
    let mut factory = FakeFactory::new().with_fault(1, 3, Fault::Panic);
    for build in 1..=5 {
        factory = factory.with_fault(1, build, Fault::Load);
    }
    let (ensemble, factory) = start(factory).await;
    read(ensemble.submit(request(0, 4, 500)).unwrap()).await;
    until("failed", || matches!(ensemble.status().state, EnsembleState::Failed { .. })).await;
    let refusal = ensemble.submit(request(0, 4, 5)).unwrap_err().to_string();
    assert!(refusal.contains("model.safetensors is missing") && refusal.contains("5 restarts"), "{refusal}");
    assert_eq!(factory.builds(), [1, 6, 1]);
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_scheduler_s_end_takes_the_group_with_it() {
    let mut factory = FakeFactory::new();
    factory.step_time = Duration::from_millis(5);
    let (ensemble, factory) = start(factory).await;
    read(ensemble.submit(request(0, 4, 20)).unwrap()).await;
    until("the end is counted", || ensemble.status().finished.length == 1).await;
    let mut generation = ensemble.submit(request(0, 4, 900)).unwrap();
    assert!(generation.next().await.is_some());
    until("the request's first token is counted", || ensemble.status().generated_tokens > 20).await;
    let before = ensemble.status();
    first_home(&ensemble).scheduler().unwrap().kill();
    let (_, last) = read(generation).await;
    assert!(matches!(last, GenerationEvent::Failed(GenerationError::ShardLost { .. })), "{last:?}");
    until("restarted", || ensemble.status().epoch == 1 && ensemble.status().state == EnsembleState::Ready)
        .await;
    let restarted = ensemble.status();
    assert_eq!((restarted.running, restarted.waiting, restarted.used_blocks), (0, 0, 0));
    assert!(restarted.steps >= before.steps && restarted.generated_tokens >= before.generated_tokens);
    assert_eq!(restarted.prompt_tokens, 8);
    assert_eq!((restarted.finished.length, restarted.finished.failed), (1, 1), "what was open has failed");

    let (tokens, _) = read(ensemble.submit(request(0, 4, 30)).unwrap()).await;
    assert_eq!(tokens, expected(&request(0, 4, 30)));
    until("the end is counted", || ensemble.status().finished.length == 2).await;
    let after = ensemble.status();
    assert_eq!((after.prompt_tokens, after.finished.failed), (12, 1));
    assert_eq!(after.generated_tokens, restarted.generated_tokens + 30, "counters go on where they were");
    assert!(after.steps >= restarted.steps + 30);
    assert_eq!(factory.builds(), [2, 2, 2]);
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduler_that_keeps_ending_leaves_nothing_open_and_what_was_open_has_failed() {
    let mut factory = FakeFactory::new();
    factory.step_time = Duration::from_millis(5);
    let (ensemble, factory) = start(factory).await;
    let has_failed = || matches!(ensemble.status().state, EnsembleState::Failed { .. });
    let mut lives = 0;
    while !has_failed() {
        lives += 1;
        let mut open: Vec<Generation> =
            (0..3).map(|first| ensemble.submit(request(first, 4, 900)).unwrap()).collect();
        for generation in &mut open {
            assert!(generation.next().await.is_some());
        }
        first_home(&ensemble).scheduler().unwrap().kill();
        for generation in open {
            let (_, last) = read(generation).await;
            assert!(matches!(last, GenerationEvent::Failed(GenerationError::ShardLost { .. })), "{last:?}");
        }
        until("it is restarted, or given up", || {
            let status = ensemble.status();
            has_failed() || (status.epoch == lives && status.state == EnsembleState::Ready)
        })
        .await;
        let status = ensemble.status();
        assert_eq!((status.running, status.waiting, status.used_blocks), (0, 0, 0), "life {lives}");
        assert_eq!(status.finished.failed, 3 * lives);
    }
    assert_eq!(lives, 6, "five restarts");
    finish(ensemble, &factory).await;
}

/// Short enough to wait for, and far beyond what a fake step takes on a busy machine.
const SILENCE: Duration = Duration::from_millis(1500);

async fn start_watched(factory: FakeFactory) -> (Ensemble, Arc<FakeFactory>) {
    let factory = Arc::new(factory);
    (Ensemble::start_watched(spec(&factory), None, SILENCE).await.unwrap(), factory)
}

async fn until_failed(ensemble: &Ensemble) -> String {
    until("failed", || matches!(ensemble.status().state, EnsembleState::Failed { .. })).await;
    let EnsembleState::Failed { reason } = ensemble.status().state else { unreachable!("failed is final") };
    reason
}

/// Shuts down with one thread that hangs, and then lets it go.
async fn finish_hung(ensemble: Ensemble, factory: &FakeFactory) {
    ensemble.shutdown(Duration::ZERO).await;
    assert_eq!(ensemble.status().state, EnsembleState::Stopped);
    assert_eq!(ensemble.inner.shared.reap(), 1, "only the hung thread is left");
    factory.release();
    until("the thread ends by itself", || ensemble.inner.shared.reap() == 0).await;
    assert_eq!(factory.alive(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_hangs_is_named_and_fails_the_ensemble() {
    let (ensemble, factory) = start_watched(FakeFactory::new().with_fault(1, 4, Fault::Hang)).await;
    let (tokens, last) = read(ensemble.submit(request(0, 4, 900)).unwrap()).await;
    let GenerationEvent::Failed(GenerationError::ShardLost { reason }) = last else { panic!("{last:?}") };
    assert!(
        reason.starts_with("step 4 was not answered for 1.5s by") && reason.contains("rank 1"),
        "{reason}"
    );
    assert_eq!(tokens, expected(&request(0, 4, 4)), "what was streamed before is right");
    assert!(matches!(ensemble.submit(request(0, 4, 5)), Err(SubmitError::NotReady(_))));

    let reason = until_failed(&ensemble).await;
    println!("{reason}");
    let named = "epoch 1 was not joined for 1.5s by rank 1, after: step 4 was not answered";
    assert!(reason.starts_with(named), "those that only waited for rank 1 are not blamed: {reason}");
    assert_eq!(ensemble.status().ranks[1].state, ShardState::Lost);
    let refusal = ensemble.submit(request(0, 4, 5)).unwrap_err().to_string();
    assert!(refusal.contains(named), "{refusal}");
    assert_eq!(factory.builds(), [1, 1, 1], "a hung thread keeps its memory, so no successor is built");
    finish_hung(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_answers_late_joins_the_next_epoch() {
    let (ensemble, factory) = start_watched(FakeFactory::new().with_fault(1, 4, Fault::Hang)).await;
    let (_, last) = read(ensemble.submit(request(0, 4, 900)).unwrap()).await;
    assert!(matches!(last, GenerationEvent::Failed(GenerationError::ShardLost { .. })), "{last:?}");
    factory.release();
    until_ready(&ensemble).await;
    let (tokens, _) = read(ensemble.submit(request(0, 4, 30)).unwrap()).await;
    assert_eq!(tokens, expected(&request(0, 4, 30)));
    assert_eq!((ensemble.status().epoch, factory.builds()), (1, vec![1, 1, 1]));
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_hangs_in_its_restart_fails_the_ensemble() {
    let factory = FakeFactory::new().with_fault(1, 4, Fault::Panic).with_fault(1, 1, Fault::LoadHang);
    let (ensemble, factory) = start_watched(factory).await;
    read(ensemble.submit(request(0, 4, 900)).unwrap()).await;
    let reason = until_failed(&ensemble).await;
    let named = "epoch 1 was not joined for 1.5s by rank 1, after: rank 1: the compute thread panicked";
    assert!(reason.starts_with(named), "{reason}");
    finish_hung(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_loads_for_long_and_says_so_is_waited_for() {
    assert!(SLOW_LOAD > 2 * SILENCE);
    let factory = FakeFactory::new().with_fault(1, 4, Fault::Panic).with_fault(1, 1, Fault::LoadSlow);
    let (ensemble, factory) = start_watched(factory).await;
    read(ensemble.submit(request(0, 4, 900)).unwrap()).await;
    until("it plays again, or gives up", || {
        !matches!(ensemble.status().state, EnsembleState::Restarting { .. })
    })
    .await;
    assert_eq!((ensemble.status().state, ensemble.status().epoch), (EnsembleState::Ready, 1));
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_ensemble_is_not_taken_for_a_silent_one() {
    let (ensemble, factory) = start_watched(FakeFactory::new()).await;
    tokio::time::sleep(2 * SILENCE).await;
    let (tokens, _) = read(ensemble.submit(request(0, 4, 30)).unwrap()).await;
    assert_eq!((tokens, ensemble.status().epoch), (expected(&request(0, 4, 30)), 0));
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_thread_costs_one_restart() {
    let (ensemble, factory) = start(FakeFactory::new().with_fault(1, 10, Fault::Panic)).await;
    first_home(&ensemble).threads().refusals.store(2, Ordering::SeqCst);
    read(ensemble.submit(request(0, 4, 500)).unwrap()).await;
    until_ready(&ensemble).await;
    assert_eq!(
        (ensemble.status().epoch, factory.builds()),
        (3, vec![1, 2, 1]),
        "survivors keep their weights"
    );

    // A new group whose first thread is refused.
    first_home(&ensemble).threads().refusals.store(1, Ordering::SeqCst);
    first_home(&ensemble).scheduler().unwrap().kill();
    until("restarted", || ensemble.status().epoch == 5 && ensemble.status().state == EnsembleState::Ready)
        .await;
    let (tokens, _) = read(ensemble.submit(request(0, 4, 30)).unwrap()).await;
    assert_eq!(tokens, expected(&request(0, 4, 30)));
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn threads_that_are_refused_again_and_again_fail_the_ensemble() {
    let (ensemble, factory) = start(FakeFactory::new().with_fault(1, 10, Fault::Panic)).await;
    first_home(&ensemble).threads().refusals.store(100, Ordering::SeqCst);
    read(ensemble.submit(request(0, 4, 500)).unwrap()).await;
    let reason = until_failed(&ensemble).await;
    assert!(reason.contains("rank 1: the compute thread could not be spawned: injected"), "{reason}");
    assert!(reason.contains("after 5 restarts"), "{reason}");
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_load_failure_is_returned_in_full() {
    let factory = Arc::new(FakeFactory::new().with_fault(2, 0, Fault::Load));
    let error = Ensemble::start(spec(&factory), None).await.unwrap_err();
    assert_eq!(error.to_string(), "rank 2: loading failed: model.safetensors is missing");
    let cause = error.source().and_then(|source| source.source()).expect("the factory's own error is kept");
    assert!(cause.is::<std::io::Error>());
    assert_eq!(factory.alive(), 0);
    assert_eq!(factory.builds(), [1, 1, 1], "a load that fails at the start is not retried");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_while_loading_is_an_error_of_start() {
    let factory = Arc::new(FakeFactory::new().with_fault(1, 0, Fault::LoadPanic));
    let error = Ensemble::start(spec(&factory), None).await.unwrap_err();
    assert_eq!(error.to_string(), "rank 1: the compute thread panicked: injected LoadPanic");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loading_reports_progress_of_every_rank() {
    let factory = Arc::new(FakeFactory::new());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let progress = move |progress: crate::LoadProgress| sink.lock().unwrap().push(progress);
    let ensemble = Ensemble::start(spec(&factory), Some(Arc::new(progress))).await.unwrap();
    let mut ends: Vec<u16> =
        seen.lock().unwrap().iter().filter(|p| p.loaded_bytes == p.total_bytes).map(|p| p.rank.0).collect();
    ends.sort_unstable();
    assert_eq!(ends, [0, 1, 2]);
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_specification_s_violations_are_all_named() {
    let factory = Arc::new(FakeFactory::new());
    let mut spec = spec(&factory);
    (spec.ranks, spec.cache.block_size, spec.scheduler.max_num_seqs) = (0, 0, 65);
    let EnsembleError::Spec { problems } = Ensemble::start(spec, None).await.unwrap_err() else { panic!() };
    assert_eq!(problems.len(), 3, "{problems:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_belong_together_are_accepted_together_or_not_at_all() {
    let mut factory = FakeFactory::new();
    factory.step_time = Duration::from_millis(5);
    let factory = Arc::new(factory);
    let mut spec = spec(&factory);
    (spec.scheduler.max_num_seqs, spec.scheduler.max_waiting_requests) = (1, 3);
    let ensemble = Ensemble::start(spec, None).await.unwrap();
    let mut first = ensemble.submit(request(0, 4, 900)).unwrap();
    assert!(first.next().await.is_some());
    let group = |count: u32| ensemble.submit_all((0..count).map(|id| request(id, 4, 2)).collect());
    assert_eq!(group(4).unwrap_err(), SubmitError::Overloaded { waiting: 0, limit: 3 });
    let waiting = group(2).unwrap();
    for _ in 0..5 {
        assert_eq!(group(2).unwrap_err(), SubmitError::Overloaded { waiting: 2, limit: 3 });
    }
    // One that is refused for itself takes the others with it, and no place is lost.
    let unknown = request(0, 4, 2);
    let unknown = Request { prompt: vec![VOCAB as u32], ..unknown };
    let mixed = ensemble.submit_all(vec![request(0, 4, 2), unknown]);
    assert!(matches!(mixed, Err(SubmitError::UnknownToken { .. })), "{mixed:?}");
    let third = group(1).unwrap();
    drop(first);
    for (id, generation) in waiting.into_iter().enumerate() {
        assert_eq!(read(generation).await.0, expected(&request(id as u32, 4, 2)));
    }
    drop(third);
    until("every place is free again", || group(3).is_ok()).await;
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_exceeds_the_waiting_bound_is_overload() {
    let mut factory = FakeFactory::new();
    factory.step_time = Duration::from_millis(30);
    let factory = Arc::new(factory);
    let mut spec = spec(&factory);
    (spec.scheduler.max_num_seqs, spec.scheduler.max_waiting_requests) = (1, 2);
    let ensemble = Ensemble::start(spec, None).await.unwrap();
    let mut first = ensemble.submit(request(0, 4, 900)).unwrap();
    assert!(first.next().await.is_some());
    let waiting: Vec<Generation> = (0..2).map(|_| ensemble.submit(request(0, 4, 2)).unwrap()).collect();
    let refusal = ensemble.submit(request(0, 4, 2)).unwrap_err();
    assert_eq!(refusal, SubmitError::Overloaded { waiting: 2, limit: 2 });
    // Cancelled waiting requests give their places back.
    drop(waiting);
    until("places are free", || ensemble.submit(request(0, 4, 2)).is_ok()).await;
    drop(first);
    until("idle", || ensemble.status().running == 0 && ensemble.status().used_blocks == 0).await;
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_lets_running_requests_finish_within_grace() {
    let mut factory = FakeFactory::new();
    factory.step_time = Duration::from_millis(2);
    let (ensemble, factory) = start(factory).await;
    let running = tokio::spawn(read(ensemble.submit(request(0, 4, 50)).unwrap()));
    let closing = tokio::spawn({
        let ensemble = ensemble.clone();
        async move { ensemble.shutdown(PATIENCE).await }
    });
    until("draining", || ensemble.status().state != EnsembleState::Ready).await;
    assert_eq!(ensemble.submit(request(0, 4, 5)).unwrap_err(), SubmitError::ShuttingDown);
    let (tokens, last) = running.await.unwrap();
    assert_eq!((tokens.len(), last), (50, GenerationEvent::Finished(FinishReason::Length)));
    closing.await.unwrap();
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_what_outlives_its_grace() {
    let mut factory = FakeFactory::new();
    factory.step_time = Duration::from_millis(10);
    let (ensemble, factory) = start(factory).await;
    let running = tokio::spawn(read(ensemble.submit(request(0, 4, 900)).unwrap()));
    ensemble.shutdown(Duration::from_millis(50)).await;
    assert_eq!(running.await.unwrap().1, GenerationEvent::Failed(GenerationError::ShuttingDown));
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_returns_although_a_shard_hangs() {
    let (ensemble, factory) = start(FakeFactory::new().with_fault(1, 4, Fault::Hang)).await;
    let running = tokio::spawn(read(ensemble.submit(request(0, 4, 900)).unwrap()));
    until("hung", || ensemble.status().steps == 4).await;
    tokio::time::timeout(PATIENCE, ensemble.shutdown(Duration::from_millis(20)))
        .await
        .expect("shutdown returns");
    assert_eq!(running.await.unwrap().1, GenerationEvent::Failed(GenerationError::ShuttingDown));
    assert_eq!(factory.alive(), 1, "survivors left the collective; a thread that hangs cannot be ended");
    factory.release();
    until("the thread ends by itself", || factory.alive() == 0).await;
}

/// The next change, which must come.
async fn next(watch: &mut StateWatch) -> Option<EnsembleState> {
    tokio::time::timeout(PATIENCE, watch.changed()).await.expect("a change is told")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_is_told_of_a_restart_and_of_the_shutdown() {
    let (ensemble, factory) = start(FakeFactory::new().with_fault(1, 4, Fault::Panic)).await;
    let mut watch = ensemble.watch();
    assert_eq!(watch.state(), EnsembleState::Ready);
    read(ensemble.submit(request(0, 4, 900)).unwrap()).await;
    // The restart may be over before anybody looks: only the last state is certain to be seen.
    let mut seen = vec![next(&mut watch).await.unwrap()];
    while seen.last() != Some(&EnsembleState::Ready) {
        seen.push(next(&mut watch).await.unwrap());
    }
    println!("{seen:?}");
    assert!(
        seen.iter().rev().skip(1).all(|state| matches!(state, EnsembleState::Restarting { .. })),
        "{seen:?}"
    );

    let other = watch.clone();
    let waits = tokio::spawn(async move { { other }.ended().await });
    finish(ensemble, &factory).await;
    assert_eq!(waits.await.unwrap(), EnsembleState::Stopped);
    assert_eq!(watch.ended().await, EnsembleState::Stopped);
    assert_eq!(next(&mut watch).await, None, "nothing can follow");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_is_told_why_an_ensemble_failed() {
    let (ensemble, factory) = start_watched(FakeFactory::new().with_fault(1, 4, Fault::Hang)).await;
    let mut watch = ensemble.watch();
    read(ensemble.submit(request(0, 4, 900)).unwrap()).await;
    let end = tokio::time::timeout(PATIENCE, watch.ended()).await.expect("the failure is told");
    let EnsembleState::Failed { reason } = end else { panic!("{end:?}") };
    assert!(reason.contains("rank 1"), "{reason}");
    finish_hung(ensemble, &factory).await;
    assert_eq!(watch.ended().await, EnsembleState::Stopped);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_of_every_change_ends_though_handles_are_held() {
    let (ensemble, factory) = start(FakeFactory::new()).await;
    let (mut watch, mut late) = (ensemble.watch(), ensemble.watch());
    let held = ensemble.clone();
    finish(ensemble, &factory).await;
    let mut seen = Vec::new();
    while let Some(state) = next(&mut watch).await {
        seen.push(state);
    }
    assert_eq!(seen, [EnsembleState::Stopped], "told once");
    assert_eq!(late.state(), EnsembleState::Stopped);
    assert_eq!(next(&mut late).await, None, "it was seen");
    assert_eq!(next(&mut held.watch()).await, None, "nothing changes from there on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_failure_the_shutdown_is_still_a_change() {
    let (ensemble, factory) = start_watched(FakeFactory::new().with_fault(1, 4, Fault::Hang)).await;
    let (mut watch, held) = (ensemble.watch(), ensemble.clone());
    read(ensemble.submit(request(0, 4, 900)).unwrap()).await;
    let end = tokio::time::timeout(PATIENCE, watch.ended()).await.expect("the failure is told");
    assert!(matches!(end, EnsembleState::Failed { .. }), "{end:?}");
    let mut follower = watch.clone();
    follower.state();
    let more = tokio::time::timeout(Duration::from_millis(50), follower.changed()).await;
    assert!(more.is_err(), "{more:?} came by itself");
    finish_hung(ensemble, &factory).await;
    let mut seen = vec![next(&mut follower).await.unwrap()];
    while let Some(state) = next(&mut follower).await {
        seen.push(state);
    }
    assert_eq!(seen.last(), Some(&EnsembleState::Stopped));
    assert!(
        seen.iter().all(|state| matches!(state, EnsembleState::Draining | EnsembleState::Stopped)),
        "{seen:?}"
    );
    drop(held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_does_not_keep_an_ensemble_alive() {
    let (ensemble, factory) = start(FakeFactory::new()).await;
    let mut watch = ensemble.watch();
    drop(ensemble);
    let end = tokio::time::timeout(PATIENCE, watch.ended()).await.expect("the end is told");
    assert_eq!(end, EnsembleState::Stopped);
    assert_eq!(factory.alive(), 0, "it is told once nothing is left");
    assert_eq!(next(&mut watch).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_the_last_handle_ends_actors_and_threads() {
    let mut factory = FakeFactory::new();
    factory.step_time = Duration::from_millis(2);
    let (ensemble, factory) = start(factory).await;
    let generation = ensemble.submit(request(0, 4, 900)).unwrap();
    let shared = Arc::clone(&ensemble.inner.shared);
    let clone = ensemble.clone();
    drop(ensemble);
    assert_eq!(clone.status().state, EnsembleState::Ready, "a clone keeps it alive");
    drop(clone);
    assert_eq!(read(generation).await.1, GenerationEvent::Failed(GenerationError::ShuttingDown));
    until("stopped", || shared.board.state() == EnsembleState::Stopped).await;
    assert_eq!((shared.reap(), factory.alive()), (0, 0));
    until("no actor holds on to it", || Arc::strong_count(&shared) == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_never_reads_is_cut_off() {
    let factory = Arc::new(FakeFactory::new());
    let mut spec = spec(&factory);
    (spec.scheduler.max_model_len, spec.cache.num_blocks) = (9000, 2000);
    let ensemble = Ensemble::start(spec, None).await.unwrap();
    let slow = ensemble.submit(request(0, 1, 7000)).unwrap();
    until("cut off", || ensemble.status().finished.slow_reader == 1).await;
    let (tokens, last) = read(slow).await;
    // The queue also held the end of the prefill.
    assert_eq!(tokens.len(), super::GENERATION_QUEUE_EVENTS - 2);
    assert_eq!(last, GenerationEvent::Failed(GenerationError::SlowReader { queued: tokens.len() + 1 }));
    until("blocks are free", || ensemble.status().used_blocks == 0).await;
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ensembles_of_one_process_do_not_see_each_other() {
    let (first, first_factory) = start(FakeFactory::new().with_fault(0, 8, Fault::Panic)).await;
    let (second, second_factory) = start(FakeFactory::new()).await;
    let lost = tokio::spawn(read(first.submit(request(0, 4, 500)).unwrap()));
    let (tokens, last) = read(second.submit(request(9, 4, 200)).unwrap()).await;
    assert_eq!(
        (tokens, last),
        (expected(&request(9, 4, 200)), GenerationEvent::Finished(FinishReason::Length))
    );
    assert!(matches!(lost.await.unwrap().1, GenerationEvent::Failed(_)));
    finish(first, &first_factory).await;
    assert_eq!(second.status().state, EnsembleState::Ready);
    finish(second, &second_factory).await;
}

#[test]
fn handles_can_be_shared_and_sent() {
    fn shared<T: Clone + Send + Sync + 'static>() {}
    fn sent<T: Send + 'static + tokio_stream::Stream<Item = GenerationEvent>>() {}
    shared::<Ensemble>();
    sent::<Generation>();
}
