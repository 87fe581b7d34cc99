//! `consort demo`: the whole instrument once, through the real server, and who played what.

use std::{
    io::{self, Write},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::{
    args::DemoArgs,
    client, report,
    serve::{Running, Signals},
};

/// Longest answer of the demonstration.
const ANSWER_TOKENS_MAX: usize = 128;

pub(super) async fn demo(args: DemoArgs) -> anyhow::Result<()> {
    let builder = args.model.builder(args.source, args.server);
    let mut settings = builder.server_settings()?;
    if !args.serve {
        // Nobody else is to find this server, so any free port will do.
        settings.listen = "127.0.0.1:0".into();
    }
    let api_key = settings.api_keys.first().cloned();
    let mut signals = Signals::new()?;
    let Some(running) = Running::start(builder, settings, &mut signals).await? else { return Ok(()) };

    let mut out = io::stdout();
    writeln!(out, "> {}", args.question)?;
    let asked = tokio::select! {
        asked = ask(&running, api_key.as_deref(), &args.question) => asked?,
        () = signals.next() => return running.end(&mut signals).await,
    };
    writeln!(out, "\n")?;
    writeln!(out, "{}", report::compute_line(running.engine.compute()))?;
    for line in report::ensemble_lines(&running.engine.status().ensemble) {
        writeln!(out, "{line}")?;
    }
    writeln!(out, "{}", report::speed(asked.tokens, asked.first, asked.last))?;
    if args.serve {
        writeln!(out, "{} stays at http://{} until Ctrl-C", running.engine.model_name(), running.address)?;
        return running.wait(&mut signals).await;
    }
    running.end(&mut signals).await
}

struct Asked {
    tokens: usize,
    first: Duration,
    last: Duration,
}

/// Asks over HTTP and writes the answer as it comes.
async fn ask(running: &Running, api_key: Option<&str>, question: &str) -> anyhow::Result<Asked> {
    let body = json!({
        "model": running.engine.model_name(),
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS_MAX,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    let started = Instant::now();
    let mut events =
        client::post_stream(running.address, "/v1/chat/completions", api_key, body.to_string()).await?;
    let mut out = io::stdout();
    let (mut first, mut last, mut tokens) = (None, Duration::ZERO, 0);
    while let Some(payload) = events.next().await? {
        if payload == "[DONE]" {
            let first = first.context("the answer was empty")?;
            return Ok(Asked { tokens, first, last });
        }
        let chunk: Value =
            serde_json::from_str(&payload).context("the server sent a line that is not JSON")?;
        if let Some(message) = chunk["error"]["message"].as_str() {
            bail!("the server gave up: {message}");
        }
        if let Some(count) = chunk["usage"]["completion_tokens"].as_u64() {
            tokens = count as usize;
        }
        let Some(text) = chunk["choices"][0]["delta"]["content"].as_str() else { continue };
        if chunk["choices"][0]["delta"]["role"].is_null() {
            last = started.elapsed();
            first.get_or_insert(last);
        }
        out.write_all(text.as_bytes())?;
        out.flush()?;
    }
    bail!("the server closed the stream before its end")
}
