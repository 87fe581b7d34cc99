//! A recorded launch on a device.
#![allow(unsafe_code)]

use std::time::Duration;

use anyhow::Result;
use consort_kernels::cuda::{
    Args, Launch, Launcher,
    device::{ArenaPlan, DeviceBuffer},
};

use super::{
    compare::{Difference, Tolerance, compare},
    recording::Recording,
};
use crate::session::Session;

/// Longest wait for one launch: the emulator's are small.
const LAUNCH_LIMIT: Duration = Duration::from_secs(5);

/// Launches it over memory as it was, and holds what is there afterwards against what was there then.
pub(super) fn replay(session: &Session, recording: &Recording, tolerance: Tolerance) -> Result<Difference> {
    let device = &session.device;
    let mut plan = ArenaPlan::new();
    let reserved: Vec<_> = (recording.memories.iter())
        // Kernels may touch the 16 bytes in which memory ends.
        .map(|memory| plan.reserve::<u32>(words(&memory.before).len().next_multiple_of(4), "recorded memory"))
        .collect();
    let arena = plan.allocate(device)?;
    let mut buffers: Vec<DeviceBuffer<u32>> =
        reserved.into_iter().map(|reserved| arena.buffer(reserved)).collect();
    for (memory, buffer) in recording.memories.iter().zip(&mut buffers) {
        let words = words(&memory.before);
        device.upload(&words, buffer.slice_mut(0..words.len()))?;
    }
    let launch = &recording.launch;
    let mut arguments = launch.arguments.clone();
    for &[argument, at, memory, offset] in &launch.pointers {
        let address = buffers[memory].address() + offset as u64;
        arguments[argument][at..at + 8].copy_from_slice(&address.to_ne_bytes());
    }
    let launch = Launch {
        kernel: &launch.kernel,
        grid: launch.grid,
        threads: launch.threads,
        shared_bytes: launch.shared_bytes,
        args: arguments.iter().fold(Args::new(), |args, bytes| args.bytes(bytes)),
    };
    // SAFETY: an operation made this launch for memory of these sizes; the device checks the arguments' sizes, and the
    // buffers stay until the work is done.
    unsafe { device.launch(&launch)? };
    device.synchronize("end a recorded launch", LAUNCH_LIMIT)?;
    let mut found = Difference::default();
    for (memory, buffer) in recording.memories.iter().zip(&buffers) {
        let mut got = vec![0u32; words(&memory.before).len()];
        device.download(buffer.slice(0..got.len()), &mut got, LAUNCH_LIMIT)?;
        let got: Vec<u8> = got.into_iter().flat_map(u32::to_ne_bytes).collect();
        found = found.and(compare(memory, &got, tolerance));
    }
    Ok(found)
}

/// Bytes as words, the last one filled up with zeros.
fn words(bytes: &[u8]) -> Vec<u32> {
    let word = |chunk: &[u8]| {
        let mut word = [0; 4];
        word[..chunk.len()].copy_from_slice(chunk);
        u32::from_ne_bytes(word)
    };
    bytes.chunks(4).map(word).collect()
}
