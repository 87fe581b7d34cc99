//! Ranks that fail and take long to end, as a rank does whose device hangs while its memory is given back.

use consort_parallel::ids::Rank;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::{mpsc, oneshot};

use super::*;
use crate::{
    ensemble::Shared,
    group::{GroupActor, GroupArguments, GroupMessage, SILENCE_MAX},
    ids::{Epoch, Step},
    plan::StepPlan,
    scheduler::SchedulerMessage,
};

/// An ensemble whose ranks `failing` fail in their fourth step, and end when the test lets them.
async fn start_failing(failing: &[(u16, Fault)]) -> (Ensemble, Arc<FakeFactory>) {
    let faults = failing.iter();
    let factory =
        faults.fold(FakeFactory::new(), |factory, &(rank, fault)| factory.with_fault(rank, 4, fault));
    factory.drop_latch.close();
    start(factory).await
}

fn states(ensemble: &Ensemble) -> Vec<ShardState> {
    ensemble.status().ranks.iter().map(|rank| rank.state).collect()
}

fn restarts(ensemble: &Ensemble) -> Vec<u32> {
    ensemble.status().ranks.iter().map(|rank| rank.restarts).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_end_and_readiness_goes_before_a_failed_rank_has_given_its_memory_back() {
    for (fault, cause) in [(Fault::Panic, "the compute thread panicked"), (Fault::Error, "injected error")] {
        let (ensemble, factory) = start_failing(&[(1, fault)]).await;
        let others: Vec<_> = (1..4).map(|first| ensemble.submit(request(first, 4, 500)).unwrap()).collect();
        let (_, last) = read(ensemble.submit(request(0, 4, 500)).unwrap()).await;
        let GenerationEvent::Failed(GenerationError::ShardLost { reason }) = last else { panic!("{last:?}") };
        assert!(reason.contains("rank 1") && reason.contains(cause), "{reason}");
        for other in others {
            let (_, last) = read(other).await;
            assert_eq!(last, GenerationEvent::Failed(GenerationError::ShardLost { reason: reason.clone() }));
        }
        let refusal = ensemble.submit(request(0, 4, 5)).unwrap_err();
        assert!(matches!(&refusal, SubmitError::NotReady(text) if text.contains(cause)), "{refusal}");
        assert!(matches!(ensemble.status().state, EnsembleState::Restarting { attempt: 1, .. }));
        assert_eq!(states(&ensemble), [ShardState::Ready, ShardState::Lost, ShardState::Ready]);
        assert_eq!(factory.alive(), 3, "rank 1 still holds its memory");
        assert_eq!((ensemble.status().epoch, factory.builds()), (0, vec![1, 1, 1]), "so nobody replaces it");

        factory.drop_latch.open();
        until_ready(&ensemble).await;
        let (tokens, _) = read(ensemble.submit(request(0, 4, 30)).unwrap()).await;
        assert_eq!(tokens, expected(&request(0, 4, 30)));
        assert_eq!((ensemble.status().epoch, factory.builds()), (1, vec![1, 2, 1]));
        assert_eq!((restarts(&ensemble), ensemble.status().finished.failed), (vec![0, 1, 0], 4));
        finish(ensemble, &factory).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_epoch_forms_once_every_failed_rank_has_ended() {
    let (ensemble, factory) = start_failing(&[(1, Fault::Error), (2, Fault::Panic)]).await;
    read(ensemble.submit(request(0, 4, 500)).unwrap()).await;
    let lost = [ShardState::Ready, ShardState::Lost, ShardState::Lost];
    until("both have failed", || states(&ensemble) == lost).await;
    factory.drop_latch.allow(1);
    until("one has ended", || restarts(&ensemble).iter().sum::<u32>() == 1).await;
    assert_eq!((ensemble.status().epoch, factory.builds()), (0, vec![1, 1, 1]));

    factory.drop_latch.open();
    until_ready(&ensemble).await;
    assert_eq!((ensemble.status().epoch, factory.builds()), (1, vec![1, 2, 2]), "one epoch for both");
    assert_eq!(restarts(&ensemble), [0, 1, 1]);
    let (tokens, _) = read(ensemble.submit(request(0, 4, 30)).unwrap()).await;
    assert_eq!(tokens, expected(&request(0, 4, 30)));
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_rank_that_never_ends_is_named_and_fails_the_ensemble() {
    let factory = FakeFactory::new().with_fault(1, 4, Fault::Error);
    factory.drop_latch.close();
    let (ensemble, factory) = start_watched(factory).await;
    read(ensemble.submit(request(0, 4, 500)).unwrap()).await;
    let reason = until_failed(&ensemble).await;
    let named = "epoch 0 was not left for 1.5s by rank 1, after: rank 1: ";
    assert!(reason.starts_with(named) && reason.contains("injected error"), "{reason}");
    factory.drop_latch.open();
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_returns_while_a_failed_rank_gives_its_memory_back() {
    let (ensemble, factory) = start_failing(&[(1, Fault::Error)]).await;
    read(ensemble.submit(request(0, 4, 500)).unwrap()).await;
    let closing = tokio::spawn({
        let ensemble = ensemble.clone();
        async move { ensemble.shutdown(PATIENCE).await }
    });
    until("the others have ended", || factory.alive() == 3 && !closing.is_finished()).await;
    factory.drop_latch.open();
    tokio::time::timeout(PATIENCE, closing).await.expect("shutdown returns").unwrap();
    finish(ensemble, &factory).await;
}

/// Stands where the scheduler would, and passes on what it is told.
struct Listener(mpsc::UnboundedSender<SchedulerMessage>);

impl Actor for Listener {
    type Msg = SchedulerMessage;
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<SchedulerMessage>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }

    async fn handle(
        &self,
        _myself: ActorRef<SchedulerMessage>,
        message: SchedulerMessage,
        _state: &mut (),
    ) -> Result<(), ActorProcessingErr> {
        // A test that has ended listens no more.
        let _ = self.0.send(message);
        Ok(())
    }
}

/// A group without a scheduler, and what it tells it.
struct Heard(mpsc::UnboundedReceiver<SchedulerMessage>);

impl Heard {
    async fn next(&mut self) -> SchedulerMessage {
        let message = tokio::time::timeout(PATIENCE, self.0.recv()).await;
        message.expect("the group tells something").expect("the listener lives")
    }

    async fn formed(&mut self, expected: u64) -> ActorRef<GroupMessage> {
        match self.next().await {
            SchedulerMessage::GroupFormed { epoch, group } if epoch == Epoch(expected) => group,
            _ => panic!("epoch {expected} was not what it told of"),
        }
    }

    async fn lost(&mut self, expected: u64) -> String {
        match self.next().await {
            SchedulerMessage::GroupLost { epoch, reason } if epoch == Epoch(expected) => reason,
            _ => panic!("the loss of epoch {expected} was not what it told of"),
        }
    }

    async fn executed(&mut self) -> (Epoch, Step) {
        match self.next().await {
            SchedulerMessage::StepExecuted(result) => (result.epoch, result.step),
            _ => panic!("a step was not what it told of"),
        }
    }
}

fn empty_plan(epoch: u64, step: u64) -> GroupMessage {
    let (epoch, step) = (Epoch(epoch), Step(step));
    let (begin, run, copies, end) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    GroupMessage::Execute(Arc::new(StepPlan {
        epoch,
        step,
        begin,
        run,
        copies,
        end,
        saves: Vec::new(),
        loads: Vec::new(),
        await_transfers: true,
    }))
}

fn failing(rank: u16, epoch: u64) -> GroupMessage {
    let reason = format!("told by the test of epoch {epoch}");
    GroupMessage::ShardFailing { rank: Rank(rank), epoch: Epoch(epoch), reason }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loss_is_told_once_and_what_an_earlier_epoch_says_changes_nothing() {
    let factory = Arc::new(FakeFactory::new().with_fault(1, 1, Fault::Error));
    factory.drop_latch.close();
    let (sender, receiver) = mpsc::unbounded_channel();
    let mut heard = Heard(receiver);
    let (scheduler, _) = Actor::spawn(None, Listener(sender), ()).await.unwrap();
    let shared = Arc::new(Shared::new(spec(&factory), None, SILENCE_MAX));
    let (first_load, loaded) = oneshot::channel();
    let arguments = GroupArguments {
        home: Home::new(Arc::clone(&shared), ReplicaId(0)),
        scheduler: scheduler.clone(),
        first_load: Some(first_load),
    };
    let (spawned, _) = Actor::spawn(None, GroupActor, arguments).await.unwrap();
    loaded.await.unwrap().unwrap();

    let group = heard.formed(0).await;
    group.cast(empty_plan(0, 0)).unwrap();
    assert_eq!(heard.executed().await, (Epoch(0), Step(0)));
    group.cast(empty_plan(0, 1)).unwrap();
    let reason = heard.lost(0).await;
    assert!(reason.starts_with("rank 1: ") && reason.contains("injected error"), "{reason}");

    // While rank 1 ends: it says so again, a plan comes late, and so does a result of a sound rank.
    group.cast(failing(1, 0)).unwrap();
    group.cast(empty_plan(0, 2)).unwrap();
    factory.drop_latch.open();
    let group = heard.formed(1).await;

    group.cast(failing(1, 0)).unwrap();
    group.cast(failing(2, 0)).unwrap();
    group.cast(empty_plan(1, 0)).unwrap();
    assert_eq!(heard.executed().await, (Epoch(1), Step(0)));
    assert_eq!(shared.board.state(), EnsembleState::Ready);
    let restarts: Vec<_> = shared.board.snapshot().ranks.iter().map(|rank| rank.restarts).collect();
    assert_eq!(restarts, [0, 1, 0]);

    spawned.stop_and_wait(None, None).await.unwrap();
    scheduler.stop_and_wait(None, None).await.unwrap();
    assert_eq!((shared.reap(), factory.alive()), (0, 0));
}
