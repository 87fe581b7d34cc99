//! Parts that time one operation each: every case is there, and what must be right is.

use serde_json::Value;

use crate::{cases, check, outcome, rows};

/// Asserts that a part ended well with these cases, each with a figure, and that so many had to be right and are.
fn assert_part(report: &Value, part: &str, expected: &[String], required: usize) {
    assert_eq!(outcome(report, part), "done", "{part}");
    assert_eq!(cases(report, part), expected, "{part}");
    let value = |of: &Value| of["value"].as_f64().unwrap();
    let (mut right, rows) = (0, rows(report, part));
    for row in rows {
        assert!(value(&row["ours"]) >= 0.0, "{row}");
        if row["goal"]["required"] == true {
            assert!(row["ours"]["better"] == "lower" && value(&row["ours"]) <= value(&row["goal"]), "{row}");
            right += 1;
        }
    }
    assert_eq!(right, required, "{part}");
}

#[test]
fn software_driver_products_are_timed_by_rows_and_weights_and_are_right() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = check(folder.path(), folder.path(), &[], &["--only", "linears"]);
    let mut expected = Vec::new();
    for (weights, prefilled) in [
        ("8B qkv", true),
        ("8B o", true),
        ("8B gate_up", true),
        ("8B down", true),
        ("8B head", false),
        ("gpt-oss/3 qkv", true),
        ("gpt-oss/3 o", true),
        ("gpt-oss/3 head", false),
    ] {
        let case = |rows: usize| format!("m={rows} {weights}");
        let invariant = |rows: usize| format!("m={rows} {weights}, batch invariant");
        expected.extend([case(1), invariant(1), case(8), invariant(8), case(32), case(64)]);
        expected.extend(prefilled.then(|| case(96)));
        expected.push(format!("results {weights}"));
    }
    assert_part(&report, "linears", &expected, 8);
    assert!(output.status.success());
}

#[test]
fn software_driver_attention_over_shuffled_pages_is_timed_and_right() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = check(folder.path(), folder.path(), &[], &["--only", "attention"]);
    let mut expected = Vec::new();
    for decode in [
        "decode batch=1 d=64 at 200",
        "decode batch=1 d=128 at 200",
        "decode batch=3 d=64 at 200",
        "decode batch=3 d=128 at 200",
        "decode batch=3 d=64 at 200, a third of gpt-oss",
    ] {
        expected.extend([
            decode.to_owned(),
            format!("{decode}, free chunks"),
            format!("results of {decode}"),
        ]);
    }
    for prefill in
        ["prefill d=64 of 40", "prefill d=64 of 100", "prefill d=128 of 40", "prefill d=128 of 100"]
    {
        expected.extend([prefill.to_owned(), format!("results of {prefill}")]);
    }
    assert_part(&report, "attention", &expected, 9);
    assert!(output.status.success());
}

#[test]
fn software_driver_a_part_that_is_asked_for_by_name_does_without_its_peer() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = check(folder.path(), folder.path(), &[], &["--only", "triton"]);
    let weights = ["qkv", "o", "gate_up", "down", "head"];
    let mut expected = weights.map(|weights| format!("m=1 8B {weights}, beside Triton")).to_vec();
    for decode in ["decode batch=1 d=128 at 200, beside Triton", "decode batch=3 d=128 at 200, beside Triton"]
    {
        expected.extend([
            decode.to_owned(),
            format!("{decode}, free chunks"),
            format!("results of {decode}"),
        ]);
    }
    assert_part(&report, "triton", &expected, 2);
    assert!(output.status.success());
}

#[test]
fn software_driver_draws_are_timed_and_are_the_cpus() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = check(folder.path(), folder.path(), &[], &["--only", "sampling"]);
    let mut expected = Vec::new();
    for batch in [1, 4] {
        let modes = ["greedy", "temperature", "top-k", "top-p", "min-p", "tokens"];
        expected.extend(modes.map(|mode| format!("{mode} batch={batch}")));
    }
    assert_part(&report, "sampling", &expected, 2);
    assert!(output.status.success());
}

#[test]
fn software_driver_sums_of_three_ranks_on_one_card_are_timed_and_are_the_fixed_orders() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = check(folder.path(), folder.path(), &[], &["--only", "all_reduce"]);
    let mut expected = Vec::new();
    for (name, sizes) in [
        ("one shot", &["32 B", "2060 B", "4 KiB", "16 KiB"][..]),
        ("two shots", &["32 B", "2060 B", "4 KiB", "16 KiB"][..]),
        ("with the norm", &["32 B", "4 KiB", "16 KiB"][..]),
        ("gather", &["32 B", "2060 B", "4 KiB", "16 KiB"][..]),
    ] {
        expected.extend(sizes.iter().map(|size| format!("{name} {size}")));
        expected.push(format!("results {name}"));
    }
    assert_part(&report, "all_reduce", &expected, 4);
    assert!(output.status.success());
}

#[test]
fn software_driver_a_rank_that_never_comes_ends_the_sums_with_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let faults = [("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuGraphLaunch:3=hang")];
    let (output, report) = check(folder.path(), folder.path(), &faults, &["--only", "all_reduce"]);
    assert!(!output.status.success());
    assert_eq!(outcome(&report, "all_reduce"), "failed");
    let parts = report["parts"].as_array().unwrap();
    let reason = parts[0]["reason"].as_str().unwrap();
    assert!(reason.contains("one shot 32 B"), "{reason}");
}

#[test]
fn software_driver_sums_through_nccl_at_one_rank_are_the_part_and_an_abort_leaves_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = check(folder.path(), folder.path(), &[], &["--only", "nccl"]);
    let expected = ["join", "sums of F32", "sums of BF16", "leave in order", "abort of a join"];
    assert_part(&report, "nccl", &expected.map(str::to_owned), 2);
    assert!(output.status.success());
    // 4 sums each of 1, 515 and 4096 elements.
    let note = rows(&report, "nccl")[1]["note"].as_str().unwrap();
    assert_eq!(note, "of 18448 elements");
}

#[test]
fn software_driver_a_sum_that_nccl_fails_is_told_with_its_words() {
    let folder = tempfile::tempdir().unwrap();
    let faults = [("CONSORT_SOFTWARE_DRIVER_FAULTS", "ncclAllReduce:2=3")];
    let (output, report) = check(folder.path(), folder.path(), &faults, &["--only", "nccl"]);
    assert!(!output.status.success());
    assert_eq!(outcome(&report, "nccl"), "failed");
    let reason = report["parts"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("ncclAllReduce says internal error"), "{reason}");
}
