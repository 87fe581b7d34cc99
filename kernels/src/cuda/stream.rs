//! Streams by the driver's names of them.

use std::{ffi::c_void, marker::PhantomData};

/// Work in order on a device, for libraries that enqueue there by themselves.
#[derive(Clone, Copy, Debug)]
pub struct StreamHandle<'a> {
    handle: *mut c_void,
    ordinal: u32,
    borrow: PhantomData<&'a ()>,
}

impl StreamHandle<'_> {
    /// A stream of the device `ordinal`.
    ///
    /// # Safety
    /// It is one, for the lifetime.
    pub(super) unsafe fn new(handle: *mut c_void, ordinal: u32) -> Self {
        StreamHandle { handle, ordinal, borrow: PhantomData }
    }

    pub(super) fn as_ptr(self) -> *mut c_void {
        self.handle
    }

    /// The device whose stream it is.
    pub fn ordinal(self) -> u32 {
        self.ordinal
    }
}
