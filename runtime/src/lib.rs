//! Consort: one language model over any number of devices, as a library and as an OpenAI-compatible server.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use consort::{Engine, GenerateOptions, Message, TextEvent};
//!
//! let engine = Engine::builder().model("models/smollm2").tensor_parallel_size(3).start().await?;
//! let mut answer = engine.chat(&[Message::user("What is a consort?")], GenerateOptions::default())?;
//! while let Some(event) = answer.next().await {
//!     if let TextEvent::Delta(delta) = event? {
//!         print!("{}", delta.text);
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! * [`engine`]: the embedding API, and the one validator of requests.
//! * [`topology`]: what to run where, from TOML, environment and flags.
//! * [`text`]: tokenizer, incremental decoding, stop strings, chat templates.
//! * [`server`]: the HTTP server.
//! * [`convert`]: a model as a folder for `transformers`.
//! * [`shard_main`]: what a program calls first whose engines run ranks as processes.
//! * [`cli`]: the `consort` command.
//! * [`error`]: what can go wrong.
//!
//! Absent on purpose: scheduling and supervision (`consort-actors`), models and collectives (`consort-parallel`).

pub mod cli;
pub mod convert;
pub mod engine;
pub mod error;
mod metrics;
pub mod server;
mod shard_process;
#[cfg(test)]
mod testing;
pub mod text;
pub mod topology;

pub use consort_actors::{
    EnsembleState, GenerationError, LoadProgress, RankStatus, ReplicaId, ReplicaStatus, StateWatch, Status,
    SubmitError, plan::TokenLogprobs,
};
pub use consort_kernels::device::Isa;
pub use consort_parallel::plan;

pub use crate::{
    engine::{
        ChatOptions, Completion, Engine, EngineBuilder, EngineStatus, Finish, FinishReason, GenerateOptions,
        LiveRequest, Message, Prompt, StopReason, TextDelta, TextEvent, TextStream, Usage,
    },
    error::{DeviceError, EngineError, RequestError},
    shard_process::shard_main,
    topology::{AllReduce, Isolation},
};
