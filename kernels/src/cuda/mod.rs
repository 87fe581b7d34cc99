//! What CUDA kernels have in common: views of device memory, launches, and the header of their texts.
//!
//! An operation's CUDA side is `kernel.cu`, the text, and `cuda.rs`, which checks shapes, chooses a kernel and a grid
//! and packs the arguments. Whoever runs kernels in order is a [`Launcher`]: a stream of a device, or in tests the
//! emulator, which runs the same text on the host. [`sources`] lists the texts and [`cubins`] gives what a GPU runs of
//! them: built in, or compiled by NVRTC where it is found. No file here needs CUDA to build.
#![allow(unsafe_code)]

pub mod arch;
mod args;
pub mod cubins;
pub mod declarations;
pub mod device;
mod dynamic;
pub mod image;
pub mod nccl;
pub mod nvrtc;
mod product;
mod search;
pub mod settings;
mod slice;
pub mod sources;
mod stream;
#[cfg(test)]
mod testing;

pub use args::Args;
pub use product::Product;
pub use slice::{DeviceSlice, DeviceSliceMut};
pub use stream::StreamHandle;

use std::ops::RangeInclusive;

use crate::KernelError;

/// One launch, in the terms of `cuLaunchKernel`.
#[derive(Debug)]
pub struct Launch<'a> {
    /// Name of the kernel, as in its text.
    pub kernel: &'a str,
    /// Blocks along x, y and z. A grid without blocks is not launched at all.
    pub grid: [u32; 3],
    /// Threads of a block, along x.
    pub threads: u32,
    /// Dynamic shared memory of a block. Beyond 48 KiB a device wants to be told before the kernel's first launch
    /// (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`); what a text declares is the most that is asked for.
    pub shared_bytes: u32,
    /// Parameters, in order.
    pub args: Args,
}

/// Runs kernels one after another on one device.
pub trait Launcher {
    /// Enqueues a launch.
    ///
    /// # Safety
    /// The arguments are those of the kernel's text, in number, order and size; the memory they point to is this
    /// device's (or a peer's that it can reach), as large as the kernel's contract says, and stays until the work
    /// enqueued here is done.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), KernelError>;

    /// Multiprocessors of the device: how many blocks it takes to keep all of it busy.
    fn multiprocessors(&self) -> u32;

    /// Enqueues a product on a library that is made for many rows. False where there is none, or where it does not take
    /// this one: the caller multiplies then.
    fn multiply(&self, product: &Product<'_>) -> Result<bool, KernelError> {
        let _ = product;
        Ok(false)
    }

    /// Makes a library ready for products like this one, which is of one row, with any of these numbers of rows: it
    /// chooses how to multiply, and multiplies once in each way. What the driver loads for a kernel it loads at the
    /// kernel's first launch, and may wait for the device with that; in a step, the device may wait for others.
    fn rehearse(&self, product: &Product<'_>, rows: RangeInclusive<usize>) -> Result<(), KernelError> {
        let _ = (product, rows);
        Ok(())
    }

    /// The stream that launches go to, for libraries that enqueue by themselves; `None` where there is no such thing.
    fn stream(&self) -> Option<StreamHandle<'_>> {
        None
    }
}

/// Refuses an address that 16-byte accesses would not take: on a device they end its context.
pub(crate) fn check_aligned(
    operation: &'static str,
    argument: &str,
    address: u64,
) -> Result<(), KernelError> {
    if address.is_multiple_of(16) {
        return Ok(());
    }
    let reason = format!("{argument} at {address:#x} does not start on 16 bytes");
    Err(KernelError::Unsupported { operation, reason })
}

/// Elements from one row of a BF16 matrix to the next, where rows have `width` elements: a row starts on 16 bytes. What
/// lies between is zero, in weights and in activations, so that kernels may multiply it.
pub fn row_stride(width: usize) -> usize {
    width.next_multiple_of(8)
}

/// Most blocks along y (and z) of a grid; along x there may be 2^31 - 1.
pub(crate) const GRID_Y_MAX: usize = 65_535;

/// `value` as kernels take sizes: below 2^31, so that sums of two do not overflow.
pub(crate) fn kernel_size(
    operation: &'static str,
    what: &'static str,
    value: usize,
) -> Result<u32, KernelError> {
    KernelError::check_index(operation, what, value, 1 << 31)?;
    Ok(value as u32)
}
