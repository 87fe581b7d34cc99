//! Everything a client can get wrong: what is sent, by name. What is answered stands in the golden file.

/// What is sent to the server.
pub(super) enum Sent {
    /// Fields of an otherwise good request. Both endpoints must give the same answer.
    Both(String),
    /// A body of `/v1/chat/completions`.
    Chat(Vec<u8>),
    /// A body of `/v1/completions`.
    Completion(Vec<u8>),
    /// A whole HTTP request.
    Raw(Vec<u8>),
    /// The head of a request, then this many times the piece; more than a server should read.
    Flood { head: &'static str, piece: Vec<u8>, times: usize },
}

pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) sent: Sent,
}

/// A hundred megabytes in pieces of this size.
const PIECE: usize = 100_000;
const PIECES: usize = 1000;
/// Bytes of a flood.
pub(super) const FLOOD: usize = PIECE * PIECES;

pub(super) fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.extend(fields());
    cases.extend(large_fields());
    cases.extend(prompts());
    cases.extend(messages());
    cases.extend(bodies());
    cases.extend(http());
    cases
}

/// `[item,item,...]`
fn array(item: &str, count: usize) -> String {
    format!("[{}]", vec![item; count].join(","))
}

fn nested(depth: usize) -> String {
    format!("{}{}", "[".repeat(depth), "]".repeat(depth))
}

