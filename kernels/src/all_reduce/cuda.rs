//! Launches of `kernel.cu`: shapes, the choice between one shot and two, and grids of which all blocks run at once.
#![allow(unsafe_code)]

mod peers;
#[cfg(test)]
mod tests;
mod ways;

use half::bf16;

pub use peers::{
    AREA_WORDS, BLOCKS_MAX, PEERS_MAX, POLLS_MAX, PeerAddresses, Peers, Reuse, STOP_WORDS, Stopped, Why,
};
pub use ways::{Means, NoWay, Timing, Way, WayTable};

use crate::{
    KernelError,
    cuda::{Args, DeviceSlice, DeviceSliceMut, Launch, Launcher, check_aligned, row_stride},
    rms_norm::cuda::threads_for,
};

const THREADS: u32 = 256;
const LANES: usize = 4;

/// Bytes that a link moves while ranks meet once more and wait for one more read: 2.5 µs at 450 GB/s, the rate of an
/// H100's links in one direction. From data sheets and others' reports; not measured.
const MEETING_BYTES: u128 = 1_125_000;

/// Whether a sum of `len` elements over `ranks` takes less time by reading every buffer whole.
///
/// That moves `(N - 1) n` bytes to each rank. Two shots move `2 (N - 1) / N · n`, and meet once more. So two shots pay
/// when the difference, `(N - 1)(N - 2) / N · n`, exceeds what the link could move during the meeting: from 1.7 MB on
/// for three ranks, 750 KB for four, 214 KB for eight, 86 KB for sixteen; never for two.
pub fn prefers_one_shot(len: usize, ranks: usize) -> bool {
    let (bytes, ranks) = (len as u128 * size_of::<f32>() as u128, ranks as u128);
    bytes * ranks.saturating_sub(1) * ranks.saturating_sub(2) <= MEETING_BYTES * ranks
}

/// Sums `out.len()` elements of each buffer into `out` of each rank, in whichever way [is faster](prefers_one_shot).
pub fn all_reduce(
    launcher: &dyn Launcher,
    peers: &Peers,
    out: DeviceSliceMut<'_, f32>,
) -> Result<(), KernelError> {
    if prefers_one_shot(out.len(), peers.count()) {
        all_reduce_one_shot(launcher, peers, out)
    } else {
        all_reduce_two_shot(launcher, peers, out)
    }
}

/// The same in a way that was [chosen](WayTable) before. Other than one or two shots is the caller's to take.
pub fn all_reduce_by(
    launcher: &dyn Launcher,
    peers: &Peers,
    way: Way,
    out: DeviceSliceMut<'_, f32>,
) -> Result<(), KernelError> {
    match way {
        Way::OneShot => all_reduce_one_shot(launcher, peers, out),
        Way::TwoShots => all_reduce_two_shot(launcher, peers, out),
        Way::Nccl => {
            let reason = "a sum that goes through NCCL has no kernel".to_owned();
            Err(KernelError::Unsupported { operation: "all_reduce", reason })
        }
    }
}

/// The sum, by reading every buffer whole.
pub fn all_reduce_one_shot(
    launcher: &dyn Launcher,
    peers: &Peers,
    out: DeviceSliceMut<'_, f32>,
) -> Result<(), KernelError> {
    let quads = out.len().div_ceil(LANES);
    sum(launcher, peers, "all_reduce_one_shot_f32", quads, out)
}

/// The sum, each rank computing its part of it into its own buffer, from where the others fetch it.
pub fn all_reduce_two_shot(
    launcher: &dyn Launcher,
    peers: &Peers,
    out: DeviceSliceMut<'_, f32>,
) -> Result<(), KernelError> {
    let quads_of_a_part = out.len().div_ceil(LANES).div_ceil(peers.count());
    sum(launcher, peers, "all_reduce_two_shot_f32", quads_of_a_part, out)
}

