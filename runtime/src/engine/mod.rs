//! The embedding API: an [`Engine`] is one model over its shards, ready for requests.
//!
//! An engine is a handle: `Clone + Send + Sync + 'static`, without global state, so several live in one process. It
//! starts from a TOML file ([`Engine::from_toml`]) or in code ([`Engine::builder`]); both need a tokio runtime.
//! Streams cancel their request when dropped. The server and the command line are built on this API alone.

mod builder;
mod cards;
mod factory;
mod host;
mod live;
mod options;
mod plan;
mod sizing;
#[cfg(test)]
pub(crate) mod software_driver_tests;
mod stream;
mod submit;
#[cfg(test)]
mod sums_tests;
#[cfg(test)]
mod tests;
mod validate;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use consort_actors::{CacheSalt, Ensemble, EnsembleState, StateWatch, Status};
use consort_kernels::device::Isa;
use serde_json::{Map, Value};

pub(crate) use self::{builder::Compute, factory::ModelFactory, plan::plan_request};
pub use self::{
    builder::EngineBuilder,
    live::LiveRequest,
    options::{GenerateOptions, Prompt},
    stream::{Completion, Finish, FinishReason, StopReason, TextDelta, TextEvent, TextStream, Usage},
    validate::{
        CACHE_SALT_BYTES_MAX, CHOICES_MAX, LOGIT_BIAS_MAX, LOGPROBS_MAX, MESSAGES_MAX, PROMPTS_MAX,
        STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, STOP_TOKENS_MAX, TEMPLATE_KWARGS_BYTES_MAX,
    },
};
use self::{live::LiveRequests, validate::Limits};
use crate::{
    error::RequestError,
    metrics::EngineMetrics,
    text::{ChatTemplate, TemplateError, Tokenizer},
};

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// Its text.
    pub content: String,
}

impl Message {
    /// Instructions for the whole chat.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: "system".into(), content: content.into() }
    }

    /// What the user says.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".into(), content: content.into() }
    }

    /// What the model said earlier.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: "assistant".into(), content: content.into() }
    }
}

/// How to continue a chat.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatOptions {
    /// How to generate.
    pub generate: GenerateOptions,
    /// Whether the prompt ends by opening the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables for the model's template.
    pub template_kwargs: Map<String, Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            generate: GenerateOptions::default(),
            add_generation_prompt: true,
            template_kwargs: Map::new(),
        }
    }
}

impl From<GenerateOptions> for ChatOptions {
    fn from(generate: GenerateOptions) -> Self {
        Self { generate, ..Self::default() }
    }
}

/// A snapshot of an engine.
#[derive(Clone, Debug)]
pub struct EngineStatus {
    /// Name under which the model is served.
    pub model_name: String,
    /// State of the shard group, its ranks, the scheduler's counters.
    pub ensemble: Status,
    /// Open requests, oldest first.
    pub requests: Vec<LiveRequest>,
}

/// A running model. Clones share it.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
    /// What the requests of this handle have in their salts besides their own.
    salt: Option<CacheSalt>,
}

struct Inner {
    ensemble: Ensemble,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    limits: Limits,
    model_name: String,
    compute: Compute,
    model_path: PathBuf,
    started_unix_seconds: u64,
    live: LiveRequests,
    metrics: Arc<EngineMetrics>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("model", &self.inner.model_name).finish_non_exhaustive()
    }
}

impl Engine {
    /// An engine described by a topology file; its `.start().await` starts it.
    pub fn from_toml(path: impl Into<PathBuf>) -> EngineBuilder {
        EngineBuilder::from_toml(path.into())
    }

    /// An engine described in code.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    /// Continues a prompt: text, or token ids. The request is admitted when this returns.
    pub fn generate(
        &self,
        prompt: impl Into<Prompt>,
        options: GenerateOptions,
    ) -> Result<TextStream, RequestError> {
        self.generate_n(vec![prompt.into()], &options, 1).map(only)
    }

    /// Continues a chat, through the model's chat template.
    pub fn chat(&self, messages: &[Message], options: GenerateOptions) -> Result<TextStream, RequestError> {
        self.chat_with(messages, options.into())
    }

