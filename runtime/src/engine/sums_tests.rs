//! Whole engines whose ranks sum by kernels, through NCCL, or either; over a software driver.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    time::{Duration, Instant},
};

use consort_software_driver::{Report, in_child, in_child_reported};
use futures_util::future::join_all;

use super::software_driver_tests::{
    Price, THREE, answer, assert_given_back, assert_near, block_on, checkpoint, fail_and_answer, greedy,
    tiny, with_margins,
};
use crate::AllReduce;

const CARDS: &str = "cuda:0,cuda:1,cuda:2";
const FAULTS: &str = "CONSORT_SOFTWARE_DRIVER_FAULTS";
const APART: (&str, &str) = ("CONSORT_SOFTWARE_DRIVER_PEERS", "0");

fn name(test: &str) -> String {
    format!("engine::sums_tests::{test}")
}

/// Sums that NCCL did on rank 1.
fn nccl_sums(report: &Report) -> u64 {
    report.calls.get("ncclAllReduce@1").copied().unwrap_or(0)
}

#[test]
fn software_driver_engines_say_what_the_cpu_says_whatever_their_ranks_sum_with() {
    let test = name("software_driver_engines_say_what_the_cpu_says_whatever_their_ranks_sum_with");
    for means in ["nccl", "kernels"] {
        let report = in_child_reported(&test, &[THREE, ("MEANS", means)], || {
            let means = std::env::var("MEANS").expect("it is set");
            let means = AllReduce::ALL.into_iter().find(|known| known.name() == means).expect("it is known");
            block_on(async {
                let folder = checkpoint();
                let prompts: Vec<String> =
                    (0..8).map(|at| "a few words. ".repeat(1 + at % 3) + &at.to_string()).collect();
                let cpu = tiny(&folder, "cpu").start().await.expect("it starts");
                let engine = tiny(&folder, CARDS).all_reduce(means).start().await.expect("it starts");
                let together = join_all(prompts.iter().map(|prompt| with_margins(&engine, prompt, 16))).await;
                for (prompt, together) in prompts.iter().zip(&together) {
                    let expected = with_margins(&cpu, prompt, 16).await;
                    assert_near(together, &expected, prompt);
                    assert_near(&with_margins(&engine, prompt, 16).await, &expected, prompt);
                }
                engine.shutdown(Duration::from_secs(5)).await;
                cpu.shutdown(Duration::from_secs(5)).await;
            });
        });
        let Some(report) = report else { return };
        assert_given_back(means, &report);
        let summed = nccl_sums(&report);
        println!("{means}: {summed} sums of rank 1 by NCCL, {} graphs launched", report.graph_launches);
        assert!(if means == "nccl" { summed > 300 } else { summed == 0 }, "{report:?}");
        assert!(report.graph_launches > 40, "{report:?}");
    }
}

/// Whoever sums through NCCL and has a fault fails its request for a reason, and later ones are answered.
fn struck(test: &str, fault: &str, price: &Price, reasons: &[&str]) -> Option<Report> {
    in_child_reported(&name(test), &[THREE, (FAULTS, fault)], || {
        let reason = block_on(fail_and_answer(price, AllReduce::Nccl));
        for part in reasons {
            assert!(reason.contains(part), "{part} is not in {reason}");
        }
    })
}

#[test]
fn software_driver_an_error_of_nccl_is_its_rank_s_and_costs_one_restart() {
    let test = "software_driver_an_error_of_nccl_is_its_rank_s_and_costs_one_restart";
    let (step_limit, answered) = (Duration::from_secs(60), Duration::from_secs(50));
    let price = Price { step_limit, answered, restarts: [1, 1] };
    let reasons =
        ["rank 1 of 3 (cuda:1) could not", "ncclAllReduce fails because the environment asks for it (2)"];
    // Alone, and where a peer notices that it is gone.
    for fault in ["ncclAllReduce@1:40=2", "ncclAllReduce@1:40=2,ncclAllReduce@0:40=6"] {
        let Some(report) = struck(test, fault, &price, &reasons) else { return };
        assert_given_back(fault, &report);
    }
}

#[test]
fn software_driver_an_error_that_tells_of_a_peer_is_the_group_s_and_all_keep_their_weights() {
    let test = "software_driver_an_error_that_tells_of_a_peer_is_the_group_s_and_all_keep_their_weights";
    let (step_limit, answered) = (Duration::from_secs(60), Duration::from_secs(50));
    let price = Price { step_limit, answered, restarts: [0, 0] };
    let reasons = ["rank 1 of 3 (cuda:1) could not", "Another rank's process has ended or cannot be reached"];
    let fault = "ncclAllReduce@1:40=6";
    let Some(report) = struck(test, fault, &price, &reasons) else { return };
    assert_given_back(fault, &report);
}

#[test]
fn software_driver_a_sum_of_nccl_that_hangs_ends_before_its_device_is_taken_to_hang() {
    let test = "software_driver_a_sum_of_nccl_that_hangs_ends_before_its_device_is_taken_to_hang";
    // All ranks are sound and keep what they have.
    let (step_limit, answered) = (Duration::from_secs(8), Duration::from_secs(50));
    let price = Price { step_limit, answered, restarts: [0, 0] };
    let reasons = ["rank ", "did not end the sums of a step within 6 s"];
    let fault = "ncclAllReduce@1:40=hang";
    let Some(report) = struck(test, fault, &price, &reasons) else { return };
    assert_given_back(fault, &report);
}

