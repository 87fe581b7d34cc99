//! Text to token ids and back: tokenizer, incremental decoding, stop strings, chat templates.
//!
//! * [`Tokenizer`]: from a checkpoint's `tokenizer.json`, or rebuilt from GGUF metadata.
//! * [`IncrementalDecoder`]: one stream's ids to text, never a broken character.
//! * [`StopMatcher`]: ends a stream at a stop string, holding back only what may still become one.
//! * [`ChatTemplate`]: messages to the prompt text that the model was trained on.
//!
//! All of it is synchronous and free of I/O once loaded; the server and the engine call it. It never decides
//! on end-of-sequence tokens: those are ids, and the scheduler's business.

mod decode;
mod error;
mod files;
mod stop;
mod template;
#[cfg(test)]
pub(crate) mod testing;
mod tokenizer;

pub use decode::IncrementalDecoder;
pub use error::{TemplateError, TextError};
pub use stop::{StopMatcher, StopPush, StopStrings};
pub use template::{ChatInput, ChatTemplate};
pub use tokenizer::Tokenizer;
