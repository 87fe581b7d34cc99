//! Ranks that have two steps under way.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_with_two_steps_under_way_answer_as_others_do() {
    let (ensemble, factory) = start(FakeFactory::new().pipelined()).await;
    let requests: Vec<Request> = (0..6).map(|first| request(first, 30 + first, 40)).collect();
    let awaiting = |request: &Request| Request { awaits_tokens: true, ..request.clone() };
    let streams: Vec<_> = requests
        .iter()
        .flat_map(|one| [one.clone(), awaiting(one)])
        .map(|request| ensemble.submit(request).unwrap())
        .collect();
    for (at, stream) in streams.into_iter().enumerate() {
        let (tokens, last) = read(stream).await;
        assert_eq!(tokens, expected(&requests[at / 2]));
        assert_eq!(last, GenerationEvent::Finished(FinishReason::Length));
    }
    until("blocks are free", || ensemble.status().used_blocks == 0).await;
    finish(ensemble, &factory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_fails_with_another_behind_it_ends_its_requests_and_the_survivors_go_on() {
    for (fault, cause) in [(Fault::Panic, "the compute thread panicked"), (Fault::Error, "injected error")] {
        let (ensemble, factory) = start(FakeFactory::new().with_fault(1, 9, fault).pipelined()).await;
        let (_, last) = read(ensemble.submit(request(0, 4, 500)).unwrap()).await;
        let GenerationEvent::Failed(GenerationError::ShardLost { reason }) = last else { panic!("{last:?}") };
        assert!(reason.contains("rank 1") && reason.contains(cause), "{reason}");
        until_ready(&ensemble).await;
        let (tokens, _) = read(ensemble.submit(request(0, 4, 30)).unwrap()).await;
        assert_eq!(tokens, expected(&request(0, 4, 30)));
        // The survivors were aborted with both their steps under way, answered for both, and kept their weights.
        assert_eq!((ensemble.status().epoch, factory.builds()), (1, vec![1, 2, 1]));
        assert_eq!(*factory.aborted_under_way.lock().unwrap(), [2, 2]);
        let failed = factory.failed_under_way.lock().unwrap().clone();
        assert_eq!(failed, if fault == Fault::Error { vec![2] } else { vec![] });
        finish(ensemble, &factory).await;
    }
}
