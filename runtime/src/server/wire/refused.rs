//! Fields that would change the answer and are not carried out: refused by name unless they are neutral.
//!
//! Unknown fields pass, as clients send many; but answering 200 while ignoring a grammar or a tool would be a
//! silent lie.

use serde_json::Value;

use super::{Fields, scalar::must_be};
use crate::server::error::ApiError;

/// Values longer than this are not neutral, and are not worth parsing to find out.
const NEUTRAL_BYTES_MAX: usize = 256;

/// Fields for which only an absent, null, false or empty value is neutral.
const REFUSED: &[&str] = &[
    "tools",
    "functions",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "guided_structural_tag",
    "bad_words",
    "allowed_token_ids",
    "use_beam_search",
    "suffix",
    "prompt_logprobs",
    "prompt_embeds",
    "truncate_prompt_tokens",
    "logits_processors",
    "audio",
    "chat_template",
    "documents",
    "continue_final_message",
];

/// Name of a field, its neutral value for the message, and whether a value is it.
type Neutral = (&'static str, &'static str, fn(&Value) -> bool);

/// Fields with a neutral value of their own.
const REFUSED_UNLESS: &[Neutral] = &[
    ("response_format", "{\"type\": \"text\"}", |v| v["type"] == "text"),
    ("tool_choice", "\"none\" or \"auto\"", |v| v == "none" || v == "auto"),
    ("function_call", "\"none\" or \"auto\"", |v| v == "none" || v == "auto"),
    ("modalities", "[\"text\"]", |v| *v == serde_json::json!(["text"])),
];

/// Refuses the first field that is not neutral.
pub(super) fn check(fields: &Fields<'_>) -> Result<(), ApiError> {
    for name in REFUSED {
        if !neutral(fields, name, |_| false)? {
            return Err(ApiError::field(*name, "is not supported by this server; leave it out"));
        }
    }
    for (name, allowed, own) in REFUSED_UNLESS {
        if !neutral(fields, name, own)? {
            let got = fields.raw(name).map_or("null", |raw| raw.get());
            return Err(ApiError::field(*name, must_be(&format!("{allowed}, or left out"), got)));
        }
    }
    Ok(())
}

fn neutral(fields: &Fields<'_>, name: &str, own: impl Fn(&Value) -> bool) -> Result<bool, ApiError> {
    let Some(raw) = fields.raw(name) else { return Ok(true) };
    if raw.get().len() > NEUTRAL_BYTES_MAX {
        return Ok(false);
    }
    let value: Value = fields.get(name)?.unwrap_or(Value::Null);
    Ok(match &value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) if text.is_empty() => true,
        Value::Array(items) if items.is_empty() => true,
        // The empty schema still asks for JSON.
        Value::Object(members) if members.is_empty() => name != "guided_json",
        other => own(other),
    })
}
