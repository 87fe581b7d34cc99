//! Chat templates: a conversation to the prompt text that the model was trained on.
//!
//! Templates are Jinja written for Python's `transformers`. They run here in minijinja, set up to behave as
//! there (block trimming, Python's string methods, `raise_exception`, `strftime_now`, `tojson` spelled as
//! Python spells it), with a budget of work and of output: a template comes from the checkpoint and its input
//! from anyone.

mod python;
mod strftime;
#[cfg(test)]
mod tests;

use std::{
    io,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use consort_parallel::checkpoint::Checkpoint;
use minijinja::{AutoEscape, Environment, ErrorKind, Value as Jinja, syntax::SyntaxConfig};
use serde_json::{Map, Value as Json};

use super::{
    error::{TemplateError, TextError},
    files::{read_if_present, read_json_if_present},
    tokenizer::Tokenizer,
};

/// Steps a template may take for one conversation. minijinja also charges a step per 64 bytes created, so
/// this bounds memory to about 256 MB; a conversation of 1,000 messages takes about 50,000 steps in the
/// longest templates known.
const FUEL: u64 = 4_000_000;
/// Bytes of prompt text that a template may write: beyond any context length in use.
const OUTPUT_BYTES_MAX: usize = 32 << 20;
/// Name of the template used for conversations without tools.
const DEFAULT: &str = "default";
/// Name of the template used when a request offers tools, where a model has one of that name.
const TOOL_USE: &str = "tool_use";

/// What a template is rendered with.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatInput<'a> {
    /// Messages as they came in the request: objects with `role` and `content`.
    pub messages: &'a [Json],
    /// Tools that the model may call.
    pub tools: Option<&'a [Json]>,
    /// Whether the prompt ends by opening the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables of the request (`chat_template_kwargs`); they may override `add_generation_prompt`.
    pub kwargs: Option<&'a Map<String, Json>>,
}

/// The chat template of a model, compiled. Immutable: share it with an `Arc`.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: Option<String>,
    eos: Option<String>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.environment.templates().map(|(name, _)| name).collect();
        f.debug_struct("ChatTemplate").field("templates", &names).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// The template of a checkpoint. `chat_template.jinja` wins over `tokenizer_config.json`.
    pub fn from_checkpoint(
        checkpoint: &Checkpoint,
        tokenizer: &Tokenizer,
    ) -> Result<ChatTemplate, TemplateError> {
        let path = checkpoint.path();
        let sources = match checkpoint.gguf() {
            Some(metadata) => metadata
                .string("tokenizer.chat_template")
                .map(|source| vec![(DEFAULT.to_owned(), source.to_owned())])
                .unwrap_or_default(),
            None => sources_of_folder(path)?,
        };
        if sources.is_empty() {
            return Err(TemplateError::Missing { path: path.to_path_buf() });
        }
        ChatTemplate::compile(sources, tokenizer.bos_token(), tokenizer.eos_token())
    }

    /// A template given as text, for checkpoints without one.
    pub fn from_source(
        source: &str,
        bos: Option<&str>,
        eos: Option<&str>,
    ) -> Result<ChatTemplate, TemplateError> {
        ChatTemplate::compile(vec![(DEFAULT.to_owned(), source.to_owned())], bos, eos)
    }

    fn compile(
        sources: Vec<(String, String)>,
        bos: Option<&str>,
        eos: Option<&str>,
    ) -> Result<ChatTemplate, TemplateError> {
        let mut environment = environment();
        for (name, source) in sources {
            let source = without_generation_marks(&source);
            environment.add_template_owned(name.clone(), source).map_err(|error| TemplateError::Syntax {
                template: name,
                line: error.line(),
                message: error_text(&error),
            })?;
        }
        Ok(ChatTemplate { environment, bos: bos.map(str::to_owned), eos: eos.map(str::to_owned) })
    }

    /// The prompt text of a conversation. Tokenise it without adding special tokens: the template writes
    /// them.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TemplateError> {
        let context = self.context(input)?;
        let offers_tools = input.tools.is_some_and(|tools| !tools.is_empty());
        let template = self
            .environment
            .get_template(if offers_tools { TOOL_USE } else { DEFAULT })
            .or_else(|_| self.environment.get_template(DEFAULT))
            .map_err(|error| render_error(&error))?;
        let mut output = CappedOutput { bytes: Vec::new(), overflowed: false };
        let outcome = template.render_captured_to(context, &mut output).map(drop);
        if output.overflowed {
            return Err(TemplateError::TooLong { limit: OUTPUT_BYTES_MAX });
        }
        outcome.map_err(|error| render_error(&error))?;
        Ok(String::from_utf8_lossy(&output.bytes).into_owned())
    }

    fn context(&self, input: &ChatInput<'_>) -> Result<Jinja, TemplateError> {
        let messages = input.messages.iter().enumerate().map(|(at, message)| message_value(at, message));
        let messages = messages.collect::<Result<Vec<_>, _>>()?;
        let tools = input.tools.map(|tools| tools.iter().map(python::from_json).collect::<Vec<_>>());
        let kwargs =
            input.kwargs.into_iter().flatten().map(|(key, value)| (key.as_str(), python::from_json(value)));
        let mut variables = vec![("add_generation_prompt", Jinja::from(input.add_generation_prompt))];
        variables.extend(kwargs);
        variables.extend([("messages", Jinja::from(messages)), ("tools", Jinja::from(tools))]);
        for (name, token) in [("bos_token", &self.bos), ("eos_token", &self.eos)] {
            variables.extend(token.as_deref().map(|token| (name, Jinja::from(token))));
        }
        Ok(Jinja::from_pairs(variables))
    }
}

