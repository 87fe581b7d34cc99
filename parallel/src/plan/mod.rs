//! Whether a model fits, how many users it serves at once, and how fast it could be: from shapes alone, before anything
//! is loaded.
//!
//! | file | what it is |
//! |---|---|
//! | [`shape`], [`models`] | what is known of a model, and models by name |
//! | [`gpus`] | cards by name |
//! | `format` | how weights, keys and values are held |
//! | `weights`, `workspace`, `cache` | bytes of each |
//! | [`reserves`] | what of a card is not the model's |
//! | `roofline` | the least time of a step |
//! | `change` | the smallest change that makes a model fit |
//!
//! A [`Plan`] is a pure value. The engine takes the size of its KV cache from one; `consort plan` prints one.

mod cache;
mod change;
mod format;
pub mod gpus;
pub mod models;
pub mod reserves;
mod roofline;
pub mod shape;
mod shortfall;
#[cfg(test)]
mod tests;
mod weights;
mod workspace;

use std::collections::BTreeMap;

use consort_kernels::{DType, KernelError};

pub use self::{
    cache::{CacheShape, Policy},
    change::Change,
    format::{KvFormat, WeightFormat},
    gpus::GpuSpec,
    roofline::{Limit, StepEstimate},
    shape::ModelShape,
    shortfall::{Shortfall, amount},
    weights::WeightGroup,
};
use self::{
    reserves::Reserves,
    weights::{bytes_by_group, matrices},
    workspace::workspace_bytes,
};
use crate::{
    config::ModelConfig,
    ids::Rank,
    kv::KvGroups,
    model::{self, AllReduce, LoadOptions, STEP_LIMIT},
    partition::{Partition, PartitionError, Share},
};

/// Memory for keys and values in the host's memory, over all ranks, where nobody says how much: a modest share of a
/// developer's machine.
pub const HOST_KV_BYTES_DEFAULT: u64 = 1 << 30;
/// Largest page in tokens; beyond, a cache of short sequences is mostly padding.
const BLOCK_SIZE_MAX: usize = 256;
/// Ids of blocks have 32 bits.
const PAGES_MAX: u64 = u32::MAX as u64;

/// Where a rank computes.
#[derive(Clone, Debug, PartialEq)]
pub enum RankDevice {
    /// A card that nobody has looked at.
    Card(GpuSpec),
    /// A card of this machine.
    Seen {
        /// What it is.
        card: GpuSpec,
        /// What its driver calls it, as in `cuda:0`.
        label: String,
        /// What others have left of its memory.
        free_bytes: u64,
    },
    /// The host's processor, whose memory all ranks share.
    Host,
}

impl RankDevice {
    /// The card, if it is one.
    pub fn gpu(&self) -> Option<&GpuSpec> {
        match self {
            RankDevice::Card(card) | RankDevice::Seen { card, .. } => Some(card),
            RankDevice::Host => None,
        }
    }

    /// How to call it.
    pub fn name(&self) -> &str {
        match self {
            RankDevice::Card(card) => &card.name,
            RankDevice::Seen { label, .. } => label,
            RankDevice::Host => "cpu",
        }
    }
}

/// Bounds of what is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of a page.
    pub block_size: usize,
    /// Most tokens of a sequence.
    pub max_model_len: usize,
    /// Most sequences that run at a time.
    pub max_num_seqs: usize,
    /// Most tokens of a step.
    pub max_num_batched_tokens: usize,
    /// Whether a request's tokens must not depend on its company, which takes scratch memory on cards.
    pub is_batch_invariant: bool,
    /// Whether each rank is in a process of its own, whose part in sums takes whole pages of a card.
    pub separate_processes: bool,
}

