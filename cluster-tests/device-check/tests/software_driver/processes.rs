//! Ranks that are processes on one card, each with a software driver of its own.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{cases, check, outcome, part, row, rows, whole_models::folder_of};

const SAME: &str = "tokens and logits of three processes";
const LOST: &str = "a killed process ends the waits of the others";
const SUMS: [&str; 2] = ["sums of three processes, one shot", "sums of three processes, two shots"];
const OUTLIVED: &str = "memory of a killed process";
const CASES: [&str; 5] = [SUMS[0], SUMS[1], OUTLIVED, SAME, LOST];

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
fn software_driver_three_processes_add_say_what_three_threads_say_and_survive_the_loss_of_one() {
    let folder = folder_of(&["tiny_llama_odd"]);
    let (is_good, report, counted) = run(folder.path(), &[]);
    assert_eq!((outcome(&report, "processes"), cases(&report, "processes")), ("done", CASES.to_vec()));
    // Four sums of each length, of three ranks; the longest, of two; eight tokens and their logits, of three.
    let of_sums = format!("of {} elements", 3 * 4 * (7 + 515 + 4096));
    let of_memory = format!("of {} elements", 2 * 4096);
    let of_model = format!("of {} numbers", 3 * 8 * (1 + 263));
    let compared = [(SUMS[0], &of_sums), (SUMS[1], &of_sums), (OUTLIVED, &of_memory), (SAME, &of_model)];
    for (case, compared) in compared {
        let row = row(&report, "processes", case);
        assert_eq!((&row["ours"]["value"], &row["goal"]["value"]), (&0.0.into(), &0.0.into()), "{row}");
        assert_eq!(
            (&row["ours"]["better"], &row["goal"]["required"]),
            (&"lower".into(), &true.into()),
            "{row}"
        );
        assert!(row["note"].as_str().unwrap().starts_with(compared), "{row}");
    }
    let lost = row(&report, "processes", LOST);
    assert!(lost["ours"]["value"].as_f64().unwrap() < 5.0 && lost["goal"]["required"] == true, "{lost}");
    assert!(is_good, "{report:#}");
    // The part itself, and all ranks but those that were killed: of sums, of the model's answers, of its loss.
    let calls = |counted: &Value, name: &str| counted["calls"][name].as_u64().unwrap_or(0);
    let ranks: Vec<&Value> =
        counted.iter().filter(|counted| calls(counted, "cuMemImportFromShareableHandle") > 0).collect();
    assert_eq!((counted.len(), ranks.len()), (1 + 2 + 3 + 2, 2 + 3 + 2));
    for rank in ranks {
        assert_eq!((calls(rank, "cuMemMap"), &rank["violations"]), (3, &0.into()), "{rank:#}");
        assert!(rank["graph_launches"].as_u64().unwrap() >= 7, "{rank:#}");
    }
}

#[test]
fn software_driver_where_no_memory_can_be_shared_the_part_says_why_and_nothing_is_wrong() {
    let folder = folder_of(&["tiny_llama_odd"]);
    let (is_good, report, _) = run(folder.path(), &[("CONSORT_SOFTWARE_DRIVER_SHARES", "0")]);
    assert_eq!((outcome(&report, "processes"), cases(&report, "processes")), ("done", CASES.to_vec()));
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
    assert_eq!((outcome(&report, "processes"), cases(&report, "processes")), ("done", CASES.to_vec()));
    for row in rows(&report, "processes") {
        assert_eq!(row["ours"], Value::Null, "{row}");
        assert!(row["note"].as_str().unwrap().contains("map the memory of rank"), "{row}");
    }
    assert!(!is_good);
}

#[test]
fn software_driver_without_a_tiny_model_processes_add_and_the_part_says_what_it_lacks() {
    let folder = folder_of(&[]);
    let (is_good, report, _) = run(folder.path(), &[]);
    assert_eq!((outcome(&report, "processes"), cases(&report, "processes")), ("done", CASES.to_vec()));
    for case in [SUMS[0], SUMS[1], OUTLIVED] {
        assert_eq!(row(&report, "processes", case)["ours"]["value"], 0.0, "{report:#}");
    }
    for case in [SAME, LOST] {
        let row = row(&report, "processes", case);
        assert_eq!((&row["ours"], &row["note"]), (&Value::Null, &"there is no tiny model".into()));
    }
    assert!(is_good, "{report:#}");
}

#[test]
fn software_driver_a_process_that_hangs_in_a_sum_fails_the_check_in_time() {
    let folder = folder_of(&[]);
    let (is_good, report, _) =
        run(folder.path(), &[("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuGraphLaunch:2=hang")]);
    assert_eq!((outcome(&report, "processes"), cases(&report, "processes")), ("done", CASES.to_vec()));
    for case in [SUMS[0], SUMS[1], OUTLIVED] {
        let row = row(&report, "processes", case);
        assert_eq!((&row["ours"], &row["goal"]["required"]), (&Value::Null, &true.into()), "{row}");
    }
    let seconds = part(&report, "processes")["seconds"].as_f64().unwrap();
    assert!(!is_good && seconds < 20.0, "{seconds} s: {report:#}");
}

/// Waits for it, so many seconds at most.
fn until(seconds: u64, what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(seconds), "not within {seconds} s: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn software_driver_processes_end_with_the_part_that_started_them() {
    let folder = folder_of(&[]);
    // Without their end they would wait for their devices for seconds.
    let mut part = Command::new(env!("CARGO_BIN_EXE_consort-device-check"))
        .args(["--size", "small", "--folder"])
        .arg(folder.path())
        .args(["part", "processes", "--report"])
        .arg(folder.path().join("rows"))
        .env("CONSORT_CUDA_LIB_PATH", consort_software_driver::folder())
        .env("CONSORT_CACHE_DIR", folder.path().join("cache"))
        .env("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuGraphLaunch:1=hang")
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let children = format!("/proc/{0}/task/{0}/children", part.id());
    let mut ranks = Vec::new();
    until(10, "three processes", || {
        let children = fs::read_to_string(&children).unwrap();
        ranks = children.split_whitespace().map(str::to_owned).collect();
        ranks.len() == 3
    });
    part.kill().unwrap();
    part.wait().unwrap();
    // One that nobody has waited for yet is a zombie.
    let is_at_work = |rank: &String| {
        let status = fs::read_to_string(format!("/proc/{rank}/status"));
        status.is_ok_and(|status| !status.contains("State:\tZ") && !status.contains("State:\tX"))
    };
    until(3, "all processes have ended", || !ranks.iter().any(is_at_work));
}
