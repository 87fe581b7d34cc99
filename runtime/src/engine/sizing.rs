//! How long sequences may be and how many KV blocks there are. Pure.

#[cfg(test)]
mod tests;

use consort_parallel::config::GenerationDefaults;

use super::validate::{REPETITION_PENALTY_MAX, REPETITION_PENALTY_MIN};

/// KV memory over all ranks when none is asked for: a modest share of a developer's machine.
const KV_CACHE_BYTES_DEFAULT: u64 = 1 << 30;

/// Not even one sequence of full length would fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheTooSmall {
    /// Memory given, over all ranks.
    pub(super) given_bytes: u64,
    /// Blocks that fit into it.
    pub(super) given_blocks: usize,
    /// Blocks of one such sequence.
    pub(super) needed_blocks: usize,
    /// Their size, over all ranks.
    pub(super) needed_bytes: u64,
    /// Longest sequence that the given memory holds.
    pub(super) fitting_len: usize,
}

/// What the number of blocks depends on.
pub(super) struct KvDemand {
    /// Memory to use over all ranks, if the operator said so.
    pub(super) given_bytes: Option<u64>,
    /// Blocks that fit on every card, where ranks compute on GPUs.
    pub(super) card_blocks: Option<usize>,
    /// One block's bytes, summed over ranks.
    pub(super) block_bytes: u64,
    /// Tokens per block.
    pub(super) block_size: usize,
    /// Blocks that so many tokens of a sequence take: one in each group of layers.
    pub(super) groups: usize,
    /// Longest sequence.
    pub(super) max_model_len: usize,
    /// Most sequences at a time.
    pub(super) max_num_seqs: usize,
}

impl KvDemand {
    /// Blocks of the pool: never too few for one sequence of full length, for then nothing could be promised.
    pub(super) fn num_blocks(&self) -> Result<usize, CacheTooSmall> {
        let groups = self.groups.max(1);
        let needed_blocks = self.max_model_len.div_ceil(self.block_size).saturating_mul(groups);
        let block_bytes = self.block_bytes.max(1);
        // Ids of blocks have 32 bits.
        let fit =
            |bytes: u64| usize::try_from(bytes / block_bytes).unwrap_or(usize::MAX).min(u32::MAX as usize);
        let (given_bytes, given_blocks) = match (self.given_bytes, self.card_blocks) {
            (None, Some(blocks)) => ((blocks as u64).saturating_mul(block_bytes), blocks),
            (given, _) => {
                let bytes = given.unwrap_or(KV_CACHE_BYTES_DEFAULT);
                (bytes, fit(bytes))
            }
        };
        if given_blocks < needed_blocks {
            return Err(CacheTooSmall {
                given_bytes,
                given_blocks,
                needed_blocks,
                needed_bytes: (needed_blocks as u64).saturating_mul(block_bytes),
                fitting_len: (given_blocks / groups).saturating_mul(self.block_size),
            });
        }
        match self.given_bytes {
            Some(_) => Ok(given_blocks),
            // Nobody asked for memory that cannot be used.
            None => Ok(given_blocks.min(needed_blocks.saturating_mul(self.max_num_seqs))),
        }
    }
}

/// Threads of each rank: the machine's cores, shared out.
pub(super) fn threads_per_rank(requested: Option<usize>, cores: usize, ranks: usize) -> usize {
    requested.unwrap_or(cores / ranks.max(1)).max(1)
}

/// The checkpoint's sampling defaults without those that no request could have: a bad file must not make every
/// request fail.
pub(super) fn sane(defaults: &GenerationDefaults) -> GenerationDefaults {
    let keep = |name: &str, value: Option<f32>, good: fn(f32) -> bool| {
        let value = value?;
        if good(value) {
            return Some(value);
        }
        tracing::warn!(name, value, "generation_config.json has a value out of range; ignored");
        None
    };
    GenerationDefaults {
        repetition_penalty: keep("repetition_penalty", defaults.repetition_penalty, |v| {
            (REPETITION_PENALTY_MIN..=REPETITION_PENALTY_MAX).contains(&v)
        }),
        temperature: keep("temperature", defaults.temperature, |v| (0.0..=2.0).contains(&v)),
        top_p: keep("top_p", defaults.top_p, |v| v > 0.0 && v <= 1.0),
        min_p: keep("min_p", defaults.min_p, |v| (0.0..=1.0).contains(&v)),
        ..defaults.clone()
    }
}