/// What is to be planned.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanRequest {
    /// The model.
    pub model: ModelShape,
    /// One for each rank of a replica.
    pub devices: Vec<RankDevice>,
    /// Replicas of the model, each on devices of its own; at least one. What is planned is one of them.
    pub replicas: usize,
    /// Relative share of each rank, where they are not to be equal.
    pub shares: Option<Vec<f32>>,
    /// How weights are held.
    pub format: WeightFormat,
    /// How keys and values are held.
    pub kv_format: KvFormat,
    /// Bounds of what is served.
    pub limits: Limits,
    /// Part of a card's memory that may be used; all but the reserves where nothing is said.
    pub utilization: Option<f64>,
    /// Memory for keys and values over all ranks of a replica, where somebody said how much.
    pub kv_bytes: Option<u64>,
    /// Memory of the host for what loses its place in the cache, over all ranks of a replica.
    pub offloading_bytes: Option<u64>,
    /// Bytes of the host's memory, if known: all replicas live in it.
    pub host_memory_bytes: Option<u64>,
    /// Formats that may be proposed in place of `format`.
    pub formats: Vec<WeightFormat>,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The model cannot be divided so.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// The engine cannot lay it out so.
    #[error("cannot lay out the model")]
    Layout(#[from] KernelError),
    /// The format means nothing for the model.
    #[error("mxfp4 is a format of experts, and {model} has none; plan with fp8, bfloat16 or float32")]
    Format {
        /// The model.
        model: String,
    },
    /// A bound is none.
    #[error("{name} is {value}; it must be from 1 to {most}")]
    Limit {
        /// Which.
        name: &'static str,
        /// What was given.
        value: usize,
        /// What could be.
        most: usize,
    },
    /// Kernels do not read pages of that size.
    #[error("block_size is {size}; it must be a multiple of 16 up to {most}", most = BLOCK_SIZE_MAX)]
    BlockSize {
        /// What was given.
        size: usize,
    },
    /// The model knows no positions so far.
    #[error(
        "max_model_len is {asked}, which exceeds the {trained} positions that {model} was trained for; lower it or \
         leave it out"
    )]
    Positions {
        /// The model.
        model: String,
        /// Tokens asked for.
        asked: usize,
        /// Those that it was trained for.
        trained: usize,
    },
    /// Every sequence that runs has a token in each step.
    #[error(
        "max_num_batched_tokens is {tokens}, which cannot carry max_num_seqs = {sequences} sequences: each has a token \
         in every step; raise it to {sequences} or more, or lower max_num_seqs"
    )]
    Steps {
        /// Tokens of a step.
        tokens: usize,
        /// Sequences of a step.
        sequences: usize,
    },
}

/// One rank's memory, and what is in it.
#[derive(Clone, Debug, PartialEq)]
pub struct RankPlan {
    /// Where it computes.
    pub device: RankDevice,
    /// What it holds.
    pub share: Share,
    /// Bytes of its weights, part by part.
    pub weights: BTreeMap<WeightGroup, u64>,
    /// Bytes of activations and scratch.
    pub workspace_bytes: u64,
    /// What of its memory is not the model's; nothing where a card was looked at, which says what is free.
    pub reserves: Reserves,
    /// Bytes of its memory; unknown where the host's is.
    pub memory_bytes: Option<u64>,
    /// Bytes that may be used for weights, workspace, keys and values; only of a card.
    pub usable_bytes: Option<u64>,
    /// Bytes of a page of keys and values.
    pub page_bytes: u64,
}

impl RankPlan {
    /// Bytes of its weights.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.values().sum()
    }

    /// Bytes of weights and workspace.
    pub fn model_bytes(&self) -> u64 {
        self.weight_bytes().saturating_add(self.workspace_bytes)
    }

    /// Bytes left for keys and values on a card.
    pub fn room_bytes(&self) -> Option<u64> {
        Some(self.usable_bytes?.saturating_sub(self.model_bytes()))
    }
}

/// What a request comes to.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What was asked for.
    pub request: PlanRequest,
    /// Who holds what.
    pub partition: Partition,
    /// One for each rank.
    pub ranks: Vec<RankPlan>,
    /// How keys and values lie in pages.
    pub cache: CacheShape,
}

impl Plan {
    /// Plans a request. That a model does not fit is no error: see [`Plan::shortfall`].
    pub fn new(request: &PlanRequest) -> Result<Plan, PlanError> {
        check(request)?;
        let PlanRequest { model, devices, shares, format, kv_format, limits, .. } = request;
        let partition = Partition::of(&model.dividend(*format), devices.len(), shares.as_deref())?;
        let cache = cache_shape(model, limits);
        let mut ranks = Vec::with_capacity(devices.len());
        for (at, (device, share)) in devices.iter().zip(partition.shares()).enumerate() {
            let page_bytes = cache.page_bytes(model, share, *kv_format);
            let memory = Memory::of(device, request);
            let (weights, workspace_bytes) = contents(request, &partition, at, page_bytes, &memory)?;
            ranks.push(RankPlan {
                device: device.clone(),
                share: share.clone(),
                weights,
                workspace_bytes,
                reserves: memory.reserves,
                memory_bytes: memory.bytes,
                usable_bytes: memory.usable_bytes,
                page_bytes,
            });
        }
        Ok(Plan { request: request.clone(), partition, ranks, cache })
    }

