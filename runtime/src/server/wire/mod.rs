//! The OpenAI shapes, as this server reads and writes them.
//!
//! A body is kept as raw fields ([`Fields`]) and each field is parsed by itself: an error names its field, unknown
//! fields cost nothing, and a long token array never exists as a tree of values.

mod bias;
mod bounded;
mod chat;
mod completions;
mod content;
mod refused;
mod scalar;
#[cfg(test)]
mod tests;

use std::{collections::HashMap, fmt};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error as _, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

use self::{
    bias::LogitBias,
    bounded::Bounded,
    scalar::{Scalar, TokenId, must_be, reason},
};
pub(crate) use self::{
    chat::{
        ChatAnswer, ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessageOut,
        ChatRequest, TokenEntry, TopEntry,
    },
    completions::{CompletionAnswer, CompletionChoice, CompletionLogprobs, CompletionRequest, TopLogprobs},
};
use super::error::ApiError;
use crate::engine::{self, GenerateOptions, STOP_STRINGS_MAX, STOP_TOKENS_MAX, StopReason};

/// Most fields of a request: several times what any client sends; each costs a table entry before it is looked at.
const FIELDS_MAX: usize = 256;

/// The fields of a JSON object, unparsed. Of repeated names the last one counts.
pub(crate) struct Fields<'a> {
    by_name: HashMap<String, &'a RawValue>,
    /// Where the object stands in the body, as in `messages[3]`; empty for the body itself.
    place: String,
}

impl<'a> Fields<'a> {
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body)
            .map_err(|error| ApiError::bad_request(format!("the body is not UTF-8: {error}")))?;
        let trimmed = text.trim_ascii();
        if trimmed.is_empty() {
            return Err(ApiError::bad_request("the body is empty; send a JSON object"));
        }
        let Named(by_name) = serde_json::from_str(text).map_err(|error| {
            let what = if !error.is_data() {
                format!("is not valid JSON: {error}")
            } else if trimmed.starts_with('{') {
                reason(&error)
            } else {
                must_be("a JSON object", trimmed)
            };
            ApiError::bad_request(format!("the body {what}"))
        })?;
        Ok(Self { by_name, place: String::new() })
    }

    /// The fields of an object inside the body.
    fn inside(raw: &'a RawValue, place: String) -> Result<Self, ApiError> {
        match serde_json::from_str(raw.get()) {
            Ok(Named(by_name)) => Ok(Self { by_name, place }),
            Err(error) if raw.get().starts_with('{') => Err(ApiError::field(place, reason(&error))),
            Err(_) => Err(ApiError::field(place, must_be("an object", raw.get()))),
        }
    }

    pub(crate) fn raw(&self, name: &str) -> Option<&'a RawValue> {
        self.by_name.get(name).copied().filter(|raw| raw.get() != "null")
    }

    /// The field's value; `None` where it is absent or null.
    pub(crate) fn get<T: Deserialize<'a>>(&self, name: &str) -> Result<Option<T>, ApiError> {
        let read = |raw: &'a RawValue| serde_json::from_str(raw.get());
        self.raw(name).map(read).transpose().map_err(|error| self.wrong(name, reason(&error)))
    }

    /// The single value of a field; `None` where it is absent or null.
    pub(crate) fn scalar<T: Scalar>(&self, name: &str) -> Result<Option<T>, ApiError> {
        self.raw(name).map(|raw| T::read(raw.get())).transpose().map_err(|what| self.wrong(name, what))
    }

    pub(crate) fn flag(&self, name: &str, default: bool) -> Result<bool, ApiError> {
        Ok(self.scalar(name)?.unwrap_or(default))
    }

    /// The error of a field of this object.
    fn wrong(&self, name: &str, what: impl fmt::Display) -> ApiError {
        let separator = if self.place.is_empty() { "" } else { "." };
        ApiError::field(format!("{}{separator}{name}", self.place), what)
    }
}

/// Fields by name, none of them parsed.
struct Named<'a>(HashMap<String, &'a RawValue>);

impl<'de: 'a, 'a> Deserialize<'de> for Named<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;

        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = HashMap<String, &'de RawValue>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = HashMap::new();
                while let Some((name, value)) = map.next_entry()? {
                    fields.insert(name, value);
                    if fields.len() > FIELDS_MAX {
                        return Err(A::Error::custom(format_args!("must have at most {FIELDS_MAX} fields")));
                    }
                }
                Ok(fields)
            }
        }

        deserializer.deserialize_map(FieldsVisitor).map(Self)
    }
}

/// What both endpoints take in the same words.
pub(crate) struct Common {
    pub(crate) model: Option<String>,
    pub(crate) stream: bool,
    pub(crate) stream_options: StreamOptions,
    pub(crate) return_token_ids: bool,
    /// Choices of each prompt.
    pub(crate) n: usize,
    /// All but `max_tokens`, `logprobs` and `request_id`, which the endpoints spell differently.
    pub(crate) options: GenerateOptions,
}

