use serde_json::{Value, json};

use super::{ChatRequest, CompletionLogprobs, CompletionRequest, Fields, TopLogprobs, Usage};
use crate::{
    engine::{self, Prompt},
    server::error::ApiError,
};

fn completion(body: Value) -> Result<CompletionRequest, ApiError> {
    CompletionRequest::parse(body.to_string().as_bytes())
}

fn chat(body: Value) -> Result<ChatRequest, ApiError> {
    ChatRequest::parse(body.to_string().as_bytes())
}

fn refused<T>(parsed: Result<T, ApiError>) -> ApiError {
    let error = parsed.err().expect("the body must be refused");
    assert_eq!(error.status.as_u16(), 400);
    error
}

#[test]
fn a_prompt_is_a_string_strings_ids_or_arrays_of_ids() {
    let prompts = |value: Value| completion(json!({"prompt": value})).expect("accepted").prompts;
    assert_eq!(prompts(json!("a")), [Prompt::Text("a".into())]);
    assert_eq!(prompts(json!(["a", "b"])), [Prompt::Text("a".into()), Prompt::Text("b".into())]);
    assert_eq!(prompts(json!([1, 2])), [Prompt::Tokens(vec![1, 2])]);
    assert_eq!(prompts(json!([[1], [2, 3]])), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]);
}

#[test]
fn spaces_inside_a_prompt_array_do_not_change_its_kind() {
    let body = b"{\"prompt\" : [ \n [ 7 ] ] }";
    assert_eq!(CompletionRequest::parse(body).expect("accepted").prompts, [Prompt::Tokens(vec![7])]);
}

#[test]
fn a_bad_prompt_is_refused_by_name() {
    for bad in [json!(5), json!({}), json!([1, "a"]), json!([-1]), json!([1.5]), json!(null)] {
        assert_eq!(refused(completion(json!({"prompt": bad}))).param.as_deref(), Some("prompt"), "{bad}");
    }
    assert_eq!(refused(completion(json!({}))).param.as_deref(), Some("prompt"));
    let many: Vec<&str> = vec!["a"; 1025];
    assert!(refused(completion(json!({"prompt": many}))).message.contains("1024"));
}

