//! `consort serve` with a process for each rank.

use std::{collections::BTreeMap, fs, thread, time::Duration};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::harness::{Served, consort, eventually, model, one_model_at_a_time};

/// How long a process may be there after its engine was killed.
const ORPHAN_MAX: Duration = Duration::from_secs(2);

fn serve(isolation: &str) -> Served {
    let arguments = ["--tp", "3", "--isolation", isolation, "--max-model-len", "512"];
    Served::start(model().to_str().unwrap(), &arguments)
}

/// The ranks' processes of a server, by rank.
pub(crate) fn shards(server: u32) -> BTreeMap<u16, i32> {
    let prefix = format!("CONSORT_SHARD={server}:");
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(environment) = fs::read(entry.path().join("environ")) else { continue };
        let variables = environment.split(|byte| *byte == 0);
        let rank = variables.filter_map(|one| std::str::from_utf8(one).ok()?.strip_prefix(&prefix)).next();
        if let Some(rank) = rank {
            found.insert(rank.parse().unwrap(), pid);
        }
    }
    found
}

pub(crate) fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

fn completion(server: &Served, seed: u64) -> Value {
    let body = json!({
        "model": "SmolLM2-135M-Instruct.Q4_1", "prompt": "The capital of France is", "max_tokens": 12,
        "temperature": if seed == 0 { 0.0 } else { 0.8 }, "seed": seed, "logprobs": 3,
    });
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"].clone()
}

/// Kills rank 1 while `body` is answered: the stream ends with who was killed and how, and the group comes back with
/// the others' processes.
pub(crate) fn lose_rank_1(server: &Served, body: &Value) {
    let first = shards(server.pid());
    let mut events = server.stream("/v1/completions", body);
    events.next().unwrap();
    signal(first[&1], Signal::KILL);
    let rest: Vec<String> = events.collect();
    let reason = format!("rank 1: its process {} was killed by SIGKILL", first[&1]);
    assert!(rest.iter().any(|event| event.contains(&reason)), "{rest:?}");
    eventually("the group is back", Duration::from_secs(60), || server.get("/readyz").0 == 200);
    let second = shards(server.pid());
    assert_eq!((second[&0], second[&2]), (first[&0], first[&2]), "survivors stay");
}

#[test]
fn a_server_of_processes_answers_as_one_of_threads_and_survives_the_loss_of_a_rank() {
    let _guard = one_model_at_a_time();
    let of_threads: Vec<Value> = {
        let server = serve("thread");
        assert!(shards(server.pid()).is_empty());
        (0..4).map(|seed| completion(&server, seed)).collect()
    };
    let server = serve("process");
    let first = shards(server.pid());
    assert_eq!(first.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
    let of_processes: Vec<Value> = (0..4).map(|seed| completion(&server, seed)).collect();
    assert_eq!(of_processes, of_threads);

    let body = json!({"model": "SmolLM2-135M-Instruct.Q4_1", "prompt": "Once", "max_tokens": 400, "stream": true,
                      "ignore_eos": true});
    lose_rank_1(&server, &body);
    assert_eq!(completion(&server, 0), of_threads[0]);

    let pid = server.pid();
    server.terminate();
    let (status, errors) = server.end(Duration::from_secs(60));
    assert_eq!(status, Some(0), "{errors}");
    assert!(shards(pid).is_empty());
}

#[test]
fn no_rank_is_left_two_seconds_after_its_server_was_killed() {
    let _guard = one_model_at_a_time();
    let server = serve("process");
    let pid = server.pid();
    let body = json!({"model": "SmolLM2-135M-Instruct.Q4_1", "prompt": "Once", "max_tokens": 400, "stream": true,
                      "ignore_eos": true});
    let mut events = server.stream("/v1/completions", &body);
    events.next().unwrap();
    assert_eq!(shards(pid).len(), 3);
    // Also a rank that is stopped, and could not notice by itself.
    signal(shards(pid)[&2], Signal::STOP);
    signal(pid as i32, Signal::KILL);
    thread::sleep(ORPHAN_MAX);
    assert!(shards(pid).is_empty());
}

#[test]
fn a_rank_called_by_hand_says_what_it_is() {
    let output = consort().arg("shard").output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("consort serve --isolation process"), "{errors}");
}
