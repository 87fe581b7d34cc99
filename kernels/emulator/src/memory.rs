//! Device memory of the emulator: it ends where nobody may touch.
#![allow(unsafe_code)]

use std::{marker::PhantomData, ptr::NonNull};

use crate::recording;

/// Alignment that kernels may count on.
const ALIGNMENT: usize = 16;

/// `len` elements followed by memory that is not there: a kernel that reads or writes beyond the end (rounded up to 16
/// bytes; bytes between must stay as they are) ends with a fault. Under a sanitizer, an exact allocation of its own.
pub struct Memory<T> {
    allocation: Allocation,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Copy> Memory<T> {
    /// A copy of `values`.
    pub fn from_slice(values: &[T]) -> Memory<T> {
        let memory = Memory::poisoned(values.len());
        // SAFETY: the allocation holds as many bytes and is not shared yet.
        unsafe {
            std::ptr::copy_nonoverlapping(values.as_ptr(), memory.allocation.start().cast(), values.len())
        };
        memory
    }

    /// `len` elements of which every bit is set: NaN as a float and as BF16.
    pub fn poisoned(len: usize) -> Memory<T> {
        assert!(align_of::<T>() <= ALIGNMENT);
        Memory { allocation: Allocation::new::<T>(len * size_of::<T>()), len, element: PhantomData }
    }

    /// Where it is, as a kernel's argument.
    pub fn address(&self) -> u64 {
        self.allocation.start() as u64
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What it holds now. `T` must be a type for which all bits are values, as numbers are. Panics when bytes beyond
    /// the end have changed.
    pub fn to_vec(&self) -> Vec<T> {
        self.allocation.check();
        // SAFETY: initialised when made, by poison at least; no launch is under way, since launches block.
        unsafe { std::slice::from_raw_parts(self.allocation.start().cast::<T>(), self.len) }.to_vec()
    }

    /// Overwrites it.
    pub fn write(&mut self, values: &[T]) {
        assert_eq!(values.len(), self.len);
        // SAFETY: as long, and exclusively borrowed.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.allocation.start().cast(), self.len) };
    }
}

const POISON: u8 = 0xff;

// SAFETY: plain bytes, owned.
unsafe impl<T: Send> Send for Memory<T> {}
// SAFETY: a shared reference only reads them; kernels write while a launch blocks its caller.
unsafe impl<T: Sync> Sync for Memory<T> {}

unsafe extern "C" {
    fn emulator_memory_take(bytes: usize) -> *mut u8;
    fn emulator_memory_intact(start: *const u8, bytes: usize) -> i32;
    fn emulator_memory_give_back(start: *mut u8, bytes: usize);
}

struct Allocation {
    start: NonNull<u8>,
    bytes: usize,
}

impl Allocation {
    fn new<T>(bytes: usize) -> Allocation {
        // SAFETY: any size may be asked for.
        let start = unsafe { emulator_memory_take(bytes) };
        let start = NonNull::new(start).expect("the host has memory for a test");
        // SAFETY: the allocation has `bytes` bytes.
        unsafe { start.as_ptr().write_bytes(POISON, bytes) };
        recording::born::<T>(start.as_ptr(), bytes);
        Allocation { start, bytes }
    }

    fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn check(&self) {
        // SAFETY: as it was made.
        let intact = unsafe { emulator_memory_intact(self.start(), self.bytes) };
        assert_eq!(intact, 1, "a kernel wrote within 16 bytes beyond the end of {} bytes", self.bytes);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        recording::gone(self.start());
        // SAFETY: as it was made; nobody uses it any more.
        unsafe { emulator_memory_give_back(self.start(), self.bytes) };
    }
}
