//! Runs the CUDA text of the kernels on the host, thread by thread, and finds what is wrong with it.
//!
//! Every `kernel.cu` is compiled in as C++ (see `build.rs`; `cpp/machine.h` tells how). [`launch`] takes what
//! `cuLaunchKernel` takes and returns when the kernel is done, or a [`Fault`] that names kernel, block and thread.
//!
//! | what is wrong | what finds it |
//! |---|---|
//! | a missing barrier | another [`Order`] of the threads: a result differs or is NaN, shared memory being poisoned |
//! | a missing wait for an asynchronous copy | [`Copies::Late`]: the copy has not happened yet |
//! | a buffer reused too early | [`Copies::Late`] and [`Order::FarWarp`] |
//! | a divergent barrier or warp (calls of one helper look alike), an early leave, a deadlock | every launch |
//! | an access out of bounds, a misaligned one | every launch (at the end of each [`Memory`] and of shared memory) |
//! | a race, an unordered flag | the race detector, `cargo xtask emulate --tsan` |
//! | any access out of bounds | `cargo xtask emulate --asan` |
//!
//! Not emulated: caches, the exact order and rounding of a tensor core's sums, the bits of approximations (`rsqrtf`,
//! `exp2_approx`), and what a compiler fuses: here nothing is contracted that is not written as `fmaf`. Kernels whose
//! bits must agree may rely on none of these.
#![allow(unsafe_code)]

mod memory;
pub mod recording;

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    fmt,
};

pub use memory::Memory;

/// The order in which a block's threads run until each must wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// By index.
    Ascending,
    /// From the last to the first.
    Descending,
    /// Another order in each round, and three blocks at once; of ranks, some rest in each round.
    Shuffled,
    /// One warp, and one rank, as far as it goes without the others: they drift apart as far as barriers allow.
    FarWarp,
}

/// When an asynchronous copy happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copies {
    /// When it is waited for.
    Late,
    /// When it is started.
    AtOnce,
    /// Either, by chance.
    ByChance,
}

/// How a launch runs; every way is a legal one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Order of the threads.
    pub order: Order,
    /// Moment of asynchronous copies.
    pub copies: Copies,
    /// Of all chance.
    pub seed: u64,
}

impl Settings {
    /// The plainest way.
    pub const PLAIN: Settings = Settings { order: Order::Ascending, copies: Copies::AtOnce, seed: 1 };

    /// Every order with every moment of copies. Under the race detector, which finds what is not ordered in any order
    /// and is slow, one order only.
    pub fn all() -> impl Iterator<Item = Settings> {
        let orders = [Order::Ascending, Order::Descending, Order::Shuffled, Order::FarWarp];
        let count = if cfg!(consort_race_detector) { 1 } else { orders.len() };
        orders.into_iter().take(count).enumerate().flat_map(|(at, order)| {
            [Copies::Late, Copies::AtOnce, Copies::ByChance].into_iter().map(move |copies| Settings {
                order,
                copies,
                seed: 1 + at as u64,
            })
        })
    }
}

/// One grid, in the terms of `cuLaunchKernel`.
#[derive(Clone, Debug)]
pub struct Grid<'a> {
    /// Name of the kernel.
    pub kernel: &'a str,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z.
    pub threads: [u32; 3],
    /// Dynamic shared memory of a block.
    pub shared_bytes: usize,
    /// A pointer to each argument.
    pub arguments: Vec<*mut c_void>,
    /// Bytes of each argument.
    pub argument_bytes: Vec<u32>,
    /// Which device runs it, for messages.
    pub rank: u32,
}

/// Why a launch did not end well: what, in which kernel, rank, block and thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(pub String);

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}

/// Runs one grid to its end.
///
/// # Safety
/// The arguments are of the types of the kernel's parameters. Memory that they point to need not be there: to touch
/// what is not is a fault. To write to what belongs to somebody else is not found.
pub unsafe fn launch(grid: Grid<'_>, settings: Settings) -> Result<(), Fault> {
    let begun = recording::begin(&grid);
    // SAFETY: the caller's promise.
    unsafe { run(&[grid], settings, false) }?;
    begun.map_or(Ok(()), recording::Begun::end)
}

