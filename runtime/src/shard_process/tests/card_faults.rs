//! What goes wrong with one card of three whose ranks are processes: which error a stream ends with, who is built anew,
//! and that nothing is left behind.

use std::{os::unix::process::CommandExt, process::Command};

use consort_actors::{ProgressReporter, ShardFactory};
use consort_parallel::ids::Rank;
use consort_software_driver::Report;

use super::{
    cards::{assert_given_back, calls, on_cards, over_driver, reports_over_driver, settings},
    rounds::{LIVES_OF_ALL, lose_one_rank_after_another},
    *,
};
use crate::{
    engine::software_driver_tests::{THREE, block_on},
    shard_process::ProcessFactory,
    topology::CudaCard,
};

const STRUCK: &str = "CONSORT_TEST_STRUCK";
const LIVES: &str = "CONSORT_TEST_LIVES";
const FAULTS: &str = "CONSORT_SOFTWARE_DRIVER_FAULTS";

/// The program of ranks: the first processes of rank 1 have cards with faults, those of `LIVES` one after another.
#[test]
fn the_program_of_ranks_one_of_which_has_a_bad_card() {
    if std::env::var("CONSORT_SHARD").is_ok_and(|shard| shard.ends_with(":1"))
        && std::env::var_os(FAULTS).is_none()
    {
        let (struck, lives) = (std::env::var(STRUCK), std::env::var(LIVES));
        let (struck, lives) = (struck.expect("a place"), lives.expect("the test names them"));
        let mut faults = lives.split(';').enumerate();
        let fault = faults.find(|(life, _)| fs::File::create_new(format!("{struck}{life}")).is_ok());
        if let Some((_, fault)) = fault {
            // The same process, whose driver is told by its environment what is to go wrong.
            let mut again = Command::new(std::env::current_exe().expect("a test has an executable"));
            let error = again.args(std::env::args_os().skip(1)).env(FAULTS, fault).exec();
            panic!("it cannot start again: {error}");
        }
    }
    the_program_of_a_rank();
}

/// Three processes, of which rank 1's first ones have the faults `lives`; what their drivers reported.
fn with_bad_cards(
    test: &str,
    lives: &str,
    more: &[(&str, &str)],
    body: impl AsyncFnOnce(EngineBuilder),
) -> Option<Vec<Report>> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let struck = folder.path().join("struck").to_string_lossy().into_owned();
    let mut environment = vec![THREE, (STRUCK, &struck), (LIVES, lives)];
    environment.extend(more);
    reports_over_driver(&format!("card_faults::{test}"), &environment, || {
        block_on(async {
            let folder = checkpoint();
            let program = "card_faults::the_program_of_ranks_one_of_which_has_a_bad_card";
            let processes = processes_of(program, settings());
            let builder = on_cards(&folder).isolation(Isolation::Process).of_processes(&processes);
            body(builder).await;
            until("all processes are gone", || shards().is_empty()).await;
        });
    })
}

/// A fault, and what it costs.
struct Case {
    lives: &'static str,
    means: AllReduce,
    /// Parts of the error that the stream ends with.
    says: &'static [&'static str],
    /// Ranks that load again.
    again: &'static [u16],
}

const MEANS: &str = "CONSORT_TEST_MEANS";
const CASE: &str = "CONSORT_TEST_CASE";

