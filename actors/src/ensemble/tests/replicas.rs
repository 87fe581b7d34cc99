//! Several replicas of one model: where requests go, and how each of them fails alone.

use super::*;
use crate::{CacheSalt, ReplicaStatus};

/// Ranks of each.
const RANKS: usize = 2;

fn spec_of(factories: &[Arc<FakeFactory>]) -> EnsembleSpec {
    let all = factories.iter().map(|factory| Arc::new(SharedFactory(Arc::clone(factory))) as _);
    EnsembleSpec { ranks: RANKS, factories: all.collect(), ..spec(&factories[0]) }
}

async fn start_all<const N: usize>(
    factories: [FakeFactory; N],
    change: impl FnOnce(&mut EnsembleSpec),
) -> (Ensemble, Vec<Arc<FakeFactory>>) {
    let factories: Vec<Arc<FakeFactory>> = factories.into_iter().map(Arc::new).collect();
    let mut spec = spec_of(&factories);
    change(&mut spec);
    (Ensemble::start_watched(spec, None, SILENCE).await.unwrap(), factories)
}

async fn start_two(first: FakeFactory, second: FakeFactory) -> (Ensemble, Vec<Arc<FakeFactory>>) {
    start_all([first, second], |_| {}).await
}

async fn finish_all(ensemble: Ensemble, factories: &[Arc<FakeFactory>]) {
    ensemble.shutdown(Duration::ZERO).await;
    let status = ensemble.status();
    assert_eq!(status.state, EnsembleState::Stopped);
    assert!(status.replicas.iter().all(|replica| replica.state == EnsembleState::Stopped));
    assert_eq!(ensemble.inner.shared.reap(), 0, "a compute thread survives");
    assert!(factories.iter().all(|factory| factory.alive() == 0), "an executor survives");
}

fn replica(ensemble: &Ensemble, number: usize) -> ReplicaStatus {
    ensemble.status().replicas.swap_remove(number)
}

/// Of each replica, the tokens of prompts that started there.
fn prompts(ensemble: &Ensemble) -> Vec<u64> {
    ensemble.status().replicas.iter().map(|replica| replica.prompt_tokens).collect()
}

fn running(ensemble: &Ensemble) -> Vec<usize> {
    ensemble.status().replicas.iter().map(|replica| replica.running).collect()
}

fn slow(milliseconds: u64) -> FakeFactory {
    let mut factory = FakeFactory::new();
    factory.step_time = Duration::from_millis(milliseconds);
    factory
}

