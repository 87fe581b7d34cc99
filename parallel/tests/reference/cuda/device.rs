//! Emulated devices: each rank's launches are recorded as a stream, then all streams run at once.
#![allow(unsafe_code)]

use std::cell::RefCell;

use consort_emulator::{Grid, Memory, Settings};
use consort_kernels::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, Launch, Launcher},
};

/// What is left to do for one rank.
pub(super) struct Stream {
    rank: u32,
    launches: RefCell<Vec<Recorded>>,
}

struct Recorded {
    kernel: String,
    grid: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    args: Args,
}

/// Multiprocessors that an emulated device claims: work is split over several blocks even where matrices are tiny.
pub(super) const MULTIPROCESSORS: u32 = 4;

impl Stream {
    pub(super) fn new(rank: usize) -> Stream {
        Stream { rank: rank as u32, launches: RefCell::default() }
    }
}

impl Launcher for Stream {
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), KernelError> {
        self.launches.borrow_mut().push(Recorded {
            kernel: launch.kernel.to_owned(),
            grid: launch.grid,
            threads: launch.threads,
            shared_bytes: launch.shared_bytes,
            args: launch.args.clone(),
        });
        Ok(())
    }

    fn multiprocessors(&self) -> u32 {
        MULTIPROCESSORS
    }
}

/// Runs all streams to their ends, ranks side by side. `owners` own all memory that was given to the launches. Returns
/// the launches of one rank.
pub(super) fn run<Owner>(streams: &[Stream], settings: Settings, _owners: &[Owner]) -> usize {
    let recorded: Vec<_> = streams.iter().map(|stream| stream.launches.take()).collect();
    let grids: Vec<Grid<'_>> = streams
        .iter()
        .zip(&recorded)
        .flat_map(|(stream, launches)| launches.iter().map(|launch| grid(launch, stream.rank)))
        .collect();
    // SAFETY: the operations checked their arguments when they launched; the memory is the owners', which live.
    let outcome = unsafe { consort_emulator::launch_together(&grids, settings) };
    outcome.unwrap_or_else(|fault| panic!("{fault} ({settings:?})"));
    recorded[0].len()
}

fn grid(launch: &Recorded, rank: u32) -> Grid<'_> {
    Grid {
        kernel: &launch.kernel,
        grid: launch.grid,
        threads: [launch.threads, 1, 1],
        shared_bytes: launch.shared_bytes as usize,
        arguments: launch.args.pointers(),
        argument_bytes: launch.args.sizes().map(|bytes| bytes as u32).collect(),
        rank,
    }
}

/// The first `len` elements, to read.
pub(super) fn view<T: Copy>(memory: &Memory<T>, len: usize) -> DeviceSlice<'_, T> {
    assert!(len <= memory.len());
    // SAFETY: there and initialised; the owner stays borrowed while the launch is recorded and lives until it has run.
    unsafe { DeviceSlice::new(memory.address(), len) }
}

/// The first `len` elements, to write.
pub(super) fn view_mut<T: Copy>(memory: &mut Memory<T>, len: usize) -> DeviceSliceMut<'_, T> {
    assert!(len <= memory.len());
    // SAFETY: as above; streams keep the order in which views were given out.
    unsafe { DeviceSliceMut::new(memory.address(), len) }
}
