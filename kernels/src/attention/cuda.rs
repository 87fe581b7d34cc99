//! Launches of `decode.cu` and `prefill.cu`, which share `attention.cuh`.
//!
//! | argument | shape |
//! |---|---|
//! | `queries` | `[rows, query heads, padded_dim]`, BF16, zero beyond `head_dim` |
//! | `pages` | `[page, KV head, keys or values, block_size, padded_dim]`, BF16, zero beyond `head_dim` |
//! | `sinks` | `[query heads]`, f32: a logit per head that takes part in the softmax and has no value |
//! | `out` | `[rows, row_stride(query heads · head_dim)]`, BF16 |
//!
//! A [`Plan`] is made once a step; spans of one row are decodes, others prefills.
#![allow(unsafe_code)]

mod plan;
#[cfg(test)]
mod tests;

use std::ops::Range;

use half::bf16;

use super::AttentionShape;
pub use plan::{CHUNK_UNIT, Chunks, Frame, Plan, workspace_floats_max};

use crate::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, Launch, Launcher, check_aligned, row_stride},
    kv_append::PageShape,
};

/// What the kernels of one layer read.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The layer's shape; pages and heads as they were planned for.
    pub shape: &'a AttentionShape,
    /// Queries of all rows, after rotation.
    pub queries: DeviceSlice<'a, bf16>,
    /// The layer's pages, this step's keys and values included.
    pub pages: DeviceSlice<'a, bf16>,
    /// Logits of heads' sinks.
    pub sinks: Option<DeviceSlice<'a, f32>>,
    /// The step's sequences.
    pub plan: &'a Plan,
    /// A copy of [`Plan::numbers`] of this plan, [`Plan::numbers_room`] long.
    pub numbers: DeviceSlice<'a, u32>,
}

/// Attends, all rows of the plan. `workspace` has at least [`Plan::workspace_floats`] floats, whose contents mean
/// nothing.
pub fn attention(
    launcher: &dyn Launcher,
    inputs: &Inputs<'_>,
    mut workspace: DeviceSliceMut<'_, f32>,
    mut out: DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    let (floats, elements) = (workspace.len(), out.len());
    decode(launcher, inputs, workspace.range(0..floats), out.range(0..elements))?;
    prefill(launcher, inputs, out)
}

/// Attends the plan's decodes, and leaves the other rows of `out` alone.
pub fn decode(
    launcher: &dyn Launcher,
    inputs: &Inputs<'_>,
    mut workspace: DeviceSliceMut<'_, f32>,
    mut out: DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    check(inputs, out.len())?;
    let plan = inputs.plan;
    let needed = plan.workspace_floats();
    check_aligned("attention", "workspace", workspace.address())?;
    KernelError::check_index("attention", "floats of workspace needed", needed, workspace.len() + 1)?;
    let chunks = chunks_seen(plan, inputs.shape);
    if plan.decodes == 0 || plan.row_tiles == 0 || chunks == 0 {
        return Ok(());
    }
    for pass in &plan.passes {
        decode_pass(launcher, inputs, pass, chunks, workspace.range(0..needed), &mut out)?;
    }
    Ok(())
}

/// Some of the decodes, of up to `chunks` chunks each. Others may have left partial sums in the workspace before.
fn decode_pass(
    launcher: &dyn Launcher,
    inputs: &Inputs<'_>,
    pass: &Range<usize>,
    chunks: usize,
    mut workspace: DeviceSliceMut<'_, f32>,
    out: &mut DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    let plan = inputs.plan;
    let class = Class::of(plan.pages);
    let (sequences, heads) = (pass.len() as u32, plan.kv_of_query.len() as u32);
    let rows = grid_limit("KV heads and their query heads", plan.pages.kv_heads() * plan.row_tiles)?;
    let work = inputs.numbers.range(plan.first_partials_at + pass.start..plan.tiles_at);
    let args = arguments(inputs, pass.start, work, plan.decode_chunk, Some(&mut workspace), out);
    let launch = Launch {
        kernel: class.decode_kernel(),
        grid: [chunks as u32, rows, sequences],
        threads: THREADS,
        shared_bytes: class.decode_layout().shared_bytes(),
        args: args.clone(),
    };
    // SAFETY: the kernels' one parameter; the plan is checked against all lengths, and its numbers are on the device.
    unsafe { launcher.launch(&launch) }?;
    if chunks == 1 {
        return Ok(());
    }
    let merge = Launch {
        kernel: "attention_merge",
        grid: [heads, sequences, 1],
        threads: (plan.pages.padded_dim() as u32 / 2).next_multiple_of(32),
        shared_bytes: 0,
        args,
    };
    // SAFETY: as above; the partial sums are in the workspace, which has room for all of the pass.
    unsafe { launcher.launch(&merge) }
}

