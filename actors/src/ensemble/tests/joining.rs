//! Ranks that meet at the beginning of an epoch, and what happens when they cannot.

use super::*;
use crate::ShardError;

/// An ensemble whose rank 1 panics in its fourth step, so that all ranks join a second time; and then `faults`, by rank
/// and number of its join.
fn rejoining(faults: &[(u16, u64, Fault)]) -> FakeFactory {
    faults.iter().fold(FakeFactory::new().with_fault(1, 4, Fault::Panic), |factory, &(rank, join, fault)| {
        factory.with_fault(rank, join, fault)
    })
}

/// Loses rank 1, and serves a request once the group has formed anew.
async fn lose_and_serve(factory: FakeFactory) -> (Ensemble, Arc<FakeFactory>) {
    let (ensemble, factory) = start(factory).await;
    let (_, last) = read(ensemble.submit(request(0, 4, 900)).unwrap()).await;
    assert!(matches!(last, GenerationEvent::Failed(GenerationError::ShardLost { .. })), "{last:?}");
    until_ready(&ensemble).await;
    let (tokens, last) = read(ensemble.submit(request(0, 4, 30)).unwrap()).await;
    assert_eq!(tokens, expected(&request(0, 4, 30)));
    assert_eq!(last, GenerationEvent::Finished(FinishReason::Length));
    (ensemble, factory)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_successor_lost_while_it_joins_is_built_again_and_the_others_keep_their_weights() {
    for fault in [Fault::JoinPanic, Fault::JoinError] {
        let (ensemble, factory) = lose_and_serve(rejoining(&[(1, 1, fault)])).await;
        assert_eq!(factory.builds(), [1, 3, 1], "{fault:?}");
        assert_eq!(ensemble.status().epoch, 2, "one epoch for each loss of the rank");
        finish(ensemble, &factory).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_survivor_lost_while_it_joins_is_built_anew_and_the_others_keep_their_weights() {
    for fault in [Fault::JoinPanic, Fault::JoinError] {
        let (ensemble, factory) = lose_and_serve(rejoining(&[(2, 1, fault)])).await;
        assert_eq!(factory.builds(), [1, 2, 2], "{fault:?}");
        finish(ensemble, &factory).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_ranks_lost_while_they_join_are_one_incident() {
    let faults = [(0, 1, Fault::JoinPanic), (1, 1, Fault::JoinError), (2, 1, Fault::JoinPanic)];
    let (ensemble, factory) = lose_and_serve(rejoining(&faults)).await;
    // Whether a rank is struck before its peer's end frees it is a race; each is built anew once at most.
    let builds = factory.builds();
    assert!(builds.iter().zip([2, 3, 2]).all(|(count, most)| *count <= most), "{builds:?}");
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collective_aborted_while_all_join_costs_a_restart_and_no_weights() {
    let (ensemble, factory) = lose_and_serve(rejoining(&[(2, 1, Fault::JoinAbort)])).await;
    assert_eq!(factory.builds(), [1, 2, 1], "all ranks were sound");
    assert_eq!(ensemble.status().epoch, 2);
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_can_never_join_are_given_up() {
    let faults: Vec<_> = (1..=6).map(|join| (2, join, Fault::JoinAbort)).collect();
    let (ensemble, factory) = start(rejoining(&faults)).await;
    read(ensemble.submit(request(0, 4, 900)).unwrap()).await;
    let reason = until_failed(&ensemble).await;
    assert!(reason.contains("injected abort") && reason.contains("5 restarts"), "{reason}");
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_hangs_while_it_joins_fails_the_ensemble() {
    let (ensemble, factory) = start_watched(rejoining(&[(2, 1, Fault::JoinHang)])).await;
    read(ensemble.submit(request(0, 4, 900)).unwrap()).await;
    let reason = until_failed(&ensemble).await;
    // All have their weights and wait: nobody can tell for whom.
    assert!(
        reason.starts_with("epoch 1 was not joined for 1.5s by rank 0, rank 1, rank 2, after"),
        "{reason}"
    );
    finish_hung(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_start_whose_ranks_cannot_join_fails_with_the_reason() {
    type Check = fn(&ShardError) -> bool;
    let cases: [(Fault, Check); 3] = [
        (Fault::JoinError, |error| error.to_string().contains("no path to the peers")),
        (Fault::JoinPanic, |error| matches!(error, ShardError::Panicked { .. })),
        (Fault::JoinAbort, |error| matches!(error, ShardError::Aborted { .. })),
    ];
    for (fault, is_it) in cases {
        let factory = Arc::new(FakeFactory::new().with_fault(1, 0, fault));
        let Err(error) = Ensemble::start(spec(&factory), None).await else { panic!("{fault:?}: it started") };
        let EnsembleError::Load { rank, source } = &error else { panic!("{error}") };
        assert!(is_it(source) && (fault == Fault::JoinAbort || rank.0 == 1), "{fault:?}: {error}");
        until("nothing is left", || factory.alive() == 0).await;
    }
}
