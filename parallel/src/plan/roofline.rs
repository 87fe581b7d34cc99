//! The time below which no step can be: bytes over bandwidth, operations over peak, sums over links.
//!
//! Nothing is measured here. A step waits for its memory or its multiplications, whichever is slower, and then for the
//! sums over ranks, which nothing hides; launches and latencies come on top of it. The slowest rank decides.

use consort_kernels::all_reduce::cuda::prefers_one_shot;

use super::{
    Plan, RankPlan,
    gpus::GpuSpec,
    shape::{Attention, ModelShape},
    weights::{Matrices, Read, matrices},
};

/// Ranks exchange f32.
const EXCHANGED_BYTES: f64 = 4.0;

/// What a step waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Reading weights, keys and values.
    Memory,
    /// Multiplying.
    Compute,
    /// Sums over ranks.
    Link,
}

impl Limit {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Limit::Memory => "memory",
            Limit::Compute => "compute",
            Limit::Link => "link",
        }
    }
}

/// One decode step of `batch` sequences, one token each, on the rank that takes longest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepEstimate {
    /// Sequences.
    pub batch: usize,
    /// Tokens of each.
    pub context: usize,
    /// The slowest rank.
    pub rank: usize,
    /// Time of the step.
    pub seconds: f64,
    /// What most of it is.
    pub limit: Limit,
    /// Weights that are read.
    pub weight_bytes: f64,
    /// Different experts that a layer's tokens choose, on average; 0 without experts.
    pub experts_read: f64,
    /// Keys and values that are read.
    pub kv_bytes: f64,
    /// What comes over links from the other ranks.
    pub link_bytes: f64,
    /// Operations: a multiplication and an addition are two.
    pub flops: f64,
    /// Time of the memory.
    pub memory_seconds: f64,
    /// Time of the multiplications; unknown where the card's peak is.
    pub compute_seconds: Option<f64>,
    /// Time of the sums; 0 for a rank alone.
    pub link_seconds: f64,
    /// Sums over ranks: each also waits for its latency, which is not counted.
    pub sums: usize,
}

impl StepEstimate {
    /// Tokens of all sequences a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.batch as f64 / self.seconds
    }
}

impl Plan {
    /// The least time of a decode step; `None` where a card's rates are unknown.
    pub fn step(&self, batch: usize, context: usize) -> Option<StepEstimate> {
        let of_rank = |(at, rank)| self.step_of_rank(at, rank, batch, context);
        let steps: Option<Vec<StepEstimate>> = self.ranks.iter().enumerate().map(of_rank).collect();
        steps?.into_iter().max_by(|left, right| left.seconds.total_cmp(&right.seconds))
    }

    fn step_of_rank(&self, at: usize, rank: &RankPlan, batch: usize, context: usize) -> Option<StepEstimate> {
        let GpuSpec { memory_bandwidth, flops: peak, link_bandwidth, .. } = &rank.device.gpu()?;
        let (model, format) = (&self.request.model, self.request.format);
        let parts = matrices(model, &rank.share, at == 0);
        let hit = experts_hit(model, batch);
        let weight_bytes = parts.iter().map(|part| bytes_read(part, model, hit, batch, format)).sum::<f64>();
        let seen = keys_seen(model, context);
        let numbers = model.kv_numbers(rank.share.kv_heads.len()) as f64;
        let kv_bytes = batch as f64 * seen * numbers * self.request.kv_format.bytes() as f64;
        let flops = batch as f64 * flops_per_token(model, &parts, rank.share.query_heads.len(), seen);
        let (link_bytes, sums) = exchanged(model, self.ranks.len(), batch);
        let memory_seconds = (weight_bytes + kv_bytes) / (*memory_bandwidth)?;
        let compute_seconds = peak.map(|peak| flops / peak);
        let link_seconds = if sums == 0 { 0.0 } else { link_bytes / (*link_bandwidth)? };
        let work = memory_seconds.max(compute_seconds.unwrap_or(0.0));
        let limit = if link_seconds > work {
            Limit::Link
        } else if work > memory_seconds {
            Limit::Compute
        } else {
            Limit::Memory
        };
        Some(StepEstimate {
            batch,
            context,
            rank: at,
            seconds: work + link_seconds,
            limit,
            weight_bytes,
            experts_read: hit,
            kv_bytes,
            link_bytes,
            flops,
            memory_seconds,
            compute_seconds,
            link_seconds,
            sums,
        })
    }
}

/// Different experts of a layer that `batch` tokens choose on average, if each chooses at random.
fn experts_hit(model: &ModelShape, batch: usize) -> f64 {
    let Some(experts) = model.experts else { return 0.0 };
    let (count, chosen) = (experts.count as f64, experts.chosen.min(experts.count) as f64);
    count * (1.0 - (1.0 - chosen / count).powf(batch as f64))
}

fn bytes_read(
    part: &Matrices,
    model: &ModelShape,
    experts_hit: f64,
    batch: usize,
    format: super::WeightFormat,
) -> f64 {
    let bytes = part.bytes(format) as f64;
    match part.read {
        Read::Whole => bytes,
        Read::Rows => bytes * (batch.min(part.rows) as f64 / part.rows.max(1) as f64),
        Read::Chosen => bytes * experts_hit / model.experts.map_or(1.0, |experts| experts.count as f64),
    }
}

/// Keys that a token sees, over all layers.
fn keys_seen(model: &ModelShape, context: usize) -> f64 {
    let of_layer = |window: &Option<std::num::NonZeroUsize>| window.map_or(context, |w| context.min(w.get()));
    model.windows.iter().map(|window| of_layer(window) as f64).sum()
}

fn flops_per_token(model: &ModelShape, parts: &[Matrices], heads: usize, keys_seen: f64) -> f64 {
    let experts = model.experts.unwrap_or_default();
    let used = |part: &Matrices| match part.read {
        Read::Whole => part.elements() as f64,
        Read::Rows => 0.0,
        Read::Chosen => part.elements() as f64 * experts.chosen as f64 / experts.count.max(1) as f64,
    };
    // Queries times keys, and what comes of it times values.
    let per_key = match model.attention {
        Attention::Grouped(grouped) => 2 * grouped.head_dim,
        Attention::Latent(latent) => 2 * latent.latent + latent.rotary,
    };
    2.0 * (parts.iter().map(used).sum::<f64>() + keys_seen * (heads * per_key) as f64)
}

/// Bytes that a rank reads from others in a step, and sums over ranks: the embedding's, two in each layer; logits are
/// gathered.
fn exchanged(model: &ModelShape, ranks: usize, batch: usize) -> (f64, usize) {
    if ranks < 2 {
        return (0.0, 0);
    }
    let others = (ranks - 1) as f64;
    let sums = 1 + 2 * model.layers();
    let elements = batch.saturating_mul(model.hidden);
    let times = if prefers_one_shot(elements, ranks) { others } else { 2.0 * others / ranks as f64 };
    let sum = times * elements as f64 * EXCHANGED_BYTES;
    let logits = others / ranks as f64 * (batch as f64 * model.vocabulary as f64) * EXCHANGED_BYTES;
    (sums as f64 * sum + logits, sums)
}
