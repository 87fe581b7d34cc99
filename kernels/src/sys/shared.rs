//! One slice written by several threads, each its own part.
#![allow(unsafe_code)]

use std::{marker::PhantomData, ops::Range};

/// An exclusively borrowed slice whose disjoint parts several threads of a team write at once.
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the slice is exclusively borrowed; `range_mut`'s contract keeps threads on disjoint parts.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Takes over the borrow.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        SharedMut { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// A part of the slice. Panics when it exceeds the slice.
    ///
    /// # Safety
    /// While the result lives, no other call may return an overlapping range.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's contract")]
    pub(crate) unsafe fn range_mut(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the assertion, unaliased by the caller's contract, borrowed for 'a.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
