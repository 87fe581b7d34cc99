//! The one validator: every entry point (embedding API, server, command line) passes through [`validate`].
//!
//! It never clamps what the caller got wrong, with vLLM's two exceptions: tiny temperatures are raised to 0.01, and
//! `top_k` beyond the vocabulary keeps everything.

#[cfg(test)]
mod tests;

use consort_actors::CacheSalt;
use consort_kernels::sampling::{Adjustments, SamplingParams};
use consort_parallel::config::GenerationDefaults;
use serde_json::{Map, Value};

use super::GenerateOptions;
use crate::{error::RequestError, text::StopStrings};

/// Most alternatives reported per token. vLLM's `max_logprobs`; each costs a map entry in every answer.
pub const LOGPROBS_MAX: u32 = 20;
/// Most prompts of one request: each becomes a request of the scheduler, whose queue holds about as many.
pub const PROMPTS_MAX: usize = 1024;
/// Most messages of a chat: bounds the template's work.
pub const MESSAGES_MAX: usize = 4096;
/// Longest variables of a chat template in bytes of JSON: switches and dates, never data.
pub const TEMPLATE_KWARGS_BYTES_MAX: usize = 64 << 10;
/// Most stop strings of a request: evaluation harnesses send dozens, and each is matched at every token.
pub const STOP_STRINGS_MAX: usize = 256;
/// Longest stop string in bytes: this much text may be held back while streaming.
pub const STOP_STRING_BYTES_MAX: usize = 1024;
/// Most stop tokens of a request.
pub const STOP_TOKENS_MAX: usize = 256;
/// Most biased tokens of a request: three times what OpenAI takes. Each is an addition per token drawn.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Most choices of one prompt, as OpenAI's.
pub const CHOICES_MAX: usize = 128;
/// Longest salt of a request in bytes: many times a secret's. Only its hash is kept.
pub const CACHE_SALT_BYTES_MAX: usize = 1024;
/// Least repetition penalty. Beyond these two a logit says nothing any more, and its arithmetic overflows at last.
pub(super) const REPETITION_PENALTY_MIN: f32 = 0.01;
/// Greatest repetition penalty.
pub(super) const REPETITION_PENALTY_MAX: f32 = 100.0;
/// Greatest size of a bias, as OpenAI's.
const BIAS_MAX: f32 = 100.0;
/// Temperatures between 0 and this are raised to it: below, float32 logits overflow when divided.
const TEMPERATURE_FLOOR: f32 = 0.01;
/// Longest name of a request in bytes; it is repeated in every log line.
const REQUEST_ID_BYTES_MAX: usize = 256;

/// What a validator must know of the model.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) vocab_size: usize,
    pub(crate) max_model_len: usize,
    pub(crate) max_waiting_requests: usize,
    pub(crate) eos_token_ids: Vec<u32>,
    pub(crate) defaults: GenerationDefaults,
}

/// Options that passed, with every default filled in. All prompts and choices of a request share them.
#[derive(Debug)]
pub(crate) struct Validated {
    /// Its seed is for [`Validated::seed`] to say, prompt by prompt.
    pub(crate) sampling: SamplingParams,
    /// The caller's seed; absent: each prompt draws one.
    pub(crate) seed: Option<u64>,
    /// Absent: whatever the context holds after the prompt.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) min_tokens: usize,
    pub(crate) stop: StopStrings,
    /// End-of-sequence tokens (unless ignored) and the caller's.
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) include_stop: bool,
    pub(crate) skip_special_tokens: bool,
    pub(crate) logprobs: Option<u32>,
    pub(crate) prompt_logprobs: Option<u32>,
    pub(crate) priority: i32,
    pub(crate) cache_salt: Option<CacheSalt>,
    pub(crate) awaits_tokens: bool,
}

/// Checks `options` and fills in the checkpoint's defaults.
pub(crate) fn validate(options: &GenerateOptions, limits: &Limits) -> Result<Validated, RequestError> {
    let defaults = &limits.defaults;
    let temperature = options.temperature.or(defaults.temperature).unwrap_or(1.0);
    in_range("temperature", temperature, 0.0, 2.0)?;
    let top_p = options.top_p.or(defaults.top_p).unwrap_or(1.0);
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(invalid("top_p", format!("must be in (0, 1], got {top_p}")));
    }
    let min_p = options.min_p.or(defaults.min_p).unwrap_or(0.0);
    in_range("min_p", min_p, 0.0, 1.0)?;
    let top_k = top_k(options.top_k.or(defaults.top_k.map(i64::from)).unwrap_or(0), limits.vocab_size)?;
    let sampling = SamplingParams {
        temperature: if temperature > 0.0 { temperature.max(TEMPERATURE_FLOOR) } else { 0.0 },
        top_k,
        top_p,
        min_p,
        seed: 0,
        adjustments: adjustments(options, limits)?,
    };
    max_tokens(options, limits)?;
    stop_strings(&options.stop)?;
    logprobs("logprobs", options.logprobs)?;
    logprobs("prompt_logprobs", options.prompt_logprobs)?;
    if options.request_id.as_ref().is_some_and(|id| id.is_empty() || id.len() > REQUEST_ID_BYTES_MAX) {
        return Err(invalid("request_id", format!("must have 1 to {REQUEST_ID_BYTES_MAX} bytes")));
    }
    Ok(Validated {
        sampling,
        // The bits are the seed; -1 is the wire's word for "none".
        seed: options.seed.filter(|seed| *seed != -1).map(i64::cast_unsigned),
        max_tokens: options.max_tokens,
        min_tokens: options.min_tokens,
        stop: StopStrings::new(options.stop.iter().map(String::as_str))?,
        stop_token_ids: stop_tokens(options, limits)?,
        include_stop: options.include_stop_str_in_output,
        skip_special_tokens: options.skip_special_tokens,
        logprobs: options.logprobs,
        prompt_logprobs: options.prompt_logprobs,
        priority: options.priority,
        cache_salt: cache_salt(options.cache_salt.as_deref())?,
        awaits_tokens: options.awaits_tokens,
    })
}

