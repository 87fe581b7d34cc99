//! Launches of `kernel.cu`.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;

use half::bf16;

use crate::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, GRID_Y_MAX, Launch, Launcher, kernel_size, row_stride},
};

const THREADS: u32 = 128;
const COLUMNS_PER_THREAD: u32 = 8;

/// Marks a token that is not an id, but says by its other bits where in `drawn` the id is.
pub const DRAWN: u32 = 1 << 31;

/// Gathers rows of `width` columns; see the [module](super). `table` holds the rows of this rank, [`row_stride`] apart,
/// of which the first belongs to token `first`.
///
/// Tokens that are marked [`DRAWN`] are looked up in `drawn`, which may be empty: an index beyond it, and
/// [`NO_TOKEN`](crate::sampling::cuda::NO_TOKEN) there, give zeros like any id that the table lacks.
pub fn embedding(
    launcher: &dyn Launcher,
    tokens: DeviceSlice<'_, u32>,
    drawn: DeviceSlice<'_, u32>,
    table: DeviceSlice<'_, bf16>,
    width: usize,
    first: usize,
    mut out: DeviceSliceMut<'_, f32>,
) -> Result<(), KernelError> {
    let (rows, stride) = (tokens.len(), row_stride(width));
    let table_rows = table.len().checked_div(stride).unwrap_or(0);
    KernelError::check_len("embedding", "table", table.len(), table_rows * stride)?;
    KernelError::check_len("embedding", "out", out.len(), rows * width)?;
    let columns = kernel_size("embedding", "width", width)?;
    if rows == 0 || width == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel: "embedding_bf16",
        grid: [columns.div_ceil(THREADS * COLUMNS_PER_THREAD), rows.min(GRID_Y_MAX) as u32, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: Args::new()
            .slice(tokens)
            .slice(drawn)
            .u32(kernel_size("embedding", "drawn tokens", drawn.len())?)
            .slice(table)
            .u32(kernel_size("embedding", "rows of the table", table_rows)?)
            .u32(stride as u32)
            .u32(kernel_size("embedding", "first token of the table", first)?)
            .slice_mut(&mut out)
            .u32(kernel_size("embedding", "tokens", rows)?)
            .u32(columns),
    };
    // SAFETY: lengths are checked above, the kernel reads rows of the table only; the arguments are its parameters.
    unsafe { launcher.launch(&launch) }
}