fn sum(
    launcher: &dyn Launcher,
    peers: &Peers,
    kernel: &'static str,
    quads_of_a_block_row: usize,
    mut out: DeviceSliceMut<'_, f32>,
) -> Result<(), KernelError> {
    check_capacity("all_reduce", peers, out.len())?;
    check_aligned("all_reduce", "out", out.address())?;
    check_grid("all_reduce", launcher, peers)?;
    if out.is_empty() {
        return Ok(());
    }
    let launch = Launch {
        kernel,
        grid: [blocks(peers, quads_of_a_block_row), 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: Args::new().bytes(&peers.bytes()).u32(out.len() as u32).slice_mut(&mut out),
    };
    // SAFETY: lengths are checked above; the arguments are the kernel's parameters; `Peers` promises the rest.
    unsafe { launcher.launch(&launch) }
}

/// Shared memory of a block at most, on the smallest devices.
const SHARED_BYTES_MAX: usize = 99 << 10;
const SCRATCH_BYTES: usize = 128;

/// Adds the sum over ranks to the residual and normalises, in one launch; shapes as in
/// [`rms_norm`](crate::rms_norm::rms_norm), each buffer being that rank's part of its `delta`, but rows of `out` are
/// [`row_stride`] apart. Every rank computes all rows. For as few rows as [`prefers_one_shot`] allows.
pub fn all_reduce_rms_norm(
    launcher: &dyn Launcher,
    peers: &Peers,
    mut residual: DeviceSliceMut<'_, f32>,
    weight: DeviceSlice<'_, f32>,
    eps: f32,
    mut out: DeviceSliceMut<'_, bf16>,
) -> Result<(), KernelError> {
    const OPERATION: &str = "all_reduce_rms_norm";
    let width = weight.len();
    let rows = residual.len().checked_div(width).unwrap_or(0);
    KernelError::check_len(OPERATION, "residual", residual.len(), rows * width)?;
    KernelError::check_len(OPERATION, "out", out.len(), rows * row_stride(width))?;
    check_capacity(OPERATION, peers, residual.len())?;
    if width.is_multiple_of(LANES) {
        check_aligned(OPERATION, "residual", residual.address())?;
        check_aligned(OPERATION, "weight", weight.address())?;
        check_aligned(OPERATION, "out", out.address())?;
    }
    check_grid(OPERATION, launcher, peers)?;
    if rows == 0 {
        return Ok(());
    }
    let shared_bytes = SCRATCH_BYTES + (width * size_of::<f32>()).next_multiple_of(16);
    if shared_bytes > SHARED_BYTES_MAX {
        let reason = format!(
            "rows of {width} elements exceed a block's shared memory, {SHARED_BYTES_MAX} bytes: use all_reduce, then \
             rms_norm"
        );
        return Err(KernelError::Unsupported { operation: OPERATION, reason });
    }
    // As rms_norm has them, so that the bits do not depend on which of the two ways a step is large enough for.
    let threads = threads_for(width);
    let launch = Launch {
        kernel: "all_reduce_rms_norm_bf16",
        grid: [peers.blocks().min(rows as u32), 1, 1],
        threads,
        shared_bytes: shared_bytes as u32,
        args: Args::new()
            .bytes(&peers.bytes())
            .u32(rows as u32)
            .u32(width as u32)
            .slice_mut(&mut residual)
            .slice(weight)
            .f32(eps)
            .slice_mut(&mut out)
            .u32(row_stride(width) as u32),
    };
    // SAFETY: lengths are checked above; the arguments are the kernel's parameters; `Peers` promises the rest.
    unsafe { launcher.launch(&launch) }
}

/// Puts the ranks' rows side by side: rank `p`'s buffer holds `rows` rows of `widths[p]`, `out` rows of their sum.
pub fn all_gather_peers(
    launcher: &dyn Launcher,
    peers: &Peers,
    rows: usize,
    widths: &[usize],
    mut out: DeviceSliceMut<'_, f32>,
) -> Result<(), KernelError> {
    const OPERATION: &str = "all_gather_peers";
    KernelError::check_len(OPERATION, "widths", widths.len(), peers.count())?;
    let width = widths.iter().try_fold(0usize, |sum, &width| sum.checked_add(width));
    let all = width.and_then(|width| width.checked_mul(rows)).filter(|&all| all <= u32::MAX as usize);
    let Some(all) = all else {
        let reason = format!("{rows} rows of {widths:?} elements, more than {} in all", u32::MAX);
        return Err(KernelError::Unsupported { operation: OPERATION, reason });
    };
    KernelError::check_len(OPERATION, "out", out.len(), all)?;
    check_capacity(OPERATION, peers, rows * widths.iter().max().copied().unwrap_or(0))?;
    check_grid(OPERATION, launcher, peers)?;
    if all == 0 {
        return Ok(());
    }
    let starts = starts(widths);
    check_aligned(OPERATION, "out", out.address())?;
    let in_fours = starts.iter().all(|&start| (start as usize).is_multiple_of(LANES));
    let packs = if in_fours { all / LANES } else { all };
    let launch = Launch {
        kernel: "all_gather_f32",
        grid: [blocks(peers, packs), 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: Args::new()
            .bytes(&peers.bytes())
            .bytes(&starts.into_iter().flat_map(u32::to_ne_bytes).collect::<Vec<u8>>())
            .u32(rows as u32)
            .u32(u32::from(in_fours))
            .slice_mut(&mut out),
    };
    // SAFETY: lengths are checked above; the arguments are the kernel's parameters; `Peers` promises the rest.
    unsafe { launcher.launch(&launch) }
}

/// The kernel's `Columns`: where each rank's begin; ranks that are not there have none.
fn starts(widths: &[usize]) -> [u32; PEERS_MAX + 1] {
    let mut starts = [0; PEERS_MAX + 1];
    for peer in 0..PEERS_MAX {
        starts[peer + 1] = starts[peer] + widths.get(peer).map_or(0, |&width| width as u32);
    }
    starts
}

/// One block for each `THREADS` of work, as many as may run at once.
fn blocks(peers: &Peers, work: usize) -> u32 {
    work.div_ceil(THREADS as usize).clamp(1, peers.blocks() as usize) as u32
}

fn check_capacity(operation: &'static str, peers: &Peers, elements: usize) -> Result<(), KernelError> {
    if elements <= peers.capacity() {
        return Ok(());
    }
    let reason = format!("{elements} elements of each rank, whose buffers hold {}", peers.capacity());
    Err(KernelError::Unsupported { operation, reason })
}

/// Blocks wait for those of other ranks, so all must run at once.
fn check_grid(operation: &'static str, launcher: &dyn Launcher, peers: &Peers) -> Result<(), KernelError> {
    if peers.blocks() <= launcher.multiprocessors() {
        return Ok(());
    }
    let reason = format!(
        "{} blocks at once on a device of {} multiprocessors: give the group the smallest number of its devices",
        peers.blocks(),
        launcher.multiprocessors()
    );
    Err(KernelError::Unsupported { operation, reason })
}
