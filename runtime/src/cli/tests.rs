mod mistakes;

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use clap::{CommandFactory, Parser};
use consort_actors::{RankStatus, ReplicaId, ShardState};
use consort_kernels::device::Isa;
use consort_parallel::ids::Rank;

use super::{
    args::{Cli, Command},
    client::EventSplitter,
    convert::finished,
    report,
    serve::{Running, Signals},
};
use crate::{
    engine::{Compute, Engine, Usage},
    server::{ServerError, ServerSettings},
    testing::{self, Faults, Rebuild},
    topology::Environment,
};

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn both_names_of_the_width_are_taken() {
    for flag in ["--tp", "--tensor-parallel-size"] {
        assert!(Cli::try_parse_from(["consort", "run", "model", "hello", flag, "3"]).is_ok(), "{flag}");
    }
}

#[test]
fn wrong_usage_ends_with_code_two() {
    for arguments in
        [vec!["consort"], vec!["consort", "run", "model"], vec!["consort", "serve", "m", "--tp", "x"]]
    {
        assert_eq!(Cli::try_parse_from(&arguments).expect_err("wrong usage").exit_code(), 2, "{arguments:?}");
    }
}

#[test]
fn negative_numbers_are_values_and_no_flags() {
    let parse = |flag: &str| Cli::try_parse_from(["consort", "run", "model", "hello", flag, "-1"]);
    for taken in ["--seed", "--temperature", "--repetition-penalty", "--frequency-penalty"] {
        assert!(parse(taken).is_ok(), "{taken}: the request's rules tell what is wrong, if anything");
    }
    for refused in ["--min-tokens", "--max-tokens", "--tp", "--max-num-seqs"] {
        let text = parse(refused).expect_err("no negative number").to_string();
        assert!(text.contains("must be at least 0, got -1"), "{text}");
    }
}

#[test]
fn a_model_without_its_tokenizer_has_no_effective_configuration() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    let config = || {
        let builder = Engine::builder().model(folder.path()).environment(Environment::empty());
        builder.effective_config().map_err(|error| error.to_string())
    };
    assert!(config().is_ok());
    std::fs::remove_file(folder.path().join("tokenizer.json")).expect("it is there");
    assert_eq!(config(), Err("cannot use the model's tokenizer".to_owned()));
}

#[test]
fn only_ports_below_1024_are_called_reserved() {
    let refused = |listen: &str| {
        let source = io::Error::from(io::ErrorKind::PermissionDenied);
        ServerError::Bind { listen: listen.to_owned(), source }.to_string()
    };
    assert!(refused("0.0.0.0:80").contains("ports below 1024 are reserved"));
    let high = refused("[::1]:8000");
    assert!(high.contains("does not let this user listen there") && !high.contains("1024"), "{high}");
}

#[test]
fn sizes_of_weight_files_are_read_as_people_write_them() {
    let size =
        |text: &str| match Cli::try_parse_from(["consort", "convert", "in", "out", "--max-shard-size", text])
        {
            Ok(Cli { command: Command::Convert(args), .. }) => Some(args.max_shard_size),
            _ => None,
        };
    assert_eq!(size("5GB"), Some(5_000_000_000));
    assert_eq!(size("512 MiB"), Some(512 << 20));
    assert_eq!(size("1000"), Some(1000));
    for wrong in ["0", "", "-1", "five", "1XB", "99999999999GB"] {
        assert_eq!(size(wrong), None, "{wrong}");
    }
}

#[test]
fn events_are_cut_wherever_the_network_cuts_them() {
    let wire = b"data: {\"a\":1}\n\ndata: \xc3\xa9\n\n: comment\n\ndata: [DONE]\n\n";
    for size in 1..wire.len() {
        let mut splitter = EventSplitter::default();
        let mut payloads = Vec::new();
        for part in wire.chunks(size) {
            payloads.extend(splitter.push(part).expect("short lines"));
        }
        assert_eq!(payloads, ["{\"a\":1}", "é", "[DONE]"], "cut every {size} bytes");
    }
}

