//! Activations of a rank, from the shape alone: for models that this version plans and does not run.
//!
//! The list is that of the CUDA model's buffers, where the largest ones are concerned; a test holds the two together on
//! the models that run.

use super::{
    Limits,
    shape::{Attention, ModelShape},
};
use crate::partition::Share;

const F32: u64 = 4;
const BF16: u64 = 2;
/// Rows of logits that are made and drawn from at a time.
const LOGIT_ROWS: u64 = 64;
/// Bytes for each token of the vocabulary that changes of logits take: three kinds of change, each with its entry.
const CHANGE_BYTES: u64 = 3 * (3 * F32 + F32);
/// Partial sums and library scratch of products, and of attention whose keys are divided into chunks.
const SCRATCH_BYTES: u64 = 24 << 20;

/// Bytes of activations on a rank.
pub(super) fn workspace_bytes(model: &ModelShape, share: &Share, ranks: usize, limits: &Limits) -> u64 {
    let rows = limits.max_num_batched_tokens.max(limits.max_num_seqs) as u64;
    let (hidden, vocabulary) = (model.hidden as u64, model.vocabulary as u64);
    let sums = if ranks > 1 { 3 } else { 2 };
    let stream = hidden * (sums * F32 + 2 * BF16);
    let row = stream + attention_row(model, share) + mlp_row(model, share);
    let logits = LOGIT_ROWS * (vocabulary + share.vocabulary.len() as u64) * F32;
    let tables = limits.max_num_seqs as u64 * (limits.max_model_len / limits.block_size.max(1)) as u64 * F32;
    rows.saturating_mul(row) + logits + vocabulary * CHANGE_BYTES + tables + SCRATCH_BYTES
}

fn attention_row(model: &ModelShape, share: &Share) -> u64 {
    let heads = share.query_heads.len() as u64;
    match model.attention {
        Attention::Grouped(grouped) => {
            let dim = grouped.head_dim as u64;
            let (queries, keys) = (heads * dim, share.kv_heads.len() as u64 * dim);
            (queries + 2 * keys) * F32 + 2 * queries * BF16
        }
        Attention::Latent(latent) => {
            let remembered = (latent.latent + latent.rotary) as u64;
            let projected = latent.query_rank.unwrap_or(0) as u64 + remembered;
            let queries = heads * (latent.plain + latent.rotary) as u64;
            // Queries are turned into the latent space, and what was attended comes out of it.
            (projected + queries) * F32 + heads * (2 * remembered + latent.value as u64) * BF16
        }
    }
}

/// Gate and up, and their product, of a dense layer or of all experts that a token takes, whichever is more.
fn mlp_row(model: &ModelShape, share: &Share) -> u64 {
    let of_columns = |columns: u64| 2 * columns * F32 + columns * BF16;
    let dense = of_columns(share.columns.len() as u64);
    let Some(experts) = model.experts else { return dense };
    let taken = (experts.chosen + experts.shared) as u64;
    let routed = of_columns(taken * share.expert_columns.len() as u64) + experts.count as u64 * F32;
    dense.max(routed)
}
