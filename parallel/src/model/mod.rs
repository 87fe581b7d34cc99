//! Models built from parallel layers: what one rank executes in one step.
//!
//! [`load`] builds a rank's part from a checkpoint; [`Model::forward`] runs a batch through it, [`Model::outcomes`]
//! makes tokens of its output rows. A model never decides what to run, owns no sequence, and knows other ranks only as
//! a [`Collective`].

pub mod cuda;
mod host;
mod layers;
mod llama;
mod loader;
mod overlap;
mod rows;

use std::ops::Range;

use consort_kernels::{DType, KernelError, device::Device, element::bf16, kv_append::PageShape};
pub use host::{DrawOnHost, HostModel};
pub use loader::{AllReduce, LoadError, LoadOptions, STEP_LIMIT};
pub use overlap::{Overlap, STEPS_UNDER_WAY_MAX, drawn_by, row_of};
pub use rows::{Draw, Drawn, PromptToken, RowOutcome, RowRequest, TokenLogprobs};

use crate::{
    batch::Batch,
    checkpoint::Checkpoint,
    collective::{Collective, CollectiveError},
    config::{Architecture, ModelConfig},
    ids::Rank,
    kv::{KvGroups, KvLayout, KvStore},
    partition::{Partition, Share},
};

/// Why a step could not be executed on this rank.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The group was aborted while this rank waited for it.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The batch breaks a bound that the scheduler must hold.
    #[error("batch refused: {0}")]
    Batch(String),
    /// A kernel refused its arguments or its device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// One rank's part of a decoder model. Every rank of the group calls the same methods with the same arguments.
pub trait Model: Send {
    /// Meets the other ranks of a group before any other call with its `comm`, for what ranks must know of each other:
    /// addresses of memory, say. Called once in each life of the group, by ranks that were just built and by those
    /// that lived on; nothing of an earlier life may be used after it. Ranks may come minutes apart.
    fn join(&mut self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        let _ = comm;
        Ok(())
    }

    /// Runs all layers over `batch`, appends keys and values to `kv`, and keeps the hidden states of
    /// `batch.output_rows` for [`Model::outcomes`] and [`Model::logits`].
    ///
    /// Each layer appends the keys and values of all rows before any row attends in it, so sequences may share pages
    /// that one of them fills in the same step. Steps read and write pages in the order in which they were given. Pages
    /// that a step's rows do not see in any layer of their group are not read: see [`Batch::tables`].
    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError>;

    /// What becomes of the kept rows: one request and one outcome for each output row of the last forward, in their
    /// order. Every rank draws the same tokens; log-probabilities are made where `report` says so, on rank 0.
    fn outcomes(
        &mut self,
        requests: &[RowRequest<'_>],
        report: bool,
        comm: &mut dyn Collective,
    ) -> Result<Vec<RowOutcome>, ModelError>;

    /// Logits `[rows.len(), vocabulary]`, whole on every rank, of the given kept rows (indices into `output_rows` of
    /// the last forward). At most [`Model::logit_rows_max`] rows a call, so memory stays bounded. For tests and tools:
    /// tokens come from [`Model::outcomes`], which need not bring logits to the host.
    fn logits(&mut self, rows: Range<usize>, comm: &mut dyn Collective) -> Result<&[f32], ModelError>;

    /// Where one step can be begun while another is computed. Unless it is said otherwise a step is over when it was
    /// asked for.
    fn overlap(&mut self) -> Option<&mut dyn Overlap> {
        None
    }

    /// Most rows that one [`Model::logits`] call may ask for.
    fn logit_rows_max(&self) -> usize;

    /// Entries of the vocabulary, the width of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Bytes of weights this rank holds.
    fn weight_bytes(&self) -> u64;

    /// Bytes of activations this rank holds.
    fn workspace_bytes(&self) -> u64;
}

/// Builds `rank`'s part of the model in `checkpoint`. `progress(loaded, total)` is
/// called with bytes as they are held, by any thread of the device.
pub fn load(
    device: &Device,
    checkpoint: &Checkpoint,
    partition: &Partition,
    rank: Rank,
    options: &LoadOptions,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Box<dyn Model>, LoadError> {
    if let Device::Cuda(device) = device {
        let model = cuda::CudaLlama::load(device, checkpoint, partition, rank, options, progress)?;
        return Ok(Box::new(model));
    }
    match (checkpoint.config().architecture, options.dtype) {
        (Architecture::Llama | Architecture::Mistral, DType::F32) => {
            let model = llama::Llama::<f32>::load(device, checkpoint, partition, rank, options, progress)?;
            Ok(Box::new(DrawOnHost::new(model)))
        }
        (Architecture::Llama | Architecture::Mistral, DType::BF16) => {
            let model = llama::Llama::<bf16>::load(device, checkpoint, partition, rank, options, progress)?;
            Ok(Box::new(DrawOnHost::new(model)))
        }
    }
}

/// Shape of a rank's pages of keys and values. How many of them hold a sequence is [`KvGroups`]' to tell.
pub fn kv_layout(
    config: &ModelConfig,
    share: &Share,
    dtype: DType,
    block_size: usize,
) -> Result<KvLayout, KernelError> {
    let pages = PageShape::new(block_size, share.kv_heads.len(), config.head_dim)?;
    let groups = KvGroups::of(config);
    Ok(KvLayout { pages, layers_per_page: groups.layers_per_page(), groups: groups.count(), dtype })
}

/// Refuses pages that are not laid out as the model reads them.
fn check_layout(kv: &KvStore, expected: &KvLayout) -> Result<(), ModelError> {
    let got = kv.layout();
    if got == expected {
        return Ok(());
    }
    Err(ModelError::Batch(format!("the KV store is laid out as {got:?}, the model as {expected:?}")))
}

/// Refuses logits of rows that are not kept, and of too many at once.
fn check_logit_rows(rows: &Range<usize>, kept: usize, rows_max: usize) -> Result<(), ModelError> {
    if rows.start <= rows.end && rows.end <= kept && rows.len() <= rows_max {
        return Ok(());
    }
    Err(ModelError::Batch(format!(
        "logits of rows {rows:?} were asked for; {kept} rows are kept and {rows_max} can be had at once"
    )))
}
