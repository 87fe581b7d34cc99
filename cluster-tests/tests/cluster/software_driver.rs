//! The built command on CUDA devices, over a software driver.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use consort_software_driver::Report;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::{
    harness::{Served, consort, root},
    processes::{lose_rank_1, shards},
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
    assert_eq!(shards(server.pid()).into_keys().collect::<Vec<_>>(), [0, 1, 2]);
    let of_processes: Vec<Value> = (0..4).map(|seed| completion(&server, seed)).collect();
    assert_eq!(of_processes, of_threads);

    let body =
        json!({"model": "twin", "prompt": "27", "max_tokens": 200, "stream": true, "ignore_eos": true});
    lose_rank_1(&server, &body);
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

/// Chats of sixteen clients: long and short prompts, greedy and drawn, some with log-probabilities, which no other step
/// is begun behind.
fn clients(greedy: bool) -> Vec<Value> {
    let client = |at: usize| {
        let prompt: String = "314159265358979".chars().cycle().skip(at).take(1 + at * 5 % 23).collect();
        json!({
            "model": "twin", "prompt": prompt, "max_tokens": 8 + at * 3 % 13, "ignore_eos": true, "seed": at,
            "temperature": if greedy || at.is_multiple_of(3) { 0.0 } else { 0.8 },
            "logprobs": if greedy || at.is_multiple_of(5) { Some(2) } else { None },
        })
    };
    (0..16).map(client).collect()
}

fn ask(server: &Served, body: &Value) -> Value {
    let (status, answer) = server.post("/v1/completions", body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0].clone()
}

fn ask_all_at_once(server: &Served, bodies: &[Value]) -> Vec<Value> {
    std::thread::scope(|scope| {
        let asked: Vec<_> = bodies.iter().map(|body| scope.spawn(|| ask(server, body))).collect();
        asked.into_iter().map(|answer| answer.join().unwrap()).collect()
    })
}

/// Answers of a server on three cards, with a process for each, to these bodies at once and one after another; and what
/// the ranks' drivers reported.
fn serve_sixteen(arguments: &[&str], bodies: &[Value]) -> ([Vec<Value>; 2], Vec<Report>) {
    let (checkpoint, folder) = (checkpoint(), tempfile::tempdir().unwrap());
    let report = folder.path().join("%p.json");
    let server = Served::start_by(over_driver(&report), checkpoint.path().to_str().unwrap(), arguments);
    assert_eq!(shards(server.pid()).len(), 3);
    let together = ask_all_at_once(&server, bodies);
    let alone = bodies.iter().map(|body| ask(&server, body)).collect();
    server.terminate();
    let (status, errors) = server.end(Duration::from_secs(60));
    assert_eq!(status, Some(0), "{errors}");
    let mut of_ranks = reports(folder.path());
    of_ranks.retain(|report| report.graph_launches > 0);
    assert_eq!(of_ranks.len(), 3);
    ([together, alone], of_ranks)
}

/// Sums that NCCL did.
fn by_nccl(reports: &[Report]) -> u64 {
    let calls = reports.iter().flat_map(|report| &report.calls);
    calls.filter(|(name, _)| name.starts_with("ncclAllReduce@")).map(|(_, count)| count).sum()
}

#[test]
fn software_driver_sixteen_clients_of_a_server_on_three_cards_get_what_each_gets_alone() {
    let ([together, alone], reports) = serve_sixteen(&CARDS, &clients(false));
    assert_eq!(together, alone);
    assert!(reports.iter().all(|report| report.graphs_behind > 5), "steps overlap: {reports:#?}");
    assert_eq!(by_nccl(&reports), 0, "its order of sums is nobody's to say");
}

/// A greedy answer's tokens, and by how much each was ahead of the next one.
fn margins(choice: &Value) -> Vec<(String, f64)> {
    let logprobs = &choice["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap().iter();
    let tops = logprobs["top_logprobs"].as_array().unwrap();
    let margin = |top: &Value| {
        let mut values: Vec<f64> =
            top.as_object().unwrap().values().map(|value| value.as_f64().unwrap()).collect();
        values.sort_by(|a, b| b.total_cmp(a));
        values[0] - values[1]
    };
    tokens.zip(tops).map(|(token, top)| (token.as_str().unwrap().to_owned(), margin(top))).collect()
}

#[test]
fn software_driver_a_server_whose_ranks_sum_through_nccl_answers_as_with_kernels_but_for_ties() {
    let bodies = clients(true);
    let (by_kernels, none) = serve_sixteen(&CARDS, &bodies);
    let arguments =
        ["--devices", "cuda:0,cuda:1,cuda:2", "--served-model-name", "twin", "--all-reduce", "nccl"];
    // Few tell log-probabilities, so that steps overlap here, too.
    let mut few = bodies.clone();
    for body in few.iter_mut().enumerate().filter(|(at, _)| !at.is_multiple_of(5)).map(|(_, body)| body) {
        body["logprobs"] = Value::Null;
    }
    let (through_nccl, some) = serve_sixteen(&arguments, &few);
    assert!(by_nccl(&none) == 0 && by_nccl(&some) > 300, "{none:#?} {some:#?}");
    assert!(some.iter().all(|report| report.graphs_behind > 5), "steps overlap: {some:#?}");
    for answers in through_nccl {
        for (got, expected) in answers.iter().zip(&by_kernels[1]) {
            let (got, expected) = (got["text"].as_str().unwrap(), margins(expected));
            assert_eq!(got.chars().count(), expected.len());
            // A letter a token. What follows a tie that went the other way is another text.
            let differs = got.chars().zip(&expected).position(|(got, (token, _))| got.to_string() != *token);
            assert!(differs.is_none_or(|at| expected[at].1 < 0.05), "{got} instead of {expected:?}");
        }
    }
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