impl Common {
    pub(crate) fn from_fields(fields: &Fields<'_>) -> Result<Self, ApiError> {
        refused::check(fields)?;
        let stream = fields.flag("stream", false)?;
        let stream_options: Option<StreamOptions> = fields.get("stream_options")?;
        if stream_options.is_some() && !stream {
            return Err(ApiError::field("stream_options", "needs stream: true"));
        }
        let options = GenerateOptions {
            temperature: fields.scalar("temperature")?,
            top_p: fields.scalar("top_p")?,
            top_k: fields.scalar("top_k")?,
            min_p: fields.scalar("min_p")?,
            repetition_penalty: fields.scalar("repetition_penalty")?,
            frequency_penalty: fields.scalar("frequency_penalty")?,
            presence_penalty: fields.scalar("presence_penalty")?,
            logit_bias: fields.get::<LogitBias>("logit_bias")?.unwrap_or_default().0,
            min_tokens: fields.scalar("min_tokens")?.unwrap_or(0),
            seed: fields.scalar("seed")?,
            stop: fields.get::<OneOrMany>("stop")?.unwrap_or_default().0,
            stop_token_ids: fields
                .get::<Bounded<TokenId, STOP_TOKENS_MAX>>("stop_token_ids")?
                .unwrap_or_default()
                .into_iter()
                .map(|id| id.0)
                .collect(),
            ignore_eos: fields.flag("ignore_eos", false)?,
            include_stop_str_in_output: fields.flag("include_stop_str_in_output", false)?,
            skip_special_tokens: fields.flag("skip_special_tokens", true)?,
            add_special_tokens: fields.scalar("add_special_tokens")?,
            priority: fields.scalar("priority")?.unwrap_or(0),
            cache_salt: fields.scalar("cache_salt")?,
            ..GenerateOptions::default()
        };
        Ok(Self {
            model: fields.scalar("model")?,
            stream,
            stream_options: stream_options.unwrap_or_default(),
            return_token_ids: fields.flag("return_token_ids", false)?,
            n: choices(fields)?,
            options,
        })
    }
}

/// `n`; the best of exactly as many is all of them.
fn choices(fields: &Fields<'_>) -> Result<usize, ApiError> {
    let n = fields.scalar("n")?.unwrap_or(1);
    match fields.scalar::<usize>("best_of")? {
        Some(best_of) if best_of != n => {
            Err(ApiError::field("best_of", format!("must be n = {n} or left out, got {best_of}")))
        }
        _ => Ok(n),
    }
}

/// `"a"` or `["a", "b"]`.
#[derive(Default)]
struct OneOrMany(Vec<String>);

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrManyVisitor;

        impl<'de> Visitor<'de> for OneOrManyVisitor {
            type Value = OneOrMany;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array of strings")
            }

            fn visit_str<E>(self, text: &str) -> Result<OneOrMany, E> {
                Ok(OneOrMany(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<OneOrMany, A::Error> {
                bounded::collect::<String, _>(seq, STOP_STRINGS_MAX).map(OneOrMany)
            }
        }

        deserializer.deserialize_any(OneOrManyVisitor)
    }
}

/// What a stream tells besides text.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(expecting = "an object")]
pub(crate) struct StreamOptions {
    /// A last chunk with the usage of the whole request.
    #[serde(default)]
    include_usage: Option<bool>,
    /// The usage so far in every chunk.
    #[serde(default)]
    continuous_usage_stats: Option<bool>,
}

impl StreamOptions {
    pub(crate) fn include_usage(self) -> bool {
        self.include_usage.unwrap_or(false)
    }

    /// Only together with `include_usage`, as in vLLM.
    pub(crate) fn continuous_usage(self) -> bool {
        self.include_usage() && self.continuous_usage_stats.unwrap_or(false)
    }
}

/// Tokens of a request, all its choices together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct PromptTokensDetails {
    /// Those that were not computed for this request; of several choices, what the first one found.
    pub(crate) cached_tokens: usize,
}

impl Usage {
    /// Of a single choice.
    pub(crate) fn one(part: engine::Usage) -> Self {
        Self::sum([part], 1)
    }

    /// Of all choices of a request. Each prompt has `n` in a row and is counted once.
    pub(crate) fn sum(parts: impl IntoIterator<Item = engine::Usage>, n: usize) -> Self {
        let mut all = Self::default();
        for (index, part) in parts.into_iter().enumerate() {
            all.completion_tokens += part.completion_tokens;
            if index.is_multiple_of(n) {
                all.prompt_tokens += part.prompt_tokens;
                all.prompt_tokens_details.cached_tokens += part.cached_tokens;
            }
        }
        all.total_tokens = all.prompt_tokens + all.completion_tokens;
        all
    }
}

/// `stop_reason` of a choice: the string, the token, or null.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum StopReasonOut {
    Text(String),
    Token(u32),
}

impl From<StopReason> for StopReasonOut {
    fn from(reason: StopReason) -> Self {
        match reason {
            StopReason::Text(text) => Self::Text(text),
            StopReason::Token(token) => Self::Token(token),
        }
    }
}

/// Log-probabilities as JSON can hold them: minus infinity becomes -9999.
pub(crate) fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// `GET /v1/models`.
#[derive(Debug, Serialize)]
pub(crate) struct ModelList<'a> {
    pub(crate) object: &'static str,
    pub(crate) data: Vec<ModelCard<'a>>,
}

/// One served model.
#[derive(Debug, Serialize)]
pub(crate) struct ModelCard<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) owned_by: &'static str,
    pub(crate) root: &'a str,
    pub(crate) max_model_len: usize,
}
