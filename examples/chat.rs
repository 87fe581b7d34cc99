//! A chat in the terminal. Run: `cargo run --release --example chat -- examples/topologies/three-cpu-shards.toml`
//!
//! Ctrl-C while the model speaks cuts it short (the stream is dropped, which cancels the request); an empty line or
//! the end of the input leaves.

#![allow(clippy::print_stdout)] // the answer belongs on standard output

use std::{
    env,
    io::{self, Write},
    time::Duration,
};

use anyhow::Context;
use consort::{Engine, GenerateOptions, Message, TextEvent, TextStream};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let topology = env::args().nth(1).context("usage: chat TOPOLOGY.toml")?;
    let engine = Engine::from_toml(topology).start().await?;
    println!("{} is ready; an empty line ends the chat", engine.model_name());
    let mut messages = Vec::new();
    while let Some(question) = ask()? {
        messages.push(Message::user(question));
        let stream = engine.chat(&messages, GenerateOptions::default())?;
        messages.push(Message::assistant(speak(stream).await?));
    }
    engine.shutdown(Duration::from_secs(1)).await;
    Ok(())
}

/// Reads a line; `None` for an empty one.
fn ask() -> anyhow::Result<Option<String>> {
    print!("> ");
    io::stdout().flush()?;
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    let line = line.trim();
    Ok((!line.is_empty()).then(|| line.to_owned()))
}

/// Prints an answer as it comes and returns it, whole or as far as it got.
async fn speak(mut stream: TextStream) -> anyhow::Result<String> {
    let mut answer = String::new();
    loop {
        let event = tokio::select! {
            event = stream.next() => event,
            _ = tokio::signal::ctrl_c() => None,
        };
        match event.transpose()? {
            Some(TextEvent::Delta(delta)) => {
                print!("{}", delta.text);
                io::stdout().flush()?;
                answer.push_str(&delta.text);
            }
            Some(_) => {}
            None => break,
        }
    }
    println!();
    Ok(answer)
}