/// Fields that both endpoints have, with values short enough to stand here.
fn fields() -> Vec<Case> {
    const FIELDS: &[(&str, &str)] = &[
        ("temperature below zero", r#""temperature":-1"#),
        ("temperature far too high", r#""temperature":1e9"#),
        ("temperature beyond float32", r#""temperature":1e39"#),
        ("temperature beyond float64", r#""temperature":1e400"#),
        ("temperature as a string", r#""temperature":"hot""#),
        ("temperature as NaN, which is no JSON", r#""temperature":NaN"#),
        ("temperature as an object", r#""temperature":{"value":1}"#),
        ("top_p of zero", r#""top_p":0"#),
        ("top_p above one", r#""top_p":2"#),
        ("top_p below zero", r#""top_p":-0.1"#),
        ("top_p as a boolean", r#""top_p":true"#),
        ("top_k below minus one", r#""top_k":-2"#),
        ("top_k as a fraction", r#""top_k":1.5"#),
        ("top_k beyond 64 bits", r#""top_k":9223372036854775808"#),
        ("top_k as an array", r#""top_k":[5]"#),
        ("min_p above one", r#""min_p":1.01"#),
        ("min_p below zero", r#""min_p":-0.01"#),
        ("min_p as a string", r#""min_p":"0.1""#),
        ("repetition_penalty of zero", r#""repetition_penalty":0"#),
        ("repetition_penalty too great", r#""repetition_penalty":101"#),
        ("repetition_penalty as a string", r#""repetition_penalty":"none""#),
        ("frequency_penalty too great", r#""frequency_penalty":2.5"#),
        ("frequency_penalty as an array", r#""frequency_penalty":[0]"#),
        ("presence_penalty too small", r#""presence_penalty":-2.5"#),
        ("presence_penalty as an object", r#""presence_penalty":{}"#),
        ("max_tokens of zero", r#""max_tokens":0"#),
        ("max_tokens below zero", r#""max_tokens":-1"#),
        ("max_tokens as a fraction", r#""max_tokens":1.5"#),
        ("max_tokens beyond the context", r#""max_tokens":1025"#),
        ("max_tokens of 1e30", r#""max_tokens":1e30"#),
        ("max_tokens of 2^64", r#""max_tokens":18446744073709551616"#),
        ("max_tokens of 2^64 - 1", r#""max_tokens":18446744073709551615"#),
        ("max_tokens as a string", r#""max_tokens":"16""#),
        ("max_tokens that leaves no room for the prompt", r#""max_tokens":1024"#),
        ("min_tokens above max_tokens", r#""min_tokens":5,"max_tokens":4"#),
        ("min_tokens below zero", r#""min_tokens":-1"#),
        ("min_tokens as a fraction", r#""min_tokens":2.5"#),
        ("priority as a word", r#""priority":"high""#),
        ("priority as a fraction", r#""priority":0.5"#),
        ("priority beyond 32 bits", r#""priority":2147483648"#),
        ("cache_salt of nothing", r#""cache_salt":"""#),
        ("cache_salt as a number", r#""cache_salt":7"#),
        ("seed of 1e30", r#""seed":1e30"#),
        ("seed beyond 64 bits", r#""seed":9223372036854775808"#),
        ("seed as a string", r#""seed":"7""#),
        ("n of zero", r#""n":0"#),
        ("n below zero", r#""n":-1"#),
        ("n above the most", r#""n":129"#),
        ("n as a fraction", r#""n":1.5"#),
        ("best_of above n", r#""best_of":3,"n":2"#),
        ("best_of as a string", r#""best_of":"two""#),
        ("stop as a number", r#""stop":5"#),
        ("stop with a number", r#""stop":["a",5]"#),
        ("stop with null", r#""stop":[null]"#),
        ("stop as an empty string", r#""stop":"""#),
        ("stop with an empty string", r#""stop":["a",""]"#),
        ("stop with half a surrogate pair", r#""stop":["\udc00"]"#),
        ("stop_token_ids outside the vocabulary", r#""stop_token_ids":[2,49152]"#),
        ("stop_token_ids below zero", r#""stop_token_ids":[-1]"#),
        ("stop_token_ids with a string", r#""stop_token_ids":["2"]"#),
        ("stop_token_ids as a number", r#""stop_token_ids":2"#),
        ("logit_bias of a token outside the vocabulary", r#""logit_bias":{"49152":1}"#),
        ("logit_bias of a token below zero", r#""logit_bias":{"-1":1}"#),
        ("logit_bias of a token beyond 32 bits", r#""logit_bias":{"4294967296":1}"#),
        ("logit_bias of a word", r#""logit_bias":{"hello":1}"#),
        ("logit_bias too great", r#""logit_bias":{"5":101}"#),
        ("logit_bias too small", r#""logit_bias":{"5":-100.5}"#),
        ("logit_bias as a string", r#""logit_bias":{"5":"much"}"#),
        ("logit_bias of null", r#""logit_bias":{"5":null}"#),
        ("logit_bias beyond float32", r#""logit_bias":{"5":1e39}"#),
        ("logit_bias as an array", r#""logit_bias":[[5,1.0]]"#),
        ("stream as a string", r#""stream":"yes""#),
        ("stream_options without a stream", r#""stream_options":{"include_usage":true}"#),
        ("stream_options as a number", r#""stream":true,"stream_options":5"#),
        ("stream_options with a string", r#""stream":true,"stream_options":{"include_usage":"yes"}"#),
        ("ignore_eos as a number", r#""ignore_eos":1"#),
        ("include_stop_str_in_output as a string", r#""include_stop_str_in_output":"true""#),
        ("skip_special_tokens as a number", r#""skip_special_tokens":0"#),
        ("add_special_tokens as a string", r#""add_special_tokens":"no""#),
        ("return_token_ids as a string", r#""return_token_ids":"yes""#),
        ("an unknown model", r#""model":"gpt-4o""#),
        ("model as a number", r#""model":5"#),
        ("model with half a surrogate pair", r#""model":"\ud800x""#),
        ("response_format with a schema", r#""response_format":{"type":"json_schema","json_schema":{}}"#),
        ("response_format as a word", r#""response_format":"json""#),
        ("tools", r#""tools":[{"type":"function","function":{"name":"f"}}]"#),
        ("tool_choice that asks for one", r#""tool_choice":"required""#),
        ("functions", r#""functions":[{"name":"f"}]"#),
        ("guided_json", r#""guided_json":{}"#),
        ("guided_regex", r#""guided_regex":"a+""#),
        ("guided_choice", r#""guided_choice":["a","b"]"#),
        ("guided_grammar", r#""guided_grammar":"root ::= \"a\"""#),
        ("structured_outputs", r#""structured_outputs":{"regex":"a"}"#),
        ("prompt_logprobs", r#""prompt_logprobs":1"#),
        ("a chat template of the user's own", r#""chat_template":"{{ messages }}""#),
        ("use_beam_search", r#""use_beam_search":true"#),
        ("bad_words", r#""bad_words":["a"]"#),
        ("allowed_token_ids", r#""allowed_token_ids":[1]"#),
        ("truncate_prompt_tokens", r#""truncate_prompt_tokens":5"#),
        ("audio to be answered", r#""modalities":["text","audio"]"#),
        ("the last of two equal names is the wrong one", r#""temperature":0,"temperature":3"#),
    ];
    let case = |(name, fields): &(&'static str, &str)| Case { name, sent: Sent::Both((*fields).to_owned()) };
    FIELDS.iter().map(case).collect()
}

/// Fields whose values are large.
fn large_fields() -> Vec<Case> {
    let biases: Vec<String> = (0..1025).map(|id| format!("\"{id}\":1")).collect();
    let unknown: Vec<String> = (0..5000).map(|at| format!("\"unknown{at}\":0")).collect();
    let long = "x".repeat(200_000);
    let both = |name, fields| Case { name, sent: Sent::Both(fields) };
    vec![
        both("a thousand stop strings", format!("\"stop\":{}", array("\"a\"", 1000))),
        both("a huge stop string", format!("\"stop\":\"{}\"", "x".repeat(1025))),
        both("too many stop tokens", format!("\"stop_token_ids\":{}", array("2", 257))),
        both("too many biases", format!("\"logit_bias\":{{{}}}", biases.join(","))),
        both("thousands of unknown fields", unknown.join(",")),
        both("a temperature of 200,000 letters", format!("\"temperature\":\"{long}\"")),
        both("a model's name of 200,000 letters", format!("\"model\":\"{long}\"")),
        both("a stop of 200,000 letters where a number is", format!("\"stop_token_ids\":[\"{long}\"]")),
        both("a number of 200,000 digits", format!("\"max_tokens\":{}", "9".repeat(200_000))),
        both("arrays in arrays, 10,000 deep, as stop", format!("\"stop\":{}", nested(10_000))),
    ]
}

/// What `/v1/completions` has of its own.
fn prompts() -> Vec<Case> {
    let complete = |name, body: String| Case { name, sent: Sent::Completion(body.into_bytes()) };
    let prompt = |name, prompt: &str| complete(name, format!(r#"{{"prompt":{prompt}}}"#));
    vec![
        complete("completion: an empty object", "{}".into()),
        prompt("prompt of null", "null"),
        prompt("prompt as a number", "5"),
        prompt("prompt as an object", r#"{"text":"a"}"#),
        prompt("prompt without a token", r#""""#),
        prompt("prompt without entries", "[]"),
        prompt("prompt of an array without ids", "[[]]"),
        prompt("an empty prompt among good ones", r#"["a","","b"]"#),
        prompt("token id below zero", "[1,-1]"),
        prompt("token id of 2^32", "[4294967296]"),
        prompt("token id of 2^64", "[18446744073709551616]"),
        prompt("token id beyond the vocabulary", "[1,2,49152]"),
        prompt("token id as a fraction", "[1.5]"),
        prompt("token id as a boolean", "[true]"),
        prompt("token ids with a string", r#"[1,"a"]"#),
        prompt("strings with a token id", r#"["a",1]"#),
        prompt("arrays of ids with a string", r#"[[1],"a"]"#),
        prompt("arrays of ids with a bare id", "[[1],2]"),
        prompt("arrays of strings in an array", r#"[["a"]]"#),
        prompt("ids nested once too deep", "[[[1]]]"),
        prompt("ids nested 10,000 deep", &nested(10_000)),
        prompt("more prompts than are allowed", &array("[1]", 1025)),
        prompt("prompt with half a surrogate pair", r#""a\ud800b""#),
        prompt("prompt as long as the context", &array("5", 1024)),
        prompt("prompt longer than the context", &array("5", 1025)),
        prompt("prompt longer than the pool", &array("5", 2000)),
        prompt("text longer than the context", &format!("\"{}\"", "one word more, ".repeat(1000))),
        prompt("a megabyte of text", &format!("\"{}\"", "one word more, ".repeat(70_000))),
        prompt("one of two prompts is too long", &format!("[[1,2],{}]", array("5", 1025))),
        complete("max_tokens that the prompt leaves no room for", {
            format!(r#"{{"prompt":{},"max_tokens":25}}"#, array("5", 1000))
        }),
        complete("min_tokens above the default of max_tokens", r#"{"prompt":"a","min_tokens":17}"#.into()),
        complete("more choices than can wait", format!(r#"{{"prompt":{},"n":128}}"#, array("[1]", 1024))),
        complete("completion: logprobs above the most", r#"{"prompt":"a","logprobs":21}"#.into()),
        complete("completion: logprobs below zero", r#"{"prompt":"a","logprobs":-1}"#.into()),
        complete("completion: logprobs as a boolean", r#"{"prompt":"a","logprobs":true}"#.into()),
        complete("echo as a string", r#"{"prompt":"a","echo":"yes"}"#.into()),
        complete("suffix", r#"{"prompt":"a","suffix":"b"}"#.into()),
        complete("prompt_embeds", r#"{"prompt":"a","prompt_embeds":"AAAA"}"#.into()),
    ]
}

/// What `/v1/chat/completions` has of its own.
fn messages() -> Vec<Case> {
    let chat = |name, body: String| Case { name, sent: Sent::Chat(body.into_bytes()) };
    let messages = |name, messages: &str| chat(name, format!(r#"{{"messages":{messages}}}"#));
    let hi = r#"{"role":"user","content":"Hi"}"#;
    let message = |name, message: &str| messages(name, &format!("[{hi},{message}]"));
    let part = |name, part: &str| message(name, &format!(r#"{{"role":"user","content":[{part}]}}"#));
    let with = |name, fields: &str| chat(name, format!(r#"{{"messages":[{hi}],{fields}}}"#));
    let word = "one word more, ";
    vec![
        chat("chat: an empty object", "{}".into()),
        messages("messages without entries", "[]"),
        messages("messages of null", "null"),
        messages("messages as a string", r#""Hi""#),
        messages("messages as one message", hi),
        messages("too many messages", &array(hi, 4097)),
        messages("messages nested 10,000 deep", &nested(10_000)),
        message("a message of a string", r#""Hi""#),
        message("a message of null", "null"),
        message("a message without fields", "{}"),
        message("a message without a role", r#"{"content":"Hi"}"#),
        message("a message without content", r#"{"role":"user"}"#),
        message("a message with content of null", r#"{"role":"user","content":null}"#),
        message("content as a number", r#"{"role":"user","content":5}"#),
        message("content as an object", r#"{"role":"user","content":{"text":"Hi"}}"#),
        message("role as a number", r#"{"role":5,"content":"Hi"}"#),
        message("an unknown role", r#"{"role":"robot","content":"Hi"}"#),
        message("a tool's message", r#"{"role":"tool","tool_call_id":"a","content":"5"}"#),
        message("a message with tool calls", r#"{"role":"assistant","tool_calls":[{"id":"a"}]}"#),
        part("an image", r#"{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}"#),
        part("audio", r#"{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}}"#),
        part("a file", r#"{"type":"file","file":{"file_id":"a"}}"#),
        part("a part without a type", r#"{"text":"Hi"}"#),
        part("a text part without text", r#"{"type":"text"}"#),
        part("a text part with a number", r#"{"type":"text","text":5}"#),
        part("a part of a string", r#""Hi""#),
        part("too many parts", vec![r#"{"type":"text","text":"a"}"#; 4097].join(",").as_str()),
        message("content with half a surrogate pair", r#"{"role":"user","content":"\ud83d"}"#),
        message(
            "a chat longer than the context",
            &format!(r#"{{"role":"user","content":"{}"}}"#, word.repeat(1000)),
        ),
        message(
            "a chat with a megabyte of text",
            &format!(r#"{{"role":"user","content":"{}"}}"#, word.repeat(70_000)),
        ),
        with("max_completion_tokens of zero", r#""max_completion_tokens":0,"max_tokens":5"#),
        with("max_completion_tokens beyond the context", r#""max_completion_tokens":2000"#),
        with("max_completion_tokens as a fraction", r#""max_completion_tokens":0.5"#),
        chat(
            "min_tokens that the prompt leaves no room for",
            format!(
                r#"{{"messages":[{{"role":"user","content":"{}"}}],"min_tokens":900}}"#,
                word.repeat(100)
            ),
        ),
        with("min_tokens beyond the context", r#""min_tokens":1025"#),
        with("chat: logprobs as a number", r#""logprobs":5"#),
        with("top_logprobs above the most", r#""logprobs":true,"top_logprobs":21"#),
        with("top_logprobs below zero", r#""logprobs":true,"top_logprobs":-1"#),
        with("top_logprobs as a boolean", r#""logprobs":true,"top_logprobs":true"#),
        with("top_logprobs without logprobs", r#""top_logprobs":3"#),
        with("echo in a chat", r#""echo":true"#),
        with("add_generation_prompt as a string", r#""add_generation_prompt":"no""#),
        with("continue_final_message", r#""continue_final_message":true"#),
        with("chat_template_kwargs as an array", r#""chat_template_kwargs":[1]"#),
        with(
            "chat_template_kwargs that are too large",
            &format!(r#""chat_template_kwargs":{{"a":"{}"}}"#, "x".repeat(65_536)),
        ),
        with(
            "chat_template_kwargs nested 10,000 deep",
            &format!(r#""chat_template_kwargs":{{"a":{}}}"#, nested(10_000)),
        ),
    ]
}

/// Bodies that are no JSON object at all.
fn bodies() -> Vec<Case> {
    let complete = |name, body: &[u8]| Case { name, sent: Sent::Completion(body.to_vec()) };
    vec![
        complete("no body", b""),
        complete("a body of spaces", b" \n "),
        complete("a body of words", b"prompt=a"),
        complete("a body cut short", b"{\"prompt\":\"a"),
        complete("a body with something after it", b"{\"prompt\":\"a\"}x"),
        complete("an array as body", b"[{\"prompt\":\"a\"}]"),
        complete("a string as body", b"\"a\""),
        complete("a number as body", b"5"),
        complete("null as body", b"null"),
        complete("a body nested 10,000 deep", nested(10_000).as_bytes()),
        complete("a body that is not UTF-8", b"{\"prompt\":\"\xff\"}"),
        complete("a body in UTF-16", b"\xff\xfe{\0}\0"),
        complete("a body with half a surrogate pair as a name", b"{\"\\ud800\":1}"),
        complete("a control character in a string", b"{\"prompt\":\"a\0b\"}"),
        complete("a trailing comma", b"{\"prompt\":\"a\",}"),
        complete("single quotes", b"{'prompt':'a'}"),
    ]
}

/// Requests that are wrong before their body is looked at.
fn http() -> Vec<Case> {
    const JSON: &str = "host: x\r\ncontent-type: application/json\r\n";
    let raw = |name, text: String| Case { name, sent: Sent::Raw(text.into_bytes()) };
    let post = |name, headers: &str, body: &str| {
        raw(name, format!("POST /v1/completions HTTP/1.1\r\n{headers}\r\n{body}"))
    };
    let typed = |name, kind: &str| post(name, &format!("host: x\r\n{kind}content-length: 2\r\n"), "{}");
    let flood = |name, head, piece: Vec<u8>| Case { name, sent: Sent::Flood { head, piece, times: PIECES } };
    let chunk = format!("{PIECE:x}\r\n{}\r\n", "x".repeat(PIECE)).into_bytes();
    let many: String = (0..200).map(|at| format!("a{at}: b\r\n")).collect();
    vec![
        flood(
            "a hundred megabytes, announced",
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
             content-length: 100000000\r\n\r\n",
            vec![b'x'; PIECE],
        ),
        flood(
            "a hundred megabytes in chunks",
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
             transfer-encoding: chunked\r\n\r\n",
            chunk,
        ),
        post(
            "a body that is announced and asked for first",
            &format!("{JSON}content-length: 100000000\r\nexpect: 100-continue\r\n"),
            "",
        ),
        post(
            "a length that ends inside the body",
            &format!("{JSON}content-length: 5\r\n"),
            "{\"prompt\":\"a\"}",
        ),
        post("a length below zero", &format!("{JSON}content-length: -5\r\n"), "{}"),
        post("two lengths", &format!("{JSON}content-length: 2\r\ncontent-length: 3\r\n"), "{}"),
        post("a malformed chunk", &format!("{JSON}transfer-encoding: chunked\r\n"), "zz\r\n{}\r\n0\r\n\r\n"),
        typed("no content-type", ""),
        typed("a form", "content-type: application/x-www-form-urlencoded\r\n"),
        typed("plain text", "content-type: text/plain\r\n"),
        typed("a compressed body", "content-type: application/json\r\ncontent-encoding: gzip\r\n"),
        raw("GET where POST is meant", "GET /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n".into()),
        raw(
            "PUT where POST is meant",
            format!("PUT /v1/chat/completions HTTP/1.1\r\n{JSON}content-length: 0\r\n\r\n"),
        ),
        raw(
            "POST where GET is meant",
            format!("POST /v1/models HTTP/1.1\r\n{JSON}content-length: 2\r\n\r\n{{}}"),
        ),
        raw(
            "an unknown path",
            format!("POST /v1/embeddings HTTP/1.1\r\n{JSON}content-length: 2\r\n\r\n{{}}"),
        ),
        raw("a path that climbs", "GET /v1/../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n".into()),
        raw("a path of 5,000 letters", format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "x".repeat(5000))),
        raw("a path of 70,000 letters", format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "x".repeat(70_000))),
        raw(
            "a query that nobody reads",
            format!("POST /v1/completions?a=%zz&&=&%00 HTTP/1.1\r\n{JSON}content-length: 2\r\n\r\n{{}}"),
        ),
        raw("a control character in the path", "GET /v1/\x01 HTTP/1.1\r\nhost: x\r\n\r\n".into()),
        raw("no Host", "GET /v1/models HTTP/1.1\r\n\r\n".into()),
        raw("two Hosts", "GET /v1/models HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n".into()),
        raw(
            "a header of a megabyte",
            format!("GET /v1/models HTTP/1.1\r\nhost: x\r\na: {}\r\n\r\n", "b".repeat(1 << 20)),
        ),
        raw("two hundred headers", format!("GET /v1/models HTTP/1.1\r\nhost: x\r\n{many}\r\n")),
        raw("a header without a colon", "GET /v1/models HTTP/1.1\r\nhost: x\r\nnonsense\r\n\r\n".into()),
        raw("a request line of nonsense", "NONSENSE\r\n\r\n".into()),
        raw("an unknown version of HTTP", "GET /v1/models HTTP/7.0\r\nhost: x\r\n\r\n".into()),
        Case {
            name: "a TLS greeting",
            sent: Sent::Raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec()),
        },
    ]
}