/// Attends the plan's prefills, and leaves the other rows of `out` alone.
pub fn prefill(
    launcher: &dyn Launcher,
    inputs: &Inputs<'_>,
    mut out: DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    check(inputs, out.len())?;
    let plan = inputs.plan;
    if plan.prefill_tiles == 0 {
        return Ok(());
    }
    let class = Class::of(plan.pages);
    let work = inputs.numbers.range(plan.tiles_at..plan.groups_at);
    let chunked = plan.prefill_chunk.is_some();
    let launch = Launch {
        kernel: class.prefill_kernel(chunked),
        grid: [plan.prefill_tiles as u32, grid_limit("KV heads", plan.pages.kv_heads())?, 1],
        threads: THREADS,
        shared_bytes: class.prefill_layout(chunked).shared_bytes(),
        args: arguments(inputs, 0, work, plan.prefill_chunk.unwrap_or(CHUNK_UNIT), None, &mut out),
    };
    // SAFETY: as for decodes.
    unsafe { launcher.launch(&launch) }
}

const THREADS: u32 = 128;

/// Numbers of a span in the plan.
const SPAN_NUMBERS: usize = 4;

fn check(inputs: &Inputs<'_>, out: usize) -> Result<(), KernelError> {
    let Inputs { shape, queries, pages, sinks, plan, numbers } = inputs;
    if shape.pages != plan.pages || shape.kv_of_query != plan.kv_of_query {
        let reason = "the layer's pages or heads are not those of the plan".to_owned();
        return Err(KernelError::Unsupported { operation: "attention", reason });
    }
    if !(shape.scale > 0.0 && (shape.scale * std::f32::consts::LOG2_E).is_finite()) {
        let reason = format!("a scale of {}; it must be positive and finite", shape.scale);
        return Err(KernelError::Unsupported { operation: "attention", reason });
    }
    let (heads, padded) = (plan.kv_of_query.len(), plan.pages.padded_dim());
    KernelError::check_len("attention", "queries", queries.len(), plan.rows * heads * padded)?;
    KernelError::check_len("attention", "out", out, plan.rows * row_stride(heads * plan.pages.head_dim()))?;
    KernelError::check_len("attention", "numbers of the plan", numbers.len(), plan.numbers_room())?;
    let addresses = [
        ("queries", queries.address()),
        ("pages", pages.address()),
        ("numbers of the plan", numbers.address()),
    ];
    for (argument, address) in addresses {
        check_aligned("attention", argument, address)?;
    }
    if let Some(sinks) = sinks {
        KernelError::check_len("attention", "sinks", sinks.len(), heads)?;
    }
    let planned = plan.page_count * plan.pages.page_elements();
    KernelError::check_index("attention", "elements of the planned pages", planned, pages.len() + 1)
}

/// Chunks that a decode of this layer takes at most.
fn chunks_seen(plan: &Plan, shape: &AttentionShape) -> usize {
    // A window that begins within a chunk reaches into one more.
    let of_window = shape.window.map(|window| (window.get() - 1).div_ceil(plan.decode_chunk) + 1);
    of_window.map_or(plan.decode_chunks, |chunks| chunks.min(plan.decode_chunks))
}

fn grid_limit(what: &'static str, blocks: usize) -> Result<u32, KernelError> {
    KernelError::check_index("attention", what, blocks, 65_536)?;
    Ok(blocks as u32)
}

