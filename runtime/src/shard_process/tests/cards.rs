//! Ranks on cards, each in a process of its own, over the software driver: every process has a driver of its own, which
//! reports what became of its memory.

use std::path::Path;

use consort_actors::GenerationError;
use consort_software_driver::{Report, in_child};
use futures_util::future::join_all;

use super::*;
use crate::{
    engine::software_driver_tests::{
        THREE, answer, assert_near, block_on, overlap, requests, tiny as tiny_on, together_and_alone,
        with_margins,
    },
    error::RequestError,
};

const CARDS: &str = "cuda:0,cuda:1,cuda:2";
const REPORT: &str = "CONSORT_SOFTWARE_DRIVER_REPORT";

/// Runs `body` over the software driver and returns what each process's driver reported: of those that ended in order.
/// `None` in the process of the body.
pub(super) fn over_driver(
    test: &str,
    environment: &[(&str, &str)],
    body: impl FnOnce(),
) -> Option<Vec<Report>> {
    let reports = reports_over_driver(test, environment, body)?;
    assert_given_back(&reports, 0);
    Some(reports)
}

/// Nothing is held of any device. So often was a card told to refuse memory.
pub(super) fn assert_given_back(reports: &[Report], refused: u64) {
    for report in reports {
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:#?}");
        for (taken, given_back) in [
            ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),
            ("cuMemMap", "cuMemUnmap"),
            ("cuMemAddressReserve", "cuMemAddressFree"),
        ] {
            assert_eq!(calls(report, taken), calls(report, given_back), "{taken}: {report:#?}");
        }
        let held = calls(report, "cuMemCreate") + calls(report, "cuMemImportFromShareableHandle");
        assert!(held - calls(report, "cuMemRelease") <= refused, "{report:#?}");
    }
}

/// The same, whatever the processes have left.
pub(super) fn reports_over_driver(
    test: &str,
    environment: &[(&str, &str)],
    body: impl FnOnce(),
) -> Option<Vec<Report>> {
    let test = format!("shard_process::tests::{test}");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("%p.json").to_string_lossy().into_owned();
    let mut environment = environment.to_vec();
    environment.push((REPORT, &path));
    in_child(&test, &environment, body);
    if std::env::var_os("CONSORT_SOFTWARE_DRIVER_CHILD").is_some() {
        return None;
    }
    let files = fs::read_dir(folder.path()).expect("it is there").flatten().map(|file| file.path());
    // A process that was killed while it wrote leaves a part.
    let files = files.filter(|file| file.extension().is_some_and(|extension| extension == "json"));
    Some(files.map(|file| Report::read(&file).expect("a whole report")).collect())
}

pub(super) fn calls(report: &Report, name: &str) -> u64 {
    report.calls.get(name).copied().unwrap_or(0)
}

/// Patient with processes that share two cores with other tests, but for their silence.
pub(super) fn settings() -> WorkSettings {
    WorkSettings {
        silence_max: Duration::from_secs(4),
        device_answer_max: Duration::from_secs(100),
        stop_max: Duration::from_secs(60),
        device_standstill_max: Duration::from_secs(5),
        ..WorkSettings::default()
    }
}

/// Three ranks on three cards.
pub(super) fn on_cards(folder: &TempDir) -> EngineBuilder {
    tiny_on(folder, CARDS).max_model_len(512).batch_invariant(true)
}

fn isolated_on_cards(folder: &TempDir) -> EngineBuilder {
    let processes = processes_of("the_program_of_a_rank", settings());
    on_cards(folder).isolation(Isolation::Process).of_processes(&processes)
}

