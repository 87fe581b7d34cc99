//! Shared by the tests of operations: numbers that look like activations, devices to run on.

use std::path::{Path, PathBuf};

pub(crate) mod emulated;

use crate::{
    Element, KernelError,
    buffer::Plain,
    device::{Device, Isa},
    linear::Weight,
};

/// A small generator for test data (splitmix64).
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub(crate) fn f32(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// `len` of them.
    pub(crate) fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.f32()).collect()
    }

    /// Uniform in `0..limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next_u64() % limit as u64) as usize
    }
}

/// Every instruction set of this machine with one and with three threads; says which ones it lacks.
pub(crate) fn devices() -> Vec<Device> {
    for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_available()) {
        println!("not tested, since this machine does not offer it: {isa}");
    }
    Isa::available()
        .flat_map(|isa| {
            [1, 3].map(|threads| Device::cpu_with(threads, isa).expect("the instruction set is there"))
        })
        .collect()
}

/// Asserts equality bit by bit.
pub(crate) fn assert_same_bits(got: &[f32], expected: &[f32], context: &str) {
    assert_eq!(got.len(), expected.len(), "{context}");
    for (at, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!(a.to_bits() == b.to_bits(), "{context}: element {at} is {a}, expected {b}");
    }
}

/// A packed matrix with the given row-major values.
pub(crate) fn weight<T: Element + Plain>(
    device: &Device,
    values: &[f32],
    outputs: usize,
    inputs: usize,
) -> Weight<T> {
    let mut weight = Weight::zeros(device, outputs, inputs, "test").expect("it fits");
    let read = |rows: std::ops::Range<usize>, out: &mut [f32]| -> Result<(), KernelError> {
        out.copy_from_slice(&values[rows.start * inputs..rows.end * inputs]);
        Ok(())
    };
    weight.fill(device, read).expect("reading a slice cannot fail");
    weight
}

/// A folder of one test, removed at its end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// An empty folder; `name` is the test's own.
    pub(crate) fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("consort-kernels-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("the temporary folder can be written");
        Folder(path)
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
