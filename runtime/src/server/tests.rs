mod caching;
mod choices;
mod templates;

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{body::Bytes, http::StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::{HeaderMap, Request, header::HeaderValue};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    sync::Semaphore,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use super::{AppState, Server, ServerSettings, auth, sse};
use crate::{
    EngineBuilder, EnsembleState,
    engine::Engine,
    testing::{self, Faults, Rebuild},
};

/// A server on a free port, with or without its tiny model.
struct Running {
    address: SocketAddr,
    state: Arc<AppState>,
    engine: Option<Engine>,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("the body is JSON")
    }

    /// Payloads of an event stream; the last must be `[DONE]`, which is left out.
    fn events(&self) -> Vec<Value> {
        let text = std::str::from_utf8(&self.body).expect("UTF-8");
        let mut payloads: Vec<&str> = text
            .split_terminator("\n\n")
            .map(|event| event.strip_prefix("data: ").expect("data lines only"))
            .collect();
        assert_eq!(payloads.pop(), Some("[DONE]"));
        payloads.into_iter().map(|payload| serde_json::from_str(payload).expect("JSON")).collect()
    }
}

async fn start(settings: ServerSettings) -> Running {
    start_with(settings, |builder| builder).await
}

async fn start_with(
    settings: ServerSettings,
    configure: impl FnOnce(EngineBuilder) -> EngineBuilder,
) -> Running {
    let server =
        Server::bind(ServerSettings { listen: "127.0.0.1:0".into(), ..settings }).await.expect("a free port");
    let (address, handle, stop) = (server.local_addr(), server.handle(), CancellationToken::new());
    let state = Arc::clone(&server.state);
    let serving = tokio::spawn(server.run(stop.clone().cancelled_owned()));
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    let builder = Engine::builder()
        .model(folder.path())
        .tensor_parallel_size(2)
        .dtype("float32")
        .served_model_name("tiny");
    let engine = configure(builder).start().await.expect("the tiny model starts");
    handle.attach(engine.clone()).expect("the first engine");
    Running { address, state, engine: Some(engine), stop, serving }
}

async fn bare() -> Running {
    let settings = ServerSettings { listen: "127.0.0.1:0".into(), ..ServerSettings::default() };
    let server = Server::bind(settings).await.expect("a free port");
    let (address, stop, state) = (server.local_addr(), CancellationToken::new(), Arc::clone(&server.state));
    let serving = tokio::spawn(server.run(stop.clone().cancelled_owned()));
    Running { address, state, engine: None, stop, serving }
}

impl Running {
    fn engine(&self) -> &Engine {
        self.engine.as_ref().expect("started with an engine")
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Answer {
        self.try_send(request).await.expect("an answer")
    }

    /// An error if the connection is closed instead.
    async fn try_send(&self, mut request: Request<Full<Bytes>>) -> hyper::Result<Answer> {
        request.headers_mut().entry("host").or_insert(HeaderValue::from_static("tiny"));
        let stream = TcpStream::connect(self.address).await.expect("the server listens");
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("HTTP");
        tokio::spawn(connection);
        let response = sender.send_request(request).await?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = response.into_body().collect().await.expect("a whole body").to_bytes();
        Ok(Answer { status, headers, body })
    }

    async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Full::default()).expect("a request")).await
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(request.body(Full::new(Bytes::from(body.to_string()))).expect("a request")).await
    }

    async fn complete(&self, mut body: Value) -> Answer {
        for (field, value) in
            [("model", json!("tiny")), ("temperature", json!(0)), ("ignore_eos", json!(true))]
        {
            if body[field].is_null() {
                body[field] = value;
            }
        }
        self.post("/v1/completions", body).await
    }

    async fn chat(&self, mut body: Value) -> Answer {
        body["model"] = json!("tiny");
        body["temperature"] = json!(0);
        body["ignore_eos"] = json!(true);
        body["messages"] = json!([{"role": "user", "content": "hi"}]);
        self.post("/v1/chat/completions", body).await
    }

    async fn end(self) {
        self.stop.cancel();
        self.serving.await.expect("the server ends");
    }
}

async fn until(what: &str, condition: impl FnMut() -> bool) {
    testing::until_within(Duration::from_secs(100), what, condition).await;
}

