mod caching;

use std::time::Duration;

use consort_actors::SubmitError;
use consort_kernels::cuda::device::CudaError;
use futures_util::future::join_all;
use tempfile::TempDir;

use super::{
    ChatOptions, Engine, FinishReason, GenerateOptions, MESSAGES_MAX, Message, PROMPTS_MAX, Prompt,
    StopReason, TEMPLATE_KWARGS_BYTES_MAX, TextEvent, TextStream, fresh_u64,
};
use crate::{
    EngineBuilder, EnsembleState, Isa,
    error::{DeviceError, EngineError, RequestError},
    testing::{self, Faults, Rebuild, greedy},
    topology::Environment,
};

/// Tokens of a generation that is not over when a test interferes with it.
const LONG: usize = 4000;

fn is_a_handle<T: Clone + Send + Sync + 'static>() {}

fn checkpoint() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    folder
}

fn tiny(folder: &TempDir, ranks: usize) -> EngineBuilder {
    Engine::builder()
        .model(folder.path())
        .tensor_parallel_size(ranks)
        .dtype("float32")
        .served_model_name("tiny")
}

async fn start(ranks: usize) -> Engine {
    let folder = checkpoint();
    // The files stay mapped after the folder is gone.
    tiny(&folder, ranks).start().await.expect("the tiny model starts")
}

async fn until(what: &str, condition: impl FnMut() -> bool) {
    testing::until_within(Duration::from_secs(20), what, condition).await;
}

#[test]
fn an_engine_is_a_handle_and_a_stream_can_move_between_threads() {
    fn is_send<T: Send + 'static>() {}
    is_a_handle::<Engine>();
    is_send::<TextStream>();
    is_send::<EngineBuilder>();
}

