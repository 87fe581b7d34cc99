//! What can go wrong between text and ids.

use std::{error::Error, io, path::PathBuf};

/// Cause that a library reports only as a boxed error.
pub(super) type Cause = Box<dyn Error + Send + Sync + 'static>;

/// A tokenizer could not be loaded or used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A folder without `tokenizer.json`.
    #[error(
        "{} has no tokenizer.json: add the one published with the model (a sentencepiece tokenizer.model \
         alone is not read; transformers' save_pretrained writes a tokenizer.json from it)",
        .folder.display()
    )]
    NoTokenizer {
        /// The checkpoint's folder.
        folder: PathBuf,
    },
    /// A file of the checkpoint could not be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file of the checkpoint is not what its name promises.
    #[error("{} is not a valid {what}", .path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What was expected in it.
        what: &'static str,
        /// What the parser said.
        #[source]
        source: Cause,
    },
    /// GGUF metadata that a tokenizer cannot be rebuilt without.
    #[error(
        "{} has no metadata key {key}, so its tokenizer cannot be rebuilt: convert the model again, with its \
         tokenizer",
        .path.display()
    )]
    MissingMetadata {
        /// The GGUF file.
        path: PathBuf,
        /// The absent key.
        key: &'static str,
    },
    /// A kind of GGUF tokenizer that is not rebuilt.
    #[error(
        "{}: tokenizer.ggml.model is `{model}`, and only `gpt2` (byte-level BPE) is supported in GGUF files: \
         use the model's folder with tokenizer.json instead",
        .path.display()
    )]
    UnsupportedModel {
        /// The GGUF file.
        path: PathBuf,
        /// What it asks for.
        model: String,
    },
    /// A GGUF pre-tokenizer whose splitting rules are not known here; guessing would silently change ids.
    #[error(
        "{}: tokenizer.ggml.pre is `{pre}`; supported are {supported}: use the model's folder with \
         tokenizer.json instead",
        .path.display()
    )]
    UnsupportedPreTokenizer {
        /// The GGUF file.
        path: PathBuf,
        /// What it asks for.
        pre: String,
        /// The names that work.
        supported: String,
    },
    /// A vocabulary that contradicts itself.
    #[error("{}: bad vocabulary: {reason}", .path.display())]
    BadVocabulary {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A `tokenizer.json` whose decoder cannot be run token by token.
    #[error(
        "{}: decoder `{decoder}` is not supported: ByteLevel, Metaspace and sentencepiece-style sequences of \
         Replace, ByteFallback, Fuse and Strip are",
        .path.display()
    )]
    UnsupportedDecoder {
        /// The file.
        path: PathBuf,
        /// Its decoder.
        decoder: String,
    },
    /// A tokenizer that has no `tokenizer.json`.
    #[error("cannot write the tokenizer as tokenizer.json")]
    Serialise {
        /// What the library said.
        #[source]
        source: Cause,
    },
    /// The tokenizer refused a text.
    #[error("cannot tokenise a text of {bytes} bytes")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the tokenizer said.
        #[source]
        source: Cause,
    },
    /// A stop string without characters would end every stream at once.
    #[error("stop strings must not be empty")]
    EmptyStop,
}

/// A chat template could not be loaded, or refused a conversation.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// A checkpoint without a chat template.
    #[error(
        "{} has no chat template (looked for chat_template.jinja, chat_template in tokenizer_config.json and \
         tokenizer.chat_template in GGUF metadata): send plain text to /v1/completions, or add the template",
        .path.display()
    )]
    Missing {
        /// The checkpoint.
        path: PathBuf,
    },
    /// Files beside the checkpoint could not be read.
    #[error(transparent)]
    Files(#[from] TextError),
    /// The template is not valid Jinja.
    #[error("chat template `{template}` does not parse{}: {message}", at_line(*.line))]
    Syntax {
        /// Name of the template.
        template: String,
        /// Line in it.
        line: Option<usize>,
        /// What is wrong.
        message: String,
    },
    /// The template itself refused the conversation (`raise_exception`).
    #[error("the model's chat template refuses this conversation: {message}")]
    Refused {
        /// The template's words.
        message: String,
    },
    /// A message part that the template cannot take.
    #[error("messages[{message}].content has a part of type `{kind}`: this model takes text only")]
    UnsupportedPart {
        /// Position of the message.
        message: usize,
        /// Type of the part.
        kind: String,
    },
    /// A message that is not an object with a role.
    #[error("messages[{message}] {problem}")]
    BadMessage {
        /// Position of the message.
        message: usize,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The template worked for too long.
    #[error("the chat template did not finish within its budget of {fuel} steps: shorten the conversation")]
    TooMuchWork {
        /// The budget.
        fuel: u64,
    },
    /// The template wrote too much.
    #[error("the chat template wrote more than {limit} bytes: shorten the conversation")]
    TooLong {
        /// The limit.
        limit: usize,
    },
    /// The template failed on this conversation.
    #[error("the chat template fails on this conversation{}: {message}", at_line(*.line))]
    Render {
        /// Line in the template.
        line: Option<usize>,
        /// What is wrong.
        message: String,
    },
}

impl TemplateError {
    /// Whether another conversation could succeed, which makes this error the client's.
    pub fn is_about_the_request(&self) -> bool {
        !matches!(
            self,
            TemplateError::Missing { .. } | TemplateError::Files(_) | TemplateError::Syntax { .. }
        )
    }
}

fn at_line(line: Option<usize>) -> String {
    line.map(|line| format!(" at line {line}")).unwrap_or_default()
}