/// Runs grids that wait for each other, as on several devices: ranks are under way at the same time, the grids of one
/// rank one after the other in the order given, with all their blocks at once.
///
/// # Safety
/// As for [`launch`].
pub unsafe fn launch_together(grids: &[Grid<'_>], settings: Settings) -> Result<(), Fault> {
    // SAFETY: the caller's promise.
    unsafe { run(grids, settings, true) }
}

/// Names of all kernels with the bytes of each parameter and the largest block, by name.
pub fn kernels() -> Vec<(&'static str, &'static [u32], u32)> {
    let mut all = Vec::new();
    let (mut name, mut bytes, mut count, mut threads) = (std::ptr::null(), std::ptr::null(), 0, 0);
    // SAFETY: the pointers are valid for writes; what they return lives as long as the program.
    while unsafe { emulator_kernel(all.len(), &mut name, &mut bytes, &mut count, &mut threads) } != 0 {
        // SAFETY: a zero-terminated literal, and an array of `count` numbers.
        let (name, bytes) =
            unsafe { (CStr::from_ptr(name), std::slice::from_raw_parts(bytes, count as usize)) };
        all.push((name.to_str().expect("kernels have ASCII names"), bytes, threads));
    }
    all
}

#[repr(C)]
struct RawGrid {
    kernel: *const c_char,
    grid: [u32; 3],
    threads: [u32; 3],
    rank: u32,
    shared_bytes: usize,
    arguments: *const *mut c_void,
    argument_bytes: *const u32,
    argument_count: usize,
}

#[repr(C)]
struct RawSettings {
    order: u32,
    copies: u32,
    seed: u64,
    together: u32,
}

unsafe extern "C" {
    static emulator_anchors: c_int;

    fn emulator_launch(
        grids: *const RawGrid,
        count: usize,
        settings: *const RawSettings,
        message: *mut c_char,
        bytes: usize,
    ) -> c_int;

    fn emulator_kernel(
        at: usize,
        name: *mut *const c_char,
        parameter_bytes: *mut *const u32,
        parameters: *mut u32,
        threads_max: *mut u32,
    ) -> c_int;
}

unsafe fn run(grids: &[Grid<'_>], settings: Settings, together: bool) -> Result<(), Fault> {
    // SAFETY: a constant of the library. Reading it keeps the kernels in the program.
    assert_eq!(unsafe { std::ptr::read_volatile(&raw const emulator_anchors) }, 1);
    let names: Result<Vec<CString>, _> = grids.iter().map(|grid| CString::new(grid.kernel)).collect();
    let names = names.map_err(|_| Fault("a kernel's name with a zero in it".to_owned()))?;
    let raw: Vec<RawGrid> = grids
        .iter()
        .zip(&names)
        .map(|(grid, name)| {
            assert_eq!(grid.arguments.len(), grid.argument_bytes.len(), "a size for each argument");
            RawGrid {
                kernel: name.as_ptr(),
                grid: grid.grid,
                threads: grid.threads,
                rank: grid.rank,
                shared_bytes: grid.shared_bytes,
                arguments: grid.arguments.as_ptr(),
                argument_bytes: grid.argument_bytes.as_ptr(),
                argument_count: grid.arguments.len(),
            }
        })
        .collect();
    let settings = RawSettings {
        order: settings.order as u32,
        copies: settings.copies as u32,
        seed: settings.seed,
        together: u32::from(together),
    };
    let mut message = [0 as c_char; 2048];
    // SAFETY: all pointers are valid during the call; the machine checks number and size of the arguments, and their
    // types are the caller's promise.
    let failed =
        unsafe { emulator_launch(raw.as_ptr(), raw.len(), &settings, message.as_mut_ptr(), message.len()) };
    if failed == 0 {
        return Ok(());
    }
    // SAFETY: the machine ends its message with a zero.
    Err(Fault(unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy().into_owned()))
}