fn invalid(field: &'static str, message: impl Into<String>) -> RequestError {
    RequestError::Invalid { field, message: message.into() }
}

/// NaN is in no range.
fn in_range(field: &'static str, value: f32, low: f32, high: f32) -> Result<(), RequestError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(invalid(field, format!("must be in [{low}, {high}], got {value}")))
}

fn outside(token: u32, vocab_size: usize) -> String {
    format!("token id {token} is outside the vocabulary of {vocab_size}")
}

fn top_k(value: i64, vocab_size: usize) -> Result<Option<u32>, RequestError> {
    match value {
        -1 | 0 => Ok(None),
        k if k < 0 => Err(invalid("top_k", format!("must be at least -1 (0 and -1 keep all), got {k}"))),
        // Values beyond u32 are beyond any vocabulary too.
        k => Ok(u32::try_from(k).ok().filter(|k| (*k as usize) < vocab_size)),
    }
}

fn max_tokens(options: &GenerateOptions, limits: &Limits) -> Result<(), RequestError> {
    let max_model_len = limits.max_model_len;
    match options.max_tokens {
        // Scoring a prompt generates nothing.
        Some(0) if options.prompt_logprobs.is_some() => Ok(()),
        Some(n) if !(1..=max_model_len).contains(&n) => Err(invalid(
            "max_tokens",
            format!("must be in [1, {max_model_len}] (this model's maximum context length), got {n}"),
        )),
        _ => Ok(()),
    }
}

/// What changes the logits. The minimum also masks end-of-sequence tokens that are ignored as ends, as vLLM's does.
fn adjustments(options: &GenerateOptions, limits: &Limits) -> Result<Adjustments, RequestError> {
    let penalty = |field, value: Option<f32>| {
        let value = value.unwrap_or(0.0);
        in_range(field, value, -2.0, 2.0).map(|()| value)
    };
    let repetition = options.repetition_penalty.or(limits.defaults.repetition_penalty).unwrap_or(1.0);
    in_range("repetition_penalty", repetition, REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX)?;
    let min_tokens = min_tokens(options, limits)?;
    let mut masked_until_min = Vec::new();
    if min_tokens > 0 {
        masked_until_min = stop_tokens(options, limits)?;
        masked_until_min.extend_from_slice(&limits.eos_token_ids);
        masked_until_min.sort_unstable();
        masked_until_min.dedup();
        if masked_until_min.len() >= limits.vocab_size {
            return Err(invalid("min_tokens", "leaves no token to generate: every token is a stop token"));
        }
    }
    Ok(Adjustments {
        min_tokens,
        masked_until_min,
        logit_bias: logit_bias(options, limits)?,
        repetition_penalty: repetition,
        frequency_penalty: penalty("frequency_penalty", options.frequency_penalty)?,
        presence_penalty: penalty("presence_penalty", options.presence_penalty)?,
    })
}

fn min_tokens(options: &GenerateOptions, limits: &Limits) -> Result<u32, RequestError> {
    let (min, max_model_len) = (options.min_tokens, limits.max_model_len);
    match options.max_tokens {
        Some(max) if min > max => {
            Err(invalid("min_tokens", format!("must be at most max_tokens = {max}, got {min}")))
        }
        _ if min > max_model_len => Err(invalid(
            "min_tokens",
            format!("must be in [0, {max_model_len}] (this model's maximum context length), got {min}"),
        )),
        // A context beyond u32 has no such minimum in practice.
        _ => Ok(u32::try_from(min).unwrap_or(u32::MAX)),
    }
}

