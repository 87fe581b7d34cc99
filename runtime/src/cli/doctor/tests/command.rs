use std::time::Instant;

use clap::Parser;
use tempfile::TempDir;

use super::*;
use crate::{
    cli::args::{Cli, Command},
    testing,
};

/// A machine without CUDA, whatever this one has: libraries are looked for in an empty folder.
fn surroundings(folder: &TempDir, variables: &[(&str, &str)]) -> Surroundings {
    Surroundings {
        settings: Settings {
            library: Some(folder.path().to_path_buf()),
            cache: Some(folder.path().join("cache")),
            ..Settings::default()
        },
        environment: variables.iter().copied().collect(),
        root: PathBuf::from("/"),
    }
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn args(words: &[&str]) -> DoctorArgs {
    let line = [&["consort", "doctor"], words].concat();
    let Command::Doctor(args) = Cli::try_parse_from(line).expect("well spelt").command else {
        panic!("doctor")
    };
    args
}

async fn examine(surroundings: &Surroundings, words: &[&str]) -> (String, anyhow::Result<()>) {
    let examination = Examination::new(&args(words), surroundings).await;
    let text = if args(words).json { examination.json().expect("JSON") } else { examination.text() };
    (text, examination.outcome())
}

#[tokio::test]
async fn a_machine_without_cuda_serves_on_its_cpu_and_says_so_within_a_second() {
    let folder = folder();
    let started = Instant::now();
    let (text, outcome) = examine(&surroundings(&folder, &[("CONSORT_CPU_ISA", "portable")]), &[]).await;
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert!(outcome.is_ok(), "{text}");
    assert!(gaps(&text)[0].contains("no CUDA driver"), "{text}");
    assert!(text.contains(&format!("{}/libcuda.so.1: not there", folder.path().display())), "{text}");
    assert!(text.contains("with portable\n") && text.contains("  CONSORT_CPU_ISA  portable\n"), "{text}");
    assert!(!folder.path().join("cache").exists(), "looking makes nothing");
}

#[tokio::test]
async fn a_card_that_is_asked_for_and_not_there_fails_and_a_cpu_does_not() {
    let folder = folder();
    let surroundings = surroundings(&folder, &[]);
    for device in ["cuda", "cuda:0", "cpu,cuda:3", "cuda:GPU-00112233-4455-6677-8899-aabbccddeeff"] {
        let (text, outcome) = examine(&surroundings, &["--device", device]).await;
        let error = outcome.expect_err("there is no card");
        assert_eq!(super::super::super::exit_code(&error), super::super::super::FAILED);
        assert!(
            error.to_string().ends_with("cannot be used on this machine; the report says why"),
            "{error}"
        );
        assert!(!error.to_string().contains("cpu"), "that one can: {error}");
        let last = gaps(&text).last().copied().unwrap_or_default();
        assert!(last.starts_with("no card can be used without the driver -> see the driver above"), "{text}");
    }
    let (text, outcome) = examine(&surroundings, &["--device", "cpu"]).await;
    assert!(outcome.is_ok() && text.contains("cpu can be used\n"), "{text}");
}

#[test]
fn a_device_that_is_none_is_a_wrong_call() {
    for (device, hint) in
        [("gpu0", "did you mean \"cuda:0\"?"), ("cuda:x", "\"cuda:N\""), ("", "use \"cpu\"")]
    {
        let error = Cli::try_parse_from(["consort", "doctor", "--device", device]).expect_err("no device");
        assert!(error.exit_code() == 2 && error.to_string().contains(hint), "{device}: {error}");
    }
}

#[tokio::test]
async fn the_devices_of_a_topology_must_be_there() {
    let folder = folder();
    testing::write_checkpoint(folder.path());
    let write = |name: &str, devices: &str| {
        let text = format!(
            "[model]\npath = \".\"\n[[node]]\ndevices = [{devices}]\n[server]\napi_key_env = \"NO_SUCH_KEY\"\n"
        );
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("the test folder is writable");
        path.to_str().expect("Unicode").to_owned()
    };
    let surroundings = surroundings(&folder, &[]);
    let (text, outcome) = examine(&surroundings, &[&write("cpus.toml", "\"cpu\", \"cpu\"")]).await;
    assert!(outcome.is_ok(), "the server's key is none of a device's: {outcome:?}");
    assert!(text.contains("\n  rank 1 ") && text.contains("cpu can be used"), "{text}");
    let (text, outcome) = examine(&surroundings, &[&write("cards.toml", "\"cuda:0\", \"cuda:1\"")]).await;
    let error = outcome.expect_err("there is no card").to_string();
    assert_eq!(error, "cuda:0, cuda:1 cannot be used on this machine; the report says why");
    assert!(text.contains("cuda:1 cannot be used\n"), "{text}");
    let (text, outcome) = examine(&surroundings, &[&write("wrong.toml", "\"gpu\"")]).await;
    let error = outcome.expect_err("no device").to_string();
    assert!(error.contains("\"gpu\" is no device"), "{error}");
    assert!(text.contains("A model can be served on"), "the report is there nevertheless: {text}");
}

#[tokio::test]
async fn json_is_one_object_without_the_value_of_a_key() {
    let folder = folder();
    let variables =
        [("CONSORT_API_KEY", "sk-8675309123"), ("CONSORT_SERVER__API_KEY_ENV", "CONSORT_API_KEY")];
    let (text, outcome) = examine(&surroundings(&folder, &variables), &["--json", "--device", "cuda"]).await;
    assert!(outcome.is_err());
    assert!(!text.contains("8675309123"), "{text}");
    let seen: serde_json::Value = serde_json::from_str(&text).expect("one object");
    assert_eq!(seen["driver"]["status"], "missing");
    assert_eq!(seen["environment"][0], serde_json::json!({"name": "CONSORT_API_KEY", "value": null}));
    assert_eq!(seen["asked"]["devices"][0]["is_usable"], false);
    assert_eq!(seen["can_serve"], serde_json::json!(["cpu"]));
}

#[tokio::test]
async fn an_odd_machine_is_told_of_as_far_as_it_can_be_read() {
    let folder = folder();
    let surroundings = Surroundings { root: folder.path().join("nothing"), ..surroundings(&folder, &[]) };
    let (text, outcome) = examine(&surroundings, &[]).await;
    assert!(outcome.is_ok() && text.contains("not told by the system"), "{text}");
    assert!(gaps(&text)[0].starts_with("no CUDA driver -> nothing to do for serving on CPUs"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_hangs_or_panics_ends_neither_the_report_nor_its_wait() {
    let (release, held) = std::sync::mpsc::channel::<()>();
    let hung = within(Duration::from_millis(20), move || held.recv().is_ok()).await;
    assert_eq!(hung, Err("it did not answer within 0 s".to_owned()));
    drop(release);
    let cut = within(ANSWER_MAX, || -> u8 { panic!("as cudarc does") }).await.expect_err("a panic");
    assert!(cut.starts_with("asking it was cut short: "), "{cut}");
    assert_eq!(within(ANSWER_MAX, || 7).await, Ok(7));
    let facts = Facts { driver: CudaFacts::unanswered(cut).driver, ..without_cuda() };
    assert!(text(&facts).contains("  ! nothing is known of CUDA: asking it was cut short"));
}
