//! Bounds of scheduling, and the one check that a request must pass.

use crate::request::{Request, SubmitError};

/// Pages of the KV cache. The same pages exist on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSpec {
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks of the pool.
    pub num_blocks: usize,
}

impl CacheSpec {
    /// Blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }
}

/// Bounds of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most sequences that run at a time.
    pub max_num_seqs: usize,
    /// Most tokens of one step: decodes and prefill chunks share it.
    pub max_num_batched_tokens: usize,
    /// Most tokens of one sequence, prompt and generation together.
    pub max_model_len: usize,
    /// Most accepted requests that have not run yet; more are refused as overload.
    pub max_waiting_requests: usize,
}

/// What a single request is held against: everything that needs no knowledge of other requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Token ids below this exist.
    pub vocab_size: usize,
    /// Most tokens of one sequence.
    pub max_model_len: usize,
    /// The pages there are.
    pub cache: CacheSpec,
}

impl Limits {
    /// Refuses what could never be served, however idle the engine.
    pub fn check(&self, request: &Request) -> Result<(), SubmitError> {
        if request.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        let known = |&token: &u32| (token as usize) < self.vocab_size;
        if let Some(position) = request.prompt.iter().position(|token| !known(token)) {
            let token = request.prompt[position];
            return Err(SubmitError::UnknownToken { token, position, vocab_size: self.vocab_size });
        }
        if request.prompt.len().saturating_add(request.max_tokens) > self.max_model_len {
            return Err(SubmitError::TooLong {
                prompt_tokens: request.prompt.len(),
                max_tokens: request.max_tokens,
                max_model_len: self.max_model_len,
            });
        }
        let needed_blocks = self.cache.blocks_for(kv_tokens_max(request));
        if needed_blocks > self.cache.num_blocks {
            return Err(SubmitError::NeverFits {
                needed_blocks,
                total_blocks: self.cache.num_blocks,
                block_size: self.cache.block_size,
            });
        }
        Ok(())
    }
}

/// Tokens whose keys and values a request may come to hold: the last drawn token is never written.
pub(crate) fn kv_tokens_max(request: &Request) -> usize {
    request.prompt.len().saturating_add(request.max_tokens.saturating_sub(1))
}
