//! Ranks that are processes of this very test program, which runs as a shard where a test below calls
//! [`shard_status`].

mod card_faults;
mod cards;
mod dispatch;
mod frames;
mod leaks;
mod losses;
mod programs;
mod rounds;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use consort_kernels::{
    DType,
    cuda::{cubins::Cubins, settings::Settings},
    device::Isa,
};
use consort_parallel::{
    checkpoint::Checkpoint,
    model::{AllReduce, LoadOptions, STEP_LIMIT},
    partition::Partition,
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{
    Processes, WorkSettings,
    spawn::{ShardCommand, Spawner},
    worker::shard_status,
};
use crate::{
    Completion, Engine, EngineBuilder, EnsembleState, GenerateOptions, Isolation,
    engine::ModelFactory,
    testing::{self, greedy},
    topology::DeviceSpec,
};

/// Children of this process are told apart by their number alone: one test at a time.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// The program of all ranks below: does nothing unless this process was started as a shard.
#[test]
fn the_program_of_a_rank() {
    if let Some(status) = shard_status() {
        std::process::exit(status.into());
    }
}

/// This program, which runs one of its tests alone.
fn program(test: &str) -> ShardCommand {
    let arguments = [format!("shard_process::tests::{test}"), "--exact".into(), "--nocapture".into()];
    ShardCommand {
        executable: std::env::current_exe().expect("a test has an executable"),
        arguments: arguments.into_iter().map(Into::into).collect(),
    }
}

fn processes_of(test: &str, settings: WorkSettings) -> Arc<Processes> {
    let spawner = Spawner::new().expect("a thread");
    Arc::new(Processes { spawner, command: program(test), settings })
}

fn processes() -> Arc<Processes> {
    processes_of("the_program_of_a_rank", WorkSettings::default())
}

fn checkpoint() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    folder
}

/// Of ranks as threads, and the blueprint of those as processes.
fn model_factory(folder: &TempDir, ranks: usize) -> ModelFactory {
    let checkpoint = Checkpoint::open(folder.path()).expect("it was written");
    let partition = Partition::new(checkpoint.config(), ranks, None).expect("it can be divided");
    let settings = Settings::default();
    let options = LoadOptions {
        dtype: DType::F32,
        max_batch_tokens: 64,
        block_size: 16,
        max_num_seqs: 8,
        max_model_len: 512,
        num_blocks: 64,
        step_limit: STEP_LIMIT,
        deterministic: true,
        separate_processes: false,
        all_reduce: AllReduce::Auto,
    };
    ModelFactory {
        checkpoint,
        partition,
        options,
        num_blocks: options.num_blocks,
        host_blocks: 0,
        overlaps: true,
        devices: vec![DeviceSpec::Cpu(None); ranks],
        threads_per_rank: 1,
        isa: Isa::detect(),
        cubins: Arc::new(Cubins::new(settings.clone())),
        settings,
    }
}

fn tiny(folder: &TempDir, ranks: usize) -> EngineBuilder {
    Engine::builder()
        .model(folder.path())
        .tensor_parallel_size(ranks)
        .threads_per_rank(1)
        .dtype("float32")
        .served_model_name("tiny")
}

fn isolated(folder: &TempDir, ranks: usize, processes: &Arc<Processes>) -> EngineBuilder {
    tiny(folder, ranks).isolation(Isolation::Process).of_processes(processes)
}

async fn until(what: &str, condition: impl FnMut() -> bool) {
    testing::until_within(Duration::from_secs(60), what, condition).await;
}