    /// Pages that there is room for, or that the given memory holds.
    pub fn pages(&self) -> u64 {
        self.pages_in(self.request.kv_format)
    }

    /// The same if keys and values were held in `format`.
    pub fn pages_in(&self, format: KvFormat) -> u64 {
        let bytes = |rank: &RankPlan| self.cache.page_bytes(&self.request.model, &rank.share, format).max(1);
        let over_all: u64 = self.ranks.iter().map(bytes).sum();
        let on_cards = || self.ranks.iter().filter_map(|rank| Some(rank.room_bytes()? / bytes(rank))).min();
        let pages = match self.request.kv_bytes {
            Some(given) => given / over_all,
            None => on_cards().unwrap_or(HOST_KV_BYTES_DEFAULT / over_all),
        };
        pages.min(PAGES_MAX)
    }

    /// The rank that has room for the fewest pages.
    pub fn tightest(&self) -> usize {
        let pages = |rank: &RankPlan| rank.room_bytes().map(|room| room / rank.page_bytes.max(1));
        let ranks = self.ranks.iter().enumerate().filter_map(|(at, rank)| Some((pages(rank)?, at)));
        ranks.min().map_or(0, |(_, at)| at)
    }

    /// Pages without which the longest sequence cannot run.
    pub fn pages_needed(&self) -> u64 {
        self.cache.pages_needed(self.request.limits.max_model_len, Policy::WindowsFreed)
    }

    /// Pages of the engine's pool: those that there are, and no more than all sequences together could use unless
    /// somebody asked for them.
    pub fn pool_pages(&self) -> usize {
        let limits = &self.request.limits;
        let of_one = self.cache.pages(limits.max_model_len, Policy::Paged);
        let most = of_one.saturating_mul(limits.max_num_seqs as u64);
        let pages = if self.request.kv_bytes.is_some() { self.pages() } else { self.pages().min(most) };
        usize::try_from(pages).unwrap_or(usize::MAX)
    }

    /// Sequences of `context` tokens that there is room for at the same time; `None` beyond the longest.
    pub fn users(&self, context: usize, policy: Policy, format: KvFormat) -> Option<u64> {
        let longest = self.request.limits.max_model_len;
        if context > longest {
            return None;
        }
        // What does not hold its weights holds no keys.
        let has_room = self.ranks.iter().all(|rank| rank.room_bytes().is_none_or(|room| room > 0));
        let pages = if has_room { self.pages_in(format) } else { 0 };
        Some(self.cache.users(pages, context, longest, policy))
    }

    /// Bytes of a page over all ranks.
    pub fn page_bytes(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.page_bytes).sum()
    }

    /// Bytes of all ranks' weights.
    pub fn weight_bytes(&self) -> u64 {
        self.ranks.iter().map(RankPlan::weight_bytes).sum()
    }

    /// Whether the model can be served.
    pub fn fits(&self) -> bool {
        self.shortfall().is_none()
    }
}

fn check(request: &PlanRequest) -> Result<(), PlanError> {
    let limits = &request.limits;
    // The same as a topology's.
    let bounds = [
        ("block_size", limits.block_size, BLOCK_SIZE_MAX),
        ("max_model_len", limits.max_model_len, 1 << 27),
        ("max_num_seqs", limits.max_num_seqs, 1 << 16),
        ("max_num_batched_tokens", limits.max_num_batched_tokens, 1 << 20),
        ("data_parallel_size", request.replicas, 1024),
    ];
    for (name, value, most) in bounds {
        if !(1..=most).contains(&value) {
            return Err(PlanError::Limit { name, value, most });
        }
    }
    if !limits.block_size.is_multiple_of(16) {
        return Err(PlanError::BlockSize { size: limits.block_size });
    }
    let (asked, trained) = (limits.max_model_len, request.model.context_max);
    if asked > trained {
        return Err(PlanError::Positions { model: request.model.called().to_owned(), asked, trained });
    }
    let (tokens, sequences) = (limits.max_num_batched_tokens, limits.max_num_seqs);
    if tokens < sequences {
        return Err(PlanError::Steps { tokens, sequences });
    }
    match request.format.suits(&request.model) {
        true => Ok(()),
        false => Err(PlanError::Format { model: request.model.name.clone() }),
    }
}

