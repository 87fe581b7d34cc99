//! Many lives of one rank.

use consort_actors::{Epoch, ProgressReporter, Rejoined, ShardFactory};
use consort_parallel::ids::Rank;

use super::*;
use crate::shard_process::ProcessFactory;

fn count(folder: &str) -> usize {
    fs::read_dir(folder).expect("Linux").count()
}

/// Descriptors and threads of this process.
fn held() -> (usize, usize) {
    (count("/proc/self/fd"), count("/proc/self/task"))
}

#[test]
fn fifty_kills_and_restarts_leave_no_descriptor_thread_or_process() {
    let _guard = ONE_AT_A_TIME.blocking_lock();
    let folder = checkpoint();
    let factory = ProcessFactory::new(model_factory(&folder, 1), processes());
    let progress = ProgressReporter::new(Rank(0), None);
    let life = |strike: bool| {
        let mut comms = factory.collective(1).expect("a segment");
        let comm = comms.pop().expect("one seat");
        let mut executor = factory.build(Rank(0), comm, &progress).expect("a process loads");
        assert_eq!(factory.left_behind.pids(), [0; 0]);
        executor.join().expect("alone");
        let comm = factory.collective(1).expect("a segment").pop().expect("one seat");
        let rejoined = executor.rejoin(Epoch(2), comm).expect("it lives");
        assert!(matches!(rejoined, Rejoined::Kept));
        executor.join().expect("alone");
        executor.check().expect("it lives");
        if strike {
            signal(shards()[&0], Signal::KILL);
            let limit = Instant::now() + Duration::from_secs(10);
            let error = loop {
                match executor.check() {
                    Ok(_) => assert!(Instant::now() < limit, "the loss was not noticed"),
                    Err(error) => break error.to_string(),
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            assert!(error.contains("was killed by SIGKILL"), "{error}");
            assert_eq!(factory.left_behind.pids().len(), 1, "its successor waits for its end");
        }
    };
    life(true);
    let before = held();
    for round in 0..50 {
        life(round % 2 == 0);
    }
    assert!(shards().is_empty(), "{:?}", shards());
    // Threads of other tests come and go; none of these rounds' may stay.
    let after = held();
    assert!(after.0 <= before.0 + 8 && after.1 <= before.1 + 8, "{before:?} before, {after:?} after");
}
