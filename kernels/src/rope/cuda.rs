//! Launches of `kernel.cu`. Heads themselves are turned by [`qkv`](crate::qkv) on the way into their pages.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;

use crate::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, GRID_Y_MAX, Launch, Launcher, kernel_size},
};

const THREADS: u32 = 128;

/// Cosines and sines `[rows, frequencies]` for each row's position, times `attention_factor`.
pub fn rope_angles(
    launcher: &dyn Launcher,
    positions: DeviceSlice<'_, u32>,
    frequencies: DeviceSlice<'_, f32>,
    attention_factor: f32,
    mut cos: DeviceSliceMut<'_, f32>,
    mut sin: DeviceSliceMut<'_, f32>,
) -> Result<(), KernelError> {
    let len = positions.len() * frequencies.len();
    KernelError::check_len("rope_angles", "cos", cos.len(), len)?;
    KernelError::check_len("rope_angles", "sin", sin.len(), len)?;
    let half = kernel_size("rope_angles", "frequencies", frequencies.len())?;
    let rows = kernel_size("rope_angles", "positions", positions.len())?;
    if len == 0 {
        return Ok(());
    }
    // Few frequencies in few threads, in whole warps.
    let threads = half.next_multiple_of(32).min(THREADS);
    let launch = Launch {
        kernel: "rope_angles",
        grid: [half.div_ceil(threads), rows.min(GRID_Y_MAX as u32), 1],
        threads,
        shared_bytes: 0,
        args: Args::new()
            .slice(positions)
            .slice(frequencies)
            .f32(attention_factor)
            .slice_mut(&mut cos)
            .slice_mut(&mut sin)
            .u32(rows)
            .u32(half),
    };
    // SAFETY: lengths are checked above; the arguments are the kernel's parameters.
    unsafe { launcher.launch(&launch) }
}
