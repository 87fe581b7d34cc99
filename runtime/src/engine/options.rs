//! What a caller may ask of a generation: raw, as given. [`super::validate`] turns it into what runs.

use std::collections::BTreeMap;

/// What to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text, tokenised by the engine.
    Text(String),
    /// Token ids, taken as they are: nothing is added in front.
    Tokens(Vec<u32>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self::Tokens(tokens)
    }
}

impl From<&[u32]> for Prompt {
    fn from(tokens: &[u32]) -> Self {
        Self::Tokens(tokens.to_vec())
    }
}

/// How to generate. Everything absent takes the checkpoint's own default (`generation_config.json`), then the
/// neutral value.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Most tokens to generate; absent: whatever the context still holds.
    pub max_tokens: Option<usize>,
    /// `0` is greedy; at most 2.
    pub temperature: Option<f32>,
    /// Keep the best tokens whose probabilities reach this; in `(0, 1]`.
    pub top_p: Option<f32>,
    /// Keep only the k best tokens; `0` and `-1` keep all.
    pub top_k: Option<i64>,
    /// Drop tokens less likely than this times the best one; in `[0, 1]`.
    pub min_p: Option<f32>,
    /// Divides positive logits of tokens in prompt or output, and multiplies negative ones; in `[0.01, 100]`, neutral
    /// at 1.
    pub repetition_penalty: Option<f32>,
    /// Taken off a token's logit for each time it was generated; in `[-2, 2]`, neutral at 0.
    pub frequency_penalty: Option<f32>,
    /// Taken off the logit of every token that was generated; in `[-2, 2]`, neutral at 0.
    pub presence_penalty: Option<f32>,
    /// Added to the logits of these tokens, each in `[-100, 100]`; at most 1024 entries.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Tokens to generate before an end-of-sequence token, a stop token or a stop string can end the generation; at
    /// most `max_tokens`.
    pub min_tokens: usize,
    /// Fixes every draw; of several choices, choice `i` draws with this plus `i`. `-1` or absent: drawn once, when the
    /// request is admitted.
    pub seed: Option<i64>,
    /// Strings that end the generation and are left out of it.
    pub stop: Vec<String>,
    /// Further tokens that end the generation.
    pub stop_token_ids: Vec<u32>,
    /// Go on past the model's end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Keep the string or token that ended the generation in its text.
    pub include_stop_str_in_output: bool,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
    /// Put the model's beginning-of-sequence token before a text prompt; absent: yes for prompts, no for chats,
    /// whose template writes it. Token prompts never get one.
    pub add_special_tokens: Option<bool>,
    /// Report log-probabilities of generated tokens: the drawn one and this many best, at most 20.
    pub logprobs: Option<u32>,
    /// Report log-probabilities of prompt tokens likewise. Of several choices of a prompt the first reports them: they
    /// are the same for all. With it, `max_tokens` may be 0.
    pub prompt_logprobs: Option<u32>,
    /// Lower comes first; 0 unless somebody says otherwise. It orders what waits, and decides who gives way when memory
    /// runs short; waiting makes up for it, by `scheduler.priority_aging_ms` for each point.
    pub priority: i32,
    /// Only requests with the same salt share cached prefixes; not empty, at most
    /// [`CACHE_SALT_BYTES_MAX`](super::CACHE_SALT_BYTES_MAX) bytes.
    pub cache_salt: Option<String>,
    /// Have each step know the tokens before it, as a grammar must: none is planned ahead for this request.
    #[doc(hidden)]
    pub awaits_tokens: bool,
    /// Name of the request in logs and in [`crate::EngineStatus`]; absent: made up.
    pub request_id: Option<String>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: None,
            temperature: None,
            top_p: None,
            top_k: None,
            min_p: None,
            repetition_penalty: None,
            frequency_penalty: None,
            presence_penalty: None,
            logit_bias: BTreeMap::new(),
            min_tokens: 0,
            seed: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            include_stop_str_in_output: false,
            skip_special_tokens: true,
            add_special_tokens: None,
            logprobs: None,
            prompt_logprobs: None,
            priority: 0,
            cache_salt: None,
            awaits_tokens: false,
            request_id: None,
        }
    }
}
