//! What it costs to have steps carried out elsewhere.

use consort_actors::{Epoch, Pipeline, ProgressReporter, ShardExecutor, ShardFactory, Step, plan::StepPlan};
use consort_parallel::ids::Rank;

use super::*;
use crate::shard_process::ProcessFactory;

const RANKS: usize = 3;
const STEPS: u64 = 4000;

fn nothing(step: u64) -> Arc<StepPlan> {
    Arc::new(StepPlan {
        epoch: Epoch(1),
        step: Step(step),
        begin: Vec::new(),
        run: Vec::new(),
        copies: Vec::new(),
        saves: Vec::new(),
        loads: Vec::new(),
        await_transfers: false,
        end: Vec::new(),
    })
}

fn pipeline(executor: &mut Box<dyn ShardExecutor>) -> &mut dyn Pipeline {
    executor.pipeline().expect("ranks elsewhere are pipelines")
}

#[test]
#[ignore = "measures; run it alone: cargo test -p consort --release --lib dispatch -- --ignored --nocapture"]
fn dispatch_to_three_processes_is_measured() {
    let _guard = ONE_AT_A_TIME.blocking_lock();
    let folder = checkpoint();
    let factory = Arc::new(ProcessFactory::new(model_factory(&folder, RANKS), processes()));
    let comms = factory.collective(RANKS).expect("a segment");
    let loads: Vec<_> = (0..)
        .map(Rank)
        .zip(comms)
        .map(|(rank, comm)| factory.build(rank, comm, &ProgressReporter::new(rank, None)).expect("it loads"))
        .collect();
    let mut executors = loads;
    let mut times: Vec<Duration> = (0..STEPS)
        .map(|step| {
            let plan = nothing(step);
            let begin = Instant::now();
            for executor in &mut executors {
                pipeline(executor).begin(&plan).expect("it lives");
            }
            for executor in &mut executors {
                while pipeline(executor).finish(Duration::from_millis(100)).expect("it lives").is_none() {}
            }
            begin.elapsed()
        })
        .collect();
    times.sort_unstable();
    let at = |part: f64| times[(times.len() as f64 * part) as usize];
    println!(
        "a step that does nothing, told to {RANKS} processes and answered by all: median {:?}, 10 % {:?}, 90 % {:?}",
        at(0.5),
        at(0.1),
        at(0.9)
    );
}
