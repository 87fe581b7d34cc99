//! `consort run` and what it says when called wrongly.

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
fn wrong_calls_say_what_where_and_what_to_do() {
    let fixture = root().join("parallel/fixtures/tiny_llama");
    let tiny = fixture.to_str().unwrap();
    let cases: [(&[&str], i32, &str); 5] = [
        (&["run", "/nowhere/model.gguf", "hi"], 1, "/nowhere/model.gguf"),
        (&["run", tiny, "hi", "--tp", "5"], 1, "4 query heads"),
        (&["run", tiny, "hi", "--dtype", "float8"], 1, "float8"),
        (&["serve"], 2, "Usage"),
        (&["serve", "/nowhere/cluster.toml"], 1, "/nowhere/cluster.toml"),
    ];
    for (arguments, code, word) in cases {
        let output = consort().args(arguments).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        assert!(errors.contains(word) && !errors.contains("panicked"), "{arguments:?}: {errors}");
    }
}
