//! Processes that end, stop or hang.

use std::time::{Duration, Instant};

use super::*;

fn impatient() -> Arc<Processes> {
    let settings = WorkSettings {
        silence_max: Duration::from_secs(4),
        answer_max: Duration::from_secs(4),
        ..WorkSettings::default()
    };
    processes_of("the_program_of_a_rank", settings)
}

/// What the group was lost by, as the restart that follows tells it.
async fn reason_of_restart(engine: &Engine, strike: impl FnOnce()) -> String {
    let mut watch = engine.watch();
    assert_eq!(watch.state(), EnsembleState::Ready);
    strike();
    match tokio::time::timeout(Duration::from_secs(30), watch.changed()).await {
        Ok(Some(EnsembleState::Restarting { reason, .. })) => reason,
        other => panic!("no restart, but {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_while_idle_costs_a_restart_of_its_rank_alone() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let (folder, loads) = (checkpoint(), Loads::default());
    let builder = isolated(&folder, 3, &processes());
    let engine = loads.watch(builder).start().await.expect("processes start");
    assert_eq!(loads.take(), BTreeSet::from([0, 1, 2]));
    let before = engine.generate("hello", greedy(12)).expect("admitted").collect().await.expect("ends");
    let first = shards();
    let reason = reason_of_restart(&engine, || signal(first[&1], Signal::KILL)).await;
    let expected =
        format!("rank 1: its process {} was killed by SIGKILL while it had nothing to do", first[&1]);
    assert_eq!(reason, expected);
    until_ready(&engine).await;
    let second = shards();
    assert_eq!((second[&0], second[&2]), (first[&0], first[&2]), "survivors stay");
    assert_ne!(second[&1], first[&1]);
    assert_eq!(loads.take(), BTreeSet::from([1]), "nobody else reads weights again");
    let after = engine.generate("hello", greedy(12)).expect("admitted").collect().await.expect("ends");
    assert_eq!(after.tokens, before.tokens);
    engine.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_end_with_the_rank_and_signal_of_a_process_killed_in_a_step() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let (folder, loads) = (checkpoint(), Loads::default());
    let engine = loads.watch(isolated(&folder, 3, &processes())).start().await.expect("processes start");
    loads.take();
    let mut streams: Vec<_> =
        (0..4).map(|_| engine.generate("abc", greedy(4000)).expect("admitted")).collect();
    for stream in &mut streams {
        stream.next().await.expect("a first token").expect("no failure");
    }
    let pid = shards()[&2];
    signal(pid, Signal::KILL);
    for stream in streams {
        let error = stream.collect().await.expect_err("the rank is lost").to_string();
        let named = error.contains(&format!("rank 2: its process {pid} was killed by SIGKILL"));
        assert!(named, "{error}");
    }
    until_ready(&engine).await;
    assert_eq!(loads.take(), BTreeSet::from([2]));
    engine.generate("abc", greedy(20)).expect("admitted").collect().await.expect("the group is back");
    engine.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_stopped_in_a_step_is_killed_and_never_costs_the_engine() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let folder = checkpoint();
    let engine = isolated(&folder, 3, &impatient()).start().await.expect("processes start");
    let mut stream = engine.generate("abc", greedy(4000)).expect("admitted");
    stream.next().await.expect("a first token").expect("no failure");
    let first = shards();
    let begin = Instant::now();
    signal(first[&1], Signal::STOP);
    let error = stream.collect().await.expect_err("the rank is lost").to_string();
    let expected = format!("rank 1: its process {} was silent for 4s in step", first[&1]);
    assert!(error.contains(&expected), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    until_ready(&engine).await;
    let second = shards();
    assert_eq!((second[&0], second[&2]), (first[&0], first[&2]));
    assert_ne!(second[&1], first[&1]);
    engine.generate("abc", greedy(20)).expect("admitted").collect().await.expect("the group is back");
    engine.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_stopped_while_idle_is_found_without_a_request() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let folder = checkpoint();
    let engine = isolated(&folder, 2, &impatient()).start().await.expect("processes start");
    let pid = shards()[&0];
    let reason = reason_of_restart(&engine, || signal(pid, Signal::STOP)).await;
    let expected =
        format!("rank 0: its process {pid} was silent for 4s while it had nothing to do, and was killed");
    assert_eq!(reason, expected);
    until_ready(&engine).await;
    engine.generate("abc", greedy(20)).expect("admitted").collect().await.expect("the group is back");
    engine.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_survivor_is_killed_when_it_does_not_enter_the_new_epoch() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let folder = checkpoint();
    let settings = WorkSettings { answer_max: Duration::from_secs(4), ..WorkSettings::default() };
    let processes = processes_of("the_program_of_a_rank", settings);
    let engine = isolated(&folder, 3, &processes).start().await.expect("processes start");
    let first = shards();
    signal(first[&0], Signal::STOP);
    signal(first[&1], Signal::KILL);
    until("the group is lost", || engine.watch().state() != EnsembleState::Ready).await;
    until_ready(&engine).await;
    let second = shards();
    assert_eq!(second[&2], first[&2], "the one that could, stayed");
    assert!(second[&0] != first[&0] && second[&1] != first[&1]);
    engine.generate("abc", greedy(20)).expect("admitted").collect().await.expect("the group is back");
    engine.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_cannot_load_again_says_why() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let folder = checkpoint();
    let engine = isolated(&folder, 2, &processes()).start().await.expect("processes start");
    let path = folder.path().to_path_buf();
    drop(folder);
    signal(shards()[&1], Signal::KILL);
    let reason = tokio::time::timeout(Duration::from_secs(60), engine.failed()).await.expect("it gives up");
    assert!(reason.contains("rank 1: its process"), "{reason}");
    assert!(reason.contains("No such file or directory"), "{reason}");
    assert!(
        reason.contains(&format!("failed while it loaded: loading failed: cannot open {}", path.display())),
        "{reason}"
    );
    engine.shutdown(Duration::from_secs(5)).await;
    until("all processes are gone", || shards().is_empty()).await;
}