/// A request that runs for long, and is known to run.
async fn open(ensemble: &Ensemble, request: Request) -> Generation {
    let mut generation = ensemble.submit(request).unwrap();
    assert!(matches!(
        generation.next().await,
        Some(GenerationEvent::Token(_) | GenerationEvent::Prefilled { .. })
    ));
    generation
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_requests_over_three_replicas_equal_their_solo_runs() {
    let (ensemble, factories) =
        start_all([FakeFactory::new(), FakeFactory::new(), FakeFactory::new()], |_| {}).await;
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
        assert_eq!(task.await.unwrap(), (expected(request), GenerationEvent::Finished(FinishReason::Length)));
    }
    until("blocks are free", || ensemble.status().used_blocks == 0).await;
    let status = ensemble.status();
    println!("{:?} moved {}", prompts(&ensemble), status.moved_requests);
    let total: usize = requests.iter().map(|request| request.prompt.len()).sum();
    assert_eq!((status.prompt_tokens, status.finished.length), (total as u64, 200));
    // How much each does depends on which cores its threads were given.
    assert!(prompts(&ensemble).iter().all(|tokens| *tokens > 0), "all of them worked");
    assert_eq!((status.total_blocks, status.ranks.len(), status.replicas.len()), (3 * 256, 3 * RANKS, 3));
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_go_where_their_prefix_is_and_salts_keep_them_apart() {
    let (ensemble, factories) = start_two(slow(1), slow(1)).await;
    let first = open(&ensemble, request(1, 80, 900)).await;
    let second = open(&ensemble, request(50, 80, 900)).await;
    assert_eq!(prompts(&ensemble), [80, 80], "the least loaded serves what nobody knows");
    // Each with a few tokens of its own behind.
    for (round, first_token) in [(0, 50), (1, 50), (2, 1), (3, 50)] {
        let mut follower = request(first_token, 80, 2);
        follower.prompt.extend([round, round, 7]);
        let before = prompts(&ensemble);
        let (tokens, _) = read(ensemble.submit(follower.clone()).unwrap()).await;
        assert_eq!(tokens, expected(&follower));
        let at = usize::from(first_token == 50);
        assert_eq!(prompts(&ensemble)[at], before[at] + 83, "round {round}");
    }
    assert_eq!(prompts(&ensemble), [80 + 83, 80 + 3 * 83]);
    // The same tokens under a salt are another prefix: the least loaded serves, and the lower number.
    let salted = Request { cache_salt: Some(CacheSalt::new(b"mine")), ..request(50, 80, 1) };
    read(ensemble.submit(salted).unwrap()).await;
    assert_eq!(prompts(&ensemble)[0], 80 + 83 + 80);
    drop((first, second));
    until("all are gone", || ensemble.status().running == 0).await;
    assert_eq!(ensemble.status().finished.cancelled, 2);
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_whose_log_probabilities_are_asked_for_goes_by_load_and_its_other_choices_with_it() {
    let (ensemble, factories) = start_two(slow(1), slow(1)).await;
    let first = open(&ensemble, request(1, 80, 900)).await;
    let second = open(&ensemble, request(50, 80, 900)).await;
    assert_eq!(prompts(&ensemble), [80, 80]);
    // Known at replica 1, and computed again all the same: so the lower number of two that have as much to do.
    let scored = Request { prompt_logprobs: Some(0), ..request(50, 80, 2) };
    let groups = ensemble.grouped(vec![scored.clone(), request(50, 80, 2), scored.clone(), scored.clone()]);
    assert_eq!(groups.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 1], "it takes nothing over");
    let choices = ensemble.submit_all(vec![scored.clone(), request(50, 80, 2)]).unwrap();
    for (mut choice, expected) in choices.into_iter().zip([79, 0]) {
        let (mut reported, mut last) = (0, None);
        while let Some(event) = choice.next().await {
            if let GenerationEvent::PromptLogprobs(some) = &event {
                reported += some.len();
            }
            last = Some(event);
        }
        assert_eq!((reported, last), (expected, Some(GenerationEvent::Finished(FinishReason::Length))));
    }
    assert_eq!(prompts(&ensemble), [80 + 2 * 80, 80]);
    drop((first, second));
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_that_a_prompt_is_still_to_take_are_not_said_to_be_free() {
    let (ensemble, factories) = start_two(FakeFactory::new(), FakeFactory::new()).await;
    factories.iter().for_each(|factory| factory.step_latch.close());
    let long = ensemble.submit(request(1, 600, 3)).unwrap();
    until("it runs", || running(&ensemble) == [1, 0]).await;
    let free = || ensemble.inner.shared.board.free_blocks();
    // 64 tokens a step and four a block, of 256.
    until("what it needs is kept for it", || free() == [256 - 150 - 1, 256]).await;
    assert!(replica(&ensemble, 0).used_blocks <= 2 * 16, "two steps are planned");
    factories.iter().for_each(|factory| factory.step_latch.open());
    let (_, last) = read(long).await;
    assert_eq!(last, GenerationEvent::Finished(FinishReason::Length));
    until("all are free", || free() == [256, 256]).await;
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_choices_of_a_prompt_stay_at_one_replica() {
    let (ensemble, factories) = start_two(slow(2), slow(2)).await;
    // Too short for a block, so that no key holds them together.
    let choices = ensemble.submit_all(vec![request(9, 3, 300); 5]).unwrap();
    let others = ensemble.submit_all(vec![request(20, 3, 300); 3]).unwrap();
    until("all run", || running(&ensemble) == [5, 3]).await;
    let sequences: Vec<u64> = choices.iter().chain(&others).map(|one| one.sequence().0).collect();
    assert_eq!(sequences, (0..8).collect::<Vec<u64>>(), "numbers are the order of arrival");
    drop((choices, others));
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_at_a_full_replica_is_moved_when_another_has_room() {
    let (ensemble, factories) = start_all([slow(2), slow(2)], |spec| spec.scheduler.max_num_seqs = 1).await;
    let first = open(&ensemble, request(1, 80, 900)).await;
    let second = open(&ensemble, request(50, 80, 900)).await;
    assert_eq!(running(&ensemble), [1, 1]);
    // It waits at replica 0, which holds its prefix; replica 1 becomes free.
    let waiting = request(1, 80, 5);
    let moved = ensemble.submit(waiting.clone()).unwrap();
    until("it waits at its prefix", || replica(&ensemble, 0).waiting == 1).await;
    assert_eq!(moved.sequence().0, 2);
    drop(second);
    let (tokens, last) = read(moved).await;
    assert_eq!((tokens, last), (expected(&waiting), GenerationEvent::Finished(FinishReason::Length)));
    let status = ensemble.status();
    assert_eq!((status.moved_requests, running(&ensemble)[0]), (1, 1), "the first still runs");
    assert_eq!(prompts(&ensemble), [80, 160]);
    drop(first);
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_are_moved_together_and_moves_are_counted_beyond_a_router_s_end() {
    let (ensemble, factories) = start_all([slow(2), slow(2)], |spec| spec.scheduler.max_num_seqs = 2).await;
    for round in 1..=2 {
        // Two at each: what they have in common with nobody else keeps them apart.
        let first = [1, 50, 1, 50];
        let mut long = Vec::new();
        for (one, first) in first.into_iter().enumerate() {
            long.push(open(&ensemble, Request { max_tokens: 500 + one, ..request(first, 80, 0) }).await);
        }
        assert_eq!(running(&ensemble), [2, 2]);
        let choice = request(1, 80, 6);
        let choices = ensemble.submit_all(vec![choice.clone(); 2]).unwrap();
        until("they wait at their prefix", || replica(&ensemble, 0).waiting == 2).await;
        let fourth = long.pop();
        drop(long.remove(1));
        drop(fourth);
        for generation in choices {
            let (tokens, last) = read(generation).await;
            assert_eq!(tokens, expected(&choice));
            assert_eq!(last, GenerationEvent::Finished(FinishReason::Length));
        }
        assert_eq!(ensemble.status().moved_requests, 2 * round, "both, to where there is room for both");
        long.push(open(&ensemble, request(50, 80, 500)).await);
        assert_eq!(running(&ensemble), [2, 1]);
        ensemble.inner.shared.router().unwrap().kill();
        until("both replicas know of a new one", || running(&ensemble) == [0, 0]).await;
        assert_eq!(ensemble.status().moved_requests, 2 * round);
    }
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bound_of_waiting_requests_is_that_of_all_replicas_together() {
    let (ensemble, factories) = start_all([slow(10), slow(10)], |spec| {
        (spec.scheduler.max_num_seqs, spec.scheduler.max_waiting_requests) = (1, 3);
    })
    .await;
    let running_ones = [open(&ensemble, request(1, 4, 900)).await, open(&ensemble, request(2, 4, 900)).await];
    let waiting: Vec<Generation> =
        (0..3).map(|first| ensemble.submit(request(first, 4, 2)).unwrap()).collect();
    for _ in 0..5 {
        let refusal = ensemble.submit(request(0, 4, 2)).unwrap_err();
        assert_eq!(refusal, SubmitError::Overloaded { waiting: 3, limit: 3 });
    }
    drop(running_ones);
    for (first, generation) in waiting.into_iter().enumerate() {
        assert_eq!(read(generation).await.0, expected(&request(first as u32, 4, 2)));
    }
    until("every place is free again", || {
        ensemble.submit_all(vec![request(0, 4, 1), request(1, 4, 1), request(2, 4, 1)]).is_ok()
    })
    .await;
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_shard_ends_what_ran_there_and_the_other_replica_goes_on() {
    let failing = FakeFactory::new().with_fault(1, 60, Fault::Panic);
    failing.drop_latch.close();
    let mut failing = failing;
    failing.step_time = Duration::from_millis(2);
    let (ensemble, factories) = start_two(slow(2), failing).await;
    let sound = request(1, 40, 300);
    let going_on = ensemble.submit(sound.clone()).unwrap();
    let lost = ensemble.submit(request(50, 40, 900)).unwrap();
    let (tokens, last) = read(lost).await;
    assert!(!tokens.is_empty(), "it ran");
    let GenerationEvent::Failed(GenerationError::ShardLost { reason }) = last else { panic!("{last:?}") };
    assert!(reason.contains("rank 1") && reason.contains("injected panic"), "{reason}");

    // While the failed rank gives its memory back: the ensemble serves, from replica 0 alone.
    let status = ensemble.status();
    assert_eq!(status.state, EnsembleState::Ready);
    assert!(
        matches!(&status.replicas[1].state, EnsembleState::Restarting { attempt: 1, reason: why } if *why == reason)
    );
    let states: Vec<ShardState> = status.ranks.iter().map(|rank| rank.state).collect();
    assert_eq!(states, [ShardState::Ready, ShardState::Ready, ShardState::Ready, ShardState::Lost]);
    let again = request(50, 40, 20);
    assert_eq!(read(ensemble.submit(again.clone()).unwrap()).await.0, expected(&again));
    assert_eq!(prompts(&ensemble), [80, 40], "the cache of replica 1 is gone");

    factories[1].drop_latch.open();
    until("replica 1 is back", || replica(&ensemble, 1).state == EnsembleState::Ready).await;
    assert_eq!((replica(&ensemble, 0).epoch, replica(&ensemble, 1).epoch), (0, 1));
    assert_eq!((factories[0].builds(), factories[1].builds()), (vec![1, 1], vec![1, 2]));
    let (tokens, last) = read(going_on).await;
    assert_eq!((tokens, last), (expected(&sound), GenerationEvent::Finished(FinishReason::Length)));
    until("all are counted", || ensemble.status().finished.length == 2).await;
    assert_eq!(ensemble.status().finished.failed, 1);
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_not_started_at_a_lost_replica_runs_at_another() {
    let mut failing = FakeFactory::new().with_fault(0, 250, Fault::Error);
    failing.step_time = Duration::from_millis(3);
    let (ensemble, factories) = start_all([slow(3), failing], |spec| spec.scheduler.max_num_seqs = 1).await;
    // Longer than until the fault: nobody else is served here before.
    let first = open(&ensemble, request(1, 40, 400)).await;
    let lost = open(&ensemble, request(50, 400, 500)).await;
    // Both are full: these wait where their prefix is, or where fewer do.
    let waiting: Vec<Generation> = (0..6).map(|_| ensemble.submit(request(50, 400, 3)).unwrap()).collect();
    until("all wait", || ensemble.status().waiting == 6).await;
    let at_the_lost = replica(&ensemble, 1).waiting as u64;
    assert!(at_the_lost > 0);
    let (_, last) = read(lost).await;
    assert!(matches!(last, GenerationEvent::Failed(GenerationError::ShardLost { .. })), "{last:?}");
    for generation in waiting {
        let (tokens, last) = read(generation).await;
        assert_eq!(tokens, expected(&request(50, 400, 3)));
        assert_eq!(last, GenerationEvent::Finished(FinishReason::Length));
    }
    assert_eq!(read(first).await.1, GenerationEvent::Finished(FinishReason::Length));
    let counts = || (ensemble.status().finished.length, ensemble.status().finished.failed);
    until("all are counted", || counts() == (7, 1)).await;
    let moved = ensemble.status().moved_requests;
    assert!(moved >= at_the_lost, "{moved} of {at_the_lost}");
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_failed_stays_out_and_only_all_of_them_are_the_end() {
    let hanging = || FakeFactory::new().with_fault(1, 4, Fault::Hang);
    let (ensemble, factories) = start_two(hanging(), hanging()).await;
    let mut watch = ensemble.watch();
    read(ensemble.submit(request(1, 4, 500)).unwrap()).await;
    until("one failed", || matches!(replica(&ensemble, 0).state, EnsembleState::Failed { .. })).await;
    assert_eq!(watch.state(), EnsembleState::Ready);
    // Only the other one serves, as far as it comes.
    let (tokens, _) = read(ensemble.submit(request(1, 4, 2)).unwrap()).await;
    assert_eq!((tokens, prompts(&ensemble)), (expected(&request(1, 4, 2)), vec![4, 4]));
    read(ensemble.submit(request(1, 4, 500)).unwrap()).await;
    let end = tokio::time::timeout(PATIENCE, watch.ended()).await.expect("the failure is told");
    let EnsembleState::Failed { reason } = end else { panic!("{end:?}") };
    assert!(reason.starts_with("replica 0: ") && reason.contains("; replica 1: "), "{reason}");
    let refusal = ensemble.submit(request(0, 4, 5)).unwrap_err();
    assert!(matches!(&refusal, SubmitError::NotReady(text) if text.contains("it failed")), "{refusal}");
    ensemble.shutdown(Duration::ZERO).await;
    assert_eq!((ensemble.status().state, ensemble.inner.shared.reap()), (EnsembleState::Stopped, 2));
    factories.iter().for_each(|factory| factory.release());
    until("the threads end by themselves", || ensemble.inner.shared.reap() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_whose_scheduler_ends_restarts_alone() {
    let (ensemble, factories) = start_two(slow(2), slow(2)).await;
    let sound = request(50, 40, 200);
    let lost = open(&ensemble, request(1, 40, 900)).await;
    let going_on = ensemble.submit(sound.clone()).unwrap();
    until("both run", || running(&ensemble) == [1, 1]).await;
    first_home(&ensemble).scheduler().unwrap().kill();
    let (_, last) = read(lost).await;
    assert!(matches!(last, GenerationEvent::Failed(GenerationError::ShardLost { .. })), "{last:?}");
    until("restarted", || {
        replica(&ensemble, 0).epoch == 1 && replica(&ensemble, 0).state == EnsembleState::Ready
    })
    .await;
    let again = request(1, 40, 20);
    assert_eq!(read(ensemble.submit(again.clone()).unwrap()).await.0, expected(&again));
    assert_eq!(replica(&ensemble, 0).prompt_tokens, 80, "replica 0 serves again, having less to do");
    assert_eq!(read(going_on).await.0, expected(&sound));
    assert_eq!((factories[0].builds(), factories[1].builds()), (vec![2, 2], vec![1, 1]));
    until("all is counted", || ensemble.status().finished.length == 2).await;
    assert_eq!(ensemble.status().finished.failed, 1);
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_ends_is_replaced_and_costs_the_open_requests() {
    let (ensemble, factories) = start_two(slow(2), slow(2)).await;
    for round in 1..=2 {
        let open = [open(&ensemble, request(1, 40, 900)).await, open(&ensemble, request(50, 40, 900)).await];
        let router = ensemble.inner.shared.router().unwrap();
        router.kill();
        for generation in open {
            let (_, last) = read(generation).await;
            let GenerationEvent::Failed(GenerationError::ShardLost { reason }) = last else {
                panic!("{last:?}")
            };
            assert!(reason.contains("the router ended"), "{reason}");
        }
        until("a new one serves", || {
            ensemble.inner.shared.router().is_some_and(|new| new.get_id() != router.get_id())
        })
        .await;
        // From both replicas.
        let all: Vec<Generation> =
            (0..4).map(|first| ensemble.submit(request(first, 60, 20)).unwrap()).collect();
        for (first, generation) in all.into_iter().enumerate() {
            let (tokens, last) = read(generation).await;
            assert_eq!(last, GenerationEvent::Finished(FinishReason::Length), "round {round}");
            assert_eq!(tokens, expected(&request(first as u32, 60, 20)));
        }
    }
    assert_eq!((ensemble.status().epoch, factories[0].builds()), (0, vec![1, 1]), "no shard was touched");
    assert!(prompts(&ensemble).iter().all(|tokens| *tokens > 4 * 40), "{:?}", prompts(&ensemble));
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_accepted_request_is_counted_once_though_the_router_ends() {
    let (ensemble, factories) = start_two(slow(1), slow(1)).await;
    let mut accepted = 0;
    for _ in 0..3 {
        let router = ensemble.inner.shared.router().unwrap();
        let mut open = Vec::new();
        for one in 0..100 {
            if one == 60 {
                router.kill();
            }
            // What comes while there is no router is refused, and not counted.
            open.extend(ensemble.submit(request(one, 20, 3)).ok());
        }
        accepted += open.len() as u64;
        for generation in open {
            read(generation).await;
        }
        until("a new one serves", || {
            ensemble.inner.shared.router().is_some_and(|new| new.get_id() != router.get_id())
        })
        .await;
    }
    let total = || {
        let finished = ensemble.status().finished;
        finished.length + finished.failed + finished.cancelled
    };
    until("every one is counted", || total() >= accepted).await;
    let finished = ensemble.status().finished;
    println!("{accepted} accepted: {finished:?}");
    assert!(finished.failed > 0, "none was lost");
    assert_eq!(finished.length + finished.failed + finished.cancelled, accepted);
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_fails_with_the_first_replica_that_cannot_load() {
    let factories = [FakeFactory::new(), FakeFactory::new().with_fault(1, 0, Fault::Load)].map(Arc::new);
    let error = Ensemble::start(spec_of(&factories), None).await.unwrap_err();
    assert_eq!(error.to_string(), "replica 1: rank 1: loading failed: model.safetensors is missing");
    assert!(factories.iter().all(|factory| factory.alive() == 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_waits_for_the_open_requests_of_every_replica() {
    let (ensemble, factories) = start_two(slow(2), slow(2)).await;
    let requests = [request(1, 40, 60), request(50, 40, 90)];
    let open = requests.clone().map(|one| tokio::spawn(read(ensemble.submit(one).unwrap())));
    until("both run", || running(&ensemble) == [1, 1]).await;
    ensemble.shutdown(PATIENCE).await;
    for (task, request) in open.into_iter().zip(&requests) {
        let (tokens, last) = task.await.unwrap();
        assert_eq!((tokens, last), (expected(request), GenerationEvent::Finished(FinishReason::Length)));
    }
    finish_all(ensemble, &factories).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_leave_while_requests_move_lose_no_place_and_no_count() {
    let (ensemble, factories) = start_all([slow(1), slow(1)], |spec| {
        (spec.scheduler.max_num_seqs, spec.scheduler.max_waiting_requests) = (1, 20);
    })
    .await;
    // Long ones at one replica and short ones at the other: what waits for the long ones is moved.
    let uneven = |one: u32| request(one * 7, 20, if one.is_multiple_of(2) { 40 } else { 1 });
    let mut accepted = 0;
    for round in 0..60u32 {
        let some: Vec<Generation> = (0..6).filter_map(|one| ensemble.submit(uneven(one)).ok()).collect();
        accepted += some.len() as u64;
        for (index, generation) in some.into_iter().enumerate() {
            if !(index as u32 + round).is_multiple_of(3) {
                drop(generation);
            } else {
                assert_eq!(read(generation).await.1, GenerationEvent::Finished(FinishReason::Length));
            }
        }
    }
    let total = || {
        let finished = ensemble.status().finished;
        finished.length + finished.cancelled
    };
    until("every one is counted", || total() == accepted).await;
    until("every place is free", || ensemble.submit_all(vec![request(0, 4, 1); 20]).is_ok()).await;
    println!("{:?} moved {}", ensemble.status().finished, ensemble.status().moved_requests);
    assert!(ensemble.status().moved_requests > 0);
    finish_all(ensemble, &factories).await;
}