#[test]
fn an_endless_event_is_refused() {
    let mut splitter = EventSplitter::default();
    assert!(splitter.push(&vec![b'x'; 2 << 20]).is_err());
}

#[test]
fn a_rank_tells_its_heads_bytes_and_blocks() {
    let rank = RankStatus {
        rank: Rank(0),
        query_heads: 0..3,
        kv_heads: 0..1,
        weight_bytes: 89_700_000,
        kv_bytes: 2_000,
        kv_blocks: 12,
        state: ShardState::Ready,
        restarts: 0,
    };
    let expected = "rank 0: query heads 0..3, KV heads 0..1, weights 89.7 MB, 12 KV blocks (2.0 kB)";
    assert_eq!(report::rank_line(&rank), expected);
}

#[test]
fn ranks_of_several_replicas_are_told_apart() {
    let line = |replica: &str| {
        format!("{replica}rank 0: query heads 0..3, KV heads 0..1, weights 5 B, 12 KV blocks (7 B)")
    };
    let rank = RankStatus {
        rank: Rank(0),
        query_heads: 0..3,
        kv_heads: 0..1,
        weight_bytes: 5,
        kv_bytes: 7,
        kv_blocks: 12,
        state: ShardState::Ready,
        restarts: 0,
    };
    let replica = |number| (ReplicaId(number), vec![rank.clone()]);
    let lines = |replicas: Vec<(ReplicaId, Vec<RankStatus>)>| {
        report::rank_lines(replicas.iter().map(|(replica, ranks)| (*replica, ranks.as_slice())))
    };
    assert_eq!(lines(vec![replica(0)]), [line("")]);
    assert_eq!(lines(vec![replica(0), replica(1)]), [line("replica 0, "), line("replica 1, ")]);
}

#[test]
fn the_way_of_computing_is_told_in_one_line() {
    let compute =
        |threads_per_rank| Compute { on_cpus: true, dtype: "bfloat16", isa: Isa::Avx2, threads_per_rank };
    let line = |threads_per_rank| report::compute_line(compute(threads_per_rank));
    assert_eq!(line(1), "bfloat16 on avx2, 1 thread for each rank");
    assert_eq!(line(2), "bfloat16 on avx2, 2 threads for each rank");
    assert_eq!(report::compute_line(Compute { on_cpus: false, ..compute(2) }), "bfloat16 on CUDA");
}

#[test]
fn help_tells_the_exit_codes_and_every_flag_of_a_key() {
    let mut command = Cli::command();
    assert!(command.render_long_help().to_string().contains("Exit codes:"));
    let serve = command.find_subcommand_mut("serve").expect("there").render_long_help().to_string();
    for word in
        ["Exit codes:", "--print-config", "--cpu-isa", "CONSORT_CPU_ISA", "CONSORT_SECTION__KEY", "--devices"]
    {
        assert!(serve.contains(word), "{word} is not in\n{serve}");
    }
    let doctor = command.find_subcommand_mut("doctor").expect("there").render_long_help().to_string();
    for word in ["Exit codes:", "--device <LIST>", "[TOPOLOGY]", "--json", "! what -> what to do"] {
        assert!(doctor.contains(word), "{word} is not in\n{doctor}");
    }
    for word in ["cuda:GPU-UUID", "--batch-invariant[=<BOOL>]", "do not depend on what else runs"] {
        assert!(serve.contains(word), "{word} is not in\n{serve}");
    }
}

#[test]
fn batch_invariance_is_a_flag_with_or_without_a_word() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    let model = folder.path().to_str().expect("Unicode");
    let config = |flags: &[&str]| {
        let line = [&["consort", "serve", "--devices", "cuda:1"], flags, &[model]].concat();
        let Command::Serve(args) = Cli::try_parse_from(line).expect("well-formed").command else { panic!() };
        let builder = args.model.builder(args.source, args.server).environment(Environment::empty());
        let written = builder.effective_config().expect("valid");
        let line = written.lines().find(|line| line.starts_with("batch_invariant")).expect("it is written");
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(config(&[]), "batch_invariant = false # default");
    // What follows the flag is the model, not its word.
    assert_eq!(config(&["--batch-invariant"]), "batch_invariant = true # --batch-invariant");
    assert_eq!(config(&["--batch-invariant=false"]), "batch_invariant = false # --batch-invariant");
    let unknown = Cli::try_parse_from(["consort", "serve", "--batch-invariant=maybe", model]);
    assert!(unknown.expect_err("no such word").to_string().contains("possible values: true, false"));
}