fn sources_of_folder(folder: &Path) -> Result<Vec<(String, String)>, TemplateError> {
    let path = folder.join("chat_template.jinja");
    if let Some(bytes) = read_if_present(&path)? {
        let source = String::from_utf8(bytes).map_err(|error| TextError::Malformed {
            path,
            what: "UTF-8 text",
            source: error.into(),
        })?;
        return Ok(vec![(DEFAULT.to_owned(), source)]);
    }
    let Some(config) = read_json_if_present(&folder.join("tokenizer_config.json"))? else {
        return Ok(Vec::new());
    };
    Ok(match config.get("chat_template") {
        Some(Json::String(source)) => vec![(DEFAULT.to_owned(), source.clone())],
        Some(Json::Array(named)) => named
            .iter()
            .filter_map(|entry| {
                Some((entry.get("name")?.as_str()?.to_owned(), entry.get("template")?.as_str()?.to_owned()))
            })
            .collect(),
        _ => Vec::new(),
    })
}

/// An environment that behaves as the one in `transformers`.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the default delimiters are valid"));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(python::write);
    environment.set_fuel(Some(FUEL));
    environment.set_debug(false);
    environment.add_filter("tojson", python::tojson);
    environment.add_function("raise_exception", |message: &str| -> Result<Jinja, minijinja::Error> {
        Err(minijinja::Error::from(ErrorKind::InvalidOperation).with_source(Raised(message.to_owned())))
    });
    environment.add_function("strftime_now", |format: &str| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        strftime::format(format, now).map_err(|what| {
            minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {what}"))
        })
    });
    environment
}

/// A template's own words in `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn render_error(error: &minijinja::Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(found) = cause {
        if let Some(Raised(message)) = found.downcast_ref() {
            return TemplateError::Refused { message: message.clone() };
        }
        if found.downcast_ref::<minijinja::Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel)
        {
            return TemplateError::TooMuchWork { fuel: FUEL };
        }
        cause = found.source();
    }
    TemplateError::Render { line: error.line(), message: error_text(error) }
}

/// The kind and detail of an error, without the place, which the caller adds.
fn error_text(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

/// A message as templates expect it: content of text parts becomes one text (joined by line breaks, as vLLM
/// does), and the arguments of earlier tool calls, which arrive as JSON text, become objects.
fn message_value(at: usize, message: &Json) -> Result<Jinja, TemplateError> {
    let problem = |problem| TemplateError::BadMessage { message: at, problem };
    let fields = message.as_object().ok_or_else(|| problem("is not an object"))?;
    if !fields.get("role").is_some_and(Json::is_string) {
        return Err(problem("has no role"));
    }
    let mut pairs = Vec::with_capacity(fields.len());
    for (key, value) in fields {
        let value = match (key.as_str(), value) {
            ("content", Json::Array(parts)) => Jinja::from(text_of_parts(at, parts)?),
            ("tool_calls", Json::Array(calls)) => {
                Jinja::from(calls.iter().map(call_value).collect::<Vec<_>>())
            }
            _ => python::from_json(value),
        };
        pairs.push((key.as_str(), value));
    }
    Ok(Jinja::from_pairs(pairs))
}

fn text_of_parts(at: usize, parts: &[Json]) -> Result<String, TemplateError> {
    let text_of = |part: &Json| -> Result<String, TemplateError> {
        let kind = part.get("type").and_then(Json::as_str);
        match (part, kind, part.get("text")) {
            (Json::String(text), _, _) => Ok(text.clone()),
            (_, Some("text" | "input_text" | "output_text") | None, Some(Json::String(text))) => {
                Ok(text.clone())
            }
            _ => Err(TemplateError::UnsupportedPart {
                message: at,
                kind: kind.unwrap_or("unknown").to_owned(),
            }),
        }
    };
    Ok(parts.iter().map(text_of).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn call_value(call: &Json) -> Jinja {
    let mut call = call.clone();
    if let Some(arguments) = call.pointer_mut("/function/arguments") {
        let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Json>(text).ok());
        if let Some(parsed @ Json::Object(_)) = parsed {
            *arguments = parsed;
        }
    }
    python::from_json(&call)
}

/// `{% generation %}` blocks mark text for training. minijinja does not know them, and an `if` that is always
/// taken trims the same whitespace around it.
fn without_generation_marks(source: &str) -> String {
    if !source.contains("generation") {
        return source.to_owned();
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let inner = &rest[start + 2..start + length];
        let keyword = inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let replaced = match keyword {
            "generation" => inner.replace("generation", "if true"),
            "endgeneration" => inner.replace("endgeneration", "endif"),
            _ => inner.to_owned(),
        };
        out.push_str(&rest[..start + 2]);
        out.push_str(&replaced);
        out.push_str("%}");
        rest = &rest[start + length + 2..];
    }
    out.push_str(rest);
    out
}

/// Refuses to grow beyond [`OUTPUT_BYTES_MAX`].
struct CappedOutput {
    bytes: Vec<u8>,
    overflowed: bool,
}

impl io::Write for &mut CappedOutput {
    fn write(&mut self, chunk: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + chunk.len() > OUTPUT_BYTES_MAX {
            self.overflowed = true;
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        self.bytes.extend_from_slice(chunk);
        Ok(chunk.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
