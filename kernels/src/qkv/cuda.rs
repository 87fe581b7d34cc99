//! Launches of `kernel.cu`.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;

use half::bf16;

use crate::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, Launch, Launcher, kernel_size},
    kv_append::PageShape,
    rope::Pairs,
};

const THREADS: u32 = 128;

/// Heads of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QkvShape {
    /// Query heads.
    pub query_heads: usize,
    /// KV heads, the width of every head, and the pages that keys and values go to.
    pub pages: PageShape,
    /// Dimensions of a head that turn; even.
    pub rotary_dim: usize,
    /// Which of them turn together.
    pub pairs: Pairs,
}

impl QkvShape {
    /// Columns of a row of `x`.
    pub fn columns(&self) -> usize {
        (self.query_heads + 2 * self.pages.kv_heads()) * self.pages.head_dim()
    }

    /// Elements of a row of queries.
    pub fn query_elements(&self) -> usize {
        self.query_heads * self.pages.padded_dim()
    }
}

/// What a layer adds to its heads and normalises them with.
#[derive(Clone, Copy, Debug, Default)]
pub struct QkvWeights<'a> {
    /// A number for each column of `x`.
    pub bias: Option<DeviceSlice<'a, f32>>,
    /// Norms of queries and keys.
    pub norms: Option<QkNorms<'a>>,
}

/// Norms over the width of a head.
#[derive(Clone, Copy, Debug)]
pub struct QkNorms<'a> {
    /// Weights for query heads.
    pub queries: DeviceSlice<'a, f32>,
    /// Weights for key heads.
    pub keys: DeviceSlice<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// What the rows of a step need in every layer.
#[derive(Clone, Copy, Debug)]
pub struct RowPlaces<'a> {
    /// Cosines `[rows][rotary_dim / 2]`.
    pub cos: DeviceSlice<'a, f32>,
    /// Sines, alike.
    pub sin: DeviceSlice<'a, f32>,
    /// Where keys and values of each row go.
    pub slots: DeviceSlice<'a, u32>,
}

/// Refuses slots that no page of a pool of `pages` has; see the [module](super).
pub fn check_slots(slots: &[u32], shape: PageShape, pages: usize) -> Result<(), KernelError> {
    let limit = pages * shape.block_size();
    slots.iter().try_for_each(|&slot| KernelError::check_index("qkv", "slot", slot as usize, limit))
}

/// Prepares the heads of every row; see the [module](super).
pub fn qkv(
    launcher: &dyn Launcher,
    shape: &QkvShape,
    weights: QkvWeights<'_>,
    x: DeviceSlice<'_, f32>,
    places: RowPlaces<'_>,
    mut queries: DeviceSliceMut<'_, bf16>,
    mut pages: DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    let rows = places.slots.len();
    check_lengths(shape, &weights, x, &places)?;
    KernelError::check_len("qkv", "queries", queries.len(), rows * shape.query_elements())?;
    let page_elements = shape.pages.page_elements();
    let pool = pages.len().checked_div(page_elements).unwrap_or(0);
    KernelError::check_len("qkv", "pages", pages.len(), pool * page_elements)?;
    let (kernel, lanes) = kernel_for(shape);
    let heads = shape.query_heads + 2 * shape.pages.kv_heads();
    let threads = kernel_size("qkv", "threads of all heads", rows * heads * lanes)?;
    if threads == 0 {
        return Ok(());
    }
    let norms = weights.norms;
    let launch = Launch {
        kernel,
        grid: [threads.div_ceil(THREADS), 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: Args::new()
            .slice(x)
            .optional(weights.bias)
            .optional(norms.map(|norms| norms.queries))
            .optional(norms.map(|norms| norms.keys))
            .slice(places.cos)
            .slice(places.sin)
            .slice(places.slots)
            .slice_mut(&mut queries)
            .slice_mut(&mut pages)
            .bytes(&shape_bytes(shape, rows, pool, norms.map_or(0.0, |norms| norms.eps))),
    };
    // SAFETY: lengths are checked above, the kernel checks slots; the arguments are its parameters.
    unsafe { launcher.launch(&launch) }
}

fn check_lengths(
    shape: &QkvShape,
    weights: &QkvWeights<'_>,
    x: DeviceSlice<'_, f32>,
    places: &RowPlaces<'_>,
) -> Result<(), KernelError> {
    let (rows, dim) = (places.slots.len(), shape.pages.head_dim());
    shape.pages.require_dense("qkv")?;
    KernelError::check_index("qkv", "rotated dimension", shape.rotary_dim, dim + 1)?;
    if !shape.rotary_dim.is_multiple_of(2) {
        let reason = format!("{} dimensions cannot turn in pairs", shape.rotary_dim);
        return Err(KernelError::Unsupported { operation: "qkv", reason });
    }
    KernelError::check_len("qkv", "x", x.len(), rows * shape.columns())?;
    KernelError::check_len("qkv", "cos", places.cos.len(), rows * shape.rotary_dim / 2)?;
    KernelError::check_len("qkv", "sin", places.sin.len(), rows * shape.rotary_dim / 2)?;
    if let Some(bias) = weights.bias {
        KernelError::check_len("qkv", "bias", bias.len(), shape.columns())?;
    }
    if let Some(norms) = weights.norms {
        KernelError::check_len("qkv", "weights of the queries' norm", norms.queries.len(), dim)?;
        KernelError::check_len("qkv", "weights of the keys' norm", norms.keys.len(), dim)?;
    }
    Ok(())
}

/// Kernel, and lanes that share a head.
fn kernel_for(shape: &QkvShape) -> (&'static str, usize) {
    let dim = shape.pages.head_dim();
    if !dim.is_multiple_of(8) || !shape.rotary_dim.is_multiple_of(8) {
        return ("qkv_any", 32);
    }
    match dim {
        0..=64 => ("qkv_8", 8),
        65..=128 => ("qkv_16", 16),
        _ => ("qkv_32", 32),
    }
}

/// The kernel's `Shape`: words of four bytes. All are bounded by lengths that were checked.
fn shape_bytes(shape: &QkvShape, rows: usize, pool: usize, eps: f32) -> Vec<u8> {
    let pages = shape.pages;
    // A pool of 2^32 slots or more has none that a `u32` cannot name but the last, which means none.
    let slots = pool.saturating_mul(pages.block_size()).min(u32::MAX as usize);
    [
        rows as u32,
        shape.query_heads as u32,
        pages.kv_heads() as u32,
        pages.head_dim() as u32,
        pages.padded_dim() as u32,
        shape.rotary_dim as u32 / 2,
        u32::from(shape.pairs == Pairs::Interleaved),
        pages.block_size() as u32,
        slots as u32,
        eps.to_bits(),
    ]
    .into_iter()
    .flat_map(u32::to_ne_bytes)
    .collect()
}
