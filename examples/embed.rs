//! Consort inside your program. Run, after `cargo xtask model`:
//! `cargo run --release --example embed -- target/models/SmolLM2-135M-Instruct.Q4_1.gguf`

#![allow(clippy::print_stdout)] // the answer belongs on standard output

use std::{env, time::Duration};

use anyhow::Context;
use consort::{Engine, GenerateOptions, Message, TextEvent};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let model = env::args().nth(1).context("usage: embed MODEL")?;
    let engine = Engine::builder().model(model).tensor_parallel_size(3).start().await?;
    let options = GenerateOptions { temperature: Some(0.0), max_tokens: Some(64), ..Default::default() };
    let mut answer = engine.chat(&[Message::user("What is the capital of France?")], options)?;
    while let Some(event) = answer.next().await {
        if let TextEvent::Delta(delta) = event? {
            print!("{}", delta.text);
        }
    }
    println!();
    engine.shutdown(Duration::from_secs(1)).await;
    Ok(())
}
