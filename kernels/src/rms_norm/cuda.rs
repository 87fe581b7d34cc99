//! Launches of `kernel.cu`.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;

use half::bf16;

use crate::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, Launch, Launcher, check_aligned, kernel_size, row_stride},
};

/// A norm's weights.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// One for each column.
    pub weight: DeviceSlice<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Adds and normalises every row; see the [module](super). Rows of `out` are [`row_stride`] apart.
pub fn rms_norm(
    launcher: &dyn Launcher,
    mut residual: DeviceSliceMut<'_, f32>,
    delta: Option<DeviceSlice<'_, f32>>,
    norm: Norm<'_>,
    out: DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    let width = norm.weight.len();
    let rows = residual.len().checked_div(width).unwrap_or(0);
    KernelError::check_len("rms_norm", "out", out.len(), rows * row_stride(width))?;
    let pointers = Args::new().slice_mut(&mut residual).optional(delta).optional::<u32>(None);
    run(launcher, residual.address(), pointers, residual.len(), delta, norm, out)
}

/// Normalises `residual + delta` of chosen rows and changes neither: row `i` of `out` comes from row `rows_of[i]`, and
/// is zero where that is no row.
pub fn rms_norm_of_rows(
    launcher: &dyn Launcher,
    residual: DeviceSlice<'_, f32>,
    delta: Option<DeviceSlice<'_, f32>>,
    rows_of: DeviceSlice<'_, u32>,
    norm: Norm<'_>,
    out: DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    let stride = row_stride(norm.weight.len());
    KernelError::check_len("rms_norm", "out", out.len(), rows_of.len() * stride)?;
    let pointers = Args::new().slice(residual).optional(delta).slice(rows_of);
    run(launcher, residual.address(), pointers, residual.len(), delta, norm, out)
}

/// `pointers` are the first three parameters; `residual` is an address, of `len` elements; `out` holds whole rows.
fn run(
    launcher: &dyn Launcher,
    residual: u64,
    pointers: Args,
    len: usize,
    delta: Option<DeviceSlice<'_, f32>>,
    norm: Norm<'_>,
    mut out: DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    let (width, stride) = (norm.weight.len(), row_stride(norm.weight.len()));
    let source_rows = len.checked_div(width).unwrap_or(0);
    KernelError::check_len("rms_norm", "residual", len, source_rows * width)?;
    if let Some(delta) = delta {
        KernelError::check_len("rms_norm", "delta", delta.len(), len)?;
    }
    let rows = kernel_size("rms_norm", "rows", out.len().checked_div(stride).unwrap_or(0))?;
    let columns = kernel_size("rms_norm", "width", width)?;
    if rows == 0 {
        return Ok(());
    }
    let (kernel, threads) = kernel_for(columns);
    if width.is_multiple_of(4) {
        check_aligned("rms_norm", "weight", norm.weight.address())?;
        check_aligned("rms_norm", "out", out.address())?;
        delta.map_or(Ok(()), |delta| check_aligned("rms_norm", "delta", delta.address()))?;
        check_aligned("rms_norm", "residual", residual)?;
    }
    let launch = Launch {
        kernel,
        grid: [rows, 1, 1],
        threads,
        shared_bytes: 32 * size_of::<f32>() as u32,
        args: pointers
            .u32(kernel_size("rms_norm", "rows of the residual", source_rows)?)
            .slice(norm.weight)
            .f32(norm.eps)
            .slice_mut(&mut out)
            .u32(columns)
            .u32(stride as u32),
    };
    // SAFETY: lengths are checked above, the kernel checks `rows_of`; the arguments are its parameters. It writes to
    // `residual` only where there is no `rows_of`, and then `pointers` come from an exclusive view.
    unsafe { launcher.launch(&launch) }
}

/// Threads that share a row, in whatever kernel normalises it: its sum of squares is theirs, in order.
pub(crate) fn threads_for(width: usize) -> u32 {
    kernel_for(width as u32).1
}

/// Kernel and threads of a block. They depend on the width alone, so that a row's sum does, too.
fn kernel_for(width: u32) -> (&'static str, u32) {
    let threads = |units: u32| units.next_multiple_of(32).min(1024);
    if !width.is_multiple_of(4) {
        return ("rms_norm_ragged", threads(width));
    }
    match width {
        0..=2048 => ("rms_norm_1", threads(width / 4)),
        2049..=4096 => ("rms_norm_2", threads(width.div_ceil(8))),
        4097..=16384 => ("rms_norm_4", threads(width.div_ceil(16))),
        _ => ("rms_norm_wide", 1024),
    }
}
