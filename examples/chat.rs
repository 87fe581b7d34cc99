//! A chat in the terminal. Run: `cargo run --release --example chat -- examples/topologies/three-cpu-shards.toml`
//!
//! Ctrl-C while the model speaks cuts it short (the stream is dropped, which cancels the request); Ctrl-C at the
//! prompt, an empty line or the end of the input leaves.

#![allow(clippy::print_stdout)] // the answer belongs on standard output

use std::{
    env,
    io::{self, Write},
    thread,
    time::Duration,
};

use anyhow::Context;
use consort::{Engine, GenerateOptions, Message, TextEvent, TextStream};
use tokio::{signal, sync::mpsc};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let topology = env::args().nth(1).context("usage: chat TOPOLOGY.toml")?;
    let engine = Engine::from_toml(topology).start().await?;
    println!("{} is ready; an empty line ends the chat", engine.model_name());
    let mut input = lines();
    let mut messages = Vec::new();
    while let Some(question) = ask(&mut input).await? {
        messages.push(Message::user(question));
        let stream = engine.chat(&messages, GenerateOptions::default())?;
        messages.push(Message::assistant(speak(stream).await?));
    }
    engine.shutdown(Duration::from_secs(1)).await;
    Ok(())
}

/// Standard input, line by line. Reading it blocks and cannot be called off, so a thread does it that nobody waits
/// for; tokio's own blocking threads would hold up the end of the program.
fn lines() -> mpsc::Receiver<io::Result<String>> {
    let (sender, receiver) = mpsc::channel(1);
    thread::spawn(move || {
        for line in io::stdin().lines() {
            if sender.blocking_send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Reads a line; `None` for an empty one, the end of the input, or Ctrl-C.
async fn ask(input: &mut mpsc::Receiver<io::Result<String>>) -> anyhow::Result<Option<String>> {
    print!("> ");
    io::stdout().flush()?;
    // Once somebody has listened for Ctrl-C, it no longer ends the process by itself.
    let line = tokio::select! {
        line = input.recv() => line.transpose()?,
        _ = signal::ctrl_c() => None,
    };
    if line.is_none() {
        println!();
    }
    Ok(line.map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()))
}

/// Prints an answer as it comes and returns it, whole or as far as it got.
async fn speak(mut stream: TextStream) -> anyhow::Result<String> {
    let mut answer = String::new();
    loop {
        let event = tokio::select! {
            event = stream.next() => event,
            _ = signal::ctrl_c() => None,
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
