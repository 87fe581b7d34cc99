//! How many blocks of a kernel run on a multiprocessor at once.
//!
//! The limits are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the
//! granularities are those of `cuda_occupancy.h`: registers are handed out to warps in units of 256, warps go to four
//! partitions, shared memory comes in units of 128 bytes, and each block takes 1 KiB of it for the system.

use std::fmt;

use anyhow::{Result, bail};
use consort_kernels::cuda::arch::Arch;

const WARP: u32 = 32;
const PARTITIONS: u32 = 4;
const REGISTERS: u32 = 65_536;
const REGISTERS_UNIT: u32 = 256;
const REGISTERS_PER_THREAD_MAX: u32 = 255;
const THREADS_PER_BLOCK_MAX: u32 = 1024;
const SHARED_UNIT: u32 = 128;
const SHARED_RESERVED_BYTES: u32 = 1024;

/// What one multiprocessor offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    warps: u32,
    blocks: u32,
    shared_bytes: u32,
}

/// What one block takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) threads: u32,
    pub(super) registers: u32,
    pub(super) static_shared_bytes: u32,
    pub(super) dynamic_shared_bytes: u32,
}

/// What fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Occupancy {
    pub(super) blocks: u32,
    pub(super) warps: u32,
    pub(super) warps_max: u32,
    pub(super) limit: Limit,
}

/// What runs out first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    Warps,
    Blocks,
    Registers,
    SharedMemory,
}

/// The limits of an architecture.
pub(super) fn limits(arch: Arch) -> Result<Limits> {
    let (warps, blocks, shared_kib) = match arch.number() {
        80 => (64, 32, 164),
        86 => (48, 16, 100),
        87 => (48, 16, 164),
        89 => (48, 24, 100),
        90 | 100 | 103 => (64, 32, 228),
        120 | 121 => (48, 24, 100),
        _ => bail!("xtask/src/cubins/occupancy.rs holds no limits of {arch}"),
    };
    Ok(Limits { warps, blocks, shared_bytes: shared_kib * 1024 })
}

