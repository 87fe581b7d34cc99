//! `/v1/completions`.

use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer, de::Error as _, ser::SerializeMap};
use serde_json::value::RawValue;

use super::{
    Common, Fields, StopReasonOut, Usage,
    bounded::Bounded,
    scalar::{TokenId, must_be, reason},
};
use crate::{
    engine::{PROMPTS_MAX, Prompt},
    server::error::ApiError,
};

/// vLLM's and OpenAI's default of this endpoint.
const MAX_TOKENS_DEFAULT: usize = 16;

/// A completion request.
pub(crate) struct CompletionRequest {
    pub(crate) common: Common,
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) echo: bool,
}

impl CompletionRequest {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let fields = Fields::parse(body)?;
        let mut common = Common::from_fields(&fields)?;
        let echo = fields.flag("echo", false)?;
        common.options.max_tokens = Some(fields.scalar("max_tokens")?.unwrap_or(MAX_TOKENS_DEFAULT));
        common.options.logprobs = fields.scalar("logprobs")?;
        if echo {
            // Without `logprobs` nobody reads the numbers, but `max_tokens: 0` needs something to run.
            let nothing_to_generate = common.options.max_tokens == Some(0);
            common.options.prompt_logprobs = common.options.logprobs.or(nothing_to_generate.then_some(0));
        }
        let prompt: PromptField =
            fields.get("prompt")?.ok_or_else(|| ApiError::field("prompt", "is missing"))?;
        Ok(Self { common, prompts: prompt.0, echo })
    }
}

/// A string, an array of strings, an array of token ids, or an array of arrays of token ids.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PromptField(pub(crate) Vec<Prompt>);

impl<'de> Deserialize<'de> for PromptField {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The first characters tell which of the four it is; guessing by trial would build value trees.
        let raw: Box<RawValue> = Deserialize::deserialize(deserializer)?;
        let text = raw.get();
        let inner = text.strip_prefix('[').map(str::trim_start);
        let parsed = match inner {
            None if text.starts_with('"') => from_str::<String, _>(text).map(|one| vec![Prompt::Text(one)]),
            None => {
                Err(D::Error::custom(must_be("a string, strings, token ids, or arrays of token ids", text)))
            }
            Some(rest) if rest.starts_with('"') => {
                from_str::<Many<String>, _>(text).map(|all| prompts(all, Prompt::Text))
            }
            Some(rest) if rest.starts_with('[') => {
                from_str::<Many<Vec<TokenId>>, _>(text).map(|all| prompts(all, tokens))
            }
            Some(rest) if rest.starts_with(']') => Ok(Vec::new()),
            Some(_) => from_str::<Vec<TokenId>, _>(text).map(|one| vec![tokens(one)]),
        };
        parsed.map(Self)
    }
}

type Many<T> = Bounded<T, PROMPTS_MAX>;

fn prompts<T>(all: Many<T>, kind: impl Fn(T) -> Prompt) -> Vec<Prompt> {
    all.into_iter().map(kind).collect()
}

fn tokens(ids: Vec<TokenId>) -> Prompt {
    Prompt::Tokens(ids.into_iter().map(|id| id.0).collect())
}

fn from_str<T: for<'a> Deserialize<'a>, E: serde::de::Error>(text: &str) -> Result<T, E> {
    serde_json::from_str(text).map_err(|error| E::custom(reason(&error)))
}

/// A whole answer, or one line of a stream.
#[derive(Debug, Serialize)]
pub(crate) struct CompletionAnswer<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
}

/// One choice.
#[derive(Debug, Serialize)]
pub(crate) struct CompletionChoice {
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    pub(crate) stop_reason: Option<StopReasonOut>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shared_ids")]
    pub(crate) prompt_token_ids: Option<Arc<[u32]>>,
}

fn shared_ids<S: Serializer>(ids: &Option<Arc<[u32]>>, serializer: S) -> Result<S::Ok, S::Error> {
    ids.as_deref().serialize(serializer)
}

/// Log-probabilities, in four arrays of one length. A prompt's first token has none.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct CompletionLogprobs {
    pub(crate) tokens: Vec<String>,
    pub(crate) token_logprobs: Vec<Option<f32>>,
    pub(crate) top_logprobs: Vec<Option<TopLogprobs>>,
    /// Where each token begins in the choice's text, in characters.
    pub(crate) text_offset: Vec<usize>,
}

/// A map from token texts to log-probabilities that keeps its order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TopLogprobs(Vec<(String, f32)>);

impl TopLogprobs {
    /// Adds an entry. Different tokens may have one text (broken characters do); then the likelier one stays.
    pub(crate) fn insert(&mut self, text: String, logprob: f32) {
        match self.0.iter_mut().find(|(known, _)| *known == text) {
            Some((_, known)) => *known = known.max(logprob),
            None => self.0.push((text, logprob)),
        }
    }
}

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (text, logprob) in &self.0 {
            map.serialize_entry(text, logprob)?;
        }
        map.end()
    }
}
