//! The built command on CUDA devices, over a software driver.

use std::{fs, path::Path, process::Output};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::harness::{consort, root};

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

/// `consort run`, greedy, on these devices.
fn run(checkpoint: &Path, devices: &str, report: &Path) -> Output {
    consort()
        .args(["run", checkpoint.to_str().unwrap(), "3141592", "--raw"])
        .args(["--max-tokens", "20", "--temperature", "0", "--min-tokens", "20", "--dtype", "bfloat16"])
        .args(["--devices", devices])
        .env("CONSORT_CUDA_LIB_PATH", consort_software_driver::folder())
        .env("CONSORT_CACHE_DIR", report.with_extension("cache"))
        .env("CONSORT_SOFTWARE_DRIVER_DEVICES", "3")
        .env("CONSORT_SOFTWARE_DRIVER_REPORT", report)
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
