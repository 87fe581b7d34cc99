//! What clients are told of the cache, and whose prefixes they find there.

use axum::body::Bytes;
use consort_actors::SubmitError;
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};

use super::{
    super::error::ApiError, Answer, Running, ServerSettings, assert_error, start, start_with, until,
};
use crate::error::RequestError;

/// A prompt of 40 tokens, the first 32 of which can be taken over.
const PROMPT: &str = "It is a truth universally acknowledged, ";
const CACHED: u64 = 32;

impl Running {
    async fn complete_as(&self, key: &str, body: Value) -> Answer {
        let request = Request::post("/v1/completions")
            .header("content-type", "application/json")
            .header("authorization", format!("Bearer {key}"));
        self.send(request.body(Full::new(Bytes::from(body.to_string()))).expect("a request")).await
    }

    fn hits(&self) -> u64 {
        self.engine().status().ensemble.prefix_cache_hits
    }
}

fn cached(usage: &Value) -> &Value {
    &usage["prompt_tokens_details"]["cached_tokens"]
}

async fn with_keys(keys: &[&str], salt_per_api_key: bool) -> Running {
    let api_keys = keys.iter().map(|key| (*key).to_owned()).collect();
    start(ServerSettings { api_keys, salt_per_api_key, ..ServerSettings::default() }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_tells_what_was_cached_in_whole_and_streamed_answers() {
    let server = start(ServerSettings::default()).await;
    let body = json!({"prompt": PROMPT, "max_tokens": 3});
    assert_eq!(PROMPT.len(), 40);
    assert_eq!(cached(&server.complete(body.clone()).await.json()["usage"]), 0);
    assert_eq!(
        server.complete(body.clone()).await.json()["usage"],
        json!({"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43,
               "prompt_tokens_details": {"cached_tokens": CACHED}})
    );
    let mut streamed = body;
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
    let events = server.complete(streamed).await.events();
    let told: Vec<&Value> = events.iter().map(|event| cached(&event["usage"])).collect();
    assert_eq!(told, [&json!(CACHED); 4], "three tokens and the usage");

    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let chat = json!({"max_tokens": 3, "stream": true, "stream_options": options});
    server.chat(chat.clone()).await;
    let events = server.chat(chat).await.events();
    let told: Vec<u64> = events.iter().filter_map(|event| cached(&event["usage"]).as_u64()).collect();
    assert_eq!(told, [0, 16, 16, 16, 16], "nothing is known when the role is told");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_prompt_counts_once_what_its_first_choice_did_not_compute() {
    let server = start(ServerSettings::default()).await;
    let body =
        json!({"prompt": [PROMPT, "another one of the same length, exactly?"], "n": 3, "max_tokens": 2});
    let before = server.engine().status().ensemble.computed_tokens;
    let usage = server.complete(body.clone()).await.json()["usage"].clone();
    assert_eq!((&usage["prompt_tokens"], cached(&usage)), (&json!(80), &json!(0)));
    // Two prompts; of each the last token for two more choices; six second tokens.
    assert_eq!(server.engine().status().ensemble.computed_tokens - before, 80 + 2 * 2 + 6);
    let usage = server.complete(body).await.json()["usage"].clone();
    assert_eq!((&usage["prompt_tokens"], cached(&usage)), (&json!(80), &json!(2 * CACHED)));
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_of_different_keys_do_not_find_each_others_prefixes() {
    let server = with_keys(&["red", "green"], true).await;
    for salt in [Value::Null, json!("red"), json!("green")] {
        let body = json!({"prompt": PROMPT, "max_tokens": 2, "cache_salt": salt});
        for key in ["red", "green"] {
            let before = server.hits();
            let first = server.complete_as(key, body.clone()).await.json();
            assert_eq!((cached(&first["usage"]), server.hits()), (&json!(0), before), "{key} with {salt}");
            let again = server.complete_as(key, body.clone()).await.json();
            assert_eq!(cached(&again["usage"]), CACHED, "{key} with {salt}");
            assert_eq!(server.hits(), before + CACHED);
        }
    }
    assert_error(
        &server.complete_as("blue", json!({"prompt": PROMPT})).await,
        401,
        "AuthenticationError",
        None,
    );
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_of_different_keys_share_where_the_operator_says_so() {
    let server = with_keys(&["red", "green"], false).await;
    let body = json!({"prompt": PROMPT, "max_tokens": 2});
    assert_eq!(cached(&server.complete_as("red", body.clone()).await.json()["usage"]), 0);
    assert_eq!(cached(&server.complete_as("green", body).await.json()["usage"]), CACHED);
    let salted = json!({"prompt": PROMPT, "max_tokens": 2, "cache_salt": "mine"});
    assert_eq!(cached(&server.complete_as("green", salted).await.json()["usage"]), 0);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_one_key_no_salt_is_added() {
    let server = with_keys(&["red"], true).await;
    let body = json!({"prompt": PROMPT, "max_tokens": 2});
    server.complete_as("red", body.clone()).await;
    let mut own = server.engine().generate(PROMPT, Default::default()).expect("admitted");
    own.next().await.expect("an event").expect("no failure");
    assert_eq!(own.usage().cached_tokens as u64, CACHED, "the program that embeds the server shares with it");
    server.end().await;
}

#[test]
fn what_never_fits_is_the_callers_mistake_and_told_with_the_numbers() {
    let submit = SubmitError::NeverFits {
        prompt_tokens: 900,
        max_tokens: 101,
        needed_blocks: 72,
        total_blocks: 70,
        block_size: 16,
    };
    let error = ApiError::from(RequestError::Submit(submit));
    assert_eq!(
        (error.status.as_u16(), error.kind, error.param.as_deref()),
        (400, "BadRequestError", Some("max_tokens"))
    );
    for number in ["900", "101", "72", "16", "70"] {
        assert!(error.message.contains(number), "{}", error.message);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn priority_and_salt_are_checked_like_other_fields() {
    let server = start(ServerSettings::default()).await;
    for (field, value, message) in [
        ("priority", json!("urgent"), "priority: must be an integer, got \"urgent\""),
        ("priority", json!(1.5), "priority: must be an integer, got 1.5"),
        ("priority", json!(1_u64 << 31), "priority: must be in [-2147483648, 2147483647], got 2147483648"),
        ("cache_salt", json!(""), "cache_salt: must have 1 to 1024 bytes, got 0"),
        ("cache_salt", json!("ä".repeat(513)), "cache_salt: must have 1 to 1024 bytes, got 1026"),
        ("cache_salt", json!(7), "cache_salt: must be a string, got 7"),
    ] {
        let mut body = json!({"prompt": "ab", "max_tokens": 1});
        body[field] = value.clone();
        let answer = server.complete(body).await;
        assert_error(&answer, 400, "BadRequestError", Some(field));
        assert_eq!(answer.json()["error"]["message"], message);
        let mut body = json!({"max_tokens": 1});
        body[field] = value;
        assert_error(&server.chat(body).await, 400, "BadRequestError", Some(field));
    }
    for fine in
        [json!({"priority": -3}), json!({"priority": null, "cache_salt": null}), json!({"cache_salt": "ä"})]
    {
        let mut body = json!({"prompt": "ab", "max_tokens": 1});
        body.as_object_mut().expect("an object").extend(fine.as_object().expect("an object").clone());
        assert_eq!(server.complete(body).await.status, 200, "{fine}");
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_of_better_priority_is_answered_first_when_the_server_is_full() {
    let server = start_with(ServerSettings::default(), |builder| builder.max_num_seqs(1)).await;
    let ask = async |prompt: &str, priority: i32, max_tokens: u32| {
        let body = json!({"prompt": prompt, "priority": priority, "max_tokens": max_tokens});
        let answer = server.complete(body).await;
        assert_eq!(answer.status, 200);
        std::time::Instant::now()
    };
    let status = || server.engine().status().ensemble;
    let batch = async {
        until("running", || status().running == 1).await;
        ask("batch", 10, 1000).await
    };
    let person = async {
        until("waiting", || status().waiting == 1).await;
        ask("person", 0, 1).await
    };
    // The batch request needs a thousand steps of its own, so the two ends are far apart.
    let (_, batch, person) = tokio::join!(ask("first", 0, 1000), batch, person);
    assert!(person < batch);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_and_health_tell_of_the_cache() {
    let server = start(ServerSettings::default()).await;
    let body = json!({"prompt": PROMPT, "max_tokens": 9});
    server.complete(body.clone()).await;
    server.complete(body).await;
    until("freeing the blocks", || server.engine().status().ensemble.used_blocks == 0).await;
    let status = server.engine().status().ensemble;
    // 40 tokens and 8 that were computed after them.
    assert_eq!(status.cached_blocks, 3);
    let metrics = server.engine().render_metrics();
    let labels = "model_name=\"tiny\",engine=\"0\"";
    for line in [
        format!("vllm:prefix_cache_queries_total{{{labels}}} 80"),
        format!("vllm:prefix_cache_hits_total{{{labels}}} 32"),
        format!("vllm:kv_cache_usage_perc{{{labels}}} 0"),
        format!("consort:kv_cache_blocks{{{labels},state=\"cached\"}} 3"),
        format!("consort:kv_cache_blocks{{{labels},state=\"free\"}} {}", status.total_blocks - 3),
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is not in\n{metrics}");
    }
    let health = server.get("/health").await.json();
    assert_eq!((&health["kv_blocks_used"], &health["kv_blocks_cached"]), (&json!(0), &json!(3)));
    assert_eq!((&health["prefix_cache_queries"], &health["prefix_cache_hits"]), (&json!(80), &json!(32)));
    server.end().await;

    let server = start_with(ServerSettings::default(), |builder| builder.enable_prefix_caching(false)).await;
    assert!(server.engine().render_metrics().contains("enable_prefix_caching=\"False\"} 1"));
    server.end().await;
}
