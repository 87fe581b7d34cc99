//! The emulator as a device that operations are launched on.
#![allow(unsafe_code)]

use std::cell::RefCell;

use consort_emulator::{Fault, Grid, Memory, Settings};

use crate::{
    KernelError,
    buffer::Plain,
    cuda::{Args, DeviceSlice, DeviceSliceMut, Launch, Launcher, row_stride, sources::SOURCES},
    element::{bf16, through},
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
    check_declared(launch);
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

/// One rank's launches, kept until all ranks [run together](run_together).
pub(crate) struct Stream {
    pub(crate) multiprocessors: u32,
    launches: RefCell<Vec<Waiting>>,
}

struct Waiting {
    kernel: String,
    grid: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    args: Args,
}

impl Stream {
    pub(crate) fn new(multiprocessors: u32) -> Stream {
        Stream { multiprocessors, launches: RefCell::default() }
    }
}

impl Launcher for Stream {
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), KernelError> {
        self.launches.borrow_mut().push(Waiting {
            kernel: launch.kernel.to_owned(),
            grid: launch.grid,
            threads: launch.threads,
            shared_bytes: launch.shared_bytes,
            args: launch.args.clone(),
        });
        Ok(())
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }
}

/// Runs what the streams of all ranks hold, each in its order, ranks side by side.
///
/// # Safety
/// What the launches point to is still there: [`Memory`] that has not been dropped since.
pub(crate) unsafe fn run_together(streams: &[Stream], settings: Settings) -> Result<(), Fault> {
    let waiting: Vec<Vec<Waiting>> = streams.iter().map(|stream| stream.launches.take()).collect();
    let launches: Vec<(u32, Launch<'_>)> = (0u32..)
        .zip(&waiting)
        .flat_map(|(rank, launches)| launches.iter().map(move |launch| (rank, launch)))
        .map(|(rank, waiting)| {
            let Waiting { kernel, grid, threads, shared_bytes, args } = waiting;
            let (grid, threads, shared_bytes, args) = (*grid, *threads, *shared_bytes, args.clone());
            (rank, Launch { kernel, grid, threads, shared_bytes, args })
        })
        .collect();
    let grids: Vec<Grid<'_>> = launches.iter().map(|(rank, launch)| grid(launch, *rank)).collect();
    // SAFETY: each launch was made by an operation, with its kernel's arguments, and the caller vouches for memory.
    unsafe { consort_emulator::launch_together(&grids, settings) }
}

/// The text of a kernel declares the most shared memory it is launched with: occupancy is computed from that.
fn check_declared(launch: &Launch<'_>) {
    let declared =
        SOURCES.iter().map(|source| source.dynamic_shared_bytes(launch.kernel).expect("as the gate"));
    let declared = declared.max().unwrap_or(0);
    let (kernel, asked) = (launch.kernel, launch.shared_bytes);
    assert!(asked <= declared, "{kernel}: {asked} bytes of shared memory, {declared} declared in its text");
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
