//! An allocator that counts what the current thread holds, so that a test can bound what a reader asks for.
#![allow(unsafe_code)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

/// Largest single request that is passed on, in bytes. Beyond it memory is refused, which ends the process: better
/// than to let a hostile length push everything else out of the machine.
const REQUEST_BYTES_MAX: usize = 1 << 30;

thread_local! {
    /// Bytes that this thread has allocated and not freed; negative where it freed those of others.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// The most of them since the last reset.
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

/// Books a change. A thread that is ending has no cells any more; nobody measures it.
fn book(change: isize) {
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: every request goes to the system's allocator unchanged, or is refused with a null pointer, as the trait
// allows. Booking neither allocates (cells without destructors, initialised at compile time) nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > REQUEST_BYTES_MAX {
            return std::ptr::null_mut();
        }
        book(layout.size() as isize);
        // SAFETY: the caller's promises are the system allocator's conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > REQUEST_BYTES_MAX {
            return std::ptr::null_mut();
        }
        book(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > REQUEST_BYTES_MAX {
            return std::ptr::null_mut();
        }
        // The system may hold both while it copies.
        book(size as isize);
        book(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        book(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Does the work, and says how many bytes this thread held at most beyond those that it held before.
pub(crate) fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    (result, (PEAK.get() - before).max(0) as usize)
}

#[test]
fn the_peak_counts_what_was_freed_again() {
    let (kept, peak) = peak_of(|| {
        drop(std::hint::black_box(vec![1_u8; 10_000]));
        std::hint::black_box(vec![0_u8; 100])
    });
    assert_eq!(peak, 10_000);
    drop(kept);
    let (mut grown, _) = peak_of(|| Vec::with_capacity(1000));
    grown.push(1_u8);
    let ((), peak) = peak_of(|| grown.reserve_exact(2999));
    assert_eq!(peak, 3000, "growing holds the new room before the old one is given back");
}
