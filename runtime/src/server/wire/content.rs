//! Messages of a chat: content is a string or an array of parts.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, SeqAccess, Visitor},
};

use super::bounded;
use crate::server::error::ApiError;

/// Most parts of one message's content.
const PARTS_MAX: usize = 4096;

/// One message as sent.
#[derive(Debug, Deserialize)]
pub(super) struct MessageIn {
    role: String,
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    tool_calls: Option<Vec<IgnoredAny>>,
}

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
                f.write_str("content as a string or an array of parts")
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
struct Part {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
}

impl MessageIn {
    /// Role and text of the message that stands at `index`.
    pub(super) fn into_text(self, index: usize) -> Result<(String, String), ApiError> {
        let at = |field: &str| format!("messages[{index}].{field}");
        if !matches!(self.role.as_str(), "system" | "developer" | "user" | "assistant") {
            let message = format!("`{}` is not one of system, developer, user, assistant", self.role);
            return Err(ApiError::field(at("role"), message));
        }
        if self.tool_calls.is_some_and(|calls| !calls.is_empty()) {
            return Err(ApiError::field(at("tool_calls"), "tools are not supported by this server"));
        }
        let text = match self.content {
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => {
                join(parts).map_err(|error| ApiError::field(at("content"), error))?
            }
            None if self.role == "assistant" => String::new(),
            None => return Err(ApiError::field(at("content"), "is missing")),
        };
        // Templates know the older word only.
        let role = if self.role == "developer" { "system".to_owned() } else { self.role };
        Ok((role, text))
    }
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
