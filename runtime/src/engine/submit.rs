//! How requests enter: rendered, tokenised, validated, and handed over together.

use std::sync::Arc;

use consort_actors::{Generation, Request, SubmitError};
use consort_kernels::sampling::SamplingParams;
use serde_json::{Value, json};

use super::{
    ChatOptions, Engine, GenerateOptions, Inner, Message, Prompt, TextStream, Usage, fresh_u64,
    stream::Composer,
    validate::{self, Validated, validate},
};
use crate::{
    error::RequestError,
    metrics::{RequestTimer, Siblings},
    text::{ChatInput, IncrementalDecoder, StopMatcher},
};

/// One prompt with its options, about to be submitted `n` times.
struct Prepared {
    prompt: Vec<u32>,
    valid: Validated,
    max_tokens: usize,
}

impl Prepared {
    /// Choice `i` draws with the seed plus `i`.
    fn request(&self, choice: usize) -> Request {
        let sampling = self.valid.sampling.clone();
        Request {
            prompt: self.prompt.clone(),
            sampling: SamplingParams { seed: sampling.seed.wrapping_add(choice as u64), ..sampling },
            max_tokens: self.max_tokens,
            stop_token_ids: self.valid.stop_token_ids.clone(),
            logprobs: self.valid.logprobs,
            prompt_logprobs: self.valid.prompt_logprobs,
        }
    }
}

impl Engine {
    /// Continues each prompt `n` times; the stream of prompt `p` and choice `c` is the one at `p * n + c`. Either all
    /// of them are admitted when this returns, or none is. Their seeds count up from the request's, or from one that is
    /// drawn; so choice 0 says what a single one would.
    pub fn generate_n(
        &self,
        prompts: Vec<Prompt>,
        options: &GenerateOptions,
        n: usize,
    ) -> Result<Vec<TextStream>, RequestError> {
        self.check(options, n, prompts.len())?;
        let add_special_tokens = options.add_special_tokens.unwrap_or(true);
        let tokens = prompts.into_iter().map(|prompt| match prompt {
            Prompt::Tokens(tokens) => Ok(tokens),
            Prompt::Text(text) => self.encode(&text, add_special_tokens),
        });
        self.submit(tokens, options, n)
    }

    /// Continues a chat `n` times, as [`Engine::generate_n`] does a prompt.
    pub fn chat_n(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        n: usize,
    ) -> Result<Vec<TextStream>, RequestError> {
        self.check(&options.generate, n, 1)?;
        let Some(template) = &self.inner.template else {
            return Err(RequestError::NoChatTemplate { model: self.inner.model_name.clone() });
        };
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| json!({"role": message.role, "content": message.content}))
            .collect();
        let text = template.render(&ChatInput {
            messages: &messages,
            tools: None,
            add_generation_prompt: options.add_generation_prompt,
            kwargs: Some(&options.template_kwargs),
        })?;
        let add_special_tokens = options.generate.add_special_tokens.unwrap_or(false);
        let tokens = self.encode(&text, add_special_tokens);
        self.submit([tokens], &options.generate, n)
    }

    /// What can be said before the prompts are looked at, which may take much longer.
    fn check(&self, options: &GenerateOptions, n: usize, prompts: usize) -> Result<(), RequestError> {
        let limits = &self.inner.limits;
        validate::choices(n, prompts, limits)?;
        validate(options, limits, || 0).map(drop)
    }

    /// Tokenises, unless the text is so long that it cannot fit whatever its tokens are: encoding megabytes takes
    /// seconds.
    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, RequestError> {
        let Inner { tokenizer, limits, .. } = &*self.inner;
        let (tokens_min, max_model_len) = (tokenizer.tokens_min(text), limits.max_model_len);
        if tokens_min > max_model_len {
            return Err(RequestError::TextTooLong { bytes: text.len(), tokens_min, max_model_len });
        }
        Ok(tokenizer.encode(text, add_special_tokens)?)
    }

    fn submit(
        &self,
        prompts: impl IntoIterator<Item = Result<Vec<u32>, RequestError>>,
        options: &GenerateOptions,
        n: usize,
    ) -> Result<Vec<TextStream>, RequestError> {
        let prepare = |prompt: Result<_, _>| self.prepare(prompt?, options);
        let prepared = prompts.into_iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
        let requests = prepared.iter().flat_map(|one| (0..n).map(|choice| one.request(choice)));
        let mut generations = self.inner.ensemble.submit_all(requests.collect())?.into_iter();
        let request_id = options.request_id.clone().unwrap_or_else(|| format!("{:016x}", fresh_u64()));
        let mut streams = Vec::with_capacity(generations.len());
        for one in &prepared {
            let siblings = Arc::new(Siblings::new(n));
            for generation in generations.by_ref().take(n) {
                streams.push(self.stream(one, generation, &request_id, &siblings)?);
            }
        }
        Ok(streams)
    }

    /// Validates what does not depend on other requests.
    fn prepare(&self, prompt: Vec<u32>, options: &GenerateOptions) -> Result<Prepared, RequestError> {
        let limits = &self.inner.limits;
        let valid = validate(options, limits, fresh_u64)?;
        let max_model_len = limits.max_model_len;
        if prompt.len() > max_model_len {
            // The ensemble would say the same, after the prompt was copied and looked through.
            let max_tokens = valid.max_tokens.unwrap_or(1);
            let prompt_tokens = prompt.len();
            return Err(SubmitError::TooLong { prompt_tokens, max_tokens, max_model_len }.into());
        }
        // A prompt that fills the context is refused by the scheduler, which needs at least one token to refuse.
        let room = (max_model_len - prompt.len()).max(1);
        let max_tokens = valid.max_tokens.unwrap_or(room);
        if valid.min_tokens > max_tokens {
            let min = valid.min_tokens;
            let message =
                format!("must be at most {max_tokens}, which the context holds after the prompt, got {min}");
            return Err(RequestError::Invalid { field: "min_tokens", message });
        }
        Ok(Prepared { prompt, valid, max_tokens })
    }

    /// The stream of an admitted generation.
    fn stream(
        &self,
        one: &Prepared,
        generation: Generation,
        request_id: &str,
        siblings: &Arc<Siblings>,
    ) -> Result<TextStream, RequestError> {
        let inner = &*self.inner;
        let Prepared { prompt, valid, max_tokens } = one;
        let (sequence, prompt_tokens) = (generation.sequence().0, prompt.len());
        tracing::debug!(request_id, sequence, prompt_tokens, max_tokens, "request admitted");
        let live = inner.live.enter(sequence, request_id.to_owned(), prompt_tokens, Box::new(generation));
        let metrics = Arc::clone(&inner.metrics);
        let timer = RequestTimer::start(metrics, prompt_tokens, valid.max_tokens, Arc::clone(siblings));
        let composer = Composer {
            decoder: IncrementalDecoder::after(
                Arc::clone(&inner.tokenizer),
                valid.skip_special_tokens,
                prompt,
            ),
            stops: StopMatcher::new(valid.stop.iter().cloned(), valid.include_stop)?,
            eos_token_ids: inner.limits.eos_token_ids.clone(),
            stop_token_ids: valid.stop_token_ids.clone(),
            include_stop: valid.include_stop,
            min_tokens: valid.min_tokens,
            max_tokens: *max_tokens,
            usage: Usage { prompt_tokens, ..Usage::default() },
            ready: Default::default(),
        };
        Ok(TextStream::new(composer, timer, live, prompt.clone(), request_id.to_owned()))
    }
}
