//! The built command on CUDA devices, over a software driver.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use consort_software_driver::Report;
use rustix::process::Signal;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::{
    harness::{Served, consort, eventually, root},
    processes::{shards, signal},
};

/// The smallest fixture, with a tokenizer of one letter a token.
fn checkpoint() -> TempDir {
    const TOKENS: u32 = 48;
    let folder = tempfile::tempdir().unwrap();
    let twin = root().join("parallel/fixtures/twin");
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(twin.join(name), folder.path().join(name)).unwrap();
    }
    let letter = |token: u32| char::from_u32(u32::from('0') + token).unwrap().to_string();
    let vocabulary: Map<String, Value> = (0..TOKENS).map(|token| (letter(token), json!(token))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary,
                  "merges": []},
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    folder
}

/// The command with three cards of the software driver, which reports to `report`.
fn over_driver(report: &Path) -> Command {
    let mut command = consort();
    command
        .env("CONSORT_CUDA_LIB_PATH", consort_software_driver::folder())
        .env("CONSORT_CACHE_DIR", report.with_file_name("cache"))
        .env("CONSORT_SOFTWARE_DRIVER_DEVICES", "3")
        .env("CONSORT_SOFTWARE_DRIVER_REPORT", report);
    command
}

/// `consort run`, greedy, on these devices.
fn run(checkpoint: &Path, devices: &str, report: &Path) -> Output {
    over_driver(report)
        .args(["run", checkpoint.to_str().unwrap(), "3141592", "--raw"])
        .args(["--max-tokens", "20", "--temperature", "0", "--min-tokens", "20", "--dtype", "bfloat16"])
        .args(["--devices", devices])
        .output()
        .unwrap()
}

#[test]
fn software_driver_the_command_says_on_one_and_three_devices_what_it_says_on_the_cpu() {
    let folder = checkpoint();
    let answer = |devices: &str| {
        let report = folder.path().join("report.json");
        let ran = run(folder.path(), devices, &report);
        assert!(ran.status.success(), "{devices}: {}", String::from_utf8_lossy(&ran.stderr));
        if devices.starts_with("cuda") {
            let report = consort_software_driver::Report::read(&report).unwrap();
            assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{devices}: {report:?}");
            assert!(report.graph_launches >= 19, "{devices}: {report:?}");
        }
        String::from_utf8(ran.stdout).unwrap()
    };
    let expected = answer("cpu");
    assert!(expected.trim_end().chars().count() >= 20, "{expected}");
    // No runner-up of these tokens is near enough for the devices' other order of sums.
    assert_eq!(answer("cuda:1"), expected);
    assert_eq!(answer("cuda:2,cuda:0,cuda:1"), expected);
}

const CARDS: [&str; 5] =
    ["--devices", "cuda:0,cuda:1,cuda:2", "--batch-invariant", "--served-model-name", "twin"];

fn completion(server: &Served, seed: u64) -> Value {
    let body = json!({
        "model": "twin", "prompt": "3141592", "max_tokens": 12, "ignore_eos": true, "seed": seed, "logprobs": 3,
        "temperature": if seed == 0 { 0.0 } else { 0.8 },
    });
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"].clone()
}

/// What the processes that ended in order reported of their devices; nothing is left of any.
fn reports(folder: &Path) -> Vec<Report> {
    let files = fs::read_dir(folder).unwrap().flatten().map(|file| file.path());
    let files = files.filter(|file| file.extension().is_some_and(|extension| extension == "json"));
    let reports: Vec<_> = files.map(|file| Report::read(&file).unwrap()).collect();
    for report in &reports {
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:#?}");
    }
    reports
}

#[test]
fn software_driver_a_server_on_three_cards_has_a_process_for_each_and_answers_as_with_threads() {
    let (checkpoint, folder) = (checkpoint(), tempfile::tempdir().unwrap());
    let report = folder.path().join("%p.json");
    let serve = |isolation: &[&str]| {
        let arguments = [&CARDS[..], isolation].concat();
        Served::start_by(over_driver(&report), checkpoint.path().to_str().unwrap(), &arguments)
    };
    let of_threads: Vec<Value> = {
        let server = serve(&["--isolation", "thread"]);
        assert!(shards(server.pid()).is_empty());
        (0..4).map(|seed| completion(&server, seed)).collect()
    };
    let server = serve(&[]);
    let first = shards(server.pid());
    assert_eq!(first.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
    let of_processes: Vec<Value> = (0..4).map(|seed| completion(&server, seed)).collect();
    assert_eq!(of_processes, of_threads);

    let body =
        json!({"model": "twin", "prompt": "27", "max_tokens": 200, "stream": true, "ignore_eos": true});
    let mut events = server.stream("/v1/completions", &body);
    events.next().unwrap();
    signal(first[&1], Signal::KILL);
    let rest: Vec<String> = events.collect();
    let reason = format!("rank 1: its process {} was killed by SIGKILL", first[&1]);
    assert!(rest.iter().any(|event| event.contains(&reason)), "{rest:?}");
    eventually("the group is back", Duration::from_secs(60), || server.get("/readyz").0 == 200);
    let second = shards(server.pid());
    assert_eq!((second[&0], second[&2]), (first[&0], first[&2]), "survivors stay");
    assert_eq!(completion(&server, 0), of_threads[0]);

    let pid = server.pid();
    server.terminate();
    let (status, errors) = server.end(Duration::from_secs(60));
    assert_eq!(status, Some(0), "{errors}");
    assert!(shards(pid).is_empty());
    let of_ranks =
        reports(folder.path()).into_iter().filter(|report| report.calls.contains_key("cuMemCreate"));
    assert_eq!(of_ranks.count(), 3, "the killed one leaves none");
}

#[test]
fn software_driver_the_configuration_of_a_server_on_cards_says_that_ranks_are_processes() {
    let checkpoint = checkpoint();
    let printed = |arguments: &[&str]| {
        let mut command = over_driver(&checkpoint.path().join("report.json"));
        let printed = command.arg("serve").arg(checkpoint.path()).arg("--print-config").args(arguments);
        let printed = printed.output().unwrap();
        assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
        let text = String::from_utf8(printed.stdout).unwrap();
        let line = text.lines().find(|line| line.starts_with("isolation")).unwrap().to_owned();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let on_cards = printed(&CARDS);
    assert_eq!(on_cards, "isolation = \"process\" # the default of `consort serve` on GPUs");
    assert_eq!(printed(&[]), "isolation = \"thread\" # default");
    let given = printed(&[&CARDS[..], &["--isolation", "thread"]].concat());
    assert_eq!(given, "isolation = \"thread\" # --isolation");
}