#[test]
fn fresh_numbers_differ() {
    let numbers: std::collections::BTreeSet<u64> = (0..1000).map(|_| fresh_u64()).collect();
    assert_eq!(numbers.len(), 1000);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_width_says_the_same() {
    let mut answers = Vec::new();
    for ranks in 1..=3 {
        let engine = start(ranks).await;
        assert_eq!(engine.status().ensemble.ranks.len(), ranks);
        let done = engine.generate("hello", greedy(12)).expect("admitted").collect().await.expect("ends");
        assert_eq!(done.tokens.len(), 12);
        assert_eq!(done.finish.reason, FinishReason::Length);
        answers.push(done.tokens);
        engine.shutdown(Duration::from_secs(1)).await;
    }
    assert_eq!(answers[0], answers[1]);
    assert_eq!(answers[0], answers[2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_and_its_collection_agree() {
    let engine = start(1).await;
    let whole = engine.generate("abc", greedy(20)).expect("admitted").collect().await.expect("ends");
    let mut stream = engine.generate("abc", greedy(20)).expect("admitted");
    let (mut text, mut tokens, mut ends) = (String::new(), Vec::new(), 0);
    while let Some(event) = stream.next().await {
        match event.expect("no failure") {
            TextEvent::Prompt(_) => panic!("prompt log-probabilities were not asked for"),
            TextEvent::Delta(delta) => {
                text.push_str(&delta.text);
                tokens.extend(delta.tokens);
            }
            TextEvent::Finished(_) => ends += 1,
        }
    }
    assert_eq!((text, tokens, ends), (whole.text, whole.tokens, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_seed_draws_alike_and_another_differently() {
    let engine = start(2).await;
    let draw = async |seed| {
        let options = GenerateOptions { temperature: Some(1.5), seed: Some(seed), ..greedy(24) };
        engine.generate("abc", options).expect("admitted").collect().await.expect("ends").tokens
    };
    let first = draw(7).await;
    assert_eq!(first, draw(7).await);
    assert_ne!(first, draw(8).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_ends_the_generation_and_frees_it() {
    let engine = start(1).await;
    let ascii = (b'a'..=b'z').map(u32::from).collect::<Vec<_>>();
    let whole = engine.generate(ascii.clone(), greedy(40)).expect("admitted").collect().await.expect("ends");
    let stop: String = whole.text.chars().skip(3).take(2).collect();
    let options = GenerateOptions { stop: vec![stop.clone()], ..greedy(40) };
    let cut = engine.generate(ascii, options).expect("admitted").collect().await.expect("ends");
    assert_eq!(cut.finish.stop_reason, Some(StopReason::Text(stop.clone())));
    assert_eq!(Some(cut.text.as_str()), whole.text.split(&stop).next());
    assert!(cut.tokens.len() < whole.tokens.len());
    until("freeing the blocks", || engine.status().ensemble.used_blocks == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_a_stream_cancels_its_request() {
    let engine = start(1).await;
    let mut stream = engine.generate("abc", greedy(LONG)).expect("admitted");
    stream.next().await.expect("an event").expect("no failure");
    assert_eq!(engine.status().requests.len(), 1);
    assert_eq!(engine.status().requests[0].prompt_tokens, 3);
    drop(stream);
    assert!(engine.status().requests.is_empty());
    until("cancelling", || {
        let status = engine.status().ensemble;
        status.running == 0 && status.used_blocks == 0
    })
    .await;
    assert!(engine.status().ensemble.generated_tokens < LONG as u64, "it must not have run to its end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_can_be_cancelled_by_its_name() {
    let engine = start(1).await;
    let options = GenerateOptions { request_id: Some("mine".into()), ..greedy(LONG) };
    let mut stream = engine.generate("abc", options).expect("admitted");
    assert_eq!(stream.request_id(), "mine");
    assert_eq!(engine.cancel("yours"), 0);
    assert_eq!(engine.cancel("mine"), 1);
    let mut last = None;
    while let Some(event) = stream.next().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(Err(RequestError::Cancelled))), "{last:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_request_frees_its_blocks_though_nobody_reads_its_stream() {
    let engine = start(1).await;
    let options = GenerateOptions { request_id: Some("mine".into()), ..greedy(LONG) };
    let mut stream = engine.generate("abc", options).expect("admitted");
    until("running", || engine.status().ensemble.running == 1).await;
    assert_eq!(engine.cancel("mine"), 1);
    until("freeing the blocks", || {
        let status = engine.status().ensemble;
        status.running == 0 && status.used_blocks == 0
    })
    .await;
    assert!(engine.status().ensemble.generated_tokens < LONG as u64, "it must not have run to its end");
    assert!(matches!(stream.next().await, Some(Err(RequestError::Cancelled))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_that_no_context_holds_is_refused_before_it_is_tokenised() {
    let engine = start(1).await;
    let text = "<|im_start|>".repeat(testing::CONTEXT);
    assert_eq!(engine.tokenizer().tokens_min(&text), testing::CONTEXT);
    let fits = engine.generate(text.as_str(), GenerateOptions { max_tokens: None, ..greedy(1) });
    assert!(matches!(fits, Err(RequestError::Submit(_))), "the longest text that might fit is counted");
    let refused = [
        engine.generate(format!("{text}a"), greedy(1)).err(),
        engine.chat(&[Message::user(text)], greedy(1)).err(),
    ];
    for error in refused {
        assert!(
            matches!(&error, Some(RequestError::TextTooLong { tokens_min, .. }) if *tokens_min > testing::CONTEXT),
            "{error:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_needs_no_key_for_a_server_that_is_not_started() {
    let folder = checkpoint();
    let topology = folder.path().join("tiny.toml");
    let key = "CONSORT_TEST_KEY_THAT_NOBODY_SETS";
    let text = format!("[model]\npath = \".\"\ndtype = \"float32\"\n[server]\napi_key_env = \"{key}\"\n");
    std::fs::write(&topology, text).expect("the test folder is writable");
    let error =
        Engine::from_toml(&topology).server_settings().expect_err("a server would be open to everyone");
    assert!(error.to_string().contains(key), "{error}");
    Engine::from_toml(&topology).start().await.expect("the engine alone starts");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_goes_through_the_template() {
    let engine = start(1).await;
    let stream = engine.chat(&[Message::user("hi")], greedy(1)).expect("admitted");
    let prompt = engine.tokenizer().decode(stream.prompt_tokens(), false);
    assert_eq!(prompt, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let closed = ChatOptions { add_generation_prompt: false, ..greedy(1).into() };
    let stream = engine.chat_with(&[Message::user("hi")], closed).expect("admitted");
    assert_eq!(engine.tokenizer().decode(stream.prompt_tokens(), false), "<|im_start|>user\nhi<|im_end|>\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_logprobs_come_for_every_token_but_the_first() {
    let engine = start(3).await;
    let options = GenerateOptions { prompt_logprobs: Some(2), logprobs: Some(2), ..greedy(1) };
    let done = engine.generate("hello", options).expect("admitted").collect().await.expect("ends");
    assert_eq!(done.prompt_logprobs.len(), 4);
    assert_eq!(done.logprobs.len(), 1);
    assert!(done.prompt_logprobs.iter().all(|entry| entry.top.len() == 2 && entry.logprob <= entry.top[0].1));
    assert_eq!(done.logprobs[0].top[0].0, done.tokens[0], "greedy takes the best");

    let alone = GenerateOptions { max_tokens: Some(0), prompt_logprobs: Some(0), ..greedy(0) };
    let done = engine.generate("hello", alone).expect("admitted").collect().await.expect("ends");
    assert_eq!((done.prompt_logprobs.len(), done.tokens.len()), (4, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_choices_the_first_tells_the_prompts_logprobs() {
    let engine = start(2).await;
    for max_tokens in [0, 2] {
        let options =
            GenerateOptions { prompt_logprobs: Some(1), max_tokens: Some(max_tokens), ..greedy(max_tokens) };
        let alone =
            engine.generate("hello", options.clone()).expect("admitted").collect().await.expect("ends");
        let streams = engine.generate_n(vec!["hello".into(), "abc".into()], &options, 3).expect("admitted");
        let done = join_all(streams.into_iter().map(TextStream::collect)).await;
        let done: Vec<_> = done.into_iter().map(|done| done.expect("ends")).collect();
        let counts: Vec<_> =
            done.iter().map(|done| (done.prompt_logprobs.len(), done.tokens.len())).collect();
        let of_prompt = |entries| [(entries, max_tokens), (0, max_tokens), (0, max_tokens)];
        assert_eq!(counts, [of_prompt(4), of_prompt(2)].concat());
        assert_eq!(done[0].prompt_logprobs, alone.prompt_logprobs);
        assert!(done[..3].iter().all(|done| done.tokens == alone.tokens));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_prompts_of_one_request_draw_differently_unless_a_seed_is_given() {
    let engine = start(1).await;
    let draw = async |seed| {
        let options = GenerateOptions { temperature: Some(1.5), seed, ..greedy(24) };
        let streams = engine.generate_n(vec!["abc".into(), "abc".into()], &options, 1).expect("admitted");
        let done = join_all(streams.into_iter().map(TextStream::collect)).await;
        done.into_iter().map(|done| done.expect("ends").tokens).collect::<Vec<_>>()
    };
    let (drawn, given) = (draw(None).await, draw(Some(7)).await);
    assert_ne!(drawn[0], drawn[1]);
    assert_eq!(given[0], given[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_entry_point_bounds_messages_prompts_and_template_variables() {
    let engine = start(1).await;
    let refused = |outcome: Result<(), RequestError>| match outcome {
        Err(RequestError::Invalid { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    let chat = |count| engine.chat(&vec![Message::user("a"); count], greedy(1)).map(drop);
    assert_eq!(refused(chat(0)), "messages");
    assert_eq!(refused(chat(MESSAGES_MAX + 1)), "messages");
    chat(1).expect("one message is a chat");
    let complete = |count| engine.generate_n(vec![Prompt::from("a"); count], &greedy(1), 1).map(drop);
    assert_eq!(refused(complete(0)), "prompt");
    assert_eq!(refused(complete(PROMPTS_MAX + 1)), "prompt");
    let text = "x".repeat(TEMPLATE_KWARGS_BYTES_MAX).into();
    let template_kwargs = [("date".to_owned(), text)].into_iter().collect();
    let large = ChatOptions { template_kwargs, ..greedy(1).into() };
    assert_eq!(refused(engine.chat_with(&[Message::user("a")], large).map(drop)), "chat_template_kwargs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_fills_the_context_is_told_so_whatever_else_is_asked() {
    let engine = start(1).await;
    let full = vec![1_u32; testing::CONTEXT];
    let open = GenerateOptions { max_tokens: None, min_tokens: 5, ..greedy(1) };
    let error = engine.generate(full.clone(), open.clone()).err();
    assert!(
        matches!(
            &error,
            Some(RequestError::Submit(SubmitError::TooLong {
                prompt_tokens: testing::CONTEXT,
                max_tokens: 1,
                ..
            }))
        ),
        "{error:?}"
    );
    let error = engine.generate(full[3..].to_vec(), open).err();
    assert!(matches!(&error, Some(RequestError::Invalid { field: "min_tokens", .. })), "{error:?}");
    let scored = GenerateOptions { max_tokens: Some(0), prompt_logprobs: Some(0), ..greedy(0) };
    let done = engine.generate(full, scored).expect("nothing is generated").collect().await.expect("ends");
    assert_eq!(done.prompt_logprobs.len(), testing::CONTEXT - 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_engines_live_side_by_side_and_end_alone() {
    let (one, two) = (start(1).await, start(2).await);
    one.shutdown(Duration::from_secs(1)).await;
    assert!(matches!(one.generate("a", greedy(1)), Err(RequestError::Submit(_))));
    let done = two.generate("a", greedy(3)).expect("admitted").collect().await.expect("ends");
    assert_eq!(done.tokens.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_say_what_one_says_and_are_counted_apart() {
    let folder = checkpoint();
    let builder = || tiny(&folder, 2).data_parallel_size(2).max_num_seqs(2);
    let config = builder().environment(Environment::empty()).effective_config().expect("valid");
    let written = config.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    let written: Vec<String> = written.collect();
    for line in [
        "tensor_parallel_size = 2 # --tensor-parallel-size",
        "data_parallel_size = 2 # --data-parallel-size",
        "# devices = [\"cpu\", \"cpu\", \"cpu\", \"cpu\"] # computed: one for each rank",
    ] {
        assert!(written.iter().any(|written| written == line), "{line} is not in\n{config}");
    }
    assert!(
        config.contains("cores shared out over 4 ranks") && config.contains("over all ranks of a replica")
    );

    let (one, two) = (start(2).await, builder().start().await.expect("two replicas of the tiny model start"));
    let status = two.status().ensemble;
    assert_eq!((status.replicas.len(), status.ranks.len()), (2, 4));
    assert_eq!(status.total_blocks, 2 * status.replicas[0].total_blocks, "each has a cache of its own");
    let prompts = ["a", "bc", "def", "ghij", "klmno", "pqrstu", "vw", "xyz"];
    let ask = |engine: &Engine| {
        let ends = prompts.map(|prompt| engine.generate(prompt, greedy(30)).expect("admitted").collect());
        join_all(ends)
    };
    let (alone, together) = (ask(&one).await, ask(&two).await);
    for (alone, together) in alone.into_iter().zip(together) {
        assert_eq!(alone.expect("ends").tokens, together.expect("ends").tokens);
    }
    let status = two.status().ensemble;
    assert!(status.replicas.iter().all(|replica| replica.generated_tokens >= 30), "{:?}", status.replicas);
    let metrics = two.render_metrics();
    for (engine, replica) in status.replicas.iter().enumerate() {
        let line = format!(
            "vllm:generation_tokens_total{{model_name=\"tiny\",engine=\"{engine}\"}} {}",
            replica.generated_tokens
        );
        assert!(metrics.contains(&line), "{line} is not in\n{metrics}");
    }
    two.shutdown(Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_lost_a_replica_for_good_serves_with_the_other() {
    let (folder, faults) = (checkpoint(), Faults::default());
    let builder = tiny(&folder, 2).data_parallel_size(2).faults(&faults);
    let engine = builder.start().await.expect("the tiny model starts");
    faults.on_rebuild(Rebuild::Fail);
    faults.panic_at_step(2);
    let lost = engine.generate("abc", greedy(LONG)).expect("admitted").collect().await;
    assert!(matches!(lost, Err(RequestError::Generation(_))), "{lost:?}");
    let failed = || {
        let is_failed = |state: &EnsembleState| matches!(state, EnsembleState::Failed { .. });
        engine.status().ensemble.replicas.iter().filter(|replica| is_failed(&replica.state)).count()
    };
    until("a replica is given up", || failed() == 1).await;
    assert_eq!((engine.watch().state(), engine.failure()), (EnsembleState::Ready, None));
    let done = engine.generate("abc", greedy(20)).expect("admitted").collect().await.expect("ends");
    assert_eq!(done.tokens.len(), 20);
    engine.shutdown(Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_follows_an_engine_is_told_of_its_failure_and_of_its_end() {
    let (folder, faults) = (checkpoint(), Faults::default());
    let engine = tiny(&folder, 2).faults(&faults).start().await.expect("the tiny model starts");
    let mut watch = engine.watch();
    assert_eq!(watch.state(), EnsembleState::Ready);
    faults.on_rebuild(Rebuild::Fail);
    faults.panic_at_step(2);
    let lost = engine.generate("abc", greedy(LONG)).expect("admitted").collect().await;
    assert!(matches!(lost, Err(RequestError::Generation(_))), "{lost:?}");
    let EnsembleState::Failed { reason } = watch.ended().await else { panic!("it cannot come back") };
    assert!(reason.contains(testing::REBUILD_FAILURE), "{reason}");
    assert_eq!((engine.failed().await, engine.failure()), (reason.clone(), Some(reason)));

    drop(engine);
    while let Some(state) = watch.changed().await {
        assert!(matches!(state, EnsembleState::Draining | EnsembleState::Stopped), "{state:?}");
    }
    assert_eq!(watch.state(), EnsembleState::Stopped);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_run_is_refused_with_its_reason() {
    let engine = start(1).await;
    let long = vec![1_u32; testing::CONTEXT];
    for (prompt, options) in [
        (Vec::new(), greedy(1)),
        (vec![testing::VOCAB_SIZE as u32], greedy(1)),
        (long.clone(), greedy(1)),
        (long, GenerateOptions { max_tokens: None, ..greedy(1) }),
    ] {
        let refused = engine.generate(prompt, options);
        assert!(matches!(refused, Err(RequestError::Submit(_))), "{:?}", refused.err());
    }
    let hot = GenerateOptions { temperature: Some(3.0), ..greedy(1) };
    assert!(matches!(engine.generate("a", hot), Err(RequestError::Invalid { field: "temperature", .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_instruction_set_of_the_machine_can_be_forced_and_answers_alike() {
    let folder = checkpoint();
    let mut answers = Vec::new();
    for isa in Isa::available() {
        // One by the call, one by the environment: both reach the ranks.
        let by_call = tiny(&folder, 2).environment(Environment::empty()).cpu_isa(isa.name());
        let by_variable =
            tiny(&folder, 2).environment([("CONSORT_CPU_ISA", isa.name())].into_iter().collect());
        for builder in [by_call, by_variable] {
            assert!(builder.effective_config().expect("valid").contains(&format!("cpu_isa = \"{isa}\"")));
            let engine = builder.start().await.expect("starts");
            assert_eq!(engine.cpu_isa(), isa);
            let stream = engine.generate("abc", greedy(8)).expect("admitted");
            answers.push(stream.collect().await.expect("ends").tokens);
        }
    }
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{answers:?}");
    let unknown =
        tiny(&folder, 1).environment([("CONSORT_CPU_ISA", "sse9")].into_iter().collect()).start().await;
    let error = unknown.expect_err("there is none of that name").to_string();
    assert!(error.contains("environment variable CONSORT_CPU_ISA: parallel.cpu_isa: \"sse9\""), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_is_not_there_is_refused_with_what_is_missing_within_a_second() {
    let folder = checkpoint();
    let on = |devices: &str| {
        let devices = devices.to_owned();
        let builder = tiny(&folder, 2).dtype("bfloat16");
        builder.with_overrides(move |overrides| overrides.devices = Some(devices))
    };
    let devices = "cuda:98,cuda:GPU-00112233-4455-6677-8899-aabbccddeeff";
    let started = std::time::Instant::now();
    let error = on(devices).start().await.expect_err("no such GPU");
    assert!(started.elapsed().as_secs() < 1, "{:?}", started.elapsed());
    assert!(error.to_string().contains("`consort doctor`"), "the next step: {error}");
    let EngineError::Device(DeviceError(error)) = &error else { panic!("{error:?}") };
    match error {
        CudaError::NoDriver { .. } => assert!(error.to_string().contains("CONSORT_CUDA_LIB_PATH"), "{error}"),
        CudaError::NoDevice { wanted, .. } => assert_eq!(wanted, "cuda:98"),
        other => panic!("{other:?}"),
    }
    // What the configuration comes to can be read where its cards are not.
    let printed = on(devices).effective_config().expect("valid");
    assert!(printed.contains("devices = [\"cuda:98\""), "{printed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_effective_configuration_of_a_model_describes_the_same_engine() {
    let folder = checkpoint();
    let builder = tiny(&folder, 3).environment(Environment::empty());
    let printed = builder.effective_config().expect("valid");
    let file = folder.path().join("printed.toml");
    std::fs::write(&file, &printed).expect("the test folder is writable");
    let again = Engine::from_toml(&file).environment(Environment::empty());
    let values = |text: &str| text.parse::<toml::Table>().expect("TOML");
    assert_eq!(values(&again.effective_config().expect("valid")), values(&printed), "{printed}");
    let (first, second) = (builder.start().await.expect("starts"), again.start().await.expect("starts"));
    assert_eq!(first.max_model_len(), second.max_model_len());
    let blocks = |engine: &Engine| {
        engine.status().ensemble.ranks.iter().map(|rank| rank.kv_blocks).collect::<Vec<_>>()
    };
    assert_eq!(blocks(&first), blocks(&second));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cache_too_small_and_a_context_too_long_are_refused_before_loading() {
    let folder = checkpoint();
    let small = tiny(&folder, 1).kv_cache_memory_bytes(100).start().await.expect_err("too small").to_string();
    assert!(
        small.contains("--kv-cache-memory-bytes: cache.kv_cache_memory_bytes: 100 bytes hold 0"),
        "{small}"
    );
    let host = tiny(&folder, 1).kv_offloading_bytes(100).start().await.expect_err("too small").to_string();
    assert!(
        host.contains("--kv-offloading-bytes: cache.kv_offloading_bytes: 100 bytes hold no KV block"),
        "{host}"
    );
    let long =
        tiny(&folder, 9).max_model_len(testing::CONTEXT + 1).start().await.expect_err("too long").to_string();
    assert!(long.contains("--max-model-len: model.max_model_len: 4097 exceeds the 4096 positions"), "{long}");
    assert!(long.contains("the model has 6 query heads"), "both are told: {long}");
    let nowhere = Engine::builder().model(folder.path().join("nothing")).start().await;
    let error = nowhere.expect_err("there is no model");
    assert!(error.to_string().contains("nothing"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn loading_tells_its_progress() {
    let folder = checkpoint();
    let (sender, receiver) = std::sync::mpsc::channel();
    let engine = tiny(&folder, 2).on_progress(move |progress| {
        // The receiver may have what it wants already.
        let _ = sender.send(progress);
    });
    let _engine = engine.start().await.expect("starts");
    let reports: Vec<_> = receiver.try_iter().collect();
    for rank in 0..2 {
        let last = reports.iter().rfind(|report| report.rank.0 == rank).expect("each rank reports");
        assert_eq!(last.loaded_bytes, last.total_bytes);
        assert!(last.total_bytes > 0);
    }
}
