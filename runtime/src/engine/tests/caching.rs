//! What requests share of each other's work, what they are told of it, and who comes first.

use std::time::Duration;

use futures_util::stream::select_all;
use tempfile::TempDir;
use tokio_stream::StreamExt;

use super::{LONG, checkpoint, greedy, tiny, until};
use crate::{
    ChatOptions, Completion, Engine, EnsembleState, GenerateOptions, Message, Prompt, RequestError, Status,
    TextStream, Usage, testing::Faults,
};

/// Tokens of a block, by default.
const BLOCK: usize = 16;

async fn start(folder: &TempDir, caching: bool) -> Engine {
    tiny(folder, 2).enable_prefix_caching(caching).start().await.expect("the tiny model starts")
}

/// `count` tokens that no other `seed` begins with.
fn tokens(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|at| (seed * 31 + at * 7 + at * at) % 200).collect()
}

async fn ask(engine: &Engine, prompt: Vec<u32>, options: GenerateOptions) -> Completion {
    engine.generate(prompt, options).expect("admitted").collect().await.expect("ends")
}

fn status(engine: &Engine) -> Status {
    engine.status().ensemble
}

/// Ends are told before blocks are given back.
async fn until_free(engine: &Engine) {
    until("freeing the blocks", || status(engine).used_blocks == 0).await;
}

