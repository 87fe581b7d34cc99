//! AMX tiles: eight registers of 16 rows by 64 bytes, and their product of BF16 pairs.
//!
//! [`multiply`] adds to each f32 of a tile the sum over 16 pairs of inputs: one chain of fused multiply-adds over the
//! even and one over the odd halves, both from zero, then `sum += even + odd`. That is the order of
//! [`crate::linear`], so tiles and lanes give the same bits; only subnormal numbers, which tiles take for zero, would
//! tell them apart, and [`crate::element`] keeps those out. Intrinsics for AMX are not stable Rust: the instructions
//! are written as assembly.

use std::{
    arch::{
        asm,
        x86_64::{__cpuid, __cpuid_count, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _xgetbv},
    },
    marker::PhantomData,
};

/// Whether the processor has AMX-BF16 and AVX512-BF16, the system saves their state, and this process may use it.
pub(super) fn is_permitted() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const AMX_BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    const AVX512_BF16: u32 = 1 << 5;
    const TILE_CONFIG_AND_DATA: u64 = 0b11 << 17;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    if __cpuid_count(7, 0).edx & AMX_BF16_AND_TILE != AMX_BF16_AND_TILE {
        return false;
    }
    if __cpuid_count(7, 1).eax & AVX512_BF16 == 0 {
        return false;
    }
    // SAFETY: OSXSAVE says that the instruction is there.
    let saved = unsafe { extended_state() };
    saved & TILE_CONFIG_AND_DATA == TILE_CONFIG_AND_DATA && crate::sys::request_tile_data()
}

#[target_feature(enable = "xsave")]
unsafe fn extended_state() -> u64 {
    // SAFETY: register 0 exists wherever xgetbv does.
    unsafe { _xgetbv(0) }
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const LINE_BYTES: u16 = 64;

/// Tiles configured on this thread; released when dropped, so that a thread that sleeps has no 8 KiB to save.
pub(crate) struct Tiles {
    on_this_thread: PhantomData<*const ()>,
}

impl Tiles {
    /// Gives tile `t` `rows[t]` rows (1 to 16) of 64 bytes.
    ///
    /// # Safety
    /// AMX must be permitted, and no other `Tiles` may live on this thread.
    pub(crate) unsafe fn configure(rows: [u8; 8]) -> Tiles {
        // SAFETY: the caller's.
        unsafe { Tiles::configure_widths(rows, [LINE_BYTES; 8]) }
    }

    /// The same with lines of `bytes[t]` bytes (4 to 64, a multiple of 4).
    ///
    /// # Safety
    /// As [`Tiles::configure`].
    pub(crate) unsafe fn configure_widths(rows: [u8; 8], bytes: [u16; 8]) -> Tiles {
        let mut configuration =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        configuration.row_bytes[..8].copy_from_slice(&bytes);
        configuration.rows[..8].copy_from_slice(&rows);
        // SAFETY: 64 bytes are read; palette 1 has 8 tiles of up to 16 rows by 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &configuration, options(nostack, readonly)) };
        Tiles { on_this_thread: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: tiles were configured, so the instruction is there.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}

// Safety of the functions below: tiles are configured on this thread; memory is valid for the tile's rows, `stride`
// bytes apart, as wide as it was configured.

/// Zeroes tile `T`.
#[inline(always)]
pub(crate) unsafe fn zero<const T: u8>() {
    unsafe { asm!("tilezero tmm{}", const T, options(nostack, nomem)) }
}

/// Loads tile `T`.
#[inline(always)]
pub(crate) unsafe fn load<const T: u8>(from: *const u8, stride: usize) {
    unsafe {
        asm!("tileloadd tmm{tile}, [{from} + {stride}]", tile = const T, from = in(reg) from, stride = in(reg) stride,
            options(nostack, readonly))
    }
}

/// Stores tile `T`.
#[inline(always)]
pub(crate) unsafe fn store<const T: u8>(to: *mut u8, stride: usize) {
    unsafe {
        asm!("tilestored [{to} + {stride}], tmm{tile}", tile = const T, to = in(reg) to, stride = in(reg) stride,
            options(nostack))
    }
}

/// `C += A · B` where A is `[rows][16 pairs]`, B `[16 pairs][16 columns x 2]`, C `[rows][16]` of f32.
#[inline(always)]
pub(crate) unsafe fn multiply<const C: u8, const A: u8, const B: u8>() {
    unsafe { asm!("tdpbf16ps tmm{}, tmm{}, tmm{}", const C, const A, const B, options(nostack, nomem)) }
}

/// Asks for a line, into the first cache. Any address will do.
#[inline(always)]
pub(crate) fn prefetch_near(line: *const u8) {
    // SAFETY: a hint that never faults; SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
}

/// Asks for a line, into the second cache. Any address will do.
#[inline(always)]
pub(crate) fn prefetch_far(line: *const u8) {
    // SAFETY: as above.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
}
