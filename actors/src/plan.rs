//! What crosses between scheduler and shards: differences down, small results up.
//!
//! Plain values. Every shard of a group gets the same plan in the same order.

use consort_kernels::sampling::SamplingParams;
use consort_parallel::ids::{BlockId, HostBlock};
pub use consort_parallel::model::TokenLogprobs;

use crate::ids::{Epoch, SequenceId, Step};

/// One step for every shard of a group.
#[derive(Clone, Debug, PartialEq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct StepPlan {
    /// Life of the group that this plan belongs to.
    pub epoch: Epoch,
    /// Its number in the epoch.
    pub step: Step,
    /// Sequences the shards have not heard of (in this epoch, or since they were preempted).
    pub begin: Vec<NewSequence>,
    /// What to execute, in row order. Empty in a step that only waits for transfers.
    pub run: Vec<Span>,
    /// Pages to copy before executing (copy-on-write).
    pub copies: Vec<BlockCopy>,
    /// Pages to copy to the host's pool. They are not written before the transfer is reported.
    pub saves: Vec<(BlockId, HostBlock)>,
    /// Pages to copy from the host's pool. They are not touched before the transfer is reported.
    pub loads: Vec<(HostBlock, BlockId)>,
    /// Whether the result may come only once all transfers ordered so far are done: somebody waits for their pages. So
    /// it is in a step that runs nothing.
    pub await_transfers: bool,
    /// Sequences to forget after the step: finished, cancelled or preempted.
    pub end: Vec<SequenceId>,
}

/// What a shard must know of a sequence once.
#[derive(Clone, Debug, PartialEq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct NewSequence {
    /// Its name in later spans.
    pub sequence: SequenceId,
    /// Tokens of its prompt. Of the tokens that a replay brings, the later ones are its own output, and penalties
    /// tell the two apart.
    pub prompt_len: usize,
    /// How to draw its tokens.
    pub sampling: SamplingParams,
    /// Log-probabilities to report with each drawn token: the drawn one and this many best.
    pub logprobs: Option<u32>,
}

/// The whole state of a group, for a shard that has its pages and has heard of nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupImage {
    /// Life of the group.
    pub epoch: Epoch,
    /// The step that comes next.
    pub next_step: Step,
    /// The sequences that run.
    pub sequences: Vec<SequenceImage>,
    /// Sequences that the next plan will end.
    pub ended: Vec<SequenceId>,
}

/// A sequence in the middle of its life.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceImage {
    /// What every shard was told once.
    pub new: NewSequence,
    /// What it was told since.
    pub cached: CachedTokens,
    /// The token that was drawn last, and whose keys and values are not written.
    pub last_sampled: Option<u32>,
}

/// A page copied over another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct BlockCopy {
    /// Source.
    pub from: BlockId,
    /// Destination.
    pub to: BlockId,
}

/// The part of a step that belongs to one sequence.
///
/// Tables have one page per layer group for each block of tokens, block after block: with two groups, pages `0` and `1`
/// belong to tokens `0..block_size`.
#[derive(Clone, Debug, PartialEq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct Span {
    /// Which.
    pub sequence: SequenceId,
    /// What comes before `tokens` and need not be computed; usually nothing.
    pub cached: CachedTokens,
    /// What to append.
    pub tokens: Tokens,
    /// Pages appended to its block table before these tokens are written.
    pub new_blocks: Vec<BlockId>,
    /// What to send back.
    pub output: Output,
}

/// Tokens whose keys and values are in pages already: found in the prefix cache, or another choice's.
#[derive(Clone, Debug, Default, PartialEq, Eq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct CachedTokens {
    /// The tokens, which the shard has not heard of.
    pub tokens: Vec<u32>,
    /// Pages appended to the sequence's table for them. Those behind a group's window are absent and never read.
    pub pages: Vec<Option<BlockId>>,
}

/// Tokens appended to a sequence in a step.
#[derive(Clone, Debug, PartialEq, Eq, wincode::SchemaRead, wincode::SchemaWrite)]
pub enum Tokens {
    /// Known to the scheduler: prompt chunks and replays.
    Given(Vec<u32>),
    /// The token that the shard itself drew for this sequence in its last span: lets a step be planned
    /// before the previous one is absorbed.
    LastSampled,
}

/// What a span sends back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, wincode::SchemaRead, wincode::SchemaWrite)]
pub enum Output {
    /// Nothing: a prefill chunk that is not the last.
    Nothing,
    /// One token drawn after the last row.
    Sample,
    /// Log-probabilities of the prompt token that follows each row, then one drawn token if `sample`.
    PromptLogprobs {
        /// Best alternatives to report per position.
        top: u32,
        /// The prompt token that follows the span's last row; absent when the span ends the prompt.
        next: Option<u32>,
        /// Whether a token is drawn after the last row.
        sample: bool,
    },
}

/// What a shard says of an executed step. Only rank 0's tokens are used; digests of all are compared.
#[derive(Clone, Debug, PartialEq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct StepResult {
    /// Epoch of the plan.
    pub epoch: Epoch,
    /// Number of the plan.
    pub step: Step,
    /// What each sequence that had an output got.
    pub outputs: Vec<SpanOutput>,
    /// All transfers of plans up to this one are done. Ranks may differ in it; the group's is the least. After a step
    /// that runs nothing it is that step: nobody waits for anything else then.
    pub transferred: Option<Step>,
    /// Hash over all drawn tokens of the step; equal on every rank or the group is broken.
    pub digest: u64,
}

/// One sequence's part of a [`StepResult`].
#[derive(Clone, Debug, PartialEq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct SpanOutput {
    /// Which.
    pub sequence: SequenceId,
    /// The drawn tokens (one today).
    pub sampled: Vec<Sampled>,
    /// Prompt log-probabilities, one per row that has a following prompt token: row `i` predicts the token after
    /// it, so the first token of a prompt has none.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Whether the drawn row held no finite logit: then its token means nothing and the sequence must end.
    pub broken: bool,
}

/// One drawn token.
#[derive(Clone, Debug, PartialEq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// Raw log-probabilities at its position, when asked for.
    pub logprobs: Option<TokenLogprobs>,
}