/// The occupancy of a block's kind, or why not even one fits.
pub(super) fn of(block: &Block, limits: Limits) -> Result<Occupancy, String> {
    let Block { threads, registers, static_shared_bytes, dynamic_shared_bytes } = *block;
    if !(1..=THREADS_PER_BLOCK_MAX).contains(&threads) {
        return Err(format!("a block of {threads} threads; at most {THREADS_PER_BLOCK_MAX} are possible"));
    }
    if registers > REGISTERS_PER_THREAD_MAX {
        return Err(format!("{registers} registers; a thread has at most {REGISTERS_PER_THREAD_MAX}"));
    }
    let warps = threads.div_ceil(WARP);
    let registers_per_warp = (registers.max(1) * WARP).next_multiple_of(REGISTERS_UNIT);
    let warps_by_registers = REGISTERS / PARTITIONS / registers_per_warp * PARTITIONS;
    // The launch is checked as if every partition took as many warps as the fullest.
    let one_fits = registers_per_warp * warps.next_multiple_of(PARTITIONS) <= REGISTERS;
    let shared = static_shared_bytes.saturating_add(dynamic_shared_bytes);
    if shared > limits.shared_bytes - SHARED_RESERVED_BYTES {
        let most = limits.shared_bytes - SHARED_RESERVED_BYTES;
        return Err(format!("a block takes {shared} bytes of shared memory; at most {most} are possible"));
    }
    let shared = (shared + SHARED_RESERVED_BYTES).next_multiple_of(SHARED_UNIT);
    let counts = [
        (limits.warps / warps, Limit::Warps),
        (limits.blocks, Limit::Blocks),
        (if one_fits { warps_by_registers / warps } else { 0 }, Limit::Registers),
        (limits.shared_bytes / shared, Limit::SharedMemory),
    ];
    let (blocks, limit) = counts
        .into_iter()
        .fold((u32::MAX, Limit::Warps), |least, count| if count.0 < least.0 { count } else { least });
    if blocks == 0 {
        return Err(format!("not one block of {threads} threads fits, by {limit}"));
    }
    Ok(Occupancy { blocks, warps: blocks * warps, warps_max: limits.warps, limit })
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Limit::Warps => "warps",
            Limit::Blocks => "blocks",
            Limit::Registers => "registers",
            Limit::SharedMemory => "shared memory",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn occupancy(arch: &str, threads: u32, registers: u32, shared: u32) -> Result<(u32, u32, Limit), String> {
        let block = Block {
            threads,
            registers,
            static_shared_bytes: shared / 2,
            dynamic_shared_bytes: shared - shared / 2,
        };
        of(&block, limits(arch.parse().unwrap()).unwrap())
            .map(|found| (found.blocks, found.warps, found.limit))
    }

    #[test]
    fn each_resource_limits_in_its_turn() {
        assert_eq!(occupancy("sm_90a", 256, 32, 0), Ok((8, 64, Limit::Warps)));
        assert_eq!(occupancy("sm_90a", 32, 32, 0), Ok((32, 32, Limit::Blocks)));
        // 40 registers are 1,280 a warp: 12 warps a partition, 48 in all, 6 blocks of 8.
        assert_eq!(occupancy("sm_80", 256, 40, 0), Ok((6, 48, Limit::Registers)));
        // 255 registers are 8,192 a warp: 2 warps a partition.
        assert_eq!(occupancy("sm_100a", 256, 255, 0), Ok((1, 8, Limit::Registers)));
        // 64 registers are 2,048 a warp: 8 warps a partition, 32 in all, 10 blocks of 3.
        assert_eq!(occupancy("sm_80", 96, 64, 0), Ok((10, 30, Limit::Registers)));
        // 48 KiB and the system's KiB: four times in 228 KiB, three times in 164, twice in 100.
        assert_eq!(occupancy("sm_90a", 128, 32, 49_152), Ok((4, 16, Limit::SharedMemory)));
        assert_eq!(occupancy("sm_80", 128, 32, 49_152), Ok((3, 12, Limit::SharedMemory)));
        assert_eq!(occupancy("sm_89", 128, 32, 49_152), Ok((2, 8, Limit::SharedMemory)));
    }

    #[test]
    fn smaller_devices_hold_fewer_warps_and_blocks() {
        assert_eq!(occupancy("sm_86", 32, 16, 0), Ok((16, 16, Limit::Blocks)));
        assert_eq!(occupancy("sm_120", 1024, 32, 0), Ok((1, 32, Limit::Warps)));
    }

    #[test]
    fn a_block_that_fits_nowhere_is_refused_with_the_reason() {
        let reason =
            |result: Result<_, String>| result.map(|_: (u32, u32, Limit)| ()).expect_err("it cannot fit");
        assert!(reason(occupancy("sm_90a", 1024, 255, 0)).contains("by registers"));
        assert!(reason(occupancy("sm_90a", 128, u32::MAX, 0)).contains("at most 255"));
        assert!(reason(occupancy("sm_90a", 2048, 16, 0)).contains("2048 threads"));
        assert_eq!(occupancy("sm_90a", 128, 32, 227 * 1024), Ok((1, 4, Limit::SharedMemory)));
        assert!(reason(occupancy("sm_90a", 128, 32, 227 * 1024 + 1)).contains("at most 232448 are possible"));
        assert!(reason(occupancy("sm_90a", 128, 32, u32::MAX)).contains("shared memory"));
    }

    #[test]
    fn every_architecture_of_a_release_has_limits_and_an_unknown_one_says_where_they_go() {
        assert!(Arch::RELEASED.into_iter().all(|arch| limits(arch).is_ok()));
        let error = limits("sm_110a".parse().unwrap()).expect_err("no limits").to_string();
        assert!(error.contains("occupancy.rs holds no limits of sm_110a"), "{error}");
    }
}
