//! Chat templates that refuse, fail, or never end: the client is told, and nobody else notices.

use std::{
    fs,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{Answer, Running, ServerSettings, assert_error, start_with};
use crate::testing;

/// Refuses and loops as the messages ask it to; the words of the first are taken from published templates.
const TEMPLATE: &str = "\
{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message.content == 'fail' %}{{ message.nothing.more }}{% endif %}
{% if message.content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}\
{% endif %}
{% if message.content == 'flood' %}{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endif %}
{{ message.content }}{% endfor %}";

async fn start() -> Running {
    let folder = tempfile::tempdir().expect("a temporary folder");
    testing::write_checkpoint(folder.path());
    fs::write(folder.path().join("chat_template.jinja"), TEMPLATE).expect("the folder is writable");
    start_with(ServerSettings::default(), |builder| builder.model(folder.path())).await
}

async fn ask(server: &Running, messages: &[(&str, &str)]) -> Answer {
    let message = |(role, content): &(&str, &str)| json!({"role": role, "content": content});
    let messages: Vec<Value> = messages.iter().map(message).collect();
    let body =
        json!({"model": "tiny", "messages": messages, "max_tokens": 3, "temperature": 0, "ignore_eos": true});
    server.post("/v1/chat/completions", body).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_refuses_fails_or_never_ends_is_the_clients_error_in_messages() {
    let server = start().await;
    let good = [("user", "a"), ("assistant", "b"), ("user", "c")];
    let before = ask(&server, &good).await.json();
    for (messages, expected) in [
        (
            &[("user", "a"), ("user", "b")][..],
            "the model's chat template refuses this conversation: Conversation roles must alternate \
             user/assistant/user/assistant/...",
        ),
        (&[("user", "fail")], "the chat template fails on this conversation at line 5: undefined value"),
        (
            &[("user", "loop")],
            "the chat template did not finish within its budget of 4000000 steps: shorten the conversation",
        ),
        (&[("user", "flood")], "the chat template wrote more than 33554432 bytes: shorten the conversation"),
    ] {
        let begin = Instant::now();
        let answer = ask(&server, messages).await;
        assert_error(&answer, 400, "BadRequestError", Some("messages"));
        assert_eq!(answer.json()["error"]["message"], expected);
        assert!(begin.elapsed() < Duration::from_secs(30), "{messages:?} took {:?}", begin.elapsed());
    }
    let after = ask(&server, &good).await.json();
    assert_eq!(before["choices"], after["choices"]);
    server.end().await;
}

#[tokio::test]
async fn templates_that_never_end_leave_the_only_worker_free() {
    let server = start().await;
    let begin = Instant::now();
    // Sent before the other question, on a runtime with a single thread.
    let looping = async { (ask(&server, &[("user", "loop")]).await, begin.elapsed()) };
    let meanwhile = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        (server.get("/health").await.status, begin.elapsed())
    };
    let ((refused, looped), (alive, answered)) = tokio::join!(looping, meanwhile);
    assert_error(&refused, 400, "BadRequestError", Some("messages"));
    assert_eq!(alive, 200);
    assert!(answered < looped, "the answer came after {answered:?}, the template's end after {looped:?}");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn templates_that_never_end_change_nobodys_tokens() {
    let server = start().await;
    let complete = || server.complete(json!({"prompt": "abc", "max_tokens": 64}));
    let alone = complete().await.json();
    let loops = (0..3).map(|_| ask(&server, &[("user", "loop")]));
    let (loops, meanwhile) = tokio::join!(futures_util::future::join_all(loops), complete());
    for answer in loops {
        assert_error(&answer, 400, "BadRequestError", Some("messages"));
    }
    assert_eq!(meanwhile.json()["choices"], alone["choices"]);
    server.end().await;
}
