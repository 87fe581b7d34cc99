//! Whole models: tokens against the CPU's, and the speed of a random one.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Output,
};

use serde_json::Value;

use crate::{check, outcome, row};

/// A folder with these fixtures as its models.
pub(crate) fn folder_of(models: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parallel/fixtures");
    fs::create_dir(folder.path().join("models")).unwrap();
    for model in models {
        symlink(fixtures.join(model), folder.path().join("models").join(model)).unwrap();
    }
    folder
}

/// Runs one part, and reads what the software driver counted in it.
fn run(folder: &Path, part: &str, faults: &str) -> (Output, Value, Option<Value>) {
    let counted: PathBuf = folder.join("driver.json");
    let environment = [
        ("CONSORT_SOFTWARE_DRIVER_REPORT", counted.to_str().unwrap()),
        ("CONSORT_SOFTWARE_DRIVER_FAULTS", faults),
    ];
    let (output, report) = check(folder, folder, &environment, &["--only", part]);
    let counted = fs::read(counted).ok().map(|text| serde_json::from_slice(&text).unwrap());
    (output, report, counted)
}

fn rows(report: &Value) -> &[Value] {
    report["parts"][0]["rows"].as_array().unwrap()
}

fn cases(report: &Value) -> Vec<&str> {
    rows(report).iter().map(|row| row["case"].as_str().unwrap()).collect()
}

/// Those that the check would fail for, which all are right.
fn required_and_right(report: &Value) -> usize {
    let required = rows(report).iter().filter(|row| row["goal"]["required"] == true);
    let right = |row: &&Value| {
        row["ours"]["better"] == "lower"
            && row["ours"]["value"].as_f64().unwrap() <= row["goal"]["value"].as_f64().unwrap()
    };
    required.clone().for_each(|row| assert!(right(&row), "{row}"));
    required.count()
}

fn assert_clean(counted: Option<Value>) -> Value {
    let counted = counted.unwrap();
    assert_eq!((&counted["violations"], &counted["devices"][0]["bytes"]), (&0.into(), &0.into()));
    assert_eq!(counted["pinned_bytes"], 0);
    counted
}

#[test]
fn software_driver_models_say_what_the_cpu_says_alone_and_as_three_ranks_on_one_card() {
    let folder = folder_of(&["tiny_llama_odd"]);
    let (output, report, counted) = run(folder.path(), "tokens", "");
    assert_eq!(outcome(&report, "tokens"), "done", "{report}");
    let expected = [
        "tiny_llama_odd, width 1: logits",
        "tiny_llama_odd, width 1: greedy tokens",
        "tiny_llama_odd, width 1: tokens of steps enqueued behind each other",
        "tiny_llama_odd, width 1: alone and among 8, batch-invariant",
        "tiny_llama_odd, width 3: logits",
        "tiny_llama_odd, width 3: greedy tokens",
        "tiny_llama_odd, width 3: tokens of steps enqueued behind each other",
        "tiny_llama_odd, width 3: alone and among 8, batch-invariant",
    ];
    assert_eq!((cases(&report), required_and_right(&report)), (expected.to_vec(), 8));
    assert!(output.status.success());
    let counted = assert_clean(counted);
    // Decodes of each pass: the prompt token by token, the answer twice; alone and in company.
    assert!(counted["graph_launches"].as_u64().unwrap() >= 4 * (20 + 4 + 4 + 4 + 4), "{counted}");
    // Some were launched while the step before was under way.
    assert!(counted["graphs_behind"].as_u64().unwrap() > 0, "{counted}");
    for width in [1, 3] {
        let case = format!("tiny_llama_odd, width {width}: tokens of steps enqueued behind each other");
        assert_eq!(row(&report, "tokens", &case)["note"], "of 4");
    }
}

#[test]
fn software_driver_a_model_that_cannot_be_read_fails_the_check_and_takes_no_other_with_it() {
    let folder = folder_of(&["twin.gguf"]);
    fs::create_dir(folder.path().join("models/broken")).unwrap();
    fs::write(folder.path().join("models/broken/config.json"), "{}").unwrap();
    let (output, report, counted) = run(folder.path(), "tokens", "");
    assert_eq!(outcome(&report, "tokens"), "done", "{report}");
    let first = &rows(&report)[0];
    assert_eq!((&first["case"], &first["ours"]), (&"broken".into(), &Value::Null));
    assert!(first["note"].as_str().unwrap().contains("config.json"), "{first}");
    assert_eq!(cases(&report)[1..3], ["twin, width 1: logits", "twin, width 1: greedy tokens"]);
    assert!(rows(&report)[1..].iter().all(|row| row["ours"]["value"].is_number()), "{report}");
    assert!(!output.status.success(), "a model is missing");
    assert_clean(counted);
}

#[test]
fn software_driver_without_models_the_part_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report, _) = run(folder.path(), "tokens", "");
    assert_eq!((outcome(&report, "tokens"), cases(&report)), ("done", vec!["models"]));
    assert!(rows(&report)[0]["note"].as_str().unwrap().contains("none"), "{report}");
    assert!(output.status.success());
}

#[test]
fn software_driver_a_model_that_hangs_the_card_is_named_and_ends_its_part() {
    let folder = folder_of(&["tiny_llama"]);
    let (output, report, _) = run(folder.path(), "tokens", "cuGraphLaunch:1=hang");
    assert_eq!(outcome(&report, "tokens"), "failed", "{report}");
    assert_eq!(cases(&report), ["tiny_llama, width 1"]);
    assert!(rows(&report)[0]["note"].as_str().unwrap().contains("within 8 s"), "{report}");
    assert!(!output.status.success());
}

#[test]
fn software_driver_a_random_model_is_loaded_filled_and_decoded_by_graphs() {
    let folder = folder_of(&[]);
    let (output, report, counted) = run(folder.path(), "model", "");
    assert_eq!(outcome(&report, "model"), "done", "{report}");
    let mut expected = vec!["load, from mapped files to the device".to_owned(), "prefill of 96".to_owned()];
    for batch in [1, 8] {
        let case = format!("decode at 96, batch {batch}");
        expected.push(format!("{case}: logits against the prefill's"));
        expected.push(case.clone());
        expected.push(format!("{case}: the layers' graph alone"));
        let behind = format!("{case}, a step enqueued behind another");
        expected.push(behind.clone());
        expected.push(format!("{behind}: tokens"));
    }
    assert_eq!((cases(&report), required_and_right(&report)), (expected.iter().map(|x| &**x).collect(), 4));
    let positive = |row: &Value| row["ours"]["value"].as_f64().unwrap() > 0.0;
    assert!(rows(&report).iter().filter(|row| row["ours"]["better"] == "higher").all(positive), "{report}");
    assert!(output.status.success());
    let counted = assert_clean(counted);
    assert!(counted["graph_launches"].as_u64().unwrap() >= 2 * (14 + 16), "{counted}");
    // At most nine of each ten that are enqueued to time the layers, and what overlaps.
    assert!(counted["graphs_behind"].as_u64().unwrap() > 2 * 9, "{counted}");
    for (batch, compared) in [(1, "of 8"), (8, "of 64")] {
        let case = format!("decode at 96, batch {batch}, a step enqueued behind another: tokens");
        assert_eq!(row(&report, "model", &case)["note"], compared, "two turns of four steps");
    }
}
