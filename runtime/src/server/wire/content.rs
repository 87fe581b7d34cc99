//! Messages of a chat: content is a string or an array of parts.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, SeqAccess, Visitor},
};

use super::{Fields, bounded};
use crate::{engine::Message, server::error::ApiError};

/// Most parts of one message's content.
const PARTS_MAX: usize = 4096;

#[derive(Debug)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor;

        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array of parts")
            }

            fn visit_str<E>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Content, A::Error> {
                bounded::collect(seq, PARTS_MAX).map(Content::Parts)
            }
        }

        deserializer.deserialize_any(ContentVisitor)
    }
}

#[derive(Debug, Deserialize)]
#[serde(expecting = "an object with `type` and `text`")]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
}

/// Role and text of a message.
pub(super) fn message(fields: Fields<'_>) -> Result<Message, ApiError> {
    let role: String = fields.scalar("role")?.ok_or_else(|| fields.wrong("role", "is missing"))?;
    if !matches!(role.as_str(), "system" | "developer" | "user" | "assistant") {
        let what = format!("must be system, developer, user or assistant, got `{role}`");
        return Err(fields.wrong("role", what));
    }
    let calls: Option<Vec<IgnoredAny>> = fields.get("tool_calls")?;
    if calls.is_some_and(|calls| !calls.is_empty()) {
        return Err(fields.wrong("tool_calls", "is not supported by this server; leave it out"));
    }
    let content = match fields.get("content")? {
        Some(Content::Text(text)) => text,
        Some(Content::Parts(parts)) => join(parts).map_err(|what| fields.wrong("content", what))?,
        None if role == "assistant" => String::new(),
        None => return Err(fields.wrong("content", "is missing")),
    };
    // Templates know the older word only.
    let role = if role == "developer" { "system".to_owned() } else { role };
    Ok(Message { role, content })
}

/// Texts of the parts, one per line as vLLM joins them.
fn join(parts: Vec<Part>) -> Result<String, String> {
    let mut texts = Vec::with_capacity(parts.len());
    for part in parts {
        match (part.kind.as_str(), part.text) {
            ("text" | "input_text" | "output_text", Some(text)) => texts.push(text),
            ("text" | "input_text" | "output_text", None) => return Err("a text part has no `text`".into()),
            (kind, _) => return Err(format!("parts of type `{kind}` are not supported, only text")),
        }
    }
    Ok(texts.join("\n"))
}
