//! The emulator as a device that operations are launched on.
#![allow(unsafe_code)]

use consort_emulator::{Grid, Memory, Settings};
use half::bf16;

use crate::{
    KernelError,
    buffer::Plain,
    cuda::{DeviceSlice, DeviceSliceMut, Launch, Launcher, row_stride},
    element::through,
};

/// Runs each launch at once, in the way that `settings` say.
pub(crate) struct Emulated {
    pub(crate) settings: Settings,
    pub(crate) multiprocessors: u32,
}

impl Emulated {
    /// One for each legal way to run a block's threads and copies.
    pub(crate) fn every_way() -> impl Iterator<Item = Emulated> {
        Settings::all().map(|settings| Emulated { settings, multiprocessors: 4 })
    }
}

/// The emulator's form of a launch.
pub(crate) fn grid<'a>(launch: &Launch<'a>, rank: u32) -> Grid<'a> {
    Grid {
        kernel: launch.kernel,
        grid: launch.grid,
        threads: [launch.threads, 1, 1],
        shared_bytes: launch.shared_bytes as usize,
        arguments: launch.args.pointers(),
        argument_bytes: launch.args.sizes().map(|bytes| bytes as u32).collect(),
        rank,
    }
}

impl Launcher for Emulated {
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        let outcome = unsafe { consort_emulator::launch(grid(launch, 0), self.settings) };
        // A fault is a bug in a kernel, or in how it was launched: a test ends here.
        outcome.unwrap_or_else(|fault| panic!("{fault} ({:?})", self.settings));
        Ok(())
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }
}

/// A view of emulated memory, to read.
pub(crate) fn device_slice<T: Plain>(memory: &Memory<T>) -> DeviceSlice<'_, T> {
    // SAFETY: the memory is there, initialised, and borrowed as long as the view.
    unsafe { DeviceSlice::new(memory.address(), memory.len()) }
}

/// A view of emulated memory, to write.
pub(crate) fn device_slice_mut<T: Plain>(memory: &mut Memory<T>) -> DeviceSliceMut<'_, T> {
    // SAFETY: as above, exclusively.
    unsafe { DeviceSliceMut::new(memory.address(), memory.len()) }
}

/// A row-major BF16 matrix as kernels read it, with the values that it holds.
pub(crate) fn bf16_rows(values: &[f32], width: usize) -> (Vec<f32>, Vec<bf16>) {
    let values: Vec<f32> = values.iter().copied().map(through::<bf16>).collect();
    let mut rows = Vec::new();
    for row in values.chunks_exact(width) {
        rows.extend(row.iter().copied().map(bf16::from_f32));
        rows.resize(rows.len().next_multiple_of(row_stride(width)), bf16::ZERO);
    }
    (values, rows)
}
