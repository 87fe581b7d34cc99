//! A scheduler that fails while it plans: every request is counted once.

use super::*;
use crate::scheduler::SchedulerMessage;

fn total(ensemble: &Ensemble) -> u64 {
    let finished = ensemble.status().finished;
    finished.length + finished.failed + finished.cancelled
}

async fn until_back(ensemble: &Ensemble) {
    until("restarted", || {
        let first = ensemble.status().replicas.swap_remove(0);
        first.epoch == 1 && first.state == EnsembleState::Ready
    })
    .await;
}

fn fail_plan_after(ensemble: &Ensemble, is_fatal: fn(&SchedulerMessage) -> bool) {
    let scheduler = first_home(ensemble).scheduler().unwrap();
    scheduler.cast(SchedulerMessage::FailPlanAfter(is_fatal)).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_arrived_before_a_plan_that_fails_has_failed() {
    let mut factory = FakeFactory::new();
    factory.step_time = Duration::from_millis(2);
    let (ensemble, factory) = start(factory).await;
    let mut runs = ensemble.submit(request(0, 4, 900)).unwrap();
    assert!(runs.next().await.is_some());
    fail_plan_after(&ensemble, |message| matches!(message, SchedulerMessage::Submit(_)));
    let arrived = ensemble.submit_all(vec![request(9, 4, 900); 3]).unwrap();
    for generation in arrived.into_iter().chain([runs]) {
        let (_, last) = read(generation).await;
        assert!(matches!(last, GenerationEvent::Failed(GenerationError::ShardLost { .. })), "{last:?}");
    }
    until_back(&ensemble).await;
    let status = ensemble.status();
    assert_eq!((status.finished.failed, status.running, status.waiting), (4, 0, 0));
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_ended_before_a_plan_that_fails_has_not_failed() {
    let mut factory = FakeFactory::new();
    factory.step_time = Duration::from_millis(2);
    let (ensemble, factory) = start(factory).await;
    let mut runs = ensemble.submit(request(0, 4, 900)).unwrap();
    assert!(runs.next().await.is_some());
    fail_plan_after(&ensemble, |message| matches!(message, SchedulerMessage::Cancel(_)));
    drop(runs);
    until_back(&ensemble).await;
    let finished = ensemble.status().finished;
    assert_eq!((finished.failed, finished.cancelled), (0, 1));
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_given_back_before_a_plan_that_fails_is_counted_where_it_went() {
    let factories = [2, 2].map(|milliseconds| {
        let mut factory = FakeFactory::new();
        factory.step_time = Duration::from_millis(milliseconds);
        Arc::new(factory)
    });
    let all = factories.iter().map(|factory| Arc::new(SharedFactory(Arc::clone(factory))) as _);
    let mut spec = EnsembleSpec { ranks: 2, factories: all.collect(), ..spec(&factories[0]) };
    spec.scheduler.max_num_seqs = 1;
    let ensemble = Ensemble::start(spec, None).await.unwrap();
    let mut first = ensemble.submit(request(1, 80, 900)).unwrap();
    assert!(first.next().await.is_some());
    let mut second = ensemble.submit(request(50, 80, 900)).unwrap();
    assert!(second.next().await.is_some());
    let waiting = ensemble.submit(request(1, 80, 5)).unwrap();
    until("it waits at its prefix", || ensemble.status().replicas[0].waiting == 1).await;
    fail_plan_after(&ensemble, |message| matches!(message, SchedulerMessage::GiveBack(_)));
    drop(second);
    let (tokens, last) = read(waiting).await;
    assert_eq!(
        (tokens, last),
        (expected(&request(1, 80, 5)), GenerationEvent::Finished(FinishReason::Length))
    );
    let (_, last) = read(first).await;
    assert!(matches!(last, GenerationEvent::Failed(GenerationError::ShardLost { .. })), "{last:?}");
    until_back(&ensemble).await;
    until("all are counted", || total(&ensemble) >= 3).await;
    let finished = ensemble.status().finished;
    assert_eq!((finished.length, finished.failed, finished.cancelled), (1, 1, 1));
    ensemble.shutdown(Duration::ZERO).await;
}
