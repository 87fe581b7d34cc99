//! Launches of `gemv.cu` and `gemm.cu`: `y = x · Wᵀ + bias` over BF16 matrices.
//!
//! | argument | shape |
//! |---|---|
//! | `x` | `[rows][row_stride(inputs)]`, BF16, zeros beyond `inputs` |
//! | `weight` | `[outputs][row_stride(inputs)]`, BF16, zeros beyond `inputs` |
//! | `bias` | `[outputs]`, f32, or none |
//! | `y` | `[rows][outputs]`, f32, overwritten |
//!
//! Products are exact, sums are f32 in one fixed order, which a row does not share with its neighbours: the same launch
//! gives the same bits again. [`Invariance`] says whether another number of rows does, too.
//!
//! Many rows are a library's where the launcher has one (cuBLASLt) and [`Invariance::None`] allows it: it uses
//! instructions of the newest devices that the kernels here do not. Where it has no algorithm for a shape, such as an
//! odd number of outputs, the kernels here multiply. With [`Invariance::Batch`] they always do, since the library
//! chooses by the number of rows.
#![allow(unsafe_code)]

mod plan;
#[cfg(test)]
mod tests;

use half::bf16;

use crate::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, Launch, Launcher, Product, check_aligned, row_stride},
};
use plan::Plan;

/// What the bits of a row of `y` may depend on, besides that row of `x`, the weight and the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invariance {
    /// On the number of rows, on the device and on its library: kernel and splits are the fastest for them. Up to eight
    /// rows are one number in this.
    None,
    /// On nothing: a row has the same bits alone, in any batch, at any place of it, on any number of multiprocessors.
    Batch,
}

/// A weight matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub struct WeightView<'a> {
    /// Rows `row_stride(inputs)` apart, zero beyond `inputs`.
    pub values: DeviceSlice<'a, bf16>,
    /// Rows of the matrix, the width of `y`.
    pub outputs: usize,
    /// Columns of the matrix, the width of `x`.
    pub inputs: usize,
}

/// Scratch memory of [`linear`]: for one launch at a time, so one for each stream.
#[derive(Debug)]
pub struct Workspace<'a> {
    /// Sums of the splits, or the library's: the more there is, the more algorithms it has; those that need none do
    /// where there is none. It uses what starts on 256 bytes. What it holds does not matter.
    pub partials: DeviceSliceMut<'a, f32>,
    /// Blocks that have come so far, by tile. Zero before the first call; every call leaves it zero.
    pub arrivals: DeviceSliceMut<'a, u32>,
}

/// Elements of a [`Workspace`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceLen {
    /// Of `partials`.
    pub partials: usize,
    /// Of `arrivals`.
    pub arrivals: usize,
}

impl WorkspaceLen {
    /// Enough for either.
    pub fn max(self, other: WorkspaceLen) -> WorkspaceLen {
        WorkspaceLen {
            partials: self.partials.max(other.partials),
            arrivals: self.arrivals.max(other.arrivals),
        }
    }
}

/// Rows from which on a library multiplies: fewer are bound by the reading of the weights, which the kernels here do as
/// fast.
pub const LIBRARY_ROWS_MIN: usize = 65;

/// `partials` with which the library has all its algorithms: 32 MiB, its own advice for the newest devices.
pub const LIBRARY_PARTIALS: usize = 8 << 20;

/// Inputs, outputs and rows at most: kernels count elements of a few rows, and rows, in 32 bits.
const INPUTS_MAX: usize = 1 << 24;
const ROWS_MAX: usize = 1 << 30;

/// What [`linear`] needs at most for a weight of this shape and up to `rows_max` rows, on a device with as many
/// multiprocessors: at most some 20 MB, and only where a sum is split so that a small matrix occupies all of a device.
pub fn workspace_len(
    multiprocessors: u32,
    outputs: usize,
    inputs: usize,
    rows_max: usize,
    invariance: Invariance,
) -> Result<WorkspaceLen, KernelError> {
    check_shape(outputs, inputs, rows_max)?;
    Ok(plan::workspace_len(multiprocessors as usize, outputs, inputs, rows_max, invariance))
}

