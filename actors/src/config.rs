//! Bounds of scheduling, and the one check that a request must pass.

use consort_parallel::kv::KV_GROUPS_MAX;

use crate::request::{Request, SubmitError};

/// Most groups of layers: tables of all are walked for every sequence.
pub const LAYER_GROUPS_MAX: usize = KV_GROUPS_MAX;

/// The groups of layers whose keys and values share a page, and how far back each looks.
///
/// A block of tokens takes one page in every group. Pages of all groups are equally large and come from one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerGroups {
    /// Keys that a token sees, its own included; 0 for all.
    windows: [u32; LAYER_GROUPS_MAX],
    count: usize,
}

impl LayerGroups {
    /// All layers in one group that sees everything.
    pub const FULL: LayerGroups = LayerGroups { windows: [0; LAYER_GROUPS_MAX], count: 1 };

    /// One group for each of `windows`: the keys that a token sees, its own included, or all. `None` when there is no
    /// group, more than [`LAYER_GROUPS_MAX`], or a window of nothing.
    pub fn new(windows: &[Option<usize>]) -> Option<Self> {
        let mut groups = LayerGroups { windows: [0; LAYER_GROUPS_MAX], count: windows.len() };
        if !(1..=LAYER_GROUPS_MAX).contains(&windows.len()) {
            return None;
        }
        for (to, window) in groups.windows.iter_mut().zip(windows) {
            *to = match window {
                None => 0,
                Some(0) => return None,
                // What sees more than 2^32 tokens sees all that can be.
                Some(window) => u32::try_from(*window).unwrap_or(0),
            };
        }
        Some(groups)
    }

    /// How many there are, at least one.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Groups that see everything.
    pub fn full(&self) -> usize {
        self.windows().filter(Option::is_none).count()
    }

    /// Of each group the keys that a token sees, its own included; `None` for all.
    pub fn windows(&self) -> impl Iterator<Item = Option<usize>> + '_ {
        self.windows[..self.count].iter().map(|&window| (window > 0).then_some(window as usize))
    }
}

/// Pages of the KV cache. The same pages exist on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSpec {
    /// Tokens per block.
    pub block_size: usize,
    /// Pages of the pool, which all groups share.
    pub num_blocks: usize,
    /// What a block of tokens takes.
    pub groups: LayerGroups,
    /// Whether blocks keep their content for later requests that begin with the same tokens.
    pub prefix_caching: bool,
    /// Pages of the host's pool, where evicted pages go; 0 for none.
    pub host_blocks: usize,
}

impl CacheSpec {
    /// A pool for layers that all see everything, with prefix caching and without a host's pool.
    pub const fn new(block_size: usize, num_blocks: usize) -> Self {
        Self { block_size, num_blocks, groups: LayerGroups::FULL, prefix_caching: true, host_blocks: 0 }
    }

    /// Blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Pages that a sequence of `tokens` tokens holds at most while it decodes, over all groups. A running prefill
    /// chunk may hold more: what its rows see reaches over the chunk and a window before it.
    pub fn pages_for(&self, tokens: usize) -> usize {
        let blocks = self.blocks_for(tokens);
        let of =
            |window: Option<usize>| window.map_or(blocks, |window| blocks.min(self.blocks_across(window)));
        self.groups.windows().map(of).sum()
    }

    /// Most blocks that a run of `tokens` positions touches, wherever it begins: 9 of 16 for 128.
    pub fn blocks_across(&self, tokens: usize) -> usize {
        if tokens <= 1 { tokens } else { (tokens - 2) / self.block_size + 2 }
    }

    /// First block of which a token at `position` sees anything in a group with this window.
    pub fn first_block_seen(&self, position: usize, window: Option<usize>) -> usize {
        window.map_or(0, |window| (position + 1).saturating_sub(window) / self.block_size)
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
    /// How much longer a request must have waited, in milliseconds, to come before one whose priority is better by one.
    pub priority_aging_ms: u64,
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
        let needed_blocks = self.cache.pages_for(kv_tokens_max(request));
        if needed_blocks > self.cache.num_blocks {
            return Err(SubmitError::NeverFits {
                prompt_tokens: request.prompt.len(),
                max_tokens: request.max_tokens,
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

#[cfg(test)]
mod tests {
    use consort_kernels::sampling::SamplingParams;

    use super::*;

    fn request(prompt: usize, max_tokens: usize) -> Request {
        Request {
            prompt: vec![1; prompt],
            sampling: SamplingParams::default(),
            max_tokens,
            stop_token_ids: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            priority: 0,
            cache_salt: None,
            awaits_tokens: false,
        }
    }

    #[test]
    fn what_never_fits_is_refused_with_the_numbers_and_a_remedy() {
        let groups = LayerGroups::new(&[None, Some(128)]).expect("two groups");
        let cache = CacheSpec { groups, ..CacheSpec::new(16, 70) };
        let limits = Limits { vocab_size: 10, max_model_len: 10_000, cache };
        let error = limits.check(&request(900, 101)).expect_err("63 blocks, and 9 within the window");
        assert_eq!(
            error.to_string(),
            "the prompt has 900 tokens and up to 101 more were requested; together they need 72 KV blocks of 16 \
             tokens, but the cache has 70; shorten the prompt or lower max_tokens, or give the server more \
             kv_cache_memory_bytes"
        );
        assert_eq!(
            limits.check(&request(900, 77)),
            Ok(()),
            "the last token is not written: 976 are 61 blocks"
        );
        assert!(limits.check(&request(900, 78)).is_err());
    }
}
