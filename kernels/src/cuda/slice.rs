//! Views of device memory: an address, a length, a lifetime.
#![allow(unsafe_code)]

use std::{marker::PhantomData, ops::Range};

/// Elements in device memory, to read.
#[derive(Debug)]
pub struct DeviceSlice<'a, T> {
    address: u64,
    len: usize,
    borrow: PhantomData<&'a [T]>,
}

/// Elements in device memory, to read and write, by nobody else meanwhile.
#[derive(Debug)]
pub struct DeviceSliceMut<'a, T> {
    address: u64,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

impl<T> Clone for DeviceSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<'_, T> {}

impl<'a, T> DeviceSlice<'a, T> {
    /// `len` elements at `address`.
    ///
    /// # Safety
    /// They are there for the lifetime, initialised, and written by nobody meanwhile.
    pub unsafe fn new(address: u64, len: usize) -> Self {
        DeviceSlice { address, len, borrow: PhantomData }
    }

    /// Where they are.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part. Panics when it exceeds the whole, as slices do.
    pub fn range(self, range: Range<usize>) -> DeviceSlice<'a, T> {
        DeviceSlice {
            address: part::<T>(self.address, self.len, &range),
            len: range.len(),
            borrow: PhantomData,
        }
    }
}

impl<'a, T> DeviceSliceMut<'a, T> {
    /// `len` elements at `address`.
    ///
    /// # Safety
    /// They are there for the lifetime, and used by nobody else meanwhile.
    pub unsafe fn new(address: u64, len: usize) -> Self {
        DeviceSliceMut { address, len, borrow: PhantomData }
    }

    /// Where they are.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part, while the whole rests. Panics when it exceeds the whole.
    pub fn range(&mut self, range: Range<usize>) -> DeviceSliceMut<'_, T> {
        DeviceSliceMut {
            address: part::<T>(self.address, self.len, &range),
            len: range.len(),
            borrow: PhantomData,
        }
    }

    /// The same elements, to read, while nobody writes.
    pub fn shared(&self) -> DeviceSlice<'_, T> {
        DeviceSlice { address: self.address, len: self.len, borrow: PhantomData }
    }
}

fn part<T>(address: u64, len: usize, range: &Range<usize>) -> u64 {
    assert!(range.start <= range.end && range.end <= len, "part {range:?} of {len} elements");
    address + (range.start * size_of::<T>()) as u64
}
