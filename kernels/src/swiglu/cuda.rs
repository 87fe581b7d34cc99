//! Launches of `kernel.cu`.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;

use half::bf16;

use crate::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, Launch, Launcher, row_stride},
};

const THREADS: u32 = 256;
const COLUMNS_PER_THREAD: u32 = 4;

/// Activates; shapes as in the [module](super), but rows of `out` are [`row_stride`] apart.
pub fn swiglu(
    launcher: &dyn Launcher,
    gate_up: DeviceSlice<'_, f32>,
    width: usize,
    mut out: DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    let stride = row_stride(width);
    let rows = out.len().checked_div(stride).unwrap_or(0);
    KernelError::check_len("swiglu", "out", out.len(), rows * stride)?;
    KernelError::check_len("swiglu", "gate_up", gate_up.len(), 2 * rows * width)?;
    if rows == 0 {
        return Ok(());
    }
    let launch = Launch {
        kernel: "swiglu_bf16",
        grid: [(stride as u32).div_ceil(THREADS * COLUMNS_PER_THREAD), rows.min(65_535) as u32, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: Args::new()
            .slice(gate_up)
            .u32(width as u32)
            .u32(rows as u32)
            .slice_mut(&mut out)
            .u32(stride as u32),
    };
    // SAFETY: lengths are checked above; the arguments are the kernel's parameters.
    unsafe { launcher.launch(&launch) }
}
