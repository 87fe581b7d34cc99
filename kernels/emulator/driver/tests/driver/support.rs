//! Devices, streams and kernels, for tests.
#![allow(unsafe_code)]

use std::{
    ffi::{CString, c_void},
    sync::{Arc, Once},
    time::{Duration, Instant},
};

use consort_software_driver::folder;
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

/// Every order in which the driver may run what is enqueued.
pub(crate) const ORDERS: [&str; 4] = ["lazy", "eager", "random:1", "random:2"];

pub(crate) const ORDER: &str = "CONSORT_SOFTWARE_DRIVER_ORDER";
pub(crate) const DEVICES: &str = "CONSORT_SOFTWARE_DRIVER_DEVICES";
pub(crate) const FAULTS: &str = "CONSORT_SOFTWARE_DRIVER_FAULTS";
pub(crate) const LENIENT: (&str, &str) = ("CONSORT_SOFTWARE_DRIVER_STRICT", "0");

/// The image that the pretend compiler makes of a text.
const IMAGE: &[u8] = b"CONSORT SOFTWARE CUBIN\ntest.cu\nsm_90\n\0";

/// A device's context, current on this thread.
pub(crate) fn device(ordinal: usize) -> Arc<CudaContext> {
    load();
    let context = CudaContext::new(ordinal).expect("the device is there");
    // Tests order things themselves.
    unsafe { context.disable_event_tracking() };
    context
}

/// Loads the driver as the product does: by its path, before anybody asks for it by name.
pub(crate) fn load() {
    static LOADED: Once = Once::new();
    LOADED.call_once(|| {
        let path =
            CString::new(folder().join("libcuda.so.1").to_string_lossy().into_owned()).expect("no zeros");
        // SAFETY: a zero-terminated path; the library's constructors touch nothing of ours.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!library.is_null(), "{path:?} can be loaded");
    });
}

pub(crate) fn code(outcome: Result<(), DriverError>) -> u32 {
    outcome.map_or_else(|error| error.0 as u32, |()| 0)
}

/// Plain memory of the current device, not freed by itself.
pub(crate) fn allocate(bytes: usize) -> u64 {
    // SAFETY: any size may be asked for.
    unsafe { result::malloc_sync(bytes) }.expect("memory for a test")
}

pub(crate) fn free(address: u64) {
    // SAFETY: the driver checks the address.
    unsafe { result::free_sync(address) }.expect("it was allocated");
}

pub(crate) fn upload<T>(address: u64, values: &[T]) {
    // SAFETY: the driver checks the extent.
    unsafe { result::memcpy_htod_sync(address, values) }.expect("a copy to the device");
}

pub(crate) fn download<T: Copy + Default>(address: u64, len: usize) -> Vec<T> {
    let mut values = vec![T::default(); len];
    // SAFETY: the driver checks the extent.
    unsafe { result::memcpy_dtoh_sync(&mut values, address) }.expect("a copy to the host");
    values
}

/// Pinned memory of the host, which is never freed: the process ends soon.
pub(crate) fn pinned(len: usize) -> &'static mut [u32] {
    // SAFETY: fresh memory of that size, filled before it is seen.
    unsafe {
        let memory = result::malloc_host(len * size_of::<u32>(), 0).expect("pinned memory").cast::<u32>();
        memory.write_bytes(0, len);
        std::slice::from_raw_parts_mut(memory, len)
    }
}

pub(crate) fn copy_to_device(stream: &CudaStream, to: u64, from: &[u32]) {
    // SAFETY: pinned memory outlives the test.
    unsafe { result::memcpy_htod_async(to, from, stream.cu_stream()) }.expect("a copy to the device");
}

pub(crate) fn copy_to_host(stream: &CudaStream, to: &mut [u32], from: u64) {
    // SAFETY: pinned memory outlives the test.
    unsafe { result::memcpy_dtoh_async(to, from, stream.cu_stream()) }.expect("a copy to the host");
}

pub(crate) fn copy(stream: &CudaStream, to: u64, from: u64, bytes: usize) {
    // SAFETY: the driver checks the extents.
    unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }.expect("a copy on the device");
}

pub(crate) fn function(name: &str) -> sys::CUfunction {
    // SAFETY: an image that the software driver knows.
    unsafe {
        let module = result::module::load_data(IMAGE.as_ptr().cast()).expect("the pretend image");
        result::module::get_function(module, CString::new(name).expect("no zeros")).expect("a kernel of ours")
    }
}

/// Launches a kernel of one dimension.
///
/// # Safety
/// The arguments are of the types of its parameters.
pub(crate) unsafe fn launch(
    stream: &CudaStream,
    function: sys::CUfunction,
    (blocks, threads): ((u32, u32), u32),
    arguments: &mut [*mut c_void],
) -> Result<(), DriverError> {
    let grid = (blocks.0, blocks.1, 1);
    // SAFETY: the caller's promise.
    unsafe { result::launch_kernel(function, grid, (threads, 1, 1), 0, stream.cu_stream(), arguments) }
}

/// `swiglu_silu` on rows of f32: gate and up halves in, BF16 out.
pub(crate) struct Swiglu {
    function: sys::CUfunction,
    pub(crate) width: u32,
    pub(crate) rows: u32,
}

impl Swiglu {
    pub(crate) fn new(width: u32, rows: u32) -> Swiglu {
        assert_eq!(width % 8, 0, "rows begin on 16 bytes");
        Swiglu { function: function("swiglu_silu"), width, rows }
    }

    pub(crate) fn input(&self, seed: u32) -> Vec<f32> {
        (0..2 * self.width * self.rows).map(|at| ((at * 7 + seed * 13) % 41) as f32 / 8.0 - 2.0).collect()
    }

    pub(crate) fn input_bytes(&self) -> usize {
        (2 * self.width * self.rows) as usize * size_of::<f32>()
    }

    pub(crate) fn output_bytes(&self) -> usize {
        (self.width * self.rows) as usize * 2
    }

    pub(crate) fn launch(&self, stream: &CudaStream, from: u64, to: u64) -> Result<(), DriverError> {
        let (mut from, mut to, mut width, mut rows, mut stride) =
            (from, to, self.width, self.rows, self.width);
        let mut arguments: [*mut c_void; 5] = [
            (&raw mut from).cast(),
            (&raw mut width).cast(),
            (&raw mut rows).cast(),
            (&raw mut to).cast(),
            (&raw mut stride).cast(),
        ];
        let blocks = (self.width / 4).div_ceil(32);
        // SAFETY: the parameters of `kernels/src/swiglu/kernel.cu`.
        unsafe { launch(stream, self.function, ((blocks, self.rows), 32), &mut arguments) }
    }

    /// Compares what the kernel wrote with the formula, within BF16's rounding.
    pub(crate) fn check(&self, input: &[f32], output: &[u16]) {
        let width = self.width as usize;
        for (row, out) in input.chunks_exact(2 * width).zip(output.chunks_exact(width)) {
            for (column, bits) in out.iter().enumerate() {
                let (gate, up) = (row[column], row[width + column]);
                let expected = gate / (1.0 + (-gate).exp()) * up;
                let found = f32::from_bits(u32::from(*bits) << 16);
                // Half of BF16's last place, and a little for the kernel's own exponential.
                let tolerance = expected.abs() / 200.0 + 1e-6;
                assert!((found - expected).abs() <= tolerance, "{found} instead of {expected}");
            }
        }
    }
}

/// Looks again and again, as a host that must not wait for ever does.
pub(crate) fn becomes(condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        if condition() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}
