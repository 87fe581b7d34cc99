//! `consort run`: one prompt, answered on standard output.

use std::{
    io::{self, Write},
    time::{Duration, Instant},
};

use super::{
    args::{RunArgs, ServerArgs},
    progress::LoadBars,
    report,
};
use crate::{
    engine::{Finish, FinishReason, GenerateOptions, Message, TextEvent},
    error::RequestError,
};

/// Time for ranks to end after the answer.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(1);

pub(super) async fn run(args: RunArgs) -> anyhow::Result<()> {
    let started = Instant::now();
    let bars = LoadBars::new();
    let reporting = bars.clone();
    let builder = args.model.builder(args.source, ServerArgs::default());
    let loading = builder.on_progress(move |progress| reporting.report(&progress)).start().await;
    bars.finish();
    let engine = loading?;
    let loaded = started.elapsed();

    let options = GenerateOptions {
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        repetition_penalty: args.repetition_penalty,
        frequency_penalty: args.frequency_penalty,
        presence_penalty: args.presence_penalty,
        min_tokens: args.min_tokens,
        seed: args.seed,
        ..GenerateOptions::default()
    };
    let asked = Instant::now();
    let mut stream = if args.raw {
        engine.generate(args.prompt, options)?
    } else {
        engine.chat(&[Message::user(args.prompt)], options).map_err(|error| match error {
            RequestError::NoChatTemplate { .. } => anyhow::Error::from(error).context("add --raw"),
            other => other.into(),
        })?
    };
    let mut out = io::stdout();
    let (mut first, mut finish): (Option<Duration>, Option<Finish>) = (None, None);
    while let Some(event) = stream.next().await {
        match event? {
            TextEvent::Prompt(_) => {}
            TextEvent::Delta(delta) => {
                first.get_or_insert_with(|| asked.elapsed());
                out.write_all(delta.text.as_bytes())?;
                out.flush()?;
            }
            TextEvent::Finished(end) => finish = Some(end),
        }
    }
    let last = asked.elapsed();
    writeln!(out)?;
    if let (Some(finish), Some(first)) = (finish, first) {
        let cut = if finish.reason == FinishReason::Length { " (stopped at the limit)" } else { "" };
        let timing = report::Timing { loaded, asked: asked.duration_since(started), first, last };
        eprintln!("{}{cut}", report::summary(finish.usage, &timing));
    }
    engine.shutdown(SHUTDOWN_GRACE).await;
    Ok(())
}
