//! `consort run` and what it says when called wrongly.

use std::net::TcpListener;

use crate::harness::{consort, model, one_model_at_a_time, root};

#[test]
fn run_answers_on_standard_output_and_reports_on_standard_error() {
    let _guard = one_model_at_a_time();
    let question = "What is the capital of France?";
    let arguments = ["--tp", "3", "--temperature", "0", "--max-tokens", "24"];
    let output = consort().arg("run").arg(model()).arg(question).args(arguments).output().unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "{err}");
    assert!(out.contains("Paris"), "{out}");
    assert!(err.contains("tokens/s") && err.contains("first after"), "{err}");
    assert!(!out.contains("tokens/s"), "{out}");
}

#[test]
fn bench_measures_what_it_is_asked_for_as_a_table_and_as_json() {
    let _guard = one_model_at_a_time();
    let bench = |arguments: &[&str]| {
        let cases = ["--cases", "8+4,8+1,6+5x3", "--rounds", "2", "--tp", "2", "--dtype", "bfloat16"];
        let output = consort().arg("bench").arg(model()).args(cases).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let table = bench(&[]);
    for part in ["bfloat16 on ", "8+4 ", "8+1 ", "6+5x3 ", "loaded in "] {
        assert!(table.contains(part), "{part} is not in {table}");
    }
    let report: serde_json::Value = serde_json::from_str(&bench(&["--json"])).unwrap();
    assert_eq!((&report["ranks"], &report["dtype"]), (&2.into(), &"bfloat16".into()), "{report}");
    assert!(report["peak_rss_bytes"].as_u64().unwrap() > 100 << 20, "{report}");
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(
        cases.iter().map(|case| case["case"].as_str().unwrap()).collect::<Vec<_>>(),
        ["8+4", "8+1", "6+5x3"]
    );
    for case in cases {
        let rounds = case["rounds"].as_array().unwrap();
        assert_eq!(rounds.len(), 2, "{case}");
        for round in rounds {
            for speed in ["first_token_s", "prefill_tokens_per_s", "end_to_end_tokens_per_s"] {
                assert!(round[speed].as_f64().unwrap() > 0.0, "{speed} of {case}");
            }
            assert_eq!(round["decode_tokens_per_s"].is_null(), case["case"] == "8+1", "{case}");
        }
    }
}

#[test]
fn wrong_calls_say_what_where_and_what_to_do() {
    let fixture = root().join("parallel/fixtures/tiny_llama");
    let tiny = fixture.to_str().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let lock = root().join("Cargo.lock");
    let damaged = std::env::temp_dir().join(format!("consort-damaged-{}.gguf", std::process::id()));
    std::fs::write(&damaged, b"GGUF\x03\0\0\0\x01\0\0\0").unwrap();
    let cases: [(&[&str], i32, &str); 13] = [
        (&["bench", tiny, "--cases", "8+0"], 2, "write PROMPT+TOKENS or PROMPT+TOKENSxN"),
        (&["run", "/nowhere/model.gguf", "hi"], 1, "/nowhere/model.gguf"),
        (&["run", tiny, "hi", "--tp", "5"], 1, "4 query heads"),
        (&["run", tiny, "hi", "--dtype", "float8"], 1, "float8"),
        (&["serve"], 2, "Usage"),
        (&["serve", "/nowhere/cluster.toml"], 1, "/nowhere/cluster.toml: nothing is there"),
        (&["serve", tiny, "--print-config", "--tp", "5"], 1, "4 query heads"),
        (&["serve", tiny, "--cpu-isa", "portabel"], 1, "did you mean \"portable\"?"),
        (&["serve", tiny, "--port", &port], 1, "another program does; stop it, or choose another port"),
        (&["serve", tiny, "--host", "192.0.2.1"], 1, "this machine has no such address"),
        (&["serve", damaged.to_str().unwrap(), "--port", "0"], 1, "damaged or incomplete at byte"),
        (&["serve", lock.to_str().unwrap()], 1, "is not a checkpoint"),
        (&["serve", tiny, "--tensor-paralel-size", "2"], 2, "a similar argument exists"),
    ];
    for (arguments, code, word) in cases {
        let output = consort().args(arguments).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        assert!(errors.contains(word) && !errors.contains("panicked"), "{arguments:?}: {errors}");
    }
    std::fs::remove_file(damaged).unwrap();
}

#[test]
fn print_config_shows_what_would_be_served_and_where_it_is_from() {
    let print = |source: &str, arguments: &[&str]| {
        let output = consort()
            .args(["serve", source, "--print-config"])
            .args(arguments)
            .env("CONSORT_CPU_ISA", "portable")
            .env("CONSORT_SCHEDULER__MAX_NUM_SEQS", "7")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let printed = print(model().to_str().unwrap(), &["--tp", "2", "--port", "1"]);
    for (line, origin) in [
        ("tensor_parallel_size = 2", "--tensor-parallel-size"),
        ("cpu_isa = \"portable\"", "environment variable CONSORT_CPU_ISA"),
        ("max_num_seqs = 7", "environment variable CONSORT_SCHEDULER__MAX_NUM_SEQS"),
        ("listen = \"127.0.0.1:1\"", "port from --port"),
        ("block_size = 16", "default"),
        ("kv_cache_memory_bytes = ", "computed"),
    ] {
        let found = printed.lines().find(|written| written.starts_with(line)).unwrap_or_default();
        assert!(found.contains(&format!("# {origin}")), "{line}: {origin}\n{printed}");
    }
    let file = std::env::temp_dir().join(format!("consort-printed-{}.toml", std::process::id()));
    std::fs::write(&file, &printed).unwrap();
    let again = print(file.to_str().unwrap(), &[]);
    std::fs::remove_file(&file).unwrap();
    let values = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(|line| line.split(" # ").next().unwrap().trim().to_owned()).collect()
    };
    assert_eq!(values(&again), values(&printed));
}
