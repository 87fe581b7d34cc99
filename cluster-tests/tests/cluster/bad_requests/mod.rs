//! Every bad request is refused in clear words, and nobody else notices.
//!
//! What each is answered stands in `fixtures/bad_requests.json`, which a run with `CONSORT_BLESS=1` writes anew.

mod cases;
mod neighbours;
mod wire;

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use self::{
    cases::{Case, FLOOD, Sent},
    neighbours::{Choices, NEIGHBOURS, Rounds},
    wire::{Answer, Connection},
};
use crate::harness::{Served, consort, eventually, model, one_model_at_a_time, root};

/// Ends a hang: the passes take seconds.
const PASSES_MAX: Duration = Duration::from_secs(120);
/// Between two passes; one takes about as long. Without it, bad requests would have the processor to themselves.
const PAUSE: Duration = Duration::from_millis(150);
/// Longest shown beginning of a request in the golden file.
const SHOWN_CHARS: usize = 90;
/// The pool holds one sequence of full length and little more, so that the neighbours also wait for each other.
const ARGUMENTS: [&str; 8] = [
    "--tp",
    "2",
    "--max-model-len",
    "1024",
    "--kv-cache-memory-bytes",
    "24000000",
    "--served-model-name",
    "smollm2",
];

#[test]
fn every_bad_request_is_refused_in_golden_words_and_changes_no_neighbours_tokens() {
    let _guard = one_model_at_a_time();
    let server = Served::start(model().to_str().unwrap(), &ARGUMENTS);
    let alone: Vec<Choices> = (0..NEIGHBOURS).map(|at| neighbours::ask(&server, at)).collect();
    let cases = cases::all();
    assert!(cases.len() >= 80);
    let names: BTreeSet<&str> = cases.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), cases.len(), "two cases have one name");

    let (rounds, over) = (Rounds::default(), AtomicBool::new(false));
    let (begin, peak) = (Instant::now(), server.peak_rss_bytes());
    let (answers, passes) = thread::scope(|scope| {
        let _end = SetOnDrop(&over);
        let (server, rounds, over) = (&server, &rounds, &over);
        for (at, alone) in alone.iter().enumerate() {
            scope.spawn(move || neighbours::live(server, at, alone, rounds, over));
        }
        let answers = one_by_one(server, &cases);
        let mut passes = 1;
        // Until bad requests have met every neighbour's prompt, decoding and end.
        while rounds.fewest() == 0 {
            thread::sleep(PAUSE);
            assert_eq!(several_at_a_time(server, &cases), answers, "an answer depends on its company");
            assert!(begin.elapsed() < PASSES_MAX, "the neighbours are stuck: {:?}", rounds.each());
            passes += 1;
        }
        (answers.join(",\n"), passes)
    });
    println!(
        "{} bad requests, {passes} times, in {:.1} s; the neighbours asked {:?} times; peak RSS {} MB, {} before",
        cases.len(),
        begin.elapsed().as_secs_f32(),
        rounds.each(),
        server.peak_rss_bytes() / 1_000_000,
        peak / 1_000_000,
    );
    // Two bodies of the largest size that is taken, while their buffers grow.
    assert!(server.peak_rss_bytes() < peak + 128_000_000, "bad requests took memory");
    compare(&format!("[\n{answers}\n]\n"));
    nothing_is_held(&server);
    // Nothing but the neighbours was ever admitted.
    let asked =
        alone.iter().zip(rounds.each()).map(|(choices, rounds)| choices.len() * (1 + rounds)).sum::<usize>();
    assert_eq!(server.metric("vllm:request_success_total"), asked as f64);
    server.terminate();
    let (code, errors) = server.end(Duration::from_secs(20));
    assert_eq!(code, Some(0), "{errors}");
    assert!(!errors.contains("panicked") && !errors.contains("ERROR"), "{errors}");
}

fn one_by_one(server: &Served, cases: &[Case]) -> Vec<String> {
    cases.iter().map(|case| entry(server, case)).collect()
}

fn several_at_a_time(server: &Served, cases: &[Case]) -> Vec<String> {
    thread::scope(|scope| {
        let share = |cases| scope.spawn(move || one_by_one(server, cases));
        let shares: Vec<_> = cases.chunks(cases.len().div_ceil(4)).map(share).collect();
        shares.into_iter().flat_map(|share| share.join().unwrap()).collect()
    })
}

