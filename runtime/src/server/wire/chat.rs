//! `/v1/chat/completions`.

use serde::Serialize;
use serde_json::value::RawValue;

use super::{Common, Fields, StopReasonOut, Usage, bounded::Bounded, content, scalar::must_be};
use crate::{
    engine::{MESSAGES_MAX, Message, TEMPLATE_KWARGS_BYTES_MAX},
    server::error::ApiError,
};

/// A chat request.
pub(crate) struct ChatRequest {
    pub(crate) common: Common,
    /// The name that the request has for the most tokens to generate.
    pub(crate) limit_name: &'static str,
    pub(crate) messages: Vec<Message>,
    pub(crate) add_generation_prompt: bool,
    pub(crate) template_kwargs: serde_json::Map<String, serde_json::Value>,
}

impl ChatRequest {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let fields = Fields::parse(body)?;
        let mut common = Common::from_fields(&fields)?;
        if fields.flag("echo", false)? {
            return Err(ApiError::field("echo", "is not supported in chats"));
        }
        let (limit_name, limit) = match fields.scalar("max_completion_tokens")? {
            Some(limit) => ("max_completion_tokens", Some(limit)),
            None => ("max_tokens", fields.scalar("max_tokens")?),
        };
        common.options.max_tokens = limit;
        common.options.logprobs = logprobs(&fields)?;
        let messages: Bounded<&RawValue, MESSAGES_MAX> =
            fields.get("messages")?.ok_or_else(|| ApiError::field("messages", "is missing"))?;
        let messages = messages
            .into_iter()
            .enumerate()
            .map(|(index, raw)| content::message(Fields::inside(raw, format!("messages[{index}]"))?))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            common,
            limit_name,
            messages,
            add_generation_prompt: fields.flag("add_generation_prompt", true)?,
            template_kwargs: template_kwargs(&fields)?,
        })
    }
}

fn template_kwargs(fields: &Fields<'_>) -> Result<serde_json::Map<String, serde_json::Value>, ApiError> {
    const NAME: &str = "chat_template_kwargs";
    // The engine's bound, before there is a tree of values, which takes many times as much memory.
    let bytes = fields.raw(NAME).map_or(0, |raw| raw.get().len());
    if bytes > TEMPLATE_KWARGS_BYTES_MAX {
        let message = format!("must have at most {TEMPLATE_KWARGS_BYTES_MAX} bytes, got {bytes}");
        return Err(ApiError::field(NAME, message));
    }
    match fields.raw(NAME) {
        Some(raw) if !raw.get().starts_with('{') => {
            Err(ApiError::field(NAME, must_be("an object", raw.get())))
        }
        _ => Ok(fields.get(NAME)?.unwrap_or_default()),
    }
}

/// How many alternatives are too many is for the engine's validator to say.
fn logprobs(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let wanted = fields.flag("logprobs", false)?;
    let top: Option<u32> = fields.scalar("top_logprobs")?;
    match (wanted, top) {
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::field("top_logprobs", "needs logprobs: true")),
        (true, top) => Ok(Some(top.unwrap_or(0))),
    }
}

/// A whole answer.
#[derive(Debug, Serialize)]
pub(crate) struct ChatAnswer<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<&'a [u32]>,
}

/// One choice of a whole answer.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: ChatMessageOut,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: &'static str,
    pub(crate) stop_reason: Option<StopReasonOut>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
}

/// The assistant's message.
#[derive(Debug, Serialize)]
pub(crate) struct ChatMessageOut {
    pub(crate) role: &'static str,
    pub(crate) content: String,
}

/// Log-probabilities of a choice or a chunk.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<TokenEntry>,
}

/// One token's log-probabilities.
#[derive(Debug, Serialize)]
pub(crate) struct TokenEntry {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) top_logprobs: Vec<TopEntry>,
}

/// One alternative.
#[derive(Debug, Serialize)]
pub(crate) struct TopEntry {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}

/// One line of a stream.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChunk<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<ChatChunkChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
}

/// The choice of a chunk.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: ChatDelta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stop_reason: Option<StopReasonOut>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
}

/// What a chunk adds.
#[derive(Debug, Serialize)]
pub(crate) struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
}