async fn until_ready(engine: &Engine) {
    let begin = Instant::now();
    while engine.watch().state() != EnsembleState::Ready {
        assert!(begin.elapsed() < Duration::from_secs(60), "the group is not ready: {:#?}", engine.status());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Processes that `parent` started as shards and that have not ended, by rank.
fn shards_of(parent: u32) -> BTreeMap<u16, i32> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc").expect("Linux").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        // The name before it may hold anything.
        let Some((_, after)) = stat.rsplit_once(')') else { continue };
        let mut fields = after.split_whitespace();
        let (state, ppid) = (fields.next(), fields.next());
        if state == Some("Z") || ppid != Some(&parent.to_string()) {
            continue;
        }
        let Ok(environment) = fs::read(entry.path().join("environ")) else { continue };
        let prefix = format!("CONSORT_SHARD={parent}:");
        let variables = environment.split(|byte| *byte == 0);
        let rank = variables.filter_map(|one| std::str::from_utf8(one).ok()?.strip_prefix(&prefix)).next();
        if let Some(rank) = rank.and_then(|rank| rank.parse().ok()) {
            found.insert(rank, pid);
        }
    }
    found
}

fn shards() -> BTreeMap<u16, i32> {
    shards_of(std::process::id())
}

fn signal(pid: i32, signal: Signal) {
    let pid = Pid::from_raw(pid).expect("a process");
    kill_process(pid, signal).expect("the process is there");
}

/// Notes which ranks load.
#[derive(Clone, Default)]
struct Loads(Arc<Mutex<BTreeSet<u16>>>);

impl Loads {
    fn watch(&self, builder: EngineBuilder) -> EngineBuilder {
        let loads = self.clone();
        builder.on_progress(move |progress| {
            loads.0.lock().unwrap_or_else(PoisonError::into_inner).insert(progress.rank.0);
        })
    }

    fn take(&self) -> BTreeSet<u16> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// So many requests of all kinds at once: long and short prompts, greedy and sampled, penalties, log-probabilities.
async fn mixed(engine: &Engine, requests: u32) -> Vec<Completion> {
    let requests = (0..requests).map(|at| {
        let len = 1 + (at * 37) % 300;
        let prompt: Vec<u32> = (0..len).map(|i| (i * 31 + at * 17) % 256).collect();
        let options = GenerateOptions {
            max_tokens: Some(4 + (at as usize * 5) % 40),
            temperature: Some([0.0, 0.7, 1.3][at as usize % 3]),
            top_p: at.is_multiple_of(4).then_some(0.9),
            top_k: at.is_multiple_of(5).then_some(40),
            frequency_penalty: at.is_multiple_of(3).then_some(0.5),
            logit_bias: if at.is_multiple_of(6) { BTreeMap::from([(65, 2.5)]) } else { BTreeMap::new() },
            seed: Some(i64::from(at)),
            logprobs: at.is_multiple_of(2).then_some(at % 6),
            prompt_logprobs: at.is_multiple_of(7).then_some(2),
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        let stream = engine.generate(prompt, options).expect("admitted");
        async move { stream.collect().await.expect("ends") }
    });
    futures_util::future::join_all(requests).await
}

fn assert_same(of_threads: &[Completion], of_processes: &[Completion]) {
    assert_eq!(of_threads.len(), of_processes.len());
    for (of_thread, of_process) in of_threads.iter().zip(of_processes) {
        assert_eq!(of_thread.tokens, of_process.tokens);
        assert_eq!(format!("{:?}", of_thread.logprobs), format!("{:?}", of_process.logprobs));
        assert_eq!(format!("{:?}", of_thread.prompt_logprobs), format!("{:?}", of_process.prompt_logprobs));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn three_processes_say_what_three_threads_say() {
    let _guard = ONE_AT_A_TIME.lock().await;
    let folder = checkpoint();
    let threads = tiny(&folder, 3).start().await.expect("threads start");
    let of_threads = mixed(&threads, 24).await;
    threads.shutdown(Duration::from_secs(5)).await;
    let engine = isolated(&folder, 3, &processes()).start().await.expect("processes start");
    assert_eq!(shards().keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
    assert_same(&of_threads, &mixed(&engine, 24).await);
    let ranks = engine.status().ensemble.ranks;
    assert!(ranks.iter().all(|rank| rank.weight_bytes > 0 && rank.kv_bytes > 0), "{ranks:?}");
    engine.shutdown(Duration::from_secs(5)).await;
    until("all processes are gone", || shards().is_empty()).await;
}
