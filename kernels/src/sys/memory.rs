//! Zeroed anonymous memory, on huge pages where the system grants them.
#![allow(unsafe_code)]

use std::{ffi::c_void, ptr::NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::KernelError;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// An owned, zeroed region of memory, aligned to 2 MiB when it is at least that large (else to a page).
///
/// Pages are taken from the system when they are first touched.
pub struct Region {
    map: NonNull<c_void>,
    map_bytes: usize,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the region is plain memory owned by this value; access goes through &/&mut of the owner.
unsafe impl Send for Region {}
// SAFETY: shared access hands out raw pointers only; their users uphold aliasing.
unsafe impl Sync for Region {}

impl Region {
    /// A zeroed region of `bytes`, named `what` in errors.
    pub fn zeroed(bytes: usize, what: &str) -> Result<Region, KernelError> {
        let failed = |reason: String| KernelError::OutOfMemory { what: what.to_owned(), bytes, reason };
        let huge = bytes >= HUGE_PAGE_BYTES;
        let slack = if huge { HUGE_PAGE_BYTES } else { 0 };
        let map_bytes = bytes.max(1).checked_add(slack).ok_or_else(|| failed("size overflows".into()))?;
        // SAFETY: a fresh anonymous private mapping at an address the kernel chooses aliases nothing.
        let map = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                map_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|error| failed(error.to_string()))?;
        let map = NonNull::new(map).ok_or_else(|| failed("mapped at address 0".into()))?;
        let offset = if huge { map.as_ptr().cast::<u8>().align_offset(HUGE_PAGE_BYTES) } else { 0 };
        // SAFETY: offset < HUGE_PAGE_BYTES = slack, so start + bytes stays inside the mapping.
        let start = unsafe { map.cast::<u8>().add(offset) };
        if huge {
            // SAFETY: the range lies inside the mapping made above. Refusal costs speed only.
            let advised = unsafe { madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
            if let Err(error) = advised {
                tracing::debug!(%error, what, "no huge pages for this region");
            }
        }
        Ok(Region { map, map_bytes, start, bytes })
    }

    /// First byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Usable size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `zeroed`; no borrow of it outlives the owner.
        if let Err(error) = unsafe { munmap(self.map.as_ptr(), self.map_bytes) } {
            tracing::warn!(%error, "could not unmap {} bytes", self.map_bytes);
        }
    }
}