#[test]
fn software_driver_three_cards_in_three_processes_say_what_three_threads_and_the_cpu_say() {
    let test = "cards::software_driver_three_cards_in_three_processes_say_what_three_threads_and_the_cpu_say";
    let reports = over_driver(test, &[THREE], || {
        block_on(async {
            let folder = checkpoint();
            let prompt = "the same prompt for all, longer than a step takes";
            let cpu = tiny_on(&folder, "cpu").start().await.expect("it starts");
            let of_cpu = with_margins(&cpu, prompt, 24).await;
            cpu.shutdown(Duration::from_secs(5)).await;
            let threads = on_cards(&folder).start().await.expect("threads start");
            let alone = with_margins(&threads, prompt, 24).await;
            let of_threads = mixed(&threads, 8).await;
            threads.shutdown(Duration::from_secs(5)).await;
            let engine = isolated_on_cards(&folder).start().await.expect("processes start");
            assert_eq!(shards().keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
            let got = with_margins(&engine, prompt, 24).await;
            assert_eq!(got, alone);
            assert_near(&got, &of_cpu, "three processes");
            assert_same(&of_threads, &mixed(&engine, 8).await);
            let ranks = engine.status().ensemble.ranks;
            assert!(ranks.iter().all(|rank| rank.weight_bytes > 0 && rank.kv_bytes > 0), "{ranks:?}");
            engine.shutdown(Duration::from_secs(5)).await;
            until("all processes are gone", || shards().is_empty()).await;
        });
    });
    let Some(reports) = reports else { return };
    let ranks: Vec<_> = reports.iter().filter(|report| calls(report, "cuMemCreate") > 0).collect();
    assert_eq!((reports.len(), ranks.len()), (4, 3), "{reports:#?}");
    for rank in ranks {
        assert!(rank.launches > 100 && rank.graph_launches > 40, "{rank:#?}");
    }
}

/// Reports of the processes that had a card's memory.
fn of_ranks(reports: &[Report]) -> Vec<&Report> {
    let ranks: Vec<_> = reports.iter().filter(|report| report.graph_launches > 0).collect();
    assert_eq!(ranks.len(), 3, "{reports:#?}");
    ranks
}

#[test]
fn software_driver_processes_overlap_steps_and_say_what_threads_say_one_step_after_another() {
    let test =
        "cards::software_driver_processes_overlap_steps_and_say_what_threads_say_one_step_after_another";
    let reports = over_driver(test, &[THREE], || {
        block_on(async {
            let folder = checkpoint();
            let requests = overlap::mixture();
            let threads = on_cards(&folder).async_scheduling(false).start().await.expect("threads start");
            let expected = overlap::together(&threads, &requests).await;
            let stopping = overlap::that_stop(&requests, &expected);
            let expected_stops = overlap::together(&threads, &stopping).await;
            threads.shutdown(Duration::from_secs(5)).await;
            let engine = isolated_on_cards(&folder).start().await.expect("processes start");
            assert_eq!(overlap::seen(&overlap::together(&engine, &requests).await), overlap::seen(&expected));
            let stopped = overlap::together(&engine, &stopping).await;
            assert_eq!(overlap::seen(&stopped), overlap::seen(&expected_stops));
            for (request, expected) in stopping.iter().zip(&expected_stops) {
                let alone = overlap::complete(&engine, request).await;
                assert_eq!(overlap::seen(&[alone]), overlap::seen(std::slice::from_ref(expected)));
            }
            engine.shutdown(Duration::from_secs(5)).await;
        });
    });
    let Some(mut reports) = reports else { return };
    // The threads' is that of the engine's process.
    reports.retain(|report| calls(report, "cuCtxEnablePeerAccess") == 0);
    for rank in of_ranks(&reports) {
        assert!(rank.graphs_behind > 30, "steps are meant to overlap: {rank:#?}");
    }
}

#[test]
fn software_driver_processes_that_sum_through_nccl_say_what_the_cpu_says() {
    let test = "cards::software_driver_processes_that_sum_through_nccl_say_what_the_cpu_says";
    // Where no card reaches another's memory, nothing else is possible.
    for environment in [&[THREE][..], &[THREE, ("CONSORT_SOFTWARE_DRIVER_SHARES", "0")]] {
        let reports = over_driver(test, environment, || {
            block_on(async {
                let folder = checkpoint();
                let cpu = tiny_on(&folder, "cpu").start().await.expect("it starts");
                let builder = isolated_on_cards(&folder).batch_invariant(false).all_reduce(AllReduce::Nccl);
                let engine = builder.start().await.expect("processes start");
                let prompts: Vec<String> =
                    (0..16).map(|at| "a few words. ".repeat(1 + at % 3) + &at.to_string()).collect();
                let together = join_all(prompts.iter().map(|prompt| with_margins(&engine, prompt, 12))).await;
                for (prompt, together) in prompts.iter().zip(&together) {
                    assert_near(together, &with_margins(&cpu, prompt, 12).await, prompt);
                }
                engine.shutdown(Duration::from_secs(5)).await;
                cpu.shutdown(Duration::from_secs(5)).await;
            });
        });
        let Some(reports) = reports else { return };
        let summed: u64 = of_ranks(&reports)
            .iter()
            .map(|report| (0..3).map(|rank| calls(report, &format!("ncclAllReduce@{rank}"))).sum::<u64>())
            .inspect(|sums| assert!(*sums > 100, "{reports:#?}"))
            .sum();
        println!("{summed} sums through NCCL");
    }
}

#[test]
fn software_driver_each_process_opens_its_own_card_and_the_engine_keeps_none() {
    let test = "cards::software_driver_each_process_opens_its_own_card_and_the_engine_keeps_none";
    let reports = over_driver(test, &[THREE], || {
        block_on(async {
            let folder = checkpoint();
            let engine = isolated_on_cards(&folder).start().await.expect("processes start");
            together_and_alone(&engine, &requests(16, 12)).await;
            engine.shutdown(Duration::from_secs(5)).await;
        });
    });
    let Some(reports) = reports else { return };
    let (ranks, engines): (Vec<_>, Vec<_>) =
        reports.iter().partition(|report| calls(report, "cuMemCreate") > 0);
    assert_eq!((ranks.len(), engines.len()), (3, 1), "{reports:#?}");
    // It looked at each card, and had given it back before its rank took what was free.
    assert_eq!(calls(engines[0], "cuDevicePrimaryCtxRetain"), 3, "{:#?}", engines[0]);
    assert_eq!(engines[0].launches, 0);
    let mut used = Vec::new();
    for rank in ranks {
        assert_eq!(calls(rank, "cuDevicePrimaryCtxRetain"), 1, "{rank:#?}");
        assert_eq!(calls(rank, "cuCtxEnablePeerAccess"), 0, "{rank:#?}");
        // Its own piece and two others'.
        assert_eq!(calls(rank, "cuMemMap"), 3, "{rank:#?}");
        used.extend(rank.devices.iter().position(|device| device.bytes_max > 0));
    }
    used.sort_unstable();
    assert_eq!(used, [0, 1, 2]);
}

#[test]
fn software_driver_cards_that_share_no_memory_are_refused_with_what_to_do() {
    let test = "cards::software_driver_cards_that_share_no_memory_are_refused_with_what_to_do";
    let environment = [THREE, ("CONSORT_SOFTWARE_DRIVER_SHARES", "0")];
    let reports = over_driver(test, &environment, || {
        block_on(async {
            let folder = checkpoint();
            let error = isolated_on_cards(&folder).start().await.map(drop).expect_err("it cannot");
            let text = format!("{:#}", anyhow::Error::from(error));
            assert!(text.contains("cannot share memory with ranks in other processes"), "{text}");
            assert!(text.contains("use isolation = \"thread\""), "{text}");
            until("all processes are gone", || shards().is_empty()).await;
            let engine = on_cards(&folder).start().await.expect("threads need none");
            answer(&engine, "abc", greedy(4)).await;
            engine.shutdown(Duration::from_secs(5)).await;
        });
    });
    assert!(reports.is_none_or(|reports| !reports.is_empty()));
}

fn count(folder: impl AsRef<Path>) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}

