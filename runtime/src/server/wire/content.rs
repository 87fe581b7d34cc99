//! Messages of a chat: content is a string or an array of parts.

use serde::Deserialize;

use crate::server::error::ApiError;

/// One message as sent.
#[derive(Debug, Deserialize)]
pub(super) struct MessageIn {
    role: String,
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    tool_calls: Option<Vec<serde_json::Value>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected content as a string or an array of parts")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
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