/// Blocks that may be taken over of a prompt, if all of it is there: its last token is computed in any case.
fn most_cached(prompt: usize) -> usize {
    (prompt - 1) / BLOCK * BLOCK
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_comes_again_is_not_computed_again_and_gets_the_same_tokens() {
    let folder = checkpoint();
    for ranks in 1..=3 {
        let with = |caching| tiny(&folder, ranks).enable_prefix_caching(caching).start();
        let (cached, plain) = (with(true).await.expect("starts"), with(false).await.expect("starts"));
        for (seed, len) in [5, 16, 17, 33, 100, 700].into_iter().enumerate() {
            let prompt = tokens(seed as u32, len);
            let expected = ask(&plain, prompt.clone(), greedy(20)).await;
            for again in 0..3 {
                let before = status(&cached);
                let answer = ask(&cached, prompt.clone(), greedy(20)).await;
                assert_eq!(answer.tokens, expected.tokens, "{ranks} ranks, {len} tokens, time {again}");
                let found = if again == 0 { 0 } else { most_cached(len) };
                let usage = Usage { prompt_tokens: len, completion_tokens: 20, cached_tokens: found };
                assert_eq!(answer.finish.usage, usage);
                let after = status(&cached);
                assert_eq!(after.prefix_cache_queries - before.prefix_cache_queries, len as u64);
                assert_eq!(after.prefix_cache_hits - before.prefix_cache_hits, found as u64);
                // The last token drawn is not computed.
                assert_eq!(after.computed_tokens - before.computed_tokens, (len - found + 19) as u64);
            }
            let uncached = ask(&plain, prompt, greedy(20)).await;
            assert_eq!((uncached.tokens, uncached.finish.usage.cached_tokens), (expected.tokens, 0));
        }
        until_free(&cached).await;
        until_free(&plain).await;
        assert!(status(&cached).cached_blocks > 0);
        assert_eq!((status(&plain).cached_blocks, status(&plain).prefix_cache_hits), (0, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chats_next_turn_computes_only_what_is_new() {
    let folder = checkpoint();
    let (cached, plain) = (start(&folder, true).await, start(&folder, false).await);
    let mut messages = vec![Message::system("Be brief. ".repeat(9))];
    // What is in the cache: all prompts and answers but each one's last token.
    let mut computed: Vec<Vec<u32>> = Vec::new();
    for (turn, question) in ["hello", "and then?", "why", "who"].into_iter().enumerate() {
        messages.push(Message::user(question));
        let stream = cached.chat(&messages, greedy(30)).expect("admitted");
        let prompt = stream.prompt_tokens().to_vec();
        let answer = stream.collect().await.expect("ends");
        let alone = plain.chat(&messages, greedy(30)).expect("admitted").collect().await.expect("ends");
        assert_eq!(answer.tokens, alone.tokens, "turn {turn}");
        let common = |past: &Vec<u32>| past.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
        let longest = computed.iter().map(common).max().unwrap_or(0);
        let expected = (longest / BLOCK * BLOCK).min(most_cached(prompt.len()));
        assert!(turn == 0 || expected >= 96, "the turns have the instructions in common at least");
        assert_eq!(answer.finish.usage.cached_tokens, expected, "turn {turn}");
        let mut all = [prompt, answer.tokens].concat();
        all.pop();
        computed.push(all);
        messages.push(Message::assistant(answer.text));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_requests_of_one_salt_share_whoever_gave_it() {
    let engine = start(&checkpoint(), true).await;
    let (alice, bob) = (engine.with_cache_salt(b"alice"), engine.with_cache_salt(b"bob"));
    let nested = alice.with_cache_salt(b"bob");
    let handles = [("none", &engine), ("alice", &alice), ("bob", &bob), ("alice, then bob", &nested)];
    let prompt = tokens(1, 100);
    let mut answers = Vec::new();
    for (name, handle) in handles {
        for own in [None, Some("alice"), Some("bob")] {
            let options = || GenerateOptions { cache_salt: own.map(str::to_owned), ..greedy(8) };
            let before = status(&engine).prefix_cache_hits;
            let first = ask(handle, prompt.clone(), options()).await;
            assert_eq!(
                first.finish.usage.cached_tokens, 0,
                "{name} with {own:?} found what another computed"
            );
            assert_eq!(status(&engine).prefix_cache_hits, before);
            let again = ask(&handle.clone(), prompt.clone(), options()).await;
            assert_eq!(again.finish.usage.cached_tokens, 96, "{name} with {own:?} did not find its own");
            assert_eq!(status(&engine).prefix_cache_hits, before + 96);
            answers.extend([first.tokens, again.tokens]);
        }
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "a salt changes what is computed");
    let empty = GenerateOptions { cache_salt: Some(String::new()), ..greedy(1) };
    let error = engine.generate(prompt, empty).err().expect("an empty salt is refused");
    assert_eq!(error.to_string(), "cache_salt: must have 1 to 1024 bytes, got 0");
    assert!(error.is_about_the_request());
}

/// The order in which requests of these priorities get their first tokens, where one runs at a time.
async fn order(aging_ms: u64, priorities: &[i32]) -> Vec<usize> {
    let folder = checkpoint();
    let engine = tiny(&folder, 1).max_num_seqs(1).priority_aging_ms(aging_ms).start().await.expect("starts");
    let submit = |seed: u32, priority: i32| {
        let options = GenerateOptions { priority, ..greedy(LONG) };
        engine.generate(tokens(seed, 20), options).expect("admitted")
    };
    let mut first = submit(99, i32::MAX);
    first.next().await.expect("an event").expect("no failure");
    let mut waiting: Vec<Option<TextStream>> =
        (0_u32..).zip(priorities).map(|(seed, priority)| Some(submit(seed, *priority))).collect();
    until("waiting", || status(&engine).waiting == priorities.len()).await;
    drop(first);
    // Each one goes on until it is dropped, and only then the next can begin.
    let mut order = Vec::new();
    while order.len() < priorities.len() {
        let open = waiting.iter_mut().enumerate();
        let open = open.filter_map(|(at, stream)| Some(stream.as_mut()?.map(move |event| (at, event))));
        let (at, event) = select_all(open).next().await.expect("an event");
        event.expect("no failure");
        waiting[at] = None;
        order.push(at);
    }
    order
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_engine_is_full_the_best_priority_comes_first_and_equals_as_they_came() {
    // Ten seconds are longer than it takes to submit them.
    assert_eq!(order(10_000, &[0, 5, -5, 0, 1, -5]).await, [2, 5, 0, 3, 4, 1]);
    assert_eq!(order(24 * 3600 * 1000, &[i32::MAX, i32::MIN, 0]).await, [1, 2, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_aging_requests_come_as_they_came() {
    assert_eq!(order(0, &[3, -3, 0]).await, [0, 1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_request_passes_only_those_that_came_within_the_time_that_its_priority_is_worth() {
    let folder = checkpoint();
    let engine = tiny(&folder, 1).max_num_seqs(1).priority_aging_ms(100).start().await.expect("starts");
    let submit = |seed: u32, priority: i32| {
        let options = GenerateOptions { priority, ..greedy(LONG) };
        engine.generate(tokens(seed, 20), options).expect("admitted")
    };
    let mut first = submit(99, 0);
    first.next().await.expect("an event").expect("no failure");
    let mut early = submit(0, 1);
    tokio::time::sleep(Duration::from_millis(150)).await;
    let mut late = submit(1, 0);
    drop(first);
    tokio::select! {
        event = early.next() => event.expect("an event").expect("no failure"),
        _ = late.next() => panic!("a request that came 150 ms later passed one whose priority is worth 100 ms"),
    };
    drop(early);
    late.next().await.expect("an event").expect("no failure");
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_choices_compute_their_prompt_once_and_draw_what_each_would_alone() {
    const N: usize = 8;
    let folder = checkpoint();
    for (caching, len) in [(true, 100), (false, 100), (true, 700), (false, 9)] {
        let engine = start(&folder, caching).await;
        let prompt = tokens(3, len);
        let options = GenerateOptions { temperature: Some(1.0), seed: Some(40), ..greedy(12) };
        let before = status(&engine).computed_tokens;
        let streams = engine.generate_n(vec![Prompt::Tokens(prompt.clone())], &options, N).expect("admitted");
        let mut choices = Vec::new();
        for stream in streams {
            choices.push(stream.collect().await.expect("ends"));
        }
        // All but the first compute the prompt's last token, whose row draws their own first one.
        let rows = len + (N - 1) + N * 11;
        assert_eq!(status(&engine).computed_tokens - before, rows as u64, "caching {caching}, {len} tokens");
        let found: Vec<usize> = choices.iter().map(|choice| choice.finish.usage.cached_tokens).collect();
        assert_eq!(found, [&[0][..], &[len - 1; N - 1]].concat());
        let alone = start(&folder, false).await;
        for (at, choice) in (0..).zip(&choices) {
            let options = GenerateOptions { seed: Some(40 + at), ..options.clone() };
            assert_eq!(choice.tokens, ask(&alone, prompt.clone(), options).await.tokens, "choice {at}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_at_once_compute_what_they_have_in_common_once() {
    let engine = start(&checkpoint(), true).await;
    let plain = start(&checkpoint(), false).await;
    let common = tokens(5, 1000);
    let prompt = |own: u32| [common.clone(), tokens(own, 10 + own as usize)].concat();
    let submit = |own| engine.generate(prompt(own), greedy(6)).expect("admitted");
    let streams: Vec<TextStream> = (10..30).map(submit).collect();
    let (mut rows, mut found) = (0, 0);
    for (own, stream) in (10..).zip(streams) {
        let answer = stream.collect().await.expect("ends");
        assert_eq!(answer.tokens, ask(&plain, prompt(own), greedy(6)).await.tokens, "request {own}");
        let usage = answer.finish.usage;
        rows += usage.prompt_tokens - usage.cached_tokens + 5;
        found += usage.cached_tokens;
    }
    assert_eq!(found, 19 * most_cached(common.len()));
    assert_eq!(status(&engine).computed_tokens, rows as u64);
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_whose_log_probabilities_are_asked_for_are_computed() {
    let engine = start(&checkpoint(), true).await;
    let prompt = tokens(4, 50);
    ask(&engine, prompt.clone(), greedy(2)).await;
    let scored = GenerateOptions { prompt_logprobs: Some(0), ..greedy(2) };
    let first = ask(&engine, prompt.clone(), scored.clone()).await;
    let again = ask(&engine, prompt, scored).await;
    assert_eq!((first.finish.usage.cached_tokens, first.prompt_logprobs.len()), (0, 49));
    assert_eq!(again, first);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_tells_what_was_cached_from_its_first_text_on() {
    let engine = start(&checkpoint(), true).await;
    let chat = |messages: &[Message]| {
        let options = ChatOptions::from(greedy(3));
        engine.chat_with(messages, options).expect("admitted")
    };
    let messages = [Message::user("hello hello hello hello")];
    let prompt = chat(&messages).prompt_tokens().len();
    chat(&messages).collect().await.expect("ends");
    let mut stream = chat(&messages);
    assert_eq!(stream.usage(), Usage { prompt_tokens: prompt, ..Usage::default() });
    stream.next().await.expect("an event").expect("no failure");
    assert_eq!(stream.usage().cached_tokens, most_cached(prompt));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cache_that_is_full_gives_its_oldest_blocks_and_refuses_nothing() {
    let folder = checkpoint();
    // Three sequences of full length fit, and 20 prompts of 200 tokens do not stay.
    let builder = tiny(&folder, 1).max_model_len(512).max_num_seqs(4).kv_cache_memory_bytes(1_200_000);
    let engine = builder.start().await.expect("starts");
    let plain = start(&folder, false).await;
    let blocks = status(&engine).total_blocks;
    assert!((64..200).contains(&blocks), "{blocks} blocks");
    for round in 0..2 {
        for seed in 0..20 {
            let answer = ask(&engine, tokens(seed, 200), greedy(5)).await;
            if round == 0 {
                assert_eq!(answer.tokens, ask(&plain, tokens(seed, 200), greedy(5)).await.tokens);
            }
        }
        let last = ask(&engine, tokens(19, 200), greedy(5)).await;
        assert_eq!(last.finish.usage.cached_tokens, 192, "the newest is kept");
    }
    until_free(&engine).await;
    let status = status(&engine);
    assert!((blocks - 12..=blocks).contains(&status.cached_blocks) && status.preemptions == 0, "{status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_forms_anew_has_lost_what_was_cached() {
    let folder = checkpoint();
    let faults = Faults::default();
    let engine = tiny(&folder, 2).faults(&faults).start().await.expect("starts");
    let prompt = tokens(8, 100);
    let expected = ask(&engine, prompt.clone(), greedy(5)).await.tokens;
    let epoch = status(&engine).epoch;
    faults.panic_at_step(0);
    let lost = engine.generate(prompt.clone(), greedy(5)).expect("admitted").collect().await;
    assert!(matches!(lost, Err(RequestError::Generation(_))), "{lost:?}");
    let is_anew = |status: Status| status.epoch > epoch && status.state == EnsembleState::Ready;
    until("the restart", || is_anew(status(&engine))).await;
    let answer = ask(&engine, prompt.clone(), greedy(5)).await;
    assert_eq!((answer.tokens, answer.finish.usage.cached_tokens), (expected, 0));
    assert_eq!(ask(&engine, prompt, greedy(5)).await.finish.usage.cached_tokens, 96);
}
