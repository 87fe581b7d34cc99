//! Linux hands out the 8 KiB of AMX tile state per process, on request.
#![allow(unsafe_code)]

/// Asks for tile data for all threads of this process; asking again changes nothing. Documented in Linux under
/// `arch/x86/xstate`.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub(crate) fn request_tile_data() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this request reads no memory of ours; it can only succeed or be refused.
    let granted =
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 };
    if !granted {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "the processor has AMX, but the system does not grant its tiles");
    }
    granted
}

/// Elsewhere nobody knows how to ask.
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "tiles exist on x86-64 only"))]
pub(crate) fn request_tile_data() -> bool {
    false
}
