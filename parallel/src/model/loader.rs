//! From slices of a checkpoint to a rank's packed weights.

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use consort_kernels::{
    DType, KernelError,
    device::Device,
    linear::{Kernels, Weight},
};

use crate::checkpoint::{Checkpoint, CheckpointError};

/// Longest wait for one step unless told otherwise: a long prompt's part takes seconds at most. Twice what a peer waits
/// on its device before it takes this one to be lost.
pub const STEP_LIMIT: Duration = Duration::from_secs(60);

/// What a model is loaded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct LoadOptions {
    /// Storage type of weights, matrix inputs, keys and values.
    pub dtype: DType,
    /// Most tokens of one step: the size of the activations.
    pub max_batch_tokens: usize,
    /// Tokens of one KV block.
    pub block_size: usize,
    /// Most sequences of one step.
    pub max_num_seqs: usize,
    /// Most tokens of one sequence.
    pub max_model_len: usize,
    /// KV blocks of the pool. Scratch memory grows with it; sequences may share blocks, and then be longer together
    /// than the pool.
    pub num_blocks: usize,
    /// Longest wait for a device to do a step, before it is taken to hang.
    pub step_limit: Duration,
    /// Whether a request's tokens must not depend on its company, at the price of slower kernels. A CPU's never do,
    /// whatever this says: its kernels add in one order for any number of rows.
    pub deterministic: bool,
    /// Whether each rank is in a process of its own: what ranks on devices touch of each other's memory is then memory
    /// that other processes can map. No effect on CPUs, nor on a rank alone.
    pub separate_processes: bool,
    /// What ranks on GPUs sum with.
    pub all_reduce: AllReduce,
}

/// What ranks on GPUs sum with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, wincode::SchemaRead, wincode::SchemaWrite)]
#[non_exhaustive]
pub enum AllReduce {
    /// Our kernels or NCCL, whichever is faster at a size, as far as they are there. NCCL has no fixed order of sums:
    /// where a request's tokens must not depend on its company, our kernels do it.
    #[default]
    Auto,
    /// Our kernels, for which every device must reach every other's memory. NCCL is not even opened.
    Kernels,
    /// NCCL.
    Nccl,
}

impl AllReduce {
    /// Every one.
    pub const ALL: [AllReduce; 3] = [AllReduce::Auto, AllReduce::Kernels, AllReduce::Nccl];

    /// The name that topologies use.
    pub fn name(self) -> &'static str {
        match self {
            AllReduce::Auto => "auto",
            AllReduce::Kernels => "kernels",
            AllReduce::Nccl => "nccl",
        }
    }
}

/// Why a rank's weights could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint lacks something or is damaged.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Memory could not be had, or the device refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// A part of a named matrix: what a rank takes of it.
pub(super) struct Part<'a> {
    pub(super) name: &'a str,
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
}

/// Reads weights and counts them.
pub(super) struct Loader<'a> {
    device: &'a Device,
    checkpoint: &'a Checkpoint,
    loaded: AtomicU64,
    total: u64,
    progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl<'a> Loader<'a> {
    /// A loader that reports progress towards `total` bytes.
    pub(super) fn new(
        device: &'a Device,
        checkpoint: &'a Checkpoint,
        total: u64,
        progress: &'a (dyn Fn(u64, u64) + Sync),
    ) -> Self {
        Loader { device, checkpoint, loaded: AtomicU64::new(0), total, progress }
    }

    /// The rows of all `parts`, one below the other, as one packed matrix. Parts have equally many columns.
    pub(super) fn matrix<T: Kernels>(&self, what: &str, parts: &[Part<'_>]) -> Result<Weight<T>, LoadError> {
        let cols = parts.first().map_or(0, |part| part.cols.len());
        let rows = parts.iter().map(|part| part.rows.len()).sum();
        let weight = Weight::zeros(self.device, rows, cols, what)?;
        self.fill(weight, parts)
    }

    /// The rows of two `parts`, gates and ups, as a paired matrix. They have equally many rows and columns.
    pub(super) fn gates<T: Kernels>(&self, what: &str, parts: [Part<'_>; 2]) -> Result<Weight<T>, LoadError> {
        let weight = Weight::paired(self.device, parts[0].rows.len(), parts[0].cols.len(), what)?;
        self.fill(weight, &parts)
    }

    fn fill<T: Kernels>(&self, mut weight: Weight<T>, parts: &[Part<'_>]) -> Result<Weight<T>, LoadError> {
        weight.fill(self.device, |rows, values| {
            read(self.checkpoint, parts, rows, values)?;
            self.count((values.len() * T::DTYPE.bytes()) as u64);
            Ok::<(), CheckpointError>(())
        })?;
        for part in parts {
            self.checkpoint.release_rows(part.name, part.rows.clone());
        }
        Ok(weight)
    }

    /// A whole vector, as f32.
    pub(super) fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let mut values = vec![0.0; len];
        self.checkpoint.read_rows(name, 0..1, 0..len, &mut values)?;
        self.count((len * 4) as u64);
        Ok(values)
    }

    fn count(&self, bytes: u64) {
        let loaded = self.loaded.fetch_add(bytes, Relaxed) + bytes;
        (self.progress)(loaded, self.total);
    }
}

/// Rows of the matrix that `parts` make up.
fn read(
    checkpoint: &Checkpoint,
    parts: &[Part<'_>],
    rows: Range<usize>,
    values: &mut [f32],
) -> Result<(), CheckpointError> {
    let (mut first, mut rest) = (0, values);
    for part in parts {
        let within = |row: usize| row.clamp(first, first + part.rows.len()) - first + part.rows.start;
        let wanted = within(rows.start)..within(rows.end);
        let (values, after) = rest.split_at_mut(wanted.len() * part.cols.len());
        if !wanted.is_empty() {
            checkpoint.read_rows(part.name, wanted, part.cols.clone(), values)?;
        }
        rest = after;
        first += part.rows.len();
    }
    Ok(())
}
