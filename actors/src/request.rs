//! What a caller hands to an ensemble, and what comes back.
//!
//! Token ids only: text lives in the crate above.

use consort_kernels::sampling::SamplingParams;

use crate::{
    plan::{Sampled, TokenLogprobs},
    prefix::CacheSalt,
};

/// One generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Prompt, at least one token.
    pub prompt: Vec<u32>,
    /// How to draw.
    pub sampling: SamplingParams,
    /// Most tokens to generate; 0 asks for prompt log-probabilities alone, or for nothing but the end.
    pub max_tokens: usize,
    /// Tokens that end the generation (the end-of-sequence tokens unless ignored, and the caller's own).
    /// The ending token is reported like any other.
    pub stop_token_ids: Vec<u32>,
    /// Log-probabilities to report per generated token: the drawn one and this many best.
    pub logprobs: Option<u32>,
    /// Log-probabilities to report per prompt token, likewise.
    pub prompt_logprobs: Option<u32>,
    /// Lower comes first; 0 unless somebody says otherwise. Waiting makes up for it, see
    /// [`crate::SchedulerConfig::priority_aging_ms`].
    pub priority: i32,
    /// Only requests with the same salt share cached prefixes.
    pub cache_salt: Option<CacheSalt>,
    /// Whether each step must know the tokens before it, as where a grammar says what may follow: then none is planned
    /// for it before they have come. Others go on beside it.
    pub awaits_tokens: bool,
}

/// What a generation's stream yields, in order; `Finished` or `Failed` is the last.
#[derive(Clone, Debug, PartialEq)]
pub enum GenerationEvent {
    /// Log-probabilities of prompt tokens `1..`, in order, in one or more parts, before any token.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// The prompt is computed; comes once, before the first token, and also where none is drawn.
    Prefilled {
        /// Tokens of it whose keys and values were there when it first ran. What it had computed itself before it gave
        /// way does not count.
        cached_tokens: usize,
    },
    /// One more token.
    Token(Sampled),
    /// Ended as asked.
    Finished(FinishReason),
    /// Ended by a failure that is not the request's fault, or by cancellation at shutdown.
    Failed(GenerationError),
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn; it is the last token of the stream.
    Stop {
        /// Which.
        token: u32,
    },
    /// `max_tokens`, or the model's context, is used up.
    Length,
}

/// Why an accepted generation could not be carried on.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum GenerationError {
    /// A shard of the group ended; the group restarts. Nothing is wrong with the request: send it again.
    #[error(
        "a shard failed while this request ran ({reason}); the group is restarting, send the request again"
    )]
    ShardLost {
        /// What the supervisor saw.
        reason: String,
    },
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The model broke down on this sequence: its activations overflowed or its weights are damaged.
    #[error(
        "the model produced no finite logit for token {position} of this sequence; the checkpoint may be damaged"
    )]
    NotFinite {
        /// Index in the sequence of the token that could not be drawn.
        position: usize,
    },
    /// The reader of this stream fell so far behind that its bounded queue filled up.
    #[error("the reader of this stream fell {queued} events behind; the request was cancelled")]
    SlowReader {
        /// Events waiting when it happened.
        queued: usize,
    },
}

/// Why a request was not accepted.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum SubmitError {
    /// The prompt has no token.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// A token id is not in the vocabulary.
    #[error("token id {token} at position {position} is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Where it stands in the prompt.
        position: usize,
        /// Ids below this exist.
        vocab_size: usize,
    },
    /// Prompt and requested tokens exceed what one sequence may hold.
    #[error(
        "this model's maximum context length is {max_model_len} tokens, but the prompt has {prompt_tokens} and \
         {max_tokens} more were requested; shorten the prompt or lower max_tokens"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Most tokens of one sequence.
        max_model_len: usize,
    },
    /// The sequence could never fit into the KV cache, even alone.
    #[error(
        "the prompt has {prompt_tokens} tokens and up to {max_tokens} more were requested; together they need \
         {needed_blocks} KV blocks of {block_size} tokens, but the cache has {total_blocks}; shorten the prompt or \
         lower max_tokens, or give the server more kv_cache_memory_bytes"
    )]
    NeverFits {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Blocks that both need, over all groups of layers.
        needed_blocks: usize,
        /// Blocks there are.
        total_blocks: usize,
        /// Tokens per block.
        block_size: usize,
    },
    /// As many requests are waiting as the engine admits.
    #[error("{waiting} requests are already queued (max_waiting_requests = {limit}); try again later")]
    Overloaded {
        /// Requests in the queue.
        waiting: usize,
        /// The bound.
        limit: usize,
    },
    /// The group is starting, restarting or failed.
    #[error("the engine is not ready: {0}")]
    NotReady(String),
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    ShuttingDown,
}