#[test]
fn software_driver_ranks_that_cannot_meet_through_nccl_in_a_restart_meet_in_the_next() {
    let test = "software_driver_ranks_that_cannot_meet_through_nccl_in_a_restart_meet_in_the_next";
    let (step_limit, answered) = (Duration::from_secs(6), Duration::from_secs(50));
    let price = Price { step_limit, answered, restarts: [1, 1] };
    let fault = "ncclAllReduce@1:40=2,ncclCommInitRankConfig@1:2=hang";
    let Some(report) = struck(test, fault, &price, &["rank 1 of 3"]) else { return };
    assert_given_back(fault, &report);
    assert_eq!(report.calls["ncclCommInitRankConfig@1"], 3, "the third met: {report:?}");
}

#[test]
fn software_driver_a_first_meeting_that_hangs_ends_in_time_and_says_who_is_missing() {
    let test = name("software_driver_a_first_meeting_that_hangs_ends_in_time_and_says_who_is_missing");
    // Where the call hangs, its rank knows, and where others are ready, they do; else nobody can tell who hangs of all
    // that have begun.
    for fault in ["stay", "7", "hang"].map(|how| format!("ncclCommInitRankConfig@1:1={how}")) {
        let report = in_child_reported(&test, &[THREE, (FAULTS, &fault)], || {
            let fault = std::env::var(FAULTS).expect("it is set");
            block_on(async {
                let (folder, started) = (checkpoint(), Instant::now());
                let engine =
                    tiny(&folder, CARDS).all_reduce(AllReduce::Nccl).step_limit(Duration::from_secs(3));
                let error = engine.start().await.expect_err("rank 1 hangs");
                let mut text = error.to_string();
                let mut source: Option<&dyn std::error::Error> = std::error::Error::source(&error);
                while let Some(cause) = source {
                    text = format!("{text}: {cause}");
                    source = cause.source();
                }
                println!("after {:?}: {text}", started.elapsed());
                assert!(started.elapsed() < Duration::from_secs(60));
                assert!(text.contains("did not meet the others through NCCL within 3 s"), "{text}");
                let who = match &*fault {
                    fault if fault.ends_with("stay") => "rank 1 has not come",
                    fault if fault.ends_with("7") => "rank 1 has begun and is not ready",
                    _ => "one hangs",
                };
                assert!(text.contains(who), "{text}");
                assert!(text.contains("all_reduce = \"kernels\""), "{text}");
            });
        });
        let Some(report) = report else { return };
        if fault.contains("stay") {
            // The thread that hangs in it keeps its device open, and nothing in its memory.
            assert_eq!(report.violations, 0, "{fault}: {report:?}");
            assert!(report.devices.iter().all(|device| device.bytes == 0), "{fault}: {report:?}");
        } else {
            assert_given_back(&fault, &report);
        }
    }
}

#[test]
fn software_driver_cards_that_cannot_reach_each_other_answer_through_nccl_or_are_refused_with_advice() {
    let test = name(
        "software_driver_cards_that_cannot_reach_each_other_answer_through_nccl_or_are_refused_with_advice",
    );
    let report = in_child_reported(&test, &[THREE, APART], || {
        block_on(async {
            let folder = checkpoint();
            let refused = tiny(&folder, CARDS).batch_invariant(true).start().await.expect_err("no way");
            let text = format!("{refused:?}");
            assert!(text.contains("leave batch_invariant off"), "{text}");
            let refused = tiny(&folder, CARDS).all_reduce(AllReduce::Kernels).start().await;
            let text = format!("{:?}", refused.expect_err("no way"));
            assert!(text.contains("leave all_reduce out"), "{text}");
            let engine = tiny(&folder, CARDS).start().await.expect("it starts");
            assert_eq!(answer(&engine, "a prompt", greedy(8)).await.len(), 8);
            engine.shutdown(Duration::from_secs(5)).await;
        });
    });
    let Some(report) = report else { return };
    assert_given_back("none", &report);
    assert!(nccl_sums(&report) > 20, "{report:?}");
}

/// The software driver's libraries but for NCCL.
fn without_nccl(folder: &Path) {
    for entry in fs::read_dir(consort_software_driver::folder()).expect("it is there").flatten() {
        if !entry.file_name().to_string_lossy().starts_with("libnccl") {
            symlink(entry.path(), folder.join(entry.file_name())).expect("a link");
        }
    }
}

#[test]
fn software_driver_a_machine_without_nccl_sums_by_kernels_or_says_what_to_install() {
    let test = name("software_driver_a_machine_without_nccl_sums_by_kernels_or_says_what_to_install");
    let libraries = tempfile::tempdir().expect("a temporary folder");
    without_nccl(libraries.path());
    let path = libraries.path().to_str().expect("it is Unicode");
    let environment = [THREE, ("CONSORT_CUDA_LIB_PATH", path)];
    in_child(&test, &[environment[0], environment[1]], || {
        block_on(async {
            let folder = checkpoint();
            let apart = std::env::var(APART.0).is_ok();
            let engine = tiny(&folder, CARDS).start().await;
            if apart {
                let text = format!("{:?}", engine.expect_err("no way"));
                assert!(text.contains("pip install nvidia-nccl-cu12"), "{text}");
                return;
            }
            let engine = engine.expect("it starts");
            assert_eq!(answer(&engine, "a prompt", greedy(8)).await.len(), 8);
            engine.shutdown(Duration::from_secs(5)).await;
            let wanted = tiny(&folder, CARDS).all_reduce(AllReduce::Nccl).start().await;
            let text = format!("{:?}", wanted.expect_err("there is none"));
            assert!(text.contains("pip install nvidia-nccl-cu12"), "{text}");
        });
    });
    in_child(&test, &[environment[0], environment[1], APART], || {});
}