    /// Continues a chat with options for the template.
    pub fn chat_with(&self, messages: &[Message], options: ChatOptions) -> Result<TextStream, RequestError> {
        self.chat_n(messages, &options, 1).map(only)
    }

    /// A handle of the same engine whose requests share cached prefixes only with those of handles of the same salt:
    /// for programs whose users must not find out what others ask. A request's own
    /// [`cache_salt`](GenerateOptions::cache_salt) counts besides, and so does the salt of the handle that this one is
    /// made from.
    pub fn with_cache_salt(&self, salt: &[u8]) -> Engine {
        // No request can name a handle's salt as its own.
        let salt = CacheSalt::new(b"consort handle of an engine").and(CacheSalt::new(salt));
        let salt = self.salt.map_or(salt, |outer| outer.and(salt));
        Engine { inner: Arc::clone(&self.inner), salt: Some(salt) }
    }

    /// Cancels the open requests of that name at once; how many there were. Their streams end with
    /// [`RequestError::Cancelled`].
    pub fn cancel(&self, request_id: &str) -> usize {
        self.inner.live.cancel(request_id)
    }

    /// A snapshot; never waits.
    pub fn status(&self) -> EngineStatus {
        EngineStatus {
            model_name: self.inner.model_name.clone(),
            ensemble: self.inner.ensemble.status(),
            requests: self.inner.live.list(),
        }
    }

    /// Why the engine failed for good, if it did: its shards were lost more often than its supervisor tolerates, and
    /// it answers no request any more.
    pub fn failure(&self) -> Option<String> {
        match self.inner.ensemble.status().state {
            EnsembleState::Failed { reason } => Some(reason),
            _ => None,
        }
    }

    /// Waits until the engine has failed for good, and says why. An engine that is shut down never does: see
    /// [`StateWatch::ended`] for both.
    pub async fn failed(&self) -> String {
        match self.watch().ended().await {
            EnsembleState::Failed { reason } => reason,
            _ => std::future::pending().await,
        }
    }

    /// Follows the engine's state without keeping the engine alive: how a supervisor in the embedding program hears
    /// that its engine restarts, failed, or was shut down by another holder of a handle.
    pub fn watch(&self) -> StateWatch {
        self.inner.ensemble.watch()
    }

    /// Admits nothing more, lets open requests end within `grace`, cancels the rest, and frees the devices.
    pub async fn shutdown(&self, grace: Duration) {
        self.inner.ensemble.shutdown(grace).await;
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.inner.tokenizer
    }

    /// Name under which the model is served.
    pub fn model_name(&self) -> &str {
        &self.inner.model_name
    }

    /// Where the model was loaded from.
    pub fn model_path(&self) -> &Path {
        &self.inner.model_path
    }

    /// The instruction set that CPU ranks use.
    pub fn cpu_isa(&self) -> Isa {
        self.inner.compute.isa
    }

    /// How the ranks compute, for reports.
    pub(crate) fn compute(&self) -> Compute {
        self.inner.compute
    }

    /// Most tokens of one sequence, prompt and answer together.
    pub fn max_model_len(&self) -> usize {
        self.inner.limits.max_model_len
    }

    /// Tokens of the model's vocabulary: ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.inner.limits.vocab_size
    }

    /// When the engine became ready, in seconds of Unix time.
    pub fn started_unix_seconds(&self) -> u64 {
        self.inner.started_unix_seconds
    }

    /// All measurements as Prometheus text, under vLLM's names.
    pub fn render_metrics(&self) -> String {
        self.inner.metrics.render(&self.inner.ensemble.status())
    }
}

/// The stream of a request with one prompt and one choice.
fn only(mut streams: Vec<TextStream>) -> TextStream {
    streams.pop().expect("one prompt with one choice is one stream")
}

/// The checkpoint's template; a checkpoint without one serves plain prompts.
fn optional(template: Result<ChatTemplate, TemplateError>) -> Result<Option<ChatTemplate>, TemplateError> {
    match template {
        Ok(template) => Ok(Some(template)),
        Err(error @ TemplateError::Missing { .. }) => {
            tracing::warn!("{error}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// An unpredictable number, for seeds and names. The hasher's keys come from the operating system, and each value
/// has keys of its own.
pub(crate) fn fresh_u64() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one("consort")
}