/// Multiplies; see the module for shapes. Without inputs `y` is the bias, or zero; without outputs or rows nothing
/// happens.
pub fn linear(
    launcher: &dyn Launcher,
    x: DeviceSlice<'_, bf16>,
    weight: WeightView<'_>,
    bias: Option<DeviceSlice<'_, f32>>,
    mut y: DeviceSliceMut<'_, f32>,
    workspace: &mut Workspace<'_>,
    invariance: Invariance,
) -> Result<(), KernelError> {
    let WeightView { values, outputs, inputs } = weight;
    let rows = y.len().checked_div(outputs).unwrap_or(0);
    check_shape(outputs, inputs, rows)?;
    let stride = row_stride(inputs);
    KernelError::check_len("linear", "weight", values.len(), outputs * stride)?;
    KernelError::check_len("linear", "y", y.len(), rows * outputs)?;
    if let Some(bias) = bias {
        KernelError::check_len("linear", "bias", bias.len(), outputs)?;
    }
    if outputs == 0 {
        return Ok(());
    }
    KernelError::check_len("linear", "x", x.len(), rows * stride)?;
    if rows == 0 {
        return Ok(());
    }
    if invariance == Invariance::None && rows >= LIBRARY_ROWS_MIN {
        let (y, scratch) =
            (y.range(0..rows * outputs), workspace.partials.range(0..workspace.partials.len()));
        let product = Product { x, weight: values, bias, y, scratch, rows, outputs, stride };
        if launcher.multiply(&product)? {
            return Ok(());
        }
    }
    let plan = Plan::new(launcher.multiprocessors() as usize, outputs, inputs, rows, invariance);
    check_workspace(workspace, plan.workspace_len())?;
    for (argument, address) in
        [("x", x.address()), ("weight", values.address()), ("partials", workspace.partials.address())]
    {
        check_aligned("linear", argument, address)?;
    }
    let (blocks, launches) = if plan.at_once { (plan.splits, 1) } else { (1, plan.splits) };
    for first_split in 0..launches {
        let mut args = Args::new()
            .slice(x)
            .slice(values)
            .optional(bias.filter(|_| first_split + 1 == launches))
            .slice_mut(&mut y)
            .slice_mut(&mut workspace.partials)
            .slice_mut(&mut workspace.arrivals)
            .u32(rows as u32)
            .u32(outputs as u32)
            .u32(stride as u32)
            .u32(plan.steps_per_split as u32);
        if *plan.tile != plan::GEMV {
            args = args.u32(first_split as u32);
        }
        let launch = Launch {
            kernel: plan.tile.kernel,
            grid: [grid_width(plan.tiles)?, blocks as u32, 1],
            threads: 32 * plan.warps() as u32,
            shared_bytes: plan.shared_bytes() as u32,
            args,
        };
        // SAFETY: lengths and alignment are checked above, and the workspace is as long as the plan says; the arguments
        // are the kernel's parameters.
        unsafe { launcher.launch(&launch)? };
    }
    Ok(())
}

/// Makes a launcher's library ready for this product with up to `rows_max` rows, so that none of them waits for what a
/// first one waits for. `x` and `y` are of one row, and begin where those of many will; `y` is overwritten.
pub fn rehearse(
    launcher: &dyn Launcher,
    x: DeviceSlice<'_, bf16>,
    weight: WeightView<'_>,
    y: DeviceSliceMut<'_, f32>,
    workspace: &mut Workspace<'_>,
    (invariance, rows_max): (Invariance, usize),
) -> Result<(), KernelError> {
    let WeightView { values, outputs, inputs } = weight;
    check_shape(outputs, inputs, rows_max)?;
    if invariance != Invariance::None {
        return Ok(());
    }
    let scratch = workspace.partials.range(0..workspace.partials.len());
    let product =
        Product { x, weight: values, bias: None, y, scratch, rows: 1, outputs, stride: row_stride(inputs) };
    launcher.rehearse(&product, LIBRARY_ROWS_MIN..=rows_max)
}

fn check_shape(outputs: usize, inputs: usize, rows: usize) -> Result<(), KernelError> {
    if inputs > INPUTS_MAX || outputs > ROWS_MAX || rows > ROWS_MAX {
        return unsupported(format!(
            "{outputs} outputs of {inputs} inputs for {rows} rows; at most {ROWS_MAX} outputs and rows and \
             {INPUTS_MAX} inputs are supported"
        ));
    }
    Ok(())
}

fn check_workspace(workspace: &Workspace<'_>, needed: WorkspaceLen) -> Result<(), KernelError> {
    let (partials, arrivals) = (workspace.partials.len(), workspace.arrivals.len());
    if partials < needed.partials || arrivals < needed.arrivals {
        return unsupported(format!(
            "the workspace holds {partials} partial sums and {arrivals} arrivals, this shape needs {} and {}; \
             workspace_len says how much to take",
            needed.partials, needed.arrivals
        ));
    }
    Ok(())
}

/// Kernels load and store 16 bytes at once.
fn grid_width(tiles: usize) -> Result<u32, KernelError> {
    match i32::try_from(tiles) {
        Ok(width) => Ok(width.unsigned_abs()),
        Err(_) => unsupported(format!("{tiles} tiles of outputs and rows; a grid has 2147483647 at most")),
    }
}

fn unsupported<T>(reason: String) -> Result<T, KernelError> {
    Err(KernelError::Unsupported { operation: "linear", reason })
}