fn logit_bias(options: &GenerateOptions, limits: &Limits) -> Result<Vec<(u32, f32)>, RequestError> {
    const FIELD: &str = "logit_bias";
    let (count, vocab_size) = (options.logit_bias.len(), limits.vocab_size);
    if count > LOGIT_BIAS_MAX {
        return Err(invalid(FIELD, format!("must have at most {LOGIT_BIAS_MAX} entries, got {count}")));
    }
    for (&token, &bias) in &options.logit_bias {
        if token as usize >= vocab_size {
            return Err(invalid(FIELD, outside(token, vocab_size)));
        }
        if !(-BIAS_MAX..=BIAS_MAX).contains(&bias) {
            let range = format!("must be in [-{BIAS_MAX}, {BIAS_MAX}], got {bias}");
            return Err(invalid(FIELD, format!("the bias of token {token} {range}")));
        }
    }
    Ok(options.logit_bias.iter().map(|(&token, &bias)| (token, bias)).collect())
}

/// Checks how many prompts a request may have.
pub(crate) fn prompts(count: usize) -> Result<(), RequestError> {
    entries("prompt", count, PROMPTS_MAX)
}

/// Checks how many messages a chat may have.
pub(crate) fn messages(count: usize) -> Result<(), RequestError> {
    entries("messages", count, MESSAGES_MAX)
}

fn entries(field: &'static str, count: usize, max: usize) -> Result<(), RequestError> {
    if (1..=max).contains(&count) {
        return Ok(());
    }
    Err(invalid(field, format!("must have 1 to {max} entries, got {count}")))
}

/// Checks the size of what a request gives the chat template besides messages.
pub(crate) fn template_kwargs(kwargs: &Map<String, Value>) -> Result<(), RequestError> {
    if kwargs.is_empty() {
        return Ok(());
    }
    // Written no further than the limit: the values may be far larger.
    let mut room = vec![0; TEMPLATE_KWARGS_BYTES_MAX];
    serde_json::to_writer(room.as_mut_slice(), kwargs).map_err(|_| {
        let message = format!("must have at most {TEMPLATE_KWARGS_BYTES_MAX} bytes of JSON");
        invalid("chat_template_kwargs", message)
    })
}

/// Checks how many choices a request of `prompts` prompts may ask for: more than can ever wait would be refused as
/// overload, and sent again, for ever.
pub(crate) fn choices(n: usize, prompts: usize, limits: &Limits) -> Result<(), RequestError> {
    if !(1..=CHOICES_MAX).contains(&n) {
        return Err(invalid("n", format!("must be in [1, {CHOICES_MAX}], got {n}")));
    }
    let limit = limits.max_waiting_requests;
    if prompts.saturating_mul(n) <= limit {
        return Ok(());
    }
    Err(match n {
        1 => invalid(
            "prompt",
            format!("must have at most {limit} entries (max_waiting_requests), got {prompts}"),
        ),
        _ => {
            let most = format!("must make at most {limit} choices (max_waiting_requests)");
            invalid("n", format!("{most}, got {n} for each of {prompts} prompts"))
        }
    })
}

fn stop_strings(stop: &[String]) -> Result<(), RequestError> {
    if stop.len() > STOP_STRINGS_MAX {
        return Err(invalid(
            "stop",
            format!("must have at most {STOP_STRINGS_MAX} entries, got {}", stop.len()),
        ));
    }
    for text in stop {
        if text.is_empty() {
            return Err(invalid("stop", "must not have an empty string, which would stop everything"));
        }
        if text.len() > STOP_STRING_BYTES_MAX {
            return Err(invalid(
                "stop",
                format!("must have strings of at most {STOP_STRING_BYTES_MAX} bytes, got {}", text.len()),
            ));
        }
    }
    Ok(())
}

fn stop_tokens(options: &GenerateOptions, limits: &Limits) -> Result<Vec<u32>, RequestError> {
    if options.stop_token_ids.len() > STOP_TOKENS_MAX {
        let got = options.stop_token_ids.len();
        return Err(invalid(
            "stop_token_ids",
            format!("must have at most {STOP_TOKENS_MAX} entries, got {got}"),
        ));
    }
    if let Some(id) = options.stop_token_ids.iter().find(|id| **id as usize >= limits.vocab_size) {
        return Err(invalid("stop_token_ids", outside(*id, limits.vocab_size)));
    }
    let mut ids = options.stop_token_ids.clone();
    if !options.ignore_eos {
        ids.extend_from_slice(&limits.eos_token_ids);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// An empty salt is refused: it would be one that everybody who forgets it shares.
fn cache_salt(given: Option<&str>) -> Result<Option<CacheSalt>, RequestError> {
    let Some(salt) = given else { return Ok(None) };
    if (1..=CACHE_SALT_BYTES_MAX).contains(&salt.len()) {
        return Ok(Some(CacheSalt::new(salt.as_bytes())));
    }
    let message = format!("must have 1 to {CACHE_SALT_BYTES_MAX} bytes, got {}", salt.len());
    Err(invalid("cache_salt", message))
}

fn logprobs(field: &'static str, value: Option<u32>) -> Result<(), RequestError> {
    match value {
        Some(n) if n > LOGPROBS_MAX => {
            Err(invalid(field, format!("must be in [0, {LOGPROBS_MAX}], got {n}")))
        }
        _ => Ok(()),
    }
}