/// A device's memory as far as the model is concerned.
struct Memory {
    bytes: Option<u64>,
    reserves: Reserves,
    usable_bytes: Option<u64>,
}

impl Memory {
    fn of(device: &RankDevice, request: &PlanRequest) -> Memory {
        let part = |bytes: u64| request.utilization.map_or(bytes, |part| (bytes as f64 * part) as u64);
        match device {
            RankDevice::Card(card) => {
                let reserves = Reserves::assumed(request.devices.len());
                let free = card.memory_bytes.saturating_sub(reserves.total_bytes());
                let usable = part(card.memory_bytes).min(free);
                Memory { bytes: Some(card.memory_bytes), reserves, usable_bytes: Some(usable) }
            }
            RankDevice::Seen { card, free_bytes, .. } => Memory {
                bytes: Some(card.memory_bytes),
                reserves: Reserves::default(),
                // Others may have taken some of it.
                usable_bytes: Some(part(card.memory_bytes).min(*free_bytes)),
            },
            RankDevice::Host => {
                Memory { bytes: request.host_memory_bytes, reserves: Reserves::default(), usable_bytes: None }
            }
        }
    }
}

/// Weights and workspace of a rank: as its CUDA model lays them out where it is one of those, else from the shape.
fn contents(
    request: &PlanRequest,
    partition: &Partition,
    at: usize,
    page_bytes: u64,
    memory: &Memory,
) -> Result<(BTreeMap<WeightGroup, u64>, u64), PlanError> {
    let PlanRequest { model, format, limits, .. } = request;
    let share = &partition.shares()[at];
    let mut weights = bytes_by_group(&matrices(model, share, at == 0), *format);
    let laid_out = match (&model.config, request.devices[at].gpu(), format) {
        (Some(config), Some(card), WeightFormat::BFloat16) => {
            // Scratch memory grows with the pool, slowly: that of a pool which fills the card is enough for any.
            let most = memory.usable_bytes.unwrap_or(0) / page_bytes.max(1);
            let options = load_options(limits, most.min(PAGES_MAX) as usize);
            on_card(config, partition, at, &options, card.multiprocessors)?
        }
        _ => None,
    };
    let Some(laid_out) = laid_out else {
        return Ok((weights, workspace_bytes(model, share, partition.size(), limits)));
    };
    // Vectors are held as f32, and every part begins on a line of its own.
    let listed: u64 = weights.values().sum();
    *weights.entry(WeightGroup::Rest).or_default() += laid_out.weight_bytes.saturating_sub(listed);
    Ok((weights, laid_out.workspace_bytes))
}

fn load_options(limits: &Limits, num_blocks: usize) -> LoadOptions {
    LoadOptions {
        dtype: DType::BF16,
        max_batch_tokens: limits.max_num_batched_tokens,
        block_size: limits.block_size,
        max_num_seqs: limits.max_num_seqs,
        max_model_len: limits.max_model_len,
        num_blocks,
        step_limit: STEP_LIMIT,
        deterministic: limits.is_batch_invariant,
        separate_processes: limits.separate_processes,
        all_reduce: AllReduce::Auto,
    }
}

/// As the CUDA model lays it out.
fn on_card(
    config: &ModelConfig,
    partition: &Partition,
    at: usize,
    options: &LoadOptions,
    multiprocessors: u32,
) -> Result<Option<model::cuda::ModelMemory>, KernelError> {
    let Ok(rank) = u16::try_from(at) else { return Ok(None) };
    model::cuda::memory(config, partition, Rank(rank), options, multiprocessors).map(Some)
}

fn cache_shape(model: &ModelShape, limits: &Limits) -> CacheShape {
    CacheShape {
        block_size: limits.block_size,
        groups: KvGroups::of_windows(&model.windows),
        chunk: limits.max_num_batched_tokens.min(limits.max_model_len),
    }
}