#[test]
fn a_body_that_is_no_object_is_refused() {
    for bad in ["", "[]", "{", "nonsense", "{\"prompt\":\"a\"} trailing"] {
        assert!(CompletionRequest::parse(bad.as_bytes()).is_err(), "{bad}");
    }
    assert!(CompletionRequest::parse(b"{\"prompt\":\"\xff\"}").is_err());
    let deep = format!("{{\"prompt\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(CompletionRequest::parse(deep.as_bytes()).is_err());
}

#[test]
fn an_error_names_the_field_of_the_wrong_type() {
    for (field, value) in [
        ("temperature", json!("hot")),
        ("top_k", json!(1.5)),
        ("seed", json!([])),
        ("stop", json!(5)),
        ("stream", json!("yes")),
        ("stop_token_ids", json!([-1])),
        ("max_tokens", json!(-1)),
        ("logprobs", json!("many")),
        ("model", json!(1)),
        ("n", json!(-1)),
        ("n", json!(1.5)),
        ("best_of", json!("two")),
        ("repetition_penalty", json!("none")),
        ("frequency_penalty", json!([0])),
        ("presence_penalty", json!({})),
        ("priority", json!("high")),
        ("priority", json!(0.5)),
        ("priority", json!(2_147_483_648_i64)),
        ("cache_salt", json!(5)),
        ("cache_salt", json!(["a"])),
        ("min_tokens", json!(-1)),
        ("min_tokens", json!(2.5)),
        ("logit_bias", json!([[5, 1.0]])),
        ("logit_bias", json!({"five": 1})),
        ("logit_bias", json!({"-5": 1})),
        ("logit_bias", json!({"5": "much"})),
        ("logit_bias", json!({"5": null})),
        ("logit_bias", json!({"4294967296": 1})),
    ] {
        let error = refused(completion(json!({"prompt": "a", field: value})));
        assert_eq!(error.param.as_deref(), Some(field), "{}", error.message);
        assert!(error.message.starts_with(field), "{}", error.message);
    }
}

#[test]
fn a_wrong_value_is_told_in_jsons_words() {
    for (field, value, expected) in [
        ("temperature", r#""hot""#, r#"must be a number, got "hot""#),
        ("temperature", "-1e39", "must be a number in float32's range, got -1e39"),
        ("stream", "1", "must be true or false, got 1"),
        ("model", "[1]", "must be a string, got [1]"),
        ("n", "1.0", "must be an integer, got 1.0"),
        ("n", "-1", "must be at least 0, got -1"),
        (
            "seed",
            "9223372036854775808",
            "must be in [-9223372036854775808, 9223372036854775807], got \
                                         9223372036854775808",
        ),
        ("priority", "-2147483649", "must be in [-2147483648, 2147483647], got -2147483649"),
        ("cache_salt", "true", "must be a string, got true"),
        ("prompt", "[1,[2]]", "must be a token id (an integer in [0, 4294967295]), got an array"),
        ("prompt", "[[1],true]", "must be an array, got true"),
        ("prompt", r#"["a, expected b",{}]"#, "must be a string, got an object"),
        (
            "prompt",
            r#""\udead""#,
            "has a string with half a surrogate pair (as in \\ud800); send whole characters",
        ),
        ("stop", "[1.5]", "must be a string, got 1.5"),
        ("logit_bias", r#"{"1":{}}"#, "must be a number, got {}"),
    ] {
        let error =
            refused(CompletionRequest::parse(format!("{{\"prompt\":\"a\",\"{field}\":{value}}}").as_bytes()));
        assert_eq!(error.message, format!("{field}: {expected}"));
    }
}

#[test]
fn of_long_values_an_error_repeats_little() {
    let long = "é".repeat(100_000);
    for (field, value) in [
        ("temperature", json!(long)),
        ("stop_token_ids", json!([long])),
        ("logit_bias", json!({&long: 1})),
        ("response_format", json!(long)),
    ] {
        let error = refused(completion(json!({"prompt": "a", field: value})));
        assert!(error.message.chars().count() <= 1010, "{}", error.message.len());
    }
    let error = refused(chat(json!({"messages": [{"role": long, "content": "a"}]})));
    let message = error.message;
    assert!(message.starts_with("messages[0].role: must be system, developer, user or assistant, got `éé"));
    assert!(message.contains("é [...] é") && message.ends_with("é`") && message.chars().count() <= 1010);
}

#[test]
fn an_error_takes_the_name_that_the_request_has_for_the_field() {
    let error = ApiError::field("max_tokens", "must be less").renamed("max_tokens", "max_completion_tokens");
    assert_eq!(error.message, "max_completion_tokens: must be less");
    assert_eq!(error.param.as_deref(), Some("max_completion_tokens"));
    let other = ApiError::field("max_tokens_too", "must be less");
    assert_eq!(other.clone().renamed("max_tokens", "max_completion_tokens"), other);
}

#[test]
fn null_is_as_good_as_absent() {
    let body = json!({"prompt": "a", "temperature": null, "logprobs": null, "stop": null, "stream": null,
                      "stream_options": null, "model": null, "max_tokens": null, "tools": null, "n": null});
    let request = completion(body).expect("accepted");
    assert_eq!(request.common.options.temperature, None);
    assert_eq!(request.common.options.max_tokens, Some(16));
}

#[test]
fn unknown_fields_are_tolerated() {
    let body = json!({"prompt": "a", "user": "me", "cache_salt": "x", "something_new": {"deep": [1, 2]}});
    assert!(completion(body).is_ok());
}

#[test]
fn what_would_change_the_answer_and_is_not_done_is_refused_by_name() {
    for (field, value) in [
        ("best_of", json!(3)),
        ("tools", json!([{"type": "function"}])),
        ("tool_choice", json!("required")),
        ("response_format", json!({"type": "json_object"})),
        ("guided_json", json!({"type": "object"})),
        ("structured_outputs", json!({"regex": "a"})),
        ("bad_words", json!(["a"])),
        ("tools", json!("x".repeat(1000))),
    ] {
        let error = refused(chat(json!({"messages": [{"role": "user", "content": "a"}], field: value})));
        assert_eq!(error.param.as_deref(), Some(field), "{}", error.message);
    }
}

#[test]
fn neutral_values_of_refused_fields_pass() {
    let body = json!({
        "messages": [{"role": "user", "content": "a"}],
        "n": 1, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {},
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0,
        "use_beam_search": false, "bad_words": [], "suffix": "",
    });
    assert!(chat(body).is_ok());
}

#[test]
fn what_changes_logits_is_read_from_both_endpoints() {
    let body = json!({
        "prompt": "a", "messages": [{"role": "user", "content": "a"}], "n": 3, "best_of": 3, "min_tokens": 2,
        "logit_bias": {"7": -1.5, "5": 100, "007": 2}, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
    });
    for common in [completion(body.clone()).expect("accepted").common, chat(body).expect("accepted").common] {
        let options = common.options;
        assert_eq!((common.n, options.min_tokens), (3, 2));
        assert_eq!(options.logit_bias.into_iter().collect::<Vec<_>>(), [(5, 100.0), (7, 2.0)]);
        let penalties = (options.presence_penalty, options.frequency_penalty, options.repetition_penalty);
        assert_eq!(penalties, (Some(0.5), Some(-0.5), Some(1.25)));
    }
}

#[test]
fn the_best_of_more_than_n_is_refused() {
    for (body, passes) in [
        (json!({"prompt": "a", "best_of": 1}), true),
        (json!({"prompt": "a", "best_of": 3}), false),
        (json!({"prompt": "a", "best_of": 3, "n": 2}), false),
        (json!({"prompt": "a", "best_of": null, "n": 2}), true),
    ] {
        let parsed = completion(body.clone());
        assert_eq!(parsed.is_ok(), passes, "{body}");
        if !passes {
            assert_eq!(refused(parsed).param.as_deref(), Some("best_of"));
        }
    }
}

#[test]
fn an_absurd_number_of_biases_is_refused_while_it_is_read() {
    let entries = |count: u32| (0..count).map(|id| format!("\"{id}\":1")).collect::<Vec<_>>().join(",");
    let body = |count| format!("{{\"prompt\":\"a\",\"logit_bias\":{{{}}}}}", entries(count));
    assert!(CompletionRequest::parse(body(1024).as_bytes()).is_ok());
    let error = refused(CompletionRequest::parse(body(1025).as_bytes()));
    assert_eq!(error.param.as_deref(), Some("logit_bias"));
    assert!(error.message.contains("1024"), "{}", error.message);
    let long = format!("{{\"prompt\":\"a\",\"logit_bias\":{{\"{}\":1}}}}", "x".repeat(100_000));
    assert!(refused(CompletionRequest::parse(long.as_bytes())).message.len() < 200);
}

#[test]
fn content_is_a_string_or_parts() {
    let request = chat(json!({"messages": [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null},
    ]}))
    .expect("accepted");
    let messages: Vec<_> = request.messages.iter().map(|m| (m.role.as_str(), m.content.as_str())).collect();
    assert_eq!(messages, [("system", "be brief"), ("user", "a\nb"), ("assistant", "")]);
}

#[test]
fn parts_that_are_no_text_and_unknown_roles_are_refused_with_their_place() {
    let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    for (message, param) in [
        (json!({"role": "user", "content": image}), "messages[1].content"),
        (json!({"role": "user"}), "messages[1].content"),
        (json!({"role": "user", "content": [{"type": "text"}]}), "messages[1].content"),
        (json!({"role": "robot", "content": "a"}), "messages[1].role"),
        (json!({"role": "assistant", "tool_calls": [{}]}), "messages[1].tool_calls"),
    ] {
        let first = json!({"role": "user", "content": "a"});
        assert_eq!(refused(chat(json!({"messages": [first, message]}))).param.as_deref(), Some(param));
    }
    assert_eq!(refused(chat(json!({}))).param.as_deref(), Some("messages"));
}

#[test]
fn chats_take_either_name_of_the_token_limit_and_prefer_the_newer() {
    let message = json!([{"role": "user", "content": "a"}]);
    let limit = |body: Value| chat(body).expect("accepted").common.options.max_tokens;
    assert_eq!(limit(json!({"messages": message})), None);
    assert_eq!(limit(json!({"messages": message, "max_tokens": 5})), Some(5));
    assert_eq!(limit(json!({"messages": message, "max_tokens": 5, "max_completion_tokens": 7})), Some(7));
}

#[test]
fn top_logprobs_needs_logprobs() {
    let with = |mut extra: Value| {
        extra["messages"] = json!([{"role": "user", "content": "a"}]);
        chat(extra)
    };
    assert_eq!(with(json!({"logprobs": true})).expect("accepted").common.options.logprobs, Some(0));
    assert_eq!(
        with(json!({"logprobs": true, "top_logprobs": 3})).expect("accepted").common.options.logprobs,
        Some(3)
    );
    assert_eq!(refused(with(json!({"top_logprobs": 3}))).param.as_deref(), Some("top_logprobs"));
    let negative = json!({"logprobs": true, "top_logprobs": -1});
    assert_eq!(refused(with(negative)).param.as_deref(), Some("top_logprobs"));
}

#[test]
fn echo_asks_for_prompt_logprobs_only_when_they_are_told_or_nothing_else_runs() {
    let wanted = |body: Value| completion(body).expect("accepted").common.options.prompt_logprobs;
    assert_eq!(wanted(json!({"prompt": "a", "echo": true, "logprobs": 1})), Some(1));
    assert_eq!(wanted(json!({"prompt": "a", "echo": true})), None);
    assert_eq!(wanted(json!({"prompt": "a", "echo": true, "max_tokens": 0})), Some(0));
    assert_eq!(wanted(json!({"prompt": "a", "logprobs": 1})), None);
}

#[test]
fn stream_options_need_a_stream() {
    let error = refused(completion(json!({"prompt": "a", "stream_options": {"include_usage": true}})));
    assert_eq!(error.param.as_deref(), Some("stream_options"));
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let request =
        completion(json!({"prompt": "a", "stream": true, "stream_options": options})).expect("accepted");
    assert!(request.common.stream_options.continuous_usage());
}

#[test]
fn usage_adds_up_over_choices_and_counts_each_prompt_once() {
    let part = engine::Usage { prompt_tokens: 3, completion_tokens: 4, cached_tokens: 1 };
    assert_eq!(Usage::sum([part; 4], 4).prompt_tokens, 3);
    let of_two = Usage::sum([part; 4], 2);
    assert_eq!((of_two.prompt_tokens, of_two.completion_tokens, of_two.total_tokens), (6, 16, 22));
    assert_eq!(of_two.prompt_tokens_details.cached_tokens, 2);
    let json = serde_json::to_value(Usage::sum([part, part], 1)).expect("serialises");
    let expected = json!({"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14,
                          "prompt_tokens_details": {"cached_tokens": 2}});
    assert_eq!(json, expected);
}

#[test]
fn equal_texts_among_the_best_keep_the_likelier_and_the_order() {
    let mut top = TopLogprobs::default();
    top.insert("\u{fffd}".into(), -2.0);
    top.insert("a".into(), -1.5);
    top.insert("\u{fffd}".into(), -1.0);
    let logprobs = CompletionLogprobs {
        tokens: vec!["\u{fffd}".into()],
        token_logprobs: vec![Some(-2.0)],
        top_logprobs: vec![None, Some(top)],
        text_offset: vec![0],
    };
    let text = serde_json::to_string(&logprobs).expect("serialises");
    assert!(text.contains("\"top_logprobs\":[null,{\"\u{fffd}\":-1.0,\"a\":-1.5}]"), "{text}");
}

#[test]
fn of_repeated_fields_the_last_one_counts() {
    let fields = Fields::parse(b"{\"seed\": 1, \"seed\": 2}").expect("an object");
    assert_eq!(fields.scalar::<i64>("seed").expect("a number"), Some(2));
}

/// `[item,item,...]`
fn array(item: &str, count: usize) -> String {
    format!("[{}]", vec![item; count].join(","))
}

#[test]
fn absurd_numbers_of_entries_are_refused_by_field_while_they_are_read() {
    let user = r#"{"role":"user","content":"a"}"#;
    let parts = array(r#"{"type":"text","text":"a"}"#, 4097);
    for (body, param, limit) in [
        (format!(r#"{{"messages":{}}}"#, array(user, 4097)), "messages", "4096"),
        (format!(r#"{{"messages":[{{"role":"user","content":{parts}}}]}}"#), "messages[0].content", "4096"),
        (format!(r#"{{"messages":[{user}],"stop":{}}}"#, array(r#""a""#, 257)), "stop", "256"),
        (format!(r#"{{"messages":[{user}],"stop_token_ids":{}}}"#, array("1", 257)), "stop_token_ids", "256"),
        (
            format!(r#"{{"messages":[{user}],"chat_template_kwargs":{{"a":{}}}}}"#, array("1", 40_000)),
            "chat_template_kwargs",
            "65536",
        ),
    ] {
        let error = refused(ChatRequest::parse(body.as_bytes()));
        assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        assert!(error.message.contains(limit), "{}", error.message);
    }
    for item in ["[1]", r#""a""#] {
        let body = format!(r#"{{"prompt":{}}}"#, array(item, 1025));
        let error = refused(CompletionRequest::parse(body.as_bytes()));
        assert_eq!(error.param.as_deref(), Some("prompt"));
        assert!(error.message.contains("1024"), "{}", error.message);
    }
    let fields: Vec<String> = (0..300).map(|n| format!("\"f{n}\":0")).collect();
    let body = format!("{{\"prompt\":\"a\",{}}}", fields.join(","));
    assert!(refused(CompletionRequest::parse(body.as_bytes())).message.contains("256 fields"));
}

#[test]
fn as_many_entries_as_are_allowed_pass() {
    let user = r#"{"role":"user","content":"a"}"#;
    let body = format!(r#"{{"messages":{},"stop":{}}}"#, array(user, 4096), array(r#""a""#, 256));
    assert_eq!(ChatRequest::parse(body.as_bytes()).expect("accepted").messages.len(), 4096);
    let body = format!(r#"{{"prompt":{}}}"#, array("[1]", 1024));
    assert_eq!(CompletionRequest::parse(body.as_bytes()).expect("accepted").prompts.len(), 1024);
}
