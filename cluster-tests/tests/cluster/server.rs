//! `consort serve` over three ranks, from outside.

use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::{Served, eventually, one_model_at_a_time, root};

fn three_shards(arguments: &[&str]) -> Served {
    Served::start(root().join("examples/topologies/three-cpu-shards.toml").to_str().unwrap(), arguments)
}

fn question(extra: Value) -> Value {
    let mut body = json!({
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[test]
fn the_whole_surface_answers_and_bad_requests_touch_nobody() {
    let _guard = one_model_at_a_time();
    let server = three_shards(&[]);
    for rank in ["rank 0", "rank 1", "rank 2"] {
        assert!(server.banner.contains(rank), "{}", server.banner);
    }
    for path in ["/livez", "/readyz", "/health"] {
        assert_eq!(server.get(path).0, 200, "{path}");
    }
    let models: Value = serde_json::from_str(&server.get("/v1/models").1).unwrap();
    assert_eq!(models["data"][0]["id"], "smollm2-135m");

    let (status, answer) = server.post("/v1/chat/completions", &question(json!({})));
    assert_eq!(status, 200, "{answer}");
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.contains("Paris"), "{text}");
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let usage = &answer["usage"];
    let tokens = |key: &str| usage[key].as_u64().unwrap();
    assert_eq!(tokens("total_tokens"), tokens("prompt_tokens") + tokens("completion_tokens"));

    streamed_text_equals_the_whole_answer(&server, text);
    echo_scores_every_prompt_token(&server);
    prompts_in_every_form_give_the_same_completion(&server);
    stop_strings_never_leak(&server, text);
    bad_requests_get_clear_errors(&server);

    // After all that, the same question still gets the same answer, and nothing is held.
    let (_, again) = server.post("/v1/chat/completions", &question(json!({})));
    assert_eq!(again["choices"][0]["message"]["content"], text);
    assert_eq!(server.metric("vllm:num_requests_running"), 0.0);
    assert!(server.metric("vllm:generation_tokens_total") > 0.0);
}

fn streamed_text_equals_the_whole_answer(server: &Served, text: &str) {
    let extra = json!({"stream": true, "stream_options": {"include_usage": true}});
    let events: Vec<String> = server.stream("/v1/chat/completions", &question(extra)).collect();
    assert_eq!(events.last().unwrap(), "[DONE]");
    let chunks: Vec<Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let streamed: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, text);
    let reasons: Vec<&str> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["finish_reason"].as_str()).collect();
    assert_eq!(reasons, ["stop"]);
    let usage = chunks.last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert!(usage["usage"]["completion_tokens"].as_u64().unwrap() > 3);
}

/// The payload of lm-eval's loglikelihood.
fn echo_scores_every_prompt_token(server: &Served) {
    let prompt = [504, 3575, 282, 4649, 314, 7042, 30];
    let body = json!({
        "model": "smollm2-135m", "prompt": [prompt], "echo": true, "max_tokens": 1, "logprobs": 1, "temperature": 0,
    });
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let logprobs = &answer["choices"][0]["logprobs"];
    let len = |key: &str| logprobs[key].as_array().unwrap().len();
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(len(key), prompt.len() + 1, "{key}");
    }
    assert!(logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null());
    for at in 1..=prompt.len() {
        let logprob = logprobs["token_logprobs"][at].as_f64().unwrap();
        let best = logprobs["top_logprobs"][at].as_object().unwrap().values().map(|x| x.as_f64().unwrap());
        let best = best.fold(f64::NEG_INFINITY, f64::max);
        assert!(logprob <= 0.0 && logprob <= best);
        if at == prompt.len() {
            assert_eq!(logprob, best, "the generated token is the greedy one");
        }
    }
    let offsets: Vec<u64> =
        logprobs["text_offset"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap()).collect();
    assert!(offsets.is_sorted() && offsets[0] == 0);
}

