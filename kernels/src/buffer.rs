//! Memory of one element type that belongs to one device, and views of it.
#![allow(unsafe_code)]

use std::{marker::PhantomData, ops::Range};

use crate::{KernelError, device::Device, sys::Region};

/// Types a buffer may hold: plain numbers for which all bytes zero is a value. Sealed, since buffers rely on that.
pub trait Plain: sealed::Sealed + Copy + Send + Sync + 'static {}
impl Plain for f32 {}
impl Plain for u32 {}
impl Plain for crate::element::bf16 {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for u32 {}
    impl Sealed for crate::element::bf16 {}
}

/// `len` elements of `T` on one device, zeroed when made.
pub struct Buffer<T> {
    storage: Storage,
    len: usize,
    element: PhantomData<T>,
}

enum Storage {
    Cpu(Region),
}

/// Shared view of a part of a buffer.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum View<'a, T> {
    /// In host memory.
    Cpu(&'a [T]),
}

/// Exclusive view of a part of a buffer.
#[derive(Debug)]
#[non_exhaustive]
pub enum ViewMut<'a, T> {
    /// In host memory.
    Cpu(&'a mut [T]),
}

impl<T: Plain> Buffer<T> {
    /// `len` zeros on `device`; `what` names the buffer in an out-of-memory error.
    pub fn zeros(device: &Device, len: usize, what: &str) -> Result<Buffer<T>, KernelError> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| KernelError::OutOfMemory {
            what: what.to_owned(),
            bytes: usize::MAX,
            reason: format!("{len} elements of {} bytes overflow", size_of::<T>()),
        })?;
        device.require_cpu("buffer")?;
        let storage = Storage::Cpu(Region::zeroed(bytes, what)?);
        Ok(Buffer { storage, len, element: PhantomData })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }

    /// The elements of `range`. Panics when it exceeds the buffer, as slices do.
    pub fn view(&self, range: Range<usize>) -> View<'_, T> {
        match &self.storage {
            // SAFETY: the region holds `len` initialised elements (zeros are values of Plain types), is aligned to a
            // page, and stays borrowed for the lifetime of the slice.
            Storage::Cpu(region) => View::Cpu(
                &unsafe { std::slice::from_raw_parts(region.as_ptr().cast::<T>(), self.len) }[range],
            ),
        }
    }

    /// The elements of `range`, to write. Panics when it exceeds the buffer.
    pub fn view_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        match &mut self.storage {
            // SAFETY: as in `view`; the exclusive borrow of the buffer makes the slice unique.
            Storage::Cpu(region) => ViewMut::Cpu(
                &mut unsafe { std::slice::from_raw_parts_mut(region.as_ptr().cast::<T>(), self.len) }[range],
            ),
        }
    }

    /// All elements, for code that runs on the host anyway.
    pub fn as_slice(&self) -> &[T] {
        self.view(0..self.len).host()
    }

    /// All elements, likewise.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        let len = self.len;
        self.view_mut(0..len).host_mut()
    }
}

impl<'a, T> View<'a, T> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            View::Cpu(slice) => slice.len(),
        }
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements in host memory.
    pub fn host(self) -> &'a [T] {
        match self {
            View::Cpu(slice) => slice,
        }
    }
}

impl<'a, T> ViewMut<'a, T> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            ViewMut::Cpu(slice) => slice.len(),
        }
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements in host memory.
    pub fn host_mut(self) -> &'a mut [T] {
        match self {
            ViewMut::Cpu(slice) => slice,
        }
    }
}

impl<'a, T> From<&'a [T]> for View<'a, T> {
    fn from(slice: &'a [T]) -> Self {
        View::Cpu(slice)
    }
}

impl<'a, T> From<&'a mut [T]> for ViewMut<'a, T> {
    fn from(slice: &'a mut [T]) -> Self {
        ViewMut::Cpu(slice)
    }
}