/// `struct Call` of `attention.cuh`, field by field; none needs padding. Sequences are counted from `first_span` on.
fn arguments(
    inputs: &Inputs<'_>,
    first_span: usize,
    work: DeviceSlice<'_, u32>,
    chunk: usize,
    workspace: Option<&mut DeviceSliceMut<'_, f32>>,
    out: &mut DeviceSliceMut<'_, bf16>,
) -> Args {
    let Inputs { shape, queries, pages, sinks, plan, numbers } = inputs;
    let (heads, padded) = (plan.kv_of_query.len(), plan.pages.padded_dim());
    let address = |at: usize| numbers.range(at..numbers.len()).address();
    let words = [
        queries.address(),
        pages.address(),
        address(SPAN_NUMBERS * first_span),
        address(plan.tables_at),
        address(plan.groups_at),
        work.address(),
        sinks.map_or(0, |sinks| sinks.address()),
        workspace.map_or(0, |workspace| workspace.address()),
        out.address(),
        plan.pages.page_elements() as u64,
        (plan.partials * heads * padded) as u64,
    ];
    let halves = [
        (shape.scale * std::f32::consts::LOG2_E).to_bits(),
        heads as u32,
        plan.pages.head_dim() as u32,
        padded as u32,
        plan.pages.block_size() as u32,
        row_stride(heads * plan.pages.head_dim()) as u32,
        shape.window.map_or(u32::MAX, |window| u32::try_from(window.get()).unwrap_or(u32::MAX)),
        chunk as u32,
        plan.row_tiles as u32,
        0,
    ];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend(halves.iter().flat_map(|half| half.to_ne_bytes()));
    Args::new().bytes(&bytes)
}

/// The kernels that serve a head: those of the next wider of four widths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    D64,
    D96,
    D128,
    D256,
}

/// `Layout` of `attention.cuh`.
struct Layout {
    dim: u32,
    groups: u32,
    share: u32,
    stages: u32,
    keep_queries: bool,
}

impl Class {
    fn of(pages: PageShape) -> Class {
        match pages.padded_dim() {
            0..=64 => Class::D64,
            65..=96 => Class::D96,
            97..=128 => Class::D128,
            _ => Class::D256,
        }
    }

    fn dim(self) -> u32 {
        match self {
            Class::D64 => 64,
            Class::D96 => 96,
            Class::D128 => 128,
            Class::D256 => 256,
        }
    }

    /// Pairs of a token and a query head in a prefill's tile.
    fn prefill_rows(self) -> usize {
        self.prefill_layout(false).groups as usize * 16
    }

    fn decode_kernel(self) -> &'static str {
        match self {
            Class::D64 => "attention_decode_d64",
            Class::D96 => "attention_decode_d96",
            Class::D128 => "attention_decode_d128",
            Class::D256 => "attention_decode_d256",
        }
    }

    fn decode_layout(self) -> Layout {
        let stages = if self == Class::D64 { 4 } else { 2 };
        Layout { dim: self.dim(), groups: 1, share: 4, stages, keep_queries: true }
    }

    fn prefill_kernel(self, chunked: bool) -> &'static str {
        match (self, chunked) {
            (Class::D64, false) => "attention_prefill_d64",
            (Class::D96, false) => "attention_prefill_d96",
            (Class::D128, false) => "attention_prefill_d128",
            (Class::D256, false) => "attention_prefill_d256",
            (Class::D64, true) => "attention_prefill_chunked_d64",
            (Class::D96, true) => "attention_prefill_chunked_d96",
            (Class::D128, true) => "attention_prefill_chunked_d128",
            (Class::D256, true) => "attention_prefill_chunked_d256",
        }
    }

    fn prefill_layout(self, chunked: bool) -> Layout {
        let (groups, share) = if self == Class::D256 { (2, 2) } else { (4, 1) };
        let keep_queries = self == Class::D64 || self != Class::D256 && !chunked;
        Layout { dim: self.dim(), groups, share, stages: 2, keep_queries }
    }
}

impl Layout {
    /// The end of the stages, as the kernel counts.
    fn shared_bytes(&self) -> u32 {
        let keys = if self.dim <= 128 { 64 } else { 32 };
        let (rows, stride) = (self.groups * 16, self.dim + 8);
        let queries = rows * stride * 2;
        let exchange = if self.share > 1 { rows * (keys + 8) * 2 + rows * self.share * 4 } else { 0 };
        let before = if self.keep_queries { queries.max(exchange) } else { queries + exchange };
        before + self.stages * 2 * keys * stride * 2
    }
}
