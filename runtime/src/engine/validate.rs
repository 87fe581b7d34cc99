//! The one validator: every entry point (embedding API, server, command line) passes through [`validate`].
//!
//! It never clamps what the caller got wrong, with vLLM's two exceptions: tiny temperatures are raised to 0.01, and
//! `top_k` beyond the vocabulary keeps everything.

#[cfg(test)]
mod tests;

use consort_kernels::sampling::SamplingParams;
use consort_parallel::config::GenerationDefaults;

use super::GenerateOptions;
use crate::error::RequestError;

/// Most alternatives reported per token. vLLM's `max_logprobs`; each costs a map entry in every answer.
pub const LOGPROBS_MAX: u32 = 20;
/// Most stop strings of a request: evaluation harnesses send dozens, and each is matched at every token.
pub const STOP_STRINGS_MAX: usize = 256;
/// Longest stop string in bytes: this much text may be held back while streaming.
pub const STOP_STRING_BYTES_MAX: usize = 1024;
/// Most stop tokens of a request.
pub const STOP_TOKENS_MAX: usize = 256;
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

/// Options that passed, with every default filled in.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Validated {
    pub(crate) sampling: SamplingParams,
    /// Absent: whatever the context holds after the prompt.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stop: Vec<String>,
    /// End-of-sequence tokens (unless ignored) and the caller's.
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) include_stop: bool,
    pub(crate) skip_special_tokens: bool,
    pub(crate) logprobs: Option<u32>,
    pub(crate) prompt_logprobs: Option<u32>,
}

/// Checks `options`, fills in the checkpoint's defaults, and takes `seed_drawn` where no seed is given.
pub(crate) fn validate(
    options: &GenerateOptions,
    limits: &Limits,
    seed_drawn: impl FnOnce() -> u64,
) -> Result<Validated, RequestError> {
    let defaults = &limits.defaults;
    let temperature = options.temperature.or(defaults.temperature).unwrap_or(1.0);
    in_range("temperature", temperature, 0.0, 2.0)?;
    let top_p = options.top_p.or(defaults.top_p).unwrap_or(1.0);
    if top_p == 0.0 {
        return Err(invalid("top_p", "must be in (0, 1], got 0"));
    }
    in_range("top_p", top_p, 0.0, 1.0)?;
    let min_p = options.min_p.or(defaults.min_p).unwrap_or(0.0);
    in_range("min_p", min_p, 0.0, 1.0)?;
    let top_k = top_k(options.top_k.or(defaults.top_k.map(i64::from)).unwrap_or(0), limits.vocab_size)?;
    let sampling = SamplingParams {
        temperature: if temperature > 0.0 { temperature.max(TEMPERATURE_FLOOR) } else { 0.0 },
        top_k,
        top_p,
        min_p,
        seed: match options.seed {
            // The bits are the seed; -1 is the wire's word for "none".
            Some(seed) if seed != -1 => seed.cast_unsigned(),
            _ => seed_drawn(),
        },
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
        max_tokens: options.max_tokens,
        stop: options.stop.clone(),
        stop_token_ids: stop_tokens(options, limits)?,
        include_stop: options.include_stop_str_in_output,
        skip_special_tokens: options.skip_special_tokens,
        logprobs: options.logprobs,
        prompt_logprobs: options.prompt_logprobs,
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

fn top_k(value: i64, vocab_size: usize) -> Result<Option<u32>, RequestError> {
    match value {
        -1 | 0 => Ok(None),
        k if k < 0 => Err(invalid("top_k", format!("must be -1 or 0 (keep all) or positive, got {k}"))),
        // Values beyond u32 are beyond any vocabulary too.
        k => Ok(u32::try_from(k).ok().filter(|k| (*k as usize) < vocab_size)),
    }
}

fn max_tokens(options: &GenerateOptions, limits: &Limits) -> Result<(), RequestError> {
    match options.max_tokens {
        Some(0) if options.prompt_logprobs.is_none() => {
            Err(invalid("max_tokens", "must be at least 1 (0 is allowed only together with echo)"))
        }
        Some(n) if n > limits.max_model_len => Err(invalid(
            "max_tokens",
            format!(
                "asks for {n} tokens, but this model's maximum context length is {}",
                limits.max_model_len
            ),
        )),
        _ => Ok(()),
    }
}

fn stop_strings(stop: &[String]) -> Result<(), RequestError> {
    if stop.len() > STOP_STRINGS_MAX {
        return Err(invalid(
            "stop",
            format!("has {} strings, at most {STOP_STRINGS_MAX} are allowed", stop.len()),
        ));
    }
    for text in stop {
        if text.is_empty() {
            return Err(invalid("stop", "contains an empty string, which would stop everything"));
        }
        if text.len() > STOP_STRING_BYTES_MAX {
            return Err(invalid(
                "stop",
                format!(
                    "contains a string of {} bytes, at most {STOP_STRING_BYTES_MAX} are allowed",
                    text.len()
                ),
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
            format!("has {got} ids, at most {STOP_TOKENS_MAX} are allowed"),
        ));
    }
    if let Some(id) = options.stop_token_ids.iter().find(|id| **id as usize >= limits.vocab_size) {
        let vocab_size = limits.vocab_size;
        return Err(invalid("stop_token_ids", format!("{id} is outside the vocabulary of {vocab_size}")));
    }
    let mut ids = options.stop_token_ids.clone();
    if !options.ignore_eos {
        ids.extend_from_slice(&limits.eos_token_ids);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn logprobs(field: &'static str, value: Option<u32>) -> Result<(), RequestError> {
    match value {
        Some(n) if n > LOGPROBS_MAX => {
            Err(invalid(field, format!("must be at most {LOGPROBS_MAX}, got {n}")))
        }
        _ => Ok(()),
    }
}