/// Lets the neighbours end also when a case fails.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Sends a case and writes down what came back, as it stands in the golden file.
fn entry(server: &Served, case: &Case) -> String {
    let chat = r#""messages":[{"role":"user","content":"Hi"}],"max_tokens":4"#;
    let completion = r#""prompt":"Hi","max_tokens":4"#;
    let post = |path, body: &[u8]| Connection::open(&server.url).ask(&posted(path, body));
    let (on, request, answer) = match &case.sent {
        Sent::Both(fields) => {
            let of_chat = post("/v1/chat/completions", format!("{{{chat},{fields}}}").as_bytes());
            let of_completion = post("/v1/completions", format!("{{{completion},{fields}}}").as_bytes());
            let (chat_says, completion_says) = (comparable(&of_chat.body), comparable(&of_completion.body));
            assert_eq!(chat_says, completion_says, "{}: the endpoints disagree", case.name);
            ("both", fields.as_bytes(), of_completion)
        }
        Sent::Chat(body) => ("chat", &body[..], post("/v1/chat/completions", body)),
        Sent::Completion(body) => ("completion", &body[..], post("/v1/completions", body)),
        Sent::Raw(bytes) => ("HTTP", &bytes[..], Connection::open(&server.url).ask(bytes)),
        Sent::Flood { head, piece, times } => {
            let (answer, sent) = Connection::open(&server.url).flood(head, piece, *times);
            // The body limit, what is thrown away after the answer, and socket buffers.
            assert!(sent < FLOOD * 7 / 10, "{}: {sent} bytes were read", case.name);
            ("HTTP", head.as_bytes(), answer)
        }
    };
    assert!((400..500).contains(&answer.status), "{}: {answer:?}", case.name);
    shown(case.name, on, request, &answer)
}

fn posted(path: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

/// What both endpoints must say alike: all but how long a prompt is, which a template makes longer, and where in the
/// body a parser gave up.
fn comparable(body: &str) -> Value {
    let mut body: Value = serde_json::from_str(body).unwrap();
    let message = body["error"]["message"].as_str().unwrap();
    let cut = ["but the prompt has", "at line 1 column"].iter().find_map(|words| message.split_once(words));
    if let Some((before, _)) = cut {
        body["error"]["message"] = json!(before);
    }
    body
}

/// Two or three lines of JSON: what was sent, and the whole answer.
fn shown(name: &str, on: &str, request: &[u8], answer: &Answer) -> String {
    let request = String::from_utf8_lossy(request);
    let mut begin: String = request.chars().take(SHOWN_CHARS).collect();
    if begin.len() < request.len() {
        let _ = write!(begin, "... ({} bytes)", request.len());
    }
    let connection = if answer.kept { "kept" } else { "closed" };
    let body = if answer.body.is_empty() { "null" } else { &answer.body };
    let (name, begin) = (json!(name), json!(begin));
    format!(
        "{{\"case\": {name}, \"on\": \"{on}\", \"sent\": {begin},\n \"status\": {}, \"connection\": \
         \"{connection}\",\n \"body\": {body}}}",
        answer.status
    )
}

/// Holds the answers against the golden file, entry by entry.
fn compare(got: &str) {
    let path = root().join("cluster-tests/fixtures/bad_requests.json");
    if std::env::var_os("CONSORT_BLESS").is_some_and(|value| value == "1") {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, got).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    if got == golden {
        return;
    }
    let parse = |text: &str| serde_json::from_str::<Vec<Value>>(text).unwrap_or_default();
    let (got, golden) = (parse(got), parse(&golden));
    let named =
        |entries: &[Value], entry: &Value| entries.iter().find(|e| e["case"] == entry["case"]).cloned();
    let mut text = String::new();
    for entry in got.iter().filter(|entry| named(&golden, entry).as_ref() != Some(*entry)) {
        let expected = named(&golden, entry).map_or("nothing".to_owned(), |entry| entry.to_string());
        let _ = writeln!(text, "got      {entry}\nexpected {expected}\n");
    }
    for entry in golden.iter().filter(|entry| named(&got, entry).is_none()) {
        let _ = writeln!(text, "no case for {entry}\n");
    }
    panic!("{} is not what the server says; CONSORT_BLESS=1 writes it anew\n{text}", path.display());
}

/// Neither queue nor cache nor list of requests holds anything.
fn nothing_is_held(server: &Served) {
    eventually("nothing runs, waits or is held", Duration::from_secs(10), || {
        let health: Value = serde_json::from_str(&server.get("/health").1).unwrap();
        ["running", "waiting", "open_requests", "kv_blocks_used"].iter().all(|key| health[*key] == 0)
    });
    for name in ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"] {
        assert_eq!(server.metric(name), 0.0, "{name}");
    }
    let health: Value = serde_json::from_str(&server.get("/health").1).unwrap();
    assert_eq!((&health["status"], &health["epoch"]), (&json!("ready"), &json!(0)), "{health}");
}

/// Otherwise a prompt could be longer than the pool and shorter than the context, and would be refused only when it
/// comes.
#[test]
fn a_pool_that_is_smaller_than_the_context_is_refused_at_the_start() {
    let arguments = ["run", model().to_str().unwrap(), "Hi", "--tp", "2"].map(str::to_owned);
    let sizes = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "23592959"];
    let output = consort().args(arguments).args(sizes).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    let expected = "error: the configuration has 1 problem:\n--kv-cache-memory-bytes: cache.kv_cache_memory_bytes: \
                    23592959 bytes hold 63 KV blocks, but one sequence of max_model_len = 1024 tokens needs 64 \
                    (23592960 bytes); give 23592960 or more, or lower max_model_len (1008 tokens would fit)\n  \
                    --max-model-len: sequences of this length are asked for here";
    assert_eq!(errors.trim_end(), expected);
}