fn prompts_in_every_form_give_the_same_completion(server: &Served) {
    let complete = |prompt: Value| {
        let body = json!({
            "model": "smollm2-135m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": true,
        });
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let text = complete(json!("Once upon a time"));
    let ids = text["choices"][0]["prompt_token_ids"].clone();
    assert!(ids.as_array().is_some_and(|ids| ids.len() >= 4), "{text}");
    let expected = text["choices"][0]["text"].as_str().unwrap();
    assert_eq!(complete(ids.clone())["choices"][0]["text"], expected);
    let both = complete(json!([ids, [1, 2, 3]]));
    assert_eq!(both["choices"].as_array().unwrap().len(), 2);
    assert_eq!(both["choices"][0]["text"], expected);
    assert_eq!(complete(json!(["Once upon a time"]))["choices"][0]["text"], expected);
}

fn stop_strings_never_leak(server: &Served, text: &str) {
    let stop = "Paris";
    let (_, answer) = server.post("/v1/chat/completions", &question(json!({"stop": [stop]})));
    let got = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(got, text.split(stop).next().unwrap());
    let events: Vec<String> = server
        .stream("/v1/chat/completions", &question(json!({"stop": stop, "stream": true})))
        .filter(|event| event != "[DONE]")
        .collect();
    let streamed: String = events
        .iter()
        .map(|event| serde_json::from_str::<Value>(event).unwrap())
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(streamed, got);
}

fn bad_requests_get_clear_errors(server: &Served) {
    let chat = |extra: Value| server.post("/v1/chat/completions", &question(extra));
    let cases = [
        (json!({"temperature": -1}), 400, "temperature"),
        (json!({"top_p": 0}), 400, "top_p"),
        (json!({"max_tokens": 0}), 400, "max_tokens"),
        (json!({"max_tokens": 1_000_000}), 400, "context"),
        (json!({"messages": []}), 400, "messages"),
        (json!({"model": "another"}), 404, "another"),
        (json!({"n": 129}), 400, "n"),
        (json!({"logit_bias": {"5": 101}}), 400, "logit_bias"),
        (json!({"min_tokens": 5, "max_tokens": 4}), 400, "min_tokens"),
        (json!({"repetition_penalty": 0}), 400, "repetition_penalty"),
        (json!({"tools": [{"type": "function"}]}), 400, "tools"),
        (json!({"guided_json": {}}), 400, "guided_json"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), 400, "image_url"),
    ];
    for (extra, status, word) in cases {
        let (got, body) = chat(extra.clone());
        assert_eq!(got, status, "{extra}: {body}");
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains(word), "{extra}: {message}");
        assert_eq!(body["error"]["code"], status.to_string());
    }
    assert_eq!(server.post_text("/v1/chat/completions", "{not json").0, 400);
    assert_eq!(server.post("/v1/completions", &json!({"prompt": [[999_999_999]], "max_tokens": 1})).0, 400);
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "", "max_tokens": 1})).0, 400);
    assert_eq!(server.get("/v1/nothing").0, 404);
    assert_eq!(server.get("/v1/chat/completions").0, 405);
    // Unknown fields are other servers' extensions: tolerated.
    assert_eq!(chat(json!({"some_extension": true})).0, 200);
}

#[test]
fn a_client_that_disconnects_gives_its_blocks_back() {
    let _guard = one_model_at_a_time();
    let server = three_shards(&["--max-model-len", "4096"]);
    let body = question(json!({"stream": true, "ignore_eos": true, "max_tokens": 4000}));
    let mut events = server.stream("/v1/chat/completions", &body);
    for _ in 0..4 {
        events.next().unwrap();
    }
    assert_eq!(server.metric("vllm:num_requests_running"), 1.0);
    assert!(server.metric("vllm:kv_cache_usage_perc") > 0.0);
    drop(events);
    eventually("the request is gone and its blocks are free", Duration::from_secs(10), || {
        server.metric("vllm:num_requests_running") == 0.0 && server.metric("vllm:kv_cache_usage_perc") == 0.0
    });
}

#[test]
fn a_terminated_server_finishes_open_streams_and_refuses_new_ones() {
    let _guard = one_model_at_a_time();
    let server = three_shards(&[]);
    let body = question(json!({"stream": true, "ignore_eos": true, "max_tokens": 150}));
    let mut events = server.stream("/v1/chat/completions", &body);
    events.next().unwrap();
    events.next().unwrap();
    server.terminate();
    eventually("readiness is gone", Duration::from_secs(5), || server.get("/readyz").0 == 503);
    assert_eq!(server.post("/v1/chat/completions", &question(json!({}))).0, 503);
    let rest: Vec<String> = events.collect();
    assert_eq!(rest.last().map(String::as_str), Some("[DONE]"));
    let last: Value = serde_json::from_str(&rest[rest.len() - 2]).unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    let (code, errors) = server.end(Duration::from_secs(20));
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn an_api_key_guards_v1_and_nothing_else() {
    let _guard = one_model_at_a_time();
    // The harness sets no key; the variable named here is set for the whole test process and read by the child.
    let server = three_shards(&["--api-key-env", "CARGO_PKG_NAME"]);
    let (status, body) = server.post("/v1/chat/completions", &question(json!({})));
    assert_eq!(status, 401, "{body}");
    assert_eq!(server.get("/health").0, 200);
    assert_eq!(server.get("/metrics").0, 200);
    let mut response = ureq::get(format!("{}/v1/models", server.url))
        .header("authorization", format!("Bearer {}", env!("CARGO_PKG_NAME")))
        .call()
        .unwrap();
    assert!(response.body_mut().read_to_string().unwrap().contains("smollm2-135m"));
}
