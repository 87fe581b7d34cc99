//! Programs that are no shards, other builds, and engines that are killed.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
};

use super::*;

const ENGINE_VARIABLE: &str = "CONSORT_TEST_ENGINE_OF";

/// Why an engine of such processes does not start: the whole chain.
async fn refusal(processes: &Arc<Processes>) -> String {
    let folder = checkpoint();
    let error = isolated(&folder, 2, processes).start().await.map(drop).expect_err("no engine comes of this");
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    until("all processes are gone", || shards().is_empty()).await;
    text
}

/// Run as a shard, it goes on as if nothing were.
#[test]
fn a_program_that_knows_nothing_of_shards() {}

#[test]
fn a_program_that_gives_up() {
    if super::super::is_misplaced() {
        eprintln!("libeverything.so.7: cannot open shared object file");
        std::process::exit(3);
    }
}

#[test]
fn a_program_that_says_nothing() {
    if super::super::is_misplaced() {
        std::thread::sleep(Duration::from_secs(600));
    }
}

#[tokio::test]
async fn a_program_that_starts_an_engine_first() {
    if super::super::is_misplaced() {
        let folder = checkpoint();
        let error = isolated(&folder, 2, &processes()).start().await.map(drop).expect_err("refused");
        eprintln!("{error}");
        std::process::exit(1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_without_shard_main_is_told_of_with_its_end() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let settings = WorkSettings::default;
    let text = refusal(&processes_of("programs::a_program_that_knows_nothing_of_shards", settings())).await;
    assert!(text.contains("exited with status 0 before it said which build it is"), "{text}");
    assert!(text.contains("must call consort::shard_main() at the start of main"), "{text}");
    let text = refusal(&processes_of("programs::a_program_that_gives_up", settings())).await;
    assert!(text.contains("exited with status 3"), "{text}");
    assert!(text.contains("it last said: libeverything.so.7: cannot open shared object file"), "{text}");
    let text = refusal(&processes_of("programs::a_program_that_starts_an_engine_first", settings())).await;
    assert!(text.contains("exited with status 1"), "{text}");
    assert!(text.contains("was started as a rank of another engine"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_says_nothing_is_killed() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let settings = WorkSettings { greeting_max: Duration::from_millis(500), ..WorkSettings::default() };
    let text = refusal(&processes_of("programs::a_program_that_says_nothing", settings)).await;
    assert!(text.contains("did not say within 500ms which build it is, and was killed"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executable_that_is_not_there_is_named() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let folder = checkpoint();
    let builder = tiny(&folder, 2).isolation(Isolation::Process).shard_executable("/nowhere/consort");
    let error = builder.start().await.map(drop).expect_err("no engine comes of this");
    let text = format!("{:#}", anyhow::Error::from(error));
    assert!(text.contains("its process could not be started from /nowhere/consort"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_build_is_refused_with_both_builds_named() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let settings = WorkSettings { build: [0xab; 16], ..WorkSettings::default() };
    let text = refusal(&processes_of("the_program_of_a_rank", settings)).await;
    let ours = format!("than the engine's ({})", "ab".repeat(16));
    assert!(text.contains("which is another build of Consort") && text.contains(&ours), "{text}");
}

/// An engine that another test kills: prints its ranks' processes, and waits.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_waits_for_its_end() {
    let Some(folder) = std::env::var_os(ENGINE_VARIABLE) else { return };
    let builder = Engine::builder().model(folder).tensor_parallel_size(3).threads_per_rank(1);
    let builder = builder.isolation(Isolation::Process).of_processes(&processes());
    let engine = builder.start().await.expect("processes start");
    println!("ready");
    // In the middle of steps.
    let _ = engine.generate("abc", greedy(4000)).expect("admitted").collect().await;
    tokio::time::sleep(Duration::from_secs(600)).await;
}

/// An engine that another test kills, whose ranks' programs never call `shard_main`.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_ranks_say_nothing() {
    let Some(folder) = std::env::var_os(ENGINE_VARIABLE) else { return };
    let settings = WorkSettings { greeting_max: Duration::from_secs(600), ..WorkSettings::default() };
    let processes = processes_of("programs::a_program_that_says_nothing", settings);
    let builder = Engine::builder().model(folder).tensor_parallel_size(3).threads_per_rank(1);
    let _ = builder.isolation(Isolation::Process).of_processes(&processes).start().await;
}

/// Runs an engine of three ranks in a process of its own, kills it once `is_ready`, and looks two seconds later.
fn kill_engine(test: &str, is_ready: impl FnOnce(&mut Child)) {
    let folder = checkpoint();
    let command = program(test);
    let mut engine = Command::new(command.executable)
        .args(command.arguments)
        .env(ENGINE_VARIABLE, folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the engine's process starts");
    is_ready(&mut engine);
    let ranks = shards_of(engine.id());
    assert_eq!(ranks.len(), 3, "{ranks:?}");
    engine.kill().expect("it is there");
    engine.wait().expect("it was there");
    std::thread::sleep(Duration::from_secs(2));
    for (rank, pid) in ranks {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        assert!(status.is_empty() || status.contains("State:\tZ"), "rank {rank} is left:\n{status}");
    }
}

#[test]
fn no_process_is_left_two_seconds_after_its_engine_was_killed() {
    let _guard = ONE_AT_A_TIME.blocking_lock();
    kill_engine("programs::an_engine_that_waits_for_its_end", |engine| {
        let lines = BufReader::new(engine.stdout.take().expect("its output is piped")).lines();
        // The harness prints the test's name before, on the same line.
        let is_ready = lines.map_while(Result::ok).any(|line| line.ends_with("ready"));
        assert!(is_ready, "the engine's process ended");
    });
    // Nothing but the system ends programs that know nothing of shards.
    kill_engine("programs::an_engine_whose_ranks_say_nothing", |engine| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while shards_of(engine.id()).len() < 3 {
            assert!(Instant::now() < deadline, "its ranks are not started");
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}
