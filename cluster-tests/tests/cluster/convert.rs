//! `consort convert`: the folder answers as the GGUF file does, in little memory, whole or not at all.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use consort::{Completion, Engine, GenerateOptions, Message};
use consort_kernels::{Element, element::bf16};
use consort_parallel::checkpoint::{Checkpoint, Encoding};
use rustix::process::Signal;

use crate::harness::{consort, eventually, model, one_model_at_a_time, root};

/// An absent path for an output, in a folder that holds nothing else.
fn output(name: &str) -> PathBuf {
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR")).join("convert").join(name);
    let _ = fs::remove_dir_all(&parent);
    fs::create_dir_all(&parent).unwrap();
    parent.join("out")
}

fn beside(output: &Path) -> Vec<PathBuf> {
    fs::read_dir(output.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Prompt and answer tokens of a few greedy questions at width 2.
async fn answers(source: &Path) -> Vec<(Vec<u32>, Completion)> {
    let engine =
        Engine::builder().model(source).tensor_parallel_size(2).max_model_len(512).start().await.unwrap();
    let options = GenerateOptions {
        max_tokens: Some(24),
        temperature: Some(0.0),
        logprobs: Some(3),
        ..GenerateOptions::default()
    };
    let mut answers = Vec::new();
    for question in ["What is the capital of France?", "Count: 1, 2, 3, 🦊 é\n\n  <|im_end|>"] {
        for stream in [
            engine.chat(&[Message::user(question)], options.clone()).unwrap(),
            engine.generate(question, options.clone()).unwrap(),
        ] {
            let prompt = stream.prompt_tokens().to_vec();
            answers.push((prompt, stream.collect().await.unwrap()));
        }
    }
    engine.shutdown(Duration::from_secs(5)).await;
    answers
}

#[tokio::test(flavor = "multi_thread")]
async fn a_converted_model_answers_with_the_same_bits_as_its_gguf_file() {
    let _guard = one_model_at_a_time();
    let folder = output("smollm2");
    let run = consort()
        .arg("convert")
        .arg(model())
        .arg(&folder)
        .args(["--max-shard-size", "100MB"])
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8(run.stdout).unwrap(), String::from_utf8(run.stderr).unwrap());
    assert!(run.status.success(), "{err}");
    assert!(out.contains("272 tensors in bfloat16, 269.0 MB of weights in 3 files"), "{out}");
    println!("{}", out.trim_end());
    assert_eq!(beside(&folder), std::slice::from_ref(&folder), "nothing stays beside it");

    let (of_gguf, of_folder) = (answers(&model()).await, answers(&folder).await);
    assert!(of_gguf[0].1.text.contains("Paris"), "{}", of_gguf[0].1.text);
    for ((prompt, expected), (prompt_of_folder, got)) in of_gguf.iter().zip(&of_folder) {
        assert_eq!(prompt_of_folder, prompt);
        assert_eq!((&got.tokens, &got.text), (&expected.tokens, &expected.text));
        // Log-probabilities are those of all logits, so equal ones mean equal logits.
        assert_eq!(got.logprobs, expected.logprobs);
    }
    fs::remove_dir_all(folder).unwrap();
}

/// The embedding alone is 113 MB as f32; tokenizer and buffers are the rest of what is allowed.
#[cfg(target_os = "linux")]
#[test]
fn converting_takes_less_memory_than_the_largest_tensor() {
    const PEAK_BYTES_MAX: u64 = 110_000_000;
    let _guard = one_model_at_a_time();
    let folder = output("memory");
    let begin = Instant::now();
    let mut child = consort().arg("convert").arg(model()).arg(&folder).stdout(Stdio::null()).spawn().unwrap();
    let mut peak = 0;
    let status = loop {
        let text = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        // The high-water mark only rises, so the last sample before the end counts; the end itself is small files.
        if let Some(line) = text.lines().find(|line| line.starts_with("VmHWM:")) {
            peak = 1024 * line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
        }
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    println!("converted in {:.2} s, peak RSS {} MB", begin.elapsed().as_secs_f64(), peak / 1_000_000);
    assert!(status.success() && peak > 0 && peak < PEAK_BYTES_MAX, "{status}, {peak} bytes");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_float32_folder_is_rounded_to_bfloat16() {
    let (source, folder) = (root().join("parallel/fixtures/twin"), output("twin"));
    let run = consort().arg("convert").arg(&source).arg(&folder).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let (from, to) = (Checkpoint::open(&source).unwrap(), Checkpoint::open(&folder).unwrap());
    assert_eq!((from.config(), from.generation_defaults()), (to.config(), to.generation_defaults()));
    for name in from.names() {
        let (info, converted) = (from.tensor(name).unwrap(), to.tensor(name).unwrap());
        assert_eq!((info.encoding, converted.encoding), (Encoding::F32, Encoding::Bf16));
        let read = |checkpoint: &Checkpoint| {
            let mut values = vec![0.0; info.rows() * info.cols()];
            checkpoint.read_rows(name, 0..info.rows(), 0..info.cols(), &mut values).unwrap();
            values
        };
        let rounded: Vec<f32> =
            read(&from).into_iter().map(|value| <bf16 as Element>::round(value).widen()).collect();
        assert_eq!(read(&to), rounded, "{name}");
    }
}

/// Once the partial folder is there, signals are listened to and most of the work is still to be done.
fn signalled(mut command: Command, output: &Path, signal: Signal) -> Output {
    let child = command.arg(model()).arg(output).stderr(Stdio::piped()).spawn().unwrap();
    eventually("a partial folder", Duration::from_secs(60), || !beside(output).is_empty());
    let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
    // It is not waited for yet, so the number is still its own.
    rustix::process::kill_process(pid, signal).unwrap();
    child.wait_with_output().unwrap()
}

/// Whether this process ignores a signal, and with it all that it starts.
fn is_ignored_here(signal: Signal) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal.as_raw() - 1) & 1 == 1
}

#[test]
fn a_conversion_that_is_told_to_stop_leaves_nothing() {
    let _guard = one_model_at_a_time();
    let folder = output("stopped");
    // Under nohup a child of this test ignores SIGHUP, too, as it should.
    let signals =
        [Signal::TERM, Signal::INT, Signal::HUP].into_iter().filter(|signal| !is_ignored_here(*signal));
    for signal in signals {
        let mut command = consort();
        command.arg("convert");
        let ended = signalled(command, &folder, signal);
        let errors = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{signal:?}: {errors}");
        assert!(errors.contains("interrupted"), "{signal:?}: {errors}");
        assert_eq!(beside(&folder), Vec::<PathBuf>::new(), "{signal:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_conversion_under_nohup_outlives_its_terminal() {
    let _guard = one_model_at_a_time();
    let folder = output("nohup");
    let mut command = Command::new("nohup");
    command.arg(consort().get_program()).arg("convert").stdin(Stdio::null()).stdout(Stdio::null());
    let ended = signalled(command, &folder, Signal::HUP);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    assert_eq!(beside(&folder), std::slice::from_ref(&folder));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn wrong_conversions_say_what_where_and_what_to_do() {
    let (tiny, free) = (root().join("parallel/fixtures/twin"), output("wrong"));
    let (tiny, free) = (tiny.to_str().unwrap(), free.to_str().unwrap());
    let taken = root().join("parallel/fixtures");
    let taken = taken.to_str().unwrap();
    let unreadable = root().join("Cargo.toml");
    let unreadable = unreadable.to_str().unwrap();
    let cases: [(&[&str], i32, &str); 10] = [
        (&["/nowhere/model.gguf", free], 1, "/nowhere/model.gguf"),
        (&[unreadable, free], 1, "neither a GGUF file nor a folder"),
        (&[&format!("{tiny}.gguf"), free], 1, "tokenizer"),
        (&[tiny, taken], 1, "--overwrite"),
        (&[tiny, taken, "--overwrite"], 1, "no config.json"),
        (&[tiny, tiny, "--overwrite"], 1, "would be deleted"),
        (&[tiny, "/dev/null/out"], 1, "/dev/null is a file and not a folder"),
        (&[tiny, "/proc", "--overwrite"], 1, "/proc is a mount point"),
        (&[tiny, free, "--dtype", "float8"], 2, "bfloat16"),
        (&[tiny, free, "--max-shard-size", "big"], 2, "5GB"),
    ];
    for (arguments, code, word) in cases {
        let output = consort().arg("convert").args(arguments).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        assert!(errors.contains(word) && !errors.contains("panicked"), "{arguments:?}: {errors}");
    }
    assert!(!Path::new(free).exists());
}
