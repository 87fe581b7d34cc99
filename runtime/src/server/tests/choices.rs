//! What a request may ask of its choices: how many, how long at least, and what changes their logits.

use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::{ServerSettings, assert_error, start, start_with, until, write_request};
use crate::{EngineBuilder, testing};

/// Texts and finish reasons by index, from the chunks of a stream.
fn assemble(events: &[Value], text_of: impl Fn(&Value) -> Option<&str>) -> Vec<(String, Vec<String>)> {
    let mut choices = Vec::new();
    for choice in events.iter().flat_map(|event| event["choices"].as_array().expect("choices")) {
        let index = choice["index"].as_u64().expect("an index") as usize;
        choices.resize(choices.len().max(index + 1), (String::new(), Vec::new()));
        choices[index].0.push_str(text_of(choice).unwrap_or_default());
        choices[index].1.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
    choices
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_draw_with_seeds_that_count_up_and_the_prompt_is_counted_once() {
    let server = start(ServerSettings::default()).await;
    let ask = async |extra: Value| {
        let mut body = json!({"prompt": "abc", "max_tokens": 6, "temperature": 1.0, "seed": 41});
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        server.complete(body).await.json()
    };
    let body = ask(json!({"n": 4, "best_of": 4})).await;
    let choices = body["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 4);
    let mut distinct = std::collections::BTreeSet::new();
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        let alone = ask(json!({"seed": 41 + index})).await;
        assert_eq!(
            choice["text"], alone["choices"][0]["text"],
            "choice {index} is the one of seed 41 + {index}"
        );
        distinct.insert(choice["text"].to_string());
    }
    assert_eq!(distinct.len(), 4);
    assert_eq!(
        (&body["usage"]["prompt_tokens"], &body["usage"]["completion_tokens"]),
        (&json!(3), &json!(24))
    );
    let unseeded = ask(json!({"n": 2, "seed": null})).await;
    assert_ne!(unseeded["choices"][0]["text"], unseeded["choices"][1]["text"]);
    let chat = server.chat(json!({"n": 3, "max_tokens": 2, "logprobs": true})).await.json();
    let one = server.chat(json!({"max_tokens": 2})).await.json();
    assert_eq!(chat["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"]);
    assert_eq!(chat["usage"]["completion_tokens"], 6);
    for (index, choice) in chat["choices"].as_array().expect("choices").iter().enumerate() {
        assert_eq!((&choice["index"], &choice["message"]), (&json!(index), &one["choices"][0]["message"]));
        assert_eq!(choice["logprobs"]["content"].as_array().map(Vec::len), Some(2));
    }
    let metrics = server.engine().render_metrics();
    assert!(
        metrics.contains("vllm:request_params_n_bucket{model_name=\"tiny\",engine=\"0\",le=\"2\"} 6"),
        "{metrics}"
    );
    assert!(metrics.contains("vllm:request_params_n_count{model_name=\"tiny\",engine=\"0\"} 8"), "{metrics}");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_of_several_prompts_are_numbered_prompt_by_prompt_and_echoed() {
    let server = start(ServerSettings::default()).await;
    let body = json!({"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 3, "temperature": 1.0, "seed": 7, "echo": true,
                      "logprobs": 1, "return_token_ids": true});
    let whole = server.complete(body.clone()).await.json();
    let choices = whole["choices"].as_array().expect("choices");
    let starts = ["ab", "ab", "xyz", "xyz"];
    assert_eq!(choices.len(), 4);
    for (index, (choice, start)) in choices.iter().zip(starts).enumerate() {
        assert_eq!(choice["index"], index);
        assert!(choice["text"].as_str().is_some_and(|text| text.starts_with(start)), "{choice}");
        let entries = choice["logprobs"]["tokens"].as_array().map(Vec::len);
        assert_eq!(entries, Some(start.len() + 3));
    }
    assert_ne!(choices[0]["text"], choices[1]["text"]);
    assert_eq!(
        (&whole["usage"]["prompt_tokens"], &whole["usage"]["completion_tokens"]),
        (&json!(5), &json!(12))
    );

    let mut streamed = body;
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let events = server.complete(streamed).await.events();
    let assembled = assemble(&events, |choice| choice["text"].as_str());
    for (index, (choice, (text, ends))) in choices.iter().zip(&assembled).enumerate() {
        assert_eq!((&choice["text"], ends.as_slice()), (&json!(text), &["length".to_owned()][..]));
        // Every choice has the log-probabilities of its prompt, which only the first one's generation reports.
        let parts = events.iter().filter_map(|event| event["choices"].get(0));
        let parts = parts.filter(|part| part["index"] == index);
        let streamed =
            parts.flat_map(|part| part["logprobs"]["token_logprobs"].as_array().cloned().expect("told"));
        let streamed: Vec<Value> = streamed.collect();
        assert_eq!(choice["logprobs"]["token_logprobs"], json!(streamed));
        let prompt = starts[index].len();
        assert!(streamed[0].is_null() && streamed[1..].iter().all(Value::is_number), "{streamed:?}");
        assert_eq!(
            streamed[..prompt],
            choices[index / 2 * 2]["logprobs"]["token_logprobs"].as_array().expect("told")[..prompt]
        );
    }
    assert_eq!(events.last().expect("the usage")["usage"], whole["usage"]);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streamed_choices_of_a_chat_each_have_a_role_a_text_and_an_end() {
    let server = start(ServerSettings::default()).await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    let mut body = json!({"messages": messages, "n": 3, "seed": 5, "temperature": 1.2, "max_tokens": 5,
                          "ignore_eos": true, "presence_penalty": 0.5});
    let whole = server.post("/v1/chat/completions", body.clone()).await.json();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
    let events = server.post("/v1/chat/completions", body).await.events();
    for (index, event) in events[..3].iter().enumerate() {
        let choice = &event["choices"][0];
        assert_eq!((&choice["index"], &choice["delta"]["role"]), (&json!(index), &json!("assistant")));
        assert_eq!(event["usage"]["completion_tokens"], 0);
    }
    assert_eq!(events.len(), 3 + 3 * 5 + 1, "a role and five tokens each, and the usage");
    let roles = events.iter().filter(|event| !event["choices"][0]["delta"]["role"].is_null()).count();
    assert_eq!(roles, 3);
    let assembled = assemble(&events, |choice| choice["delta"]["content"].as_str());
    for (choice, (text, ends)) in whole["choices"].as_array().expect("choices").iter().zip(&assembled) {
        assert_eq!(
            (&choice["message"]["content"], ends.as_slice()),
            (&json!(text), &["length".to_owned()][..])
        );
    }
    // Each chunk counts its own choice; the last counts all.
    let counts = |index: u64| -> Vec<u64> {
        let own = events.iter().filter(|event| event["choices"][0]["index"] == index);
        own.filter_map(|event| event["usage"]["completion_tokens"].as_u64()).collect()
    };
    assert!((0..3).all(|index| counts(index) == [0, 1, 2, 3, 4, 5]));
    assert_eq!(whole["usage"]["completion_tokens"], 15);
    // The first choice of the whole answer found nothing in the cache, the first of the stream its first block.
    let mut usage = whole["usage"].clone();
    assert_eq!(usage["prompt_tokens_details"].take(), json!({"cached_tokens": 0}));
    usage["prompt_tokens_details"] = json!({"cached_tokens": 16});
    assert_eq!(events.last().expect("the usage")["usage"], usage);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_alone_are_echoed_once_for_every_choice() {
    let server = start(ServerSettings::default()).await;
    for logprobs in [Value::Null, json!(1)] {
        let body = json!({"prompt": "abc", "n": 2, "max_tokens": 0, "echo": true, "logprobs": logprobs});
        let answer = server.complete(body).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        let choices = answer.json()["choices"].as_array().expect("choices").clone();
        assert_eq!(choices.len(), 2);
        for (index, choice) in choices.iter().enumerate() {
            assert_eq!((&choice["index"], &choice["text"]), (&json!(index), &json!("abc")));
            assert_eq!(choice["logprobs"], choices[0]["logprobs"]);
            let told = choice["logprobs"]["tokens"].as_array().map(Vec::len);
            assert_eq!(told, (!logprobs.is_null()).then_some(3));
        }
        assert_eq!(answer.json()["usage"]["completion_tokens"], 0);
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_that_do_not_fit_the_queue_are_refused_together_and_leave_nothing() {
    let narrow = |builder: EngineBuilder| {
        builder.with_overrides(|set| (set.max_num_seqs, set.max_waiting_requests) = (Some(1), Some(4)))
    };
    let server = start_with(ServerSettings::default(), narrow).await;
    let never = server.complete(json!({"prompt": "abc", "n": 5, "max_tokens": 1})).await;
    assert_error(&never, 400, "BadRequestError", Some("n"));
    let never = server.complete(json!({"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1})).await;
    assert_error(&never, 400, "BadRequestError", Some("n"));

    // One runs, and two wait: of four places two are left.
    let long = || crate::GenerateOptions { max_tokens: Some(4000), ignore_eos: true, ..Default::default() };
    let mut open = vec![server.engine().generate("abc", long()).expect("admitted")];
    until("the first's turn", || server.engine().status().ensemble.running == 1).await;
    open.extend(server.engine().generate_n(vec!["abc".into()], &long(), 2).expect("admitted"));
    until("both waiting", || server.engine().status().ensemble.waiting == 2).await;
    let asked = (0..12).map(|id| {
        let path = if id % 2 == 0 { "/v1/completions" } else { "/v1/chat/completions" };
        let body = json!({"prompt": "abc", "messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 1,
                          "stream": id % 3 == 0});
        server.post(path, body)
    });
    for answer in futures_util::future::join_all(asked).await {
        assert_error(&answer, 429, "TooManyRequestsError", None);
        assert!(answer.headers.contains_key("retry-after"));
    }
    let status = server.engine().status();
    assert_eq!((status.requests.len(), status.ensemble.waiting), (3, 2), "none of them stayed behind");
    drop(open);
    until("an empty engine", || {
        let status = server.engine().status();
        status.requests.is_empty() && status.ensemble.used_blocks == 0 && status.ensemble.waiting == 0
    })
    .await;
    let all = server.complete(json!({"prompt": "abc", "n": 4, "max_tokens": 2})).await;
    assert_eq!(all.status, 200, "every place is free again: {:?}", all.body);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_hangs_up_cancels_every_choice() {
    let server = start(ServerSettings::default()).await;
    for (aborted, stream) in [(5, true), (10, false)] {
        let body = json!({"prompt": "a", "max_tokens": 4000, "ignore_eos": true, "stream": stream, "n": 5});
        let mut client = TcpStream::connect(server.address).await.expect("the server listens");
        write_request(&mut client, &body).await;
        until("the choices' begin", || server.engine().status().ensemble.running == 5).await;
        drop(client);
        until("the choices' end", || {
            let status = server.engine().status();
            status.requests.is_empty() && status.ensemble.used_blocks == 0
        })
        .await;
        let line = format!("finished_reason=\"abort\"}} {aborted}\n");
        assert!(server.engine().render_metrics().contains(&line), "they must not have run to their end");
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn logits_are_changed_as_asked_and_logprobs_are_of_those_before() {
    let server = start(ServerSettings::default()).await;
    let ask = async |extra: Value| {
        let mut body = json!({"prompt": "abc", "max_tokens": 8, "return_token_ids": true, "logprobs": 0});
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        let answer = server.complete(body).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        answer.json()["choices"][0].clone()
    };
    let plain = ask(json!({})).await;
    let ids = |choice: &Value| -> Vec<u64> {
        choice["token_ids"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect()
    };
    let first = ids(&plain)[0];
    let forced = ask(json!({"logit_bias": {"300": 100}})).await;
    assert_eq!(ids(&forced), [300; 8]);
    let value = |choice: &Value| choice["logprobs"]["token_logprobs"][0].as_f64().expect("a number");
    assert!(value(&forced) < value(&plain), "as the model has it, and not nearly 0: {}", value(&forced));
    let banned = ask(json!({"logit_bias": {first.to_string(): -100}})).await;
    assert!(!ids(&banned).contains(&first));
    // A penalty of 2 for one occurrence decides wherever the model itself is undecided by less.
    let mut decided = 0;
    for quarter in -12..12 {
        let bias = json!({"300": 96, "301": 96.0 + f64::from(quarter) / 4.0});
        let two = async |field: &str, value: i32| {
            ids(&ask(json!({"logit_bias": bias, field: value, "max_tokens": 2})).await)
        };
        let (unchanged, present) = (two("presence_penalty", 0).await, two("presence_penalty", 2).await);
        assert_eq!(present, two("frequency_penalty", 2).await, "once counts as once");
        assert_eq!(present[0], unchanged[0], "nothing is generated before the first token");
        decided += usize::from(present != unchanged);
    }
    assert!(decided > 0);
    let bias = json!({"300": 100, "301": 100, "302": 100});
    let mut spread = ids(&ask(json!({"logit_bias": bias, "repetition_penalty": 50, "max_tokens": 3})).await);
    spread.sort_unstable();
    assert_eq!(spread, [300, 301, 302]);
    for neutral in [
        json!({"logit_bias": {}}),
        json!({"logit_bias": null, "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": null}),
        json!({"min_tokens": 0, "n": 1, "best_of": 1}),
    ] {
        assert_eq!(ask(neutral).await, plain);
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_ends_a_generation_before_its_minimum() {
    let server = start(ServerSettings::default()).await;
    let ask = async |extra: Value| {
        let mut body =
            json!({"prompt": "abc", "max_tokens": 10, "ignore_eos": false, "return_token_ids": true});
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        server.complete(body).await.json()["choices"][0].clone()
    };
    let eos = testing::IM_END;
    let bias = |token: u32| json!({token.to_string(): 100});
    let count = |choice: &Value| choice["token_ids"].as_array().map(Vec::len);
    let at_once = ask(json!({"logit_bias": bias(eos)})).await;
    assert_eq!(
        (count(&at_once), &at_once["finish_reason"], &at_once["stop_reason"]),
        (Some(1), &json!("stop"), &Value::Null)
    );
    let later = ask(json!({"logit_bias": bias(eos), "min_tokens": 4})).await;
    assert_eq!((count(&later), &later["finish_reason"]), (Some(5), &json!("stop")));
    let own = json!({"logit_bias": bias(33), "stop_token_ids": [33], "min_tokens": 3});
    let own = ask(own).await;
    assert_eq!((count(&own), &own["stop_reason"]), (Some(4), &json!(33)));
    // The stop token's text ("!") is left out, unless it is asked for.
    assert!(!own["text"].as_str().expect("a text").contains('!'));
    let included = json!({"logit_bias": bias(33), "stop_token_ids": [33], "min_tokens": 3,
                          "include_stop_str_in_output": true});
    assert_eq!(ask(included).await["text"], format!("{}!", own["text"].as_str().expect("a text")));
    let strings = json!({"logit_bias": bias(33), "stop": ["!"], "min_tokens": 5});
    let strings = ask(strings).await;
    assert_eq!(
        (count(&strings), &strings["text"], &strings["stop_reason"]),
        (Some(6), &json!("!!!!!"), &json!("!"))
    );
    let included =
        json!({"logit_bias": bias(33), "stop": ["!!"], "min_tokens": 5, "include_stop_str_in_output": true});
    assert_eq!(ask(included).await["text"], "!!!!!!");
    let ignored = ask(json!({"logit_bias": bias(eos), "ignore_eos": true, "min_tokens": 10})).await;
    assert_eq!(count(&ignored), Some(10));
    assert!(
        !ignored["token_ids"].as_array().expect("ids").contains(&json!(eos)),
        "the mask holds all the same"
    );
    server.end().await;
}
