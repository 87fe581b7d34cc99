//! Launches of `kernel.cu`.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use half::bf16;

use crate::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, GRID_Y_MAX, Launch, Launcher, kernel_size},
    kv_append::PageShape,
};

const THREADS: usize = 128;
const VECTORS_PER_THREAD: usize = 4;
const ELEMENTS_PER_VECTOR: usize = 8;

/// Refuses pages that a pool of `blocks` lacks, and pairs whose outcome would depend on their order.
pub fn check_copies(copies: &[(u32, u32)], blocks: usize) -> Result<(), KernelError> {
    let mut written = BTreeSet::new();
    for &(from, to) in copies {
        KernelError::check_index("kv_copy", "source block", from as usize, blocks)?;
        KernelError::check_index("kv_copy", "destination block", to as usize, blocks)?;
        if !written.insert(to) {
            return Err(KernelError::Unsupported {
                operation: "kv_copy",
                reason: format!("block {to} is copied over twice"),
            });
        }
    }
    match copies.iter().find(|(from, _)| written.contains(from)) {
        Some((from, _)) => Err(KernelError::Unsupported {
            operation: "kv_copy",
            reason: format!("block {from} is copied and copied over in one step"),
        }),
        None => Ok(()),
    }
}

/// Copies pages; see the [module](super). `copies` holds source and destination of each pair.
pub fn kv_copy(
    launcher: &dyn Launcher,
    shape: PageShape,
    layers: usize,
    copies: DeviceSlice<'_, u32>,
    mut pool: DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    let (page, pairs) = (shape.page_elements(), copies.len() / 2);
    KernelError::check_len("kv_copy", "copies", copies.len(), 2 * pairs)?;
    let blocks = pool.len().checked_div(layers * page).unwrap_or(0);
    KernelError::check_len("kv_copy", "pool", pool.len(), layers * page * blocks)?;
    let block_count = kernel_size("kv_copy", "blocks", blocks)?;
    if pairs == 0 || pool.is_empty() {
        return Ok(());
    }
    // A page is a multiple of 16 tokens of 16 dimensions: whole vectors.
    let vectors = page / ELEMENTS_PER_VECTOR;
    let launch = Launch {
        kernel: "kv_copy",
        grid: [
            kernel_size("kv_copy", "parts of a page", vectors.div_ceil(THREADS * VECTORS_PER_THREAD))?,
            pairs.min(GRID_Y_MAX) as u32,
            layers.min(GRID_Y_MAX) as u32,
        ],
        threads: THREADS as u32,
        shared_bytes: 0,
        args: Args::new()
            .slice_mut(&mut pool)
            .slice(copies)
            .u32(kernel_size("kv_copy", "pairs", pairs)?)
            .u32(kernel_size("kv_copy", "layers", layers)?)
            .u32(block_count)
            .u64(vectors as u64),
    };
    // SAFETY: lengths are checked above, the kernel checks block numbers; the arguments are its parameters.
    unsafe { launcher.launch(&launch) }
}
