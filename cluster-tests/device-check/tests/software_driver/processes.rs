//! Ranks that are processes on one card, each with a software driver of its own.

use std::{fs, path::Path};

use serde_json::Value;

use crate::{cases, check, outcome, row, rows, whole_models::folder_of};

const SAME: &str = "tokens and logits of three processes";
const LOST: &str = "a killed process ends the waits of the others";

/// Runs the part over the tiny model, and gives what each process's driver counted, of those that ended in order.
fn run(folder: &Path, environment: &[(&str, &str)]) -> (bool, Value, Vec<Value>) {
    let counted = folder.join("%p.driver");
    let mut all = vec![("CONSORT_SOFTWARE_DRIVER_REPORT", counted.to_str().unwrap())];
    all.extend(environment);
    let (output, report) = check(folder, folder, &all, &["--only", "processes"]);
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let files = files.filter(|file| file.extension().is_some_and(|extension| extension == "driver"));
    let counted = files.map(|file| serde_json::from_slice(&fs::read(file).unwrap()).unwrap()).collect();
    (output.status.success(), report, counted)
}

#[test]
fn software_driver_three_processes_say_what_three_threads_say_and_survive_the_loss_of_one() {
    let folder = folder_of(&["tiny_llama_odd"]);
    let (is_good, report, counted) = run(folder.path(), &[]);
    assert_eq!((outcome(&report, "processes"), cases(&report, "processes")), ("done", vec![SAME, LOST]));
    let (same, lost) = (row(&report, "processes", SAME), row(&report, "processes", LOST));
    assert_eq!((&same["ours"]["value"], &same["goal"]["required"]), (&0.0.into(), &true.into()), "{same}");
    // Eight tokens and their logits, of three ranks.
    let compared = 3 * 8 * (1 + 263);
    assert!(same["note"].as_str().unwrap().starts_with(&format!("of {compared} numbers")), "{same}");
    assert!(lost["ours"]["value"].as_f64().unwrap() < 5.0 && lost["goal"]["required"] == true, "{lost}");
    assert!(is_good, "{report:#}");
    // The part itself, and all ranks but the one that was killed.
    let calls = |counted: &Value, name: &str| counted["calls"][name].as_u64().unwrap_or(0);
    let ranks: Vec<&Value> =
        counted.iter().filter(|counted| calls(counted, "cuMemImportFromShareableHandle") > 0).collect();
    assert_eq!((counted.len(), ranks.len()), (1 + 3 + 2, 3 + 2));
    for rank in ranks {
        assert_eq!((calls(rank, "cuMemMap"), &rank["violations"]), (3, &0.into()), "{rank:#}");
        assert!(rank["graph_launches"].as_u64().unwrap() >= 7, "{rank:#}");
    }
}

#[test]
fn software_driver_where_no_memory_can_be_shared_the_part_says_why_and_nothing_is_wrong() {
    let folder = folder_of(&["tiny_llama_odd"]);
    let (is_good, report, _) = run(folder.path(), &[("CONSORT_SOFTWARE_DRIVER_SHARES", "0")]);
    assert_eq!((outcome(&report, "processes"), cases(&report, "processes")), ("done", vec![SAME, LOST]));
    for row in rows(&report, "processes") {
        assert_eq!((&row["ours"], &row["goal"]), (&Value::Null, &Value::Null), "{row}");
        assert!(row["note"].as_str().unwrap().contains("cannot share memory with ranks in other"), "{row}");
    }
    assert!(is_good);
}

#[test]
fn software_driver_processes_that_fail_fail_the_check_with_their_reason() {
    let folder = folder_of(&["tiny_llama_odd"]);
    // In each rank's driver; the part itself maps nobody's memory.
    let faults = [("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuMemImportFromShareableHandle:1=1")];
    let (is_good, report, _) = run(folder.path(), &faults);
    assert_eq!((outcome(&report, "processes"), cases(&report, "processes")), ("done", vec![SAME, LOST]));
    for row in rows(&report, "processes") {
        assert_eq!(row["ours"], Value::Null, "{row}");
        assert!(row["note"].as_str().unwrap().contains("map the memory of rank"), "{row}");
    }
    assert!(!is_good);
}