/// What is open: here, and in a process that lives through everything.
pub(super) fn open(survivor: i32) -> [usize; 2] {
    [count("/proc/self/fd"), count(format!("/proc/{survivor}/fd"))]
}

/// Strikes a rank in the middle of generations, which all end with an error that names rank and cause; the next request
/// is answered by a new process of that rank and the old ones of the others.
async fn strike(engine: &Engine, loads: &Loads, rank: u16, how: Signal, expected: &[u32]) {
    let before = shards();
    let mut open = ["abc", "another prompt", "one more, and a longer one"]
        .map(|prompt| engine.generate(prompt, greedy(150)).expect("admitted"));
    for stream in &mut open {
        stream.next().await.expect("a first token").expect("no failure");
    }
    let pid = before[&rank];
    signal(pid, how);
    let cause = match how {
        Signal::KILL => format!("rank {rank}: its process {pid} was killed by SIGKILL in step"),
        _ => format!("rank {rank}: its process {pid} was silent for 4s in step"),
    };
    for stream in open {
        let error = stream.collect().await.expect_err("the rank is lost");
        let RequestError::Generation(GenerationError::ShardLost { reason }) = &error else {
            panic!("{error:?}")
        };
        assert!(reason.starts_with(&cause), "{reason}");
    }
    until_ready(engine).await;
    assert_eq!(answer(engine, "hello", greedy(12)).await, expected);
    assert_eq!(loads.take(), BTreeSet::from([rank]), "nobody else reads weights again");
    for (other, pid) in shards() {
        assert_eq!(pid == before[&other], other != rank, "rank {other}");
    }
}

#[test]
fn software_driver_a_card_s_process_that_is_killed_or_stopped_costs_a_restart_of_its_rank_alone() {
    let test =
        "cards::software_driver_a_card_s_process_that_is_killed_or_stopped_costs_a_restart_of_its_rank_alone";
    let reports = over_driver(test, &[THREE], || {
        block_on(async {
            let (folder, loads) = (checkpoint(), Loads::default());
            let engine = loads.watch(isolated_on_cards(&folder)).start().await.expect("processes start");
            assert_eq!(loads.take(), BTreeSet::from([0, 1, 2]));
            let expected = answer(&engine, "hello", greedy(12)).await;
            // Rank 0 lives through all of it.
            strike(&engine, &loads, 1, Signal::KILL, &expected).await;
            let before = open(shards()[&0]);
            for (rank, how) in [(2, Signal::STOP), (1, Signal::KILL), (1, Signal::STOP), (2, Signal::KILL)] {
                let begin = Instant::now();
                strike(&engine, &loads, rank, how, &expected).await;
                println!("rank {rank} after {how:?}: answers again after {:?}", begin.elapsed());
                assert_eq!(open(shards()[&0]), before, "{how:?}");
            }
            engine.shutdown(Duration::from_secs(5)).await;
            until("all processes are gone", || shards().is_empty()).await;
        });
    });
    let Some(reports) = reports else { return };
    let ranks: Vec<_> = reports.iter().filter(|report| calls(report, "cuMemCreate") > 0).collect();
    // Those that were killed leave no report.
    assert_eq!(ranks.len(), 3, "{reports:#?}");
    // Six lives, in each of which it mapped two others; its own memory was made once.
    let survivor = ranks.iter().find(|report| calls(report, "cuMemMap") == 13);
    let survivor = survivor.unwrap_or_else(|| panic!("{ranks:#?}"));
    assert_eq!(calls(survivor, "cuMemCreate"), 1);
}
