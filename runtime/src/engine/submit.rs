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

/// One prompt, about to be submitted `n` times.
struct Prepared {
    prompt: Arc<[u32]>,
    seed: u64,
    max_tokens: usize,
}

impl Prepared {
    /// Choice `i` draws with the seed plus `i`.
    fn request(&self, choice: usize, valid: &Validated) -> Request {
        let seed = self.seed.wrapping_add(choice as u64);
        Request {
            prompt: self.prompt.to_vec(),
            sampling: SamplingParams { seed, ..valid.sampling.clone() },
            max_tokens: self.max_tokens,
            stop_token_ids: valid.stop_token_ids.clone(),
            logprobs: valid.logprobs,
            // The same for all choices.
            prompt_logprobs: valid.prompt_logprobs.filter(|_| choice == 0),
            priority: valid.priority,
            cache_salt: valid.cache_salt,
            awaits_tokens: valid.awaits_tokens,
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
        validate::prompts(prompts.len())?;
        let valid = self.check(options, n, prompts.len())?;
        let add_special_tokens = options.add_special_tokens.unwrap_or(true);
        let tokens = prompts.into_iter().map(|prompt| match prompt {
            Prompt::Tokens(tokens) => Ok(tokens),
            Prompt::Text(text) => self.encode(&text, add_special_tokens),
        });
        self.submit(tokens, &valid, options.request_id.as_deref(), n)
    }

    /// Continues a chat `n` times, as [`Engine::generate_n`] does a prompt.
    pub fn chat_n(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        n: usize,
    ) -> Result<Vec<TextStream>, RequestError> {
        validate::messages(messages.len())?;
        validate::template_kwargs(&options.template_kwargs)?;
        let valid = self.check(&options.generate, n, 1)?;
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
        self.submit([tokens], &valid, options.generate.request_id.as_deref(), n)
    }

    /// What can be said before the prompts are looked at, which may take much longer.
    fn check(&self, options: &GenerateOptions, n: usize, prompts: usize) -> Result<Validated, RequestError> {
        let limits = &self.inner.limits;
        validate::choices(n, prompts, limits)?;
        let valid = validate(options, limits)?;
        let cache_salt = match (self.salt, valid.cache_salt) {
            (Some(of_handle), Some(own)) => Some(of_handle.and(own)),
            (of_handle, own) => of_handle.or(own),
        };
        Ok(Validated { cache_salt, ..valid })
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
        valid: &Validated,
        request_id: Option<&str>,
        n: usize,
    ) -> Result<Vec<TextStream>, RequestError> {
        let prepare = |prompt: Result<Vec<u32>, _>| self.prepare(prompt?, valid);
        let prepared = prompts.into_iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
        let requests = prepared.iter().flat_map(|one| (0..n).map(|choice| one.request(choice, valid)));
        let mut generations = self.inner.ensemble.submit_all(requests.collect())?.into_iter();
        let request_id = request_id.map_or_else(|| format!("{:016x}", fresh_u64()), str::to_owned);
        let mut streams = Vec::with_capacity(generations.len());
        for one in &prepared {
            let siblings = Arc::new(Siblings::new(n));
            for generation in generations.by_ref().take(n) {
                streams.push(self.stream(one, valid, generation, &request_id, &siblings));
            }
        }
        Ok(streams)
    }

    /// Validates what does not depend on other requests.
    fn prepare(&self, prompt: Vec<u32>, valid: &Validated) -> Result<Prepared, RequestError> {
        let (prompt_tokens, max_model_len) = (prompt.len(), self.inner.limits.max_model_len);
        // The least that is asked for: nothing where a prompt is only scored, else a token.
        if prompt_tokens + valid.max_tokens.unwrap_or(1).min(1) > max_model_len {
            // The ensemble would say the same, after the prompt was copied and looked through.
            let max_tokens = valid.max_tokens.unwrap_or(1);
            return Err(SubmitError::TooLong { prompt_tokens, max_tokens, max_model_len }.into());
        }
        let max_tokens = valid.max_tokens.unwrap_or(max_model_len - prompt_tokens);
        if valid.min_tokens > max_tokens {
            let min = valid.min_tokens;
            let message =
                format!("must be at most {max_tokens}, which the context holds after the prompt, got {min}");
            return Err(RequestError::Invalid { field: "min_tokens", message });
        }
        Ok(Prepared { prompt: prompt.into(), seed: valid.seed.unwrap_or_else(fresh_u64), max_tokens })
    }

    /// The stream of an admitted generation.
    fn stream(
        &self,
        one: &Prepared,
        valid: &Validated,
        generation: Generation,
        request_id: &str,
        siblings: &Arc<Siblings>,
    ) -> TextStream {
        let inner = &*self.inner;
        let Prepared { prompt, max_tokens, .. } = one;
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
            stops: StopMatcher::new(valid.stop.clone(), valid.include_stop),
            eos_token_ids: inner.limits.eos_token_ids.clone(),
            stop_token_ids: valid.stop_token_ids.clone(),
            include_stop: valid.include_stop,
            min_tokens: valid.min_tokens,
            max_tokens: *max_tokens,
            usage: Usage { prompt_tokens, ..Usage::default() },
            ready: Default::default(),
        };
        TextStream::new(composer, timer, live, Arc::clone(prompt), request_id.to_owned())
    }
}