/// Sends a completion request and leaves the answer unread.
async fn write_request(client: &mut TcpStream, body: &Value) {
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all(head.as_bytes()).await.expect("written");
    client.write_all(body.as_bytes()).await.expect("written");
}

/// A connection whose buffers hold next to nothing.
async fn narrow_client(server: &Running) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("a small buffer");
    socket.connect(server.address).await.expect("the server listens")
}

/// Choices of [`endless_answer`].
const CHOICES: usize = 8;

/// Asks for more bytes than sockets hold on both sides together (usually 4 MiB on the sender's).
fn endless_answer() -> Value {
    json!({"model": "tiny", "prompt": [[97], [98], [99], [100], [101], [102], [103], [104]], "max_tokens": 2400,
           "ignore_eos": true, "stream": true, "temperature": 0, "logprobs": 20})
}

fn assert_error(answer: &Answer, status: u16, kind: &str, param: Option<&str>) {
    assert_eq!(answer.status.as_u16(), status, "{:?}", answer.body);
    let error = &answer.json()["error"];
    assert_eq!(error["type"], kind);
    assert_eq!(error["code"], status.to_string());
    assert_eq!(error["param"].as_str(), param, "{error}");
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_is_answered_with_message_usage_and_reason() {
    let server = start(ServerSettings::default()).await;
    let answer = server.chat(json!({"max_tokens": 5})).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let body = answer.json();
    assert!(body["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")));
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "tiny");
    assert_eq!(body["choices"][0]["message"]["role"], "assistant");
    assert!(body["choices"][0]["message"]["content"].is_string());
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["choices"][0]["logprobs"], Value::Null);
    assert_eq!(body["usage"]["completion_tokens"], 5);
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_streamed_chat_opens_with_the_role_and_says_what_the_whole_one_says() {
    let server = start(ServerSettings::default()).await;
    let whole = server.chat(json!({"max_tokens": 8})).await.json();
    let options = json!({"include_usage": true});
    let answer = server.chat(json!({"max_tokens": 8, "stream": true, "stream_options": options})).await;
    assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
    let events = answer.events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(events.len(), 1 + 8 + 1, "the role, a chunk per token, the usage");
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], text);
    assert!(events.iter().all(|event| event["object"] == "chat.completion.chunk"));
    assert_eq!(events[8]["choices"][0]["finish_reason"], "length");
    assert!(events[..8].iter().all(|event| event["choices"][0]["finish_reason"].is_null()));
    assert!(events[..9].iter().all(|event| event.get("usage").is_none()));
    assert_eq!(events[9]["choices"], json!([]));
    // The whole one left its first block of 16 tokens in the cache.
    let mut usage = whole["usage"].clone();
    assert_eq!(usage["prompt_tokens"], 21);
    assert_eq!(usage["prompt_tokens_details"].take(), json!({"cached_tokens": 0}));
    usage["prompt_tokens_details"] = json!({"cached_tokens": 16});
    assert_eq!(events[9]["usage"], usage);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn continuous_usage_counts_up_in_every_chunk() {
    let server = start(ServerSettings::default()).await;
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let answer = server.chat(json!({"max_tokens": 3, "stream": true, "stream_options": options})).await;
    let counts: Vec<u64> =
        answer.events().iter().filter_map(|event| event["usage"]["completion_tokens"].as_u64()).collect();
    assert_eq!(counts, [0, 1, 2, 3, 3]);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_logprobs_hold_token_bytes_and_the_best() {
    let server = start(ServerSettings::default()).await;
    let body = server.chat(json!({"max_tokens": 2, "logprobs": true, "top_logprobs": 3})).await.json();
    let entries = body["choices"][0]["logprobs"]["content"].as_array().expect("entries");
    assert_eq!(entries.len(), 2);
    for entry in entries {
        assert_eq!(entry["top_logprobs"].as_array().expect("the best").len(), 3);
        assert_eq!(entry["logprob"], entry["top_logprobs"][0]["logprob"], "greedy takes the best");
        assert!(entry["bytes"].is_array());
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_take_every_kind_of_prompt_and_answer_in_order() {
    let server = start(ServerSettings::default()).await;
    let text = server.complete(json!({"prompt": "ab", "max_tokens": 4})).await.json();
    let ids = server.complete(json!({"prompt": [97, 98], "max_tokens": 4})).await.json();
    assert_eq!(text["object"], "text_completion");
    assert_eq!(text["choices"][0]["text"], ids["choices"][0]["text"]);
    let many = server.complete(json!({"prompt": [[97, 98], [99], [97, 98]], "max_tokens": 4})).await.json();
    let choices = many["choices"].as_array().expect("choices");
    assert_eq!(
        choices.iter().map(|choice| choice["index"].as_u64()).collect::<Vec<_>>(),
        [Some(0), Some(1), Some(2)]
    );
    assert_eq!(choices[0]["text"], text["choices"][0]["text"]);
    assert_eq!(choices[2]["text"], text["choices"][0]["text"]);
    assert_eq!(many["usage"]["prompt_tokens"], 5);
    assert_eq!(many["usage"]["completion_tokens"], 12);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn echo_has_the_shape_that_evaluation_harnesses_read() {
    let server = start(ServerSettings::default()).await;
    let body = json!({"prompt": [[104, 195, 169, 108]], "echo": true, "max_tokens": 1, "logprobs": 1});
    let answer = server.complete(body).await.json();
    let choice = &answer["choices"][0];
    assert!(choice["text"].as_str().is_some_and(|text| text.starts_with("hél")), "{choice}");
    let logprobs = &choice["logprobs"];
    assert_eq!(
        logprobs["tokens"].as_array().map(|tokens| tokens[..4].to_vec()),
        json!(["h", "\u{fffd}", "\u{fffd}", "l"]).as_array().cloned()
    );
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3, 4]));
    let values = logprobs["token_logprobs"].as_array().expect("values");
    let tops = logprobs["top_logprobs"].as_array().expect("the best");
    assert_eq!((values.len(), tops.len()), (5, 5), "prompt and exactly one generated token");
    assert_eq!((&values[0], &tops[0]), (&Value::Null, &Value::Null));
    for (value, top) in values.iter().zip(tops).skip(1) {
        let top = top.as_object().expect("a map");
        assert!((1..=2).contains(&top.len()));
        assert!(top.values().any(|other| other == value), "the actual token is among them: {value} {top:?}");
    }
    let best = tops[4].as_object().expect("a map").values().filter_map(Value::as_f64).reduce(f64::max);
    assert_eq!(values[4].as_f64(), best, "greedy takes the best, exactly");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn echo_alone_returns_the_prompt_and_generates_nothing() {
    let server = start(ServerSettings::default()).await;
    for extra in [json!({}), json!({"logprobs": 0}), json!({"stream": true})] {
        let mut body = json!({"prompt": "abc", "echo": true, "max_tokens": 0});
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        let answer = server.complete(body).await;
        let choice = match extra["stream"].as_bool() {
            Some(true) => answer.events()[0]["choices"][0].clone(),
            _ => answer.json()["choices"][0].clone(),
        };
        assert_eq!(choice["text"], "abc");
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(choice["logprobs"].is_null(), extra.get("logprobs").is_none());
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_streamed_completion_equals_the_whole_one_with_logprobs_and_ids() {
    let server = start(ServerSettings::default()).await;
    let request = json!({
        "prompt": ["ab", "c"], "max_tokens": 5, "logprobs": 2, "echo": true, "return_token_ids": true,
    });
    let whole = server.complete(request.clone()).await.json();
    let mut streamed = request;
    streamed["stream"] = json!(true);
    let events = server.complete(streamed).await.events();
    for index in 0..2 {
        let parts: Vec<&Value> = events
            .iter()
            .map(|event| &event["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        let choice = &whole["choices"][index];
        assert_eq!(parts.len(), 5, "a chunk per token");
        let text: String = parts.iter().filter_map(|part| part["text"].as_str()).collect();
        assert_eq!(choice["text"], text);
        for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let joined: Vec<Value> = parts
                .iter()
                .flat_map(|part| part["logprobs"][field].as_array().cloned().expect("an array"))
                .collect();
            assert_eq!(choice["logprobs"][field], Value::Array(joined), "{field}");
        }
        let ids: Vec<Value> =
            parts.iter().flat_map(|part| part["token_ids"].as_array().cloned().expect("ids")).collect();
        assert_eq!(choice["token_ids"], Value::Array(ids));
        assert_eq!(parts[0]["prompt_token_ids"], choice["prompt_token_ids"]);
        assert!(parts[1].get("prompt_token_ids").is_none());
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_are_answered_with_their_status_type_and_field() {
    let settings = ServerSettings { body_limit_bytes: 1000, ..ServerSettings::default() };
    let server = start(settings).await;
    let answer = server.complete(json!({"prompt": "a", "temperature": 9})).await;
    assert_error(&answer, 400, "BadRequestError", Some("temperature"));
    let answer = server.complete(json!({"prompt": "a", "n": 129})).await;
    assert_error(&answer, 400, "BadRequestError", Some("n"));
    let answer = server.complete(json!({"prompt": "a".repeat(700), "max_tokens": 4000})).await;
    assert_error(&answer, 400, "BadRequestError", Some("max_tokens"));
    let answer = server.complete(json!({"prompt": [9999]})).await;
    assert_error(&answer, 400, "BadRequestError", Some("prompt"));
    let answer = server.complete(json!({"prompt": "a", "max_tokens": testing::CONTEXT})).await;
    assert_error(&answer, 400, "BadRequestError", Some("max_tokens"));
    let answer = server.complete(json!({"prompt": "a", "model": "other"})).await;
    assert_error(&answer, 404, "NotFoundError", Some("model"));
    assert_error(&server.get("/v1/nothing").await, 404, "NotFoundError", None);
    assert_error(&server.get("/v1/completions").await, 405, "MethodNotAllowedError", None);
    let answer = server.complete(json!({"prompt": "a".repeat(2000)})).await;
    assert_error(&answer, 413, "PayloadTooLargeError", None);
    let form = Request::post("/v1/completions").header("content-type", "application/x-www-form-urlencoded");
    let answer = server.send(form.body(Full::new(Bytes::from("{}"))).expect("a request")).await;
    assert_error(&answer, 415, "UnsupportedMediaTypeError", None);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_api_asks_for_the_key() {
    let api_keys = vec!["other".into(), "secret".into()];
    let server = start(ServerSettings { api_keys, ..ServerSettings::default() }).await;
    let models = async |key: Option<&str>| {
        let mut request = Request::get("/v1/models");
        if let Some(key) = key {
            request = request.header("authorization", key);
        }
        server.send(request.body(Full::default()).expect("a request")).await
    };
    for wrong in
        [None, Some("Bearer wrong"), Some("Bearer secre"), Some("Bearer secret2"), Some("secret"), Some("")]
    {
        let answer = models(wrong).await;
        assert_error(&answer, 401, "AuthenticationError", None);
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
    }
    assert_eq!(models(Some("Bearer secret")).await.status, 200);
    assert_eq!(models(Some("bearer secret")).await.status, 200);
    assert_eq!(models(Some("Bearer other")).await.status, 200);
    for open in ["/livez", "/readyz", "/health", "/metrics"] {
        assert_eq!(server.get(open).await.status, 200, "{open}");
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_is_listed_and_the_state_told() {
    let server = start(ServerSettings::default()).await;
    let card = &server.get("/v1/models").await.json()["data"][0];
    assert_eq!((&card["id"], &card["max_model_len"]), (&json!("tiny"), &json!(testing::CONTEXT)));
    assert!(card["root"].is_string());
    let health = server.get("/health").await.json();
    assert_eq!(health["status"], "ready");
    assert_eq!(health["ranks"].as_array().map(Vec::len), Some(2));
    assert_eq!((&health["ranks"][1]["replica"], &health["ranks"][1]["rank"]), (&json!(0), &json!(1)));
    assert_eq!(health["replicas"].as_array().map(Vec::len), Some(1));
    let replica = &health["replicas"][0];
    assert_eq!(
        (&replica["status"], &replica["reason"], &replica["epoch"]),
        (&json!("ready"), &json!(null), &json!(0))
    );
    server.complete(json!({"prompt": "abc", "max_tokens": 2})).await;
    let metrics = server.get("/metrics").await;
    let text = String::from_utf8(metrics.body.to_vec()).expect("UTF-8");
    assert!(text.contains("vllm:prompt_tokens_total{model_name=\"tiny\",engine=\"0\"} 3"), "{text}");
    assert!(text.contains("finished_reason=\"length\"} 1"), "{text}");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_engine_only_liveness_is_given() {
    let server = bare().await;
    assert_eq!(server.get("/livez").await.status, 200);
    assert_eq!(server.get("/readyz").await.status, 503);
    assert_eq!(server.get("/health").await.json()["status"], "loading");
    let answer = server.complete(json!({"prompt": "a"})).await;
    assert_error(&answer, 503, "ServiceUnavailableError", None);
    assert!(answer.headers.contains_key("retry-after"));
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clients_request_id_is_kept_and_a_silly_one_replaced() {
    let server = start(ServerSettings::default()).await;
    let send = async |id: &str| {
        let request = Request::get("/v1/models").header("x-request-id", id);
        server.send(request.body(Full::default()).expect("a request")).await.headers["x-request-id"].clone()
    };
    assert_eq!(send("abc-1").await, "abc-1");
    let long = "x".repeat(500);
    assert_ne!(send(&long).await, long.as_str());
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_hangs_up_is_cancelled() {
    let server = start(ServerSettings::default()).await;
    for (aborted, stream) in [(1, true), (2, false)] {
        let body = json!({"prompt": "a", "max_tokens": 4000, "ignore_eos": true, "stream": stream});
        let mut client = TcpStream::connect(server.address).await.expect("the server listens");
        write_request(&mut client, &body).await;
        if stream {
            let mut first = [0; 64];
            client.read_exact(&mut first).await.expect("the stream begins");
        }
        until("the request's begin", || !server.engine().status().requests.is_empty()).await;
        drop(client);
        until("the request's end", || {
            let status = server.engine().status();
            status.requests.is_empty() && status.ensemble.used_blocks == 0
        })
        .await;
        let line = format!("finished_reason=\"abort\"}} {aborted}\n");
        assert!(server.engine().render_metrics().contains(&line), "it must not have run to its end");
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_lets_open_requests_end_and_refuses_new_ones() {
    let server = start(ServerSettings::default()).await;
    let mut open = server
        .engine()
        .generate(
            "abc",
            crate::GenerateOptions { max_tokens: Some(100), ignore_eos: true, ..Default::default() },
        )
        .expect("admitted");
    open.next().await.expect("an event").expect("no failure");
    server.stop.cancel();
    let done = open.collect().await.expect("it may end");
    assert_eq!(done.finish.usage.completion_tokens, 100);
    server.serving.await.expect("the server ends");
    assert!(TcpStream::connect(server.address).await.is_err(), "nobody listens any more");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_gets_its_whole_answer_while_draining_and_new_requests_are_refused() {
    // The grace must outlast the generation on a machine that is busy with other tests.
    let settings = ServerSettings { shutdown_grace: Duration::from_secs(120), ..ServerSettings::default() };
    let server = start(settings).await;
    let mut slow = narrow_client(&server).await;
    let body = endless_answer();
    write_request(&mut slow, &body).await;
    until("the answer's generation", || server.engine().status().ensemble.running == CHOICES).await;
    server.stop.cancel();
    until("the end of all generations", || server.engine().status().ensemble.state == EnsembleState::Stopped)
        .await;
    // Longer than connections are let linger once nothing is left to wait for.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(server.get("/readyz").await.status, 503);
    assert_eq!(server.get("/livez").await.status, 200);
    let answer = server.complete(json!({"prompt": "a"})).await;
    assert_error(&answer, 503, "ServiceUnavailableError", None);
    assert!(!server.serving.is_finished(), "the slow reader is waited for");

    let mut answer = Vec::new();
    slow.read_to_end(&mut answer).await.expect("the answer is not cut");
    let text = String::from_utf8_lossy(&answer);
    assert!(text.contains("data: [DONE]\n\n") && text.ends_with("0\r\n\r\n"), "{} bytes", answer.len());
    assert!(answer.len() > 6 << 20, "{} bytes may fit into buffers", answer.len());
    server.serving.await.expect("the server ends");
    assert!(TcpStream::connect(server.address).await.is_err(), "nobody listens any more");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_never_reads_is_cut_off_when_the_grace_is_over() {
    let settings = ServerSettings { shutdown_grace: Duration::from_millis(500), ..ServerSettings::default() };
    let server = start(settings).await;
    let mut stuck = narrow_client(&server).await;
    let body = endless_answer();
    write_request(&mut stuck, &body).await;
    until("the answer's generation", || server.engine().status().ensemble.running == CHOICES).await;
    let _silent = TcpStream::connect(server.address).await.expect("the server listens");
    server.stop.cancel();
    let ended = tokio::time::timeout(Duration::from_secs(20), server.serving).await;
    ended.expect("it does not wait for ever").expect("the server ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_are_answered_when_clients_hold_all_connections() {
    let server = start(ServerSettings { connections_max: 2, ..ServerSettings::default() }).await;
    let mut silent = Vec::new();
    for _ in 0..2 {
        silent.push(TcpStream::connect(server.address).await.expect("the server listens"));
    }
    for probe in ["/livez", "/readyz", "/health", "/metrics"] {
        assert_eq!(server.get(probe).await.status, 200, "{probe}");
    }
    let refused = server.complete(json!({"prompt": "a"})).await;
    assert_error(&refused, 503, "ServiceUnavailableError", None);
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(refused.headers["connection"], "close");

    // Beyond those few, connections are closed and not left waiting.
    let mut more = Vec::new();
    for _ in 0..32 {
        more.push(TcpStream::connect(server.address).await.expect("the server listens"));
    }
    let mut last = more.pop().expect("opened");
    let got = tokio::time::timeout(Duration::from_secs(4), last.read(&mut [0; 16])).await;
    assert!(matches!(got.expect("closed at once"), Ok(0) | Err(_)), "the newest is closed");

    drop((silent, more));
    let limit = Instant::now() + Duration::from_secs(20);
    let models = || Request::get("/v1/models").body(Full::default()).expect("a request");
    while !matches!(server.try_send(models()).await, Ok(answer) if answer.status == 200) {
        assert!(Instant::now() < limit, "places are not given back");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_shard_is_an_error_for_open_streams_and_a_pause_for_everybody_else() {
    let faults = Faults::default();
    let server = start_with(ServerSettings::default(), |builder| builder.faults(&faults)).await;
    let before = server.complete(json!({"prompt": "abc", "max_tokens": 4})).await.json();
    faults.on_rebuild(Rebuild::Wait);
    faults.panic_at_step(5);
    let open = server.complete(json!({"prompt": "abc", "max_tokens": 100, "stream": true})).await;
    assert_eq!(open.status, 200, "the stream had begun");
    let events = open.events();
    let (last, chunks) = events.split_last().expect("an error at least");
    assert_eq!(last["error"]["type"], "ServiceUnavailableError");
    assert_eq!(last["error"]["code"], "503");
    assert!(last["error"]["message"].as_str().is_some_and(|text| text.contains("a shard failed")), "{last}");
    assert!(!chunks.is_empty() && chunks.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));

    assert_eq!(server.get("/readyz").await.status, 503);
    assert_eq!(server.get("/livez").await.status, 200, "it is being repaired");
    let health = server.get("/health").await.json();
    assert_eq!(health["status"], "restarting");
    assert_error(&server.complete(json!({"prompt": "abc"})).await, 503, "ServiceUnavailableError", None);

    faults.on_rebuild(Rebuild::Succeed);
    until("the group's return", || server.engine().status().ensemble.state == EnsembleState::Ready).await;
    assert_eq!(server.get("/readyz").await.status, 200);
    let after = server.complete(json!({"prompt": "abc", "max_tokens": 4})).await.json();
    assert_eq!(after["choices"], before["choices"], "{after}");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_failed_for_good_is_neither_ready_nor_live() {
    let faults = Faults::default();
    let server = start_with(ServerSettings::default(), |builder| builder.faults(&faults)).await;
    faults.on_rebuild(Rebuild::Fail);
    faults.panic_at_step(2);
    let lost = server.complete(json!({"prompt": "abc", "max_tokens": 100})).await;
    assert_error(&lost, 503, "ServiceUnavailableError", None);
    until("giving up", || server.engine().failure().is_some()).await;
    assert!(server.engine().failed().await.contains(testing::REBUILD_FAILURE));
    let live = server.get("/livez").await;
    assert_eq!(live.status, 503);
    assert!(String::from_utf8_lossy(&live.body).contains(testing::REBUILD_FAILURE), "{:?}", live.body);
    assert_eq!(server.get("/readyz").await.status, 503);
    assert_eq!(server.get("/health").await.json()["status"], "failed");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_prompts_than_can_ever_wait_are_refused_with_the_limit() {
    let few = |builder: EngineBuilder| builder.with_overrides(|set| set.max_waiting_requests = Some(3));
    let server = start_with(ServerSettings::default(), few).await;
    let answer = server.complete(json!({"prompt": [[1], [2], [3], [4]], "max_tokens": 1})).await;
    assert_error(&answer, 400, "BadRequestError", Some("prompt"));
    let message = answer.json()["error"]["message"].to_string();
    assert!(message.contains("at most 3") && message.contains("max_waiting_requests"), "{message}");
    let answer = server.complete(json!({"prompt": [[1], [2], [3]], "max_tokens": 1})).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_bodies_are_prepared_one_per_core_at_a_time_and_answered_alike() {
    let server = start(ServerSettings::default()).await;
    let words = "b ".repeat(1 << 15);
    let refused = server.complete(json!({"prompt": words})).await;
    assert_error(&refused, 400, "BadRequestError", Some("prompt"));
    let message = refused.json()["error"]["message"].to_string();
    assert!(message.contains("65536 bytes") && message.contains("maximum context length"), "{message}");
    // A long body with a short prompt is served, on another thread than a short body's.
    let padded = json!({"prompt": "abc", "max_tokens": 2, "user": "x".repeat(1 << 15)});
    let both = (
        server.complete(padded).await.json(),
        server.complete(json!({"prompt": "abc", "max_tokens": 2})).await,
    );
    assert_eq!(both.0["choices"], both.1.json()["choices"]);

    let state = &server.state;
    let all = u32::try_from(state.preparing.available_permits()).expect("few cores");
    let busy = state.preparing.acquire_many(all).await.expect("open");
    let long = server.complete(json!({"prompt": "abc", "max_tokens": 1, "user": "x".repeat(1 << 15)}));
    assert!(tokio::time::timeout(Duration::from_millis(200), long).await.is_err(), "it waits for a core");
    assert_eq!(server.complete(json!({"prompt": "abc", "max_tokens": 1})).await.status, 200);
    drop(busy);
    let long = server.complete(json!({"prompt": "abc", "max_tokens": 1, "user": "x".repeat(1 << 15)}));
    assert_eq!(long.await.status, 200);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chats_are_rendered_off_the_workers_and_do_not_wait_for_long_bodies() {
    let server = start(ServerSettings::default()).await;
    let state = &server.state;
    let take = async |permits: &Semaphore| {
        let all = u32::try_from(permits.available_permits()).expect("few cores");
        permits.acquire_many(all).await.expect("open").forget();
        all as usize
    };
    let short = || server.chat(json!({"max_tokens": 1}));
    let preparing = take(&state.preparing).await;
    assert_eq!(short().await.status, 200, "long bodies are in nobody's way");
    let rendering = take(&state.rendering).await;
    assert!(
        tokio::time::timeout(Duration::from_millis(200), short()).await.is_err(),
        "it waits for a template"
    );
    assert_eq!(server.complete(json!({"prompt": "abc", "max_tokens": 1})).await.status, 200);
    state.preparing.add_permits(preparing);
    state.rendering.add_permits(rendering);
    assert_eq!(short().await.status, 200);
    server.end().await;
}

#[test]
fn a_payload_is_one_data_line_and_an_empty_one() {
    assert_eq!(sse::frames(&["{\"a\":1}".into(), "[DONE]".into()]), "data: {\"a\":1}\n\ndata: [DONE]\n\n");
    assert_eq!(sse::frames(&[]), "");
}

#[test]
fn keys_are_compared_whole() {
    assert!(auth::same(b"abc", b"abc"));
    assert!(!auth::same(b"abd", b"abc"));
    assert!(!auth::same(b"ab", b"abc"));
    assert!(!auth::same(b"abcd", b"abc"));
    assert!(!auth::same(b"", b"abc"));
    let keys = ["abc", "abd", "b"].map(str::to_owned);
    for (at, key) in keys.iter().enumerate() {
        assert_eq!(auth::find(key.as_bytes(), &keys), Some(at));
    }
    assert!(
        [b"".as_slice(), b"a", b"abcd", b"abc,abd"].iter().all(|given| auth::find(given, &keys).is_none())
    );
    assert_eq!(auth::bearer(b"BEARER x"), Some(b"x".as_slice()));
    assert_eq!(auth::bearer(b"Basic x"), None);
    assert_eq!(auth::bearer(b"Bear"), None);
}