/// All open requests fail in each case as it says, and the next one is answered.
fn fail_and_answer(test: &str, environment: &[(&str, &str)], cases: &[Case]) {
    for (at, case) in cases.iter().enumerate() {
        let (at, means) = (at.to_string(), case.means.name());
        let more = [&[(CASE, &*at), (MEANS, means)], environment].concat();
        let reports = with_bad_cards(test, case.lives, &more, async |builder| {
            let case: usize = std::env::var(CASE).expect("it is set").parse().expect("a number");
            let case = &cases[case];
            let loads = Loads::default();
            let builder = builder.batch_invariant(case.means != AllReduce::Nccl).all_reduce(case.means);
            let engine = loads.watch(builder.step_limit(Duration::from_secs(8))).start().await;
            let engine = engine.expect("the fault comes later");
            let first = shards();
            loads.take();
            let open = ["abc", "another prompt", "one more, and a longer one"]
                .map(|prompt| engine.generate(prompt, greedy(150)).expect("admitted"));
            for stream in open {
                let error = stream.collect().await.expect_err("the group is lost").to_string();
                println!("{}: {error}", case.lives);
                for part in case.says {
                    assert!(error.contains(part), "{}: {part} is not in {error}", case.lives);
                }
            }
            // A group that meets in vain is formed once more.
            let begin = Instant::now();
            loop {
                assert!(begin.elapsed() < Duration::from_secs(90), "{}: {:?}", case.lives, engine.status());
                until_ready(&engine).await;
                if let Ok(stream) = engine.generate("hello", greedy(12))
                    && let Ok(completion) = stream.collect().await
                {
                    assert_eq!(completion.tokens.len(), 12);
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            let again: BTreeSet<u16> = case.again.iter().copied().collect();
            assert_eq!(loads.take(), again, "{}: nobody else reads weights again", case.lives);
            let second = shards();
            for (rank, pid) in &first {
                assert_eq!(second[rank] == *pid, !again.contains(rank), "{}: rank {rank}", case.lives);
            }
            engine.shutdown(Duration::from_secs(5)).await;
        });
        let Some(reports) = reports else { return };
        assert!(reports.len() >= 4, "{}: of the engine and three ranks", case.lives);
        assert_given_back(&reports, u64::from(case.lives.contains("cuMemCreate")));
    }
}

#[test]
fn software_driver_a_card_that_fails_in_its_process_costs_a_restart_of_its_rank_alone() {
    let test = "software_driver_a_card_that_fails_in_its_process_costs_a_restart_of_its_rank_alone";
    let case = |lives, says| Case { lives, means: AllReduce::Auto, says, again: &[1] };
    fail_and_answer(
        test,
        &[],
        &[
            case("cuGraphLaunch:20=719", &["rank 1: its process", "CUDA_ERROR_LAUNCH_FAILED"]),
            case("cuLaunchKernel:60=die", &["rank 1: its process", "was killed by SIGKILL"]),
            case("cuGraphLaunch:20=2", &["rank 1: its process", "out of memory on cuda:1"]),
            // Calls of the driver that do not return, while the process says that it lives: before its peers' devices
            // wait for its own, and while they do.
            case("cuGraphInstantiateWithFlags:2=stay", STUCK),
            case("cuGraphLaunch:20=stay", STUCK),
            case("cuLaunchKernel:60=stay", STUCK),
            // Its successor finds no memory, and the next one does.
            case("cuGraphLaunch:20=die;cuMemCreate:1=2", &["rank 1: its process", "was killed by SIGKILL"]),
        ],
    );
}

const STUCK: &[&str] = &["rank 1: its process", "did not get on for 5s in step"];
const LOST: &[&str] = &["rank 1: its process", "was killed by SIGKILL"];

#[test]
fn software_driver_sums_through_nccl_that_fail_in_a_process_cost_no_more_than_they_must() {
    let test = "software_driver_sums_through_nccl_that_fail_in_a_process_cost_no_more_than_they_must";
    let case = |lives, says, again| Case { lives, means: AllReduce::Nccl, says, again };
    fail_and_answer(
        test,
        &[],
        &[
            case("ncclAllReduce@1:40=2", &["rank 1: its process", "ncclAllReduce fails"], &[1]),
            case("ncclAllReduce@1:40=die", LOST, &[1]),
            case("cuGraphLaunch:20=stay", STUCK, &[1]),
            // All are sound.
            case("ncclAllReduce@1:40=hang", &["rank ", "did not end the sums of a step within 6 s"], &[]),
            // In the next epoch it hangs when it meets the others.
            case(
                "ncclAllReduce@1:40=6,ncclCommInitRankConfig@1:2=hang",
                &["rank 1 of 3 (cuda:1)", "Another rank's process has ended or cannot be reached"],
                &[],
            ),
        ],
    );
}

#[test]
fn software_driver_survivors_that_nccl_tells_of_a_death_are_not_blamed_for_it() {
    let test = "software_driver_survivors_that_nccl_tells_of_a_death_are_not_blamed_for_it";
    // As the loss of another rank, and as an error of the survivor's own system.
    for told in ["6", "2"] {
        let case = Case { lives: "ncclAllReduce@1:40=die", means: AllReduce::Nccl, says: LOST, again: &[1] };
        fail_and_answer(test, &[("CONSORT_SOFTWARE_DRIVER_NCCL_LOSS", told)], &[case]);
    }
}

#[test]
fn nobody_takes_the_place_of_a_card_s_process_that_has_not_ended() {
    let folder = checkpoint();
    let settings = WorkSettings { left_behind_max: Duration::from_millis(20), ..settings() };
    // It would start, if nobody held it back.
    let processes = processes_of("programs::a_program_that_gives_up", settings);
    let mut model = model_factory(&folder, 2);
    let refusal = |model: ModelFactory| {
        let factory = ProcessFactory::new(model, Arc::clone(&processes));
        let (handle, ends) = std::io::pipe().expect("a pipe");
        factory.left_behind.add(Rank(0), 4242, Arc::new(handle.into()));
        let build = || {
            let comm = factory.collective(2).expect("a segment").pop().expect("two seats");
            let built = factory.build(Rank(1), comm, &ProgressReporter::new(Rank(1), None));
            built.map(drop).expect_err("it gives up").to_string()
        };
        let before = build();
        drop(ends);
        [before, build()]
    };
    let _guard = ONE_AT_A_TIME.blocking_lock();
    // What one leaves behind on a CPU reaches nobody.
    for error in refusal(model_factory(&folder, 2)) {
        assert!(error.contains("exited with status 3"), "{error}");
    }
    model.devices = (0..2).map(|index| DeviceSpec::Cuda(CudaCard::Index(index))).collect();
    let [before, after] = refusal(model);
    assert!(before.contains("process 4242 of rank 0 was killed 0 s ago and has not ended"), "{before}");
    assert!(after.contains("exited with status 3"), "{after}");
}

/// Why an engine does not start.
async fn refused(builder: EngineBuilder) -> String {
    let error = builder.start().await.map(drop).expect_err("it cannot start");
    format!("{:#}", anyhow::Error::from(error))
}

#[test]
fn software_driver_a_process_without_memory_or_without_an_end_of_its_meeting_is_named_at_the_start() {
    let test =
        "software_driver_a_process_without_memory_or_without_an_end_of_its_meeting_is_named_at_the_start";
    for (lives, means, says) in [
        ("cuMemCreate:1=2", AllReduce::Auto, ["rank 1", "out of memory on cuda:1"]),
        (
            "ncclCommInitRankConfig@1:1=stay",
            AllReduce::Nccl,
            ["rank 1 has not come", "did not meet the others through NCCL within 3 s"],
        ),
        (
            "ncclCommInitRankConfig@1:1=hang",
            AllReduce::Nccl,
            ["one hangs", "did not meet the others through NCCL within 3 s"],
        ),
    ] {
        let more = [(MEANS, means.name()), (CASE, &says.join(";"))];
        let reports = with_bad_cards(test, lives, &more, async |builder| {
            let (means, says) = (std::env::var(MEANS), std::env::var(CASE));
            let (means, says) = (means.expect("it is set"), says.expect("it is set"));
            let means = AllReduce::ALL.into_iter().find(|known| known.name() == means).expect("it is known");
            let builder = builder.batch_invariant(means != AllReduce::Nccl).all_reduce(means);
            let text = refused(builder.step_limit(Duration::from_secs(3))).await;
            println!("{text}");
            for part in says.split(';') {
                assert!(text.contains(part), "{part} is not in {text}");
            }
        });
        let Some(reports) = reports else { return };
        for report in reports {
            assert_eq!(report.violations, 0, "{lives}: {report:#?}");
            // A thread that hangs in NCCL keeps its device open, and nothing in its memory.
            assert!(report.devices.iter().all(|device| device.bytes == 0), "{lives}: {report:#?}");
        }
    }
}

/// Loses ranks on cards that sum by `means`, and returns what the process of the one that lives through it reported.
fn fifty_losses_of_cards(test: &str, means: AllReduce) -> Option<Report> {
    let reports = over_driver(&format!("card_faults::{test}"), &[THREE], || {
        let folder = checkpoint();
        let mut model = model_factory(&folder, 3);
        model.devices = (0..3).map(|index| DeviceSpec::Cuda(CudaCard::Index(index))).collect();
        model.options.dtype = DType::BF16;
        model.options.separate_processes = true;
        model.options.all_reduce = means;
        model.options.deterministic = means != AllReduce::Nccl;
        let processes = processes_of("the_program_of_a_rank", settings());
        lose_one_rank_after_another(&ProcessFactory::new(model, processes));
    })?;
    // That nothing of it is held at its end was looked at.
    reports.into_iter().max_by_key(|report| report.launches)
}

#[test]
fn software_driver_fifty_losses_of_cards_processes_leave_nothing_behind() {
    let test = "software_driver_fifty_losses_of_cards_processes_leave_nothing_behind";
    let Some(survivor) = fifty_losses_of_cards(test, AllReduce::Auto) else { return };
    // It made its own memory once, and mapped two others' in each life.
    assert_eq!(calls(&survivor, "cuMemCreate"), 1, "{survivor:#?}");
    assert_eq!(calls(&survivor, "cuMemMap"), 1 + 2 * LIVES_OF_ALL, "{survivor:#?}");
    assert_eq!(calls(&survivor, "ncclCommInitRankConfig@0"), 0, "{survivor:#?}");
}

#[test]
fn software_driver_fifty_losses_of_ranks_that_sum_through_nccl_leave_nothing_behind() {
    let test = "software_driver_fifty_losses_of_ranks_that_sum_through_nccl_leave_nothing_behind";
    let Some(survivor) = fifty_losses_of_cards(test, AllReduce::Nccl) else { return };
    assert_eq!(calls(&survivor, "cuMemMap"), 0, "{survivor:#?}");
    assert_eq!(calls(&survivor, "ncclCommInitRankConfig@0"), LIVES_OF_ALL, "{survivor:#?}");
    assert_eq!(calls(&survivor, "ncclCommAbort"), LIVES_OF_ALL, "{survivor:#?}");
}