#[test]
fn speed_counts_the_tokens_after_the_first() {
    let (first, last) = (Duration::from_millis(500), Duration::from_millis(2500));
    assert_eq!(report::speed(11, first, last), "11 tokens, first after 0.50 s, then 5.0 tokens/s");
    assert_eq!(report::speed(1, first, first), "1 tokens, first after 0.50 s");
}

#[test]
fn a_run_tells_the_wait_from_its_start_and_from_its_question() {
    let ms = Duration::from_millis;
    let usage = Usage { prompt_tokens: 39, completion_tokens: 11, cached_tokens: 0 };
    let timing = report::Timing { loaded: ms(650), asked: ms(660), first: ms(140), last: ms(2140) };
    assert_eq!(
        report::summary(usage, &timing),
        "loaded in 0.65 s; first token 0.80 s after start; prompt 39 tokens; 11 tokens, first after 0.14 s, then \
         5.0 tokens/s"
    );
    let summary = report::summary(Usage { cached_tokens: 32, ..usage }, &timing);
    assert!(summary.contains("; prompt 39 tokens, 32 of them cached; 11 tokens"), "{summary}");
}

#[tokio::test(flavor = "multi_thread")]
async fn serving_ends_with_the_reason_when_the_engine_has_failed_for_good() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    let faults = Faults::default();
    let builder = Engine::builder().model(folder.path()).tensor_parallel_size(2).faults(&faults);
    let settings = ServerSettings { listen: "127.0.0.1:0".into(), ..ServerSettings::default() };
    let mut signals = Signals::new().expect("signals");
    let running = Running::start(builder, settings, &mut signals).await.expect("starts").expect("no signal");
    faults.on_rebuild(Rebuild::Fail);
    faults.panic_at_step(0);
    let mut open = running.engine.generate("abc", Default::default()).expect("admitted");
    let ended = tokio::time::timeout(Duration::from_secs(60), running.wait(&mut signals)).await;
    let error = ended.expect("it does not wait for a signal").expect_err("exit code 1").to_string();
    assert!(error.contains("failed for good") && error.contains(testing::REBUILD_FAILURE), "{error}");
    assert!(open.next().await.expect("an event").is_err(), "the open request was told");
}

#[tokio::test]
async fn a_conversion_is_asked_to_end_and_then_left_behind() {
    let stop = AtomicBool::new(false);
    assert_eq!(
        finished(std::future::ready(7), &stop, async || std::future::pending().await).await.unwrap(),
        7
    );
    assert!(!stop.load(Relaxed));

    let obedient = Box::pin(async {
        while !stop.load(Relaxed) {
            tokio::task::yield_now().await;
        }
        8
    });
    let mut count = 0;
    let once = async || {
        count += 1;
        if count > 1 {
            std::future::pending::<()>().await;
        }
    };
    assert_eq!(finished(obedient, &stop, once).await.unwrap(), 8);

    stop.store(false, Relaxed);
    let stuck = std::future::pending::<()>();
    let error = finished(stuck, &stop, async || {}).await.expect_err("the second signal").to_string();
    assert!(stop.load(Relaxed) && error.contains("second signal") && error.contains("partial"), "{error}");
}

#[test]
fn causes_are_told_once_each() {
    let error = anyhow::Error::from(io::Error::other("inner")).context("outer");
    assert_eq!(report::chain(&error), "error: outer\n  caused by: inner");
}

#[test]
fn a_broken_pipe_is_found_below_other_causes() {
    let broken = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe)).context("writing");
    assert!(report::is_broken_pipe(&broken));
    assert!(!report::is_broken_pipe(&anyhow::anyhow!("other")));
}
