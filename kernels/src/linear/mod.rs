//! `y = x · Wᵀ` with weights packed once at load.
//!
//! | argument | shape |
//! |---|---|
//! | `x` | `[rows, in]`, `T`, row-major |
//! | `weight` | `[out, in]`, packed (see [`Weight`]) |
//! | `y` | `[rows, out]`, f32, overwritten |
//!
//! **Order of summation**, the same on every instruction set, for any number of rows and any split over threads: per
//! block of 32 inputs, one chain of fused multiply-adds over the 16 even and one over the 16 odd inputs, both from
//! zero; then `sum += even + odd`. This is what AMX's `tdpbf16ps` computes, which `tiles` uses where there is AMX. In
//! BF16, inputs that are neither zero nor at least [`crate::element::BF16_SMALLEST`] may tell tiles from lanes:
//! [`Element::round`] makes none.

mod cpu;
pub mod cuda;
mod reference;
#[cfg(test)]
mod tests;
mod tiles;

pub use reference::linear as linear_reference;

use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    Element, KernelError,
    buffer::{Buffer, Plain, View, ViewMut},
    device::Device,
    simd::LanesElement,
};

/// Inputs summed in one pair of chains.
pub(crate) const BLOCK: usize = 32;
/// Outputs packed side by side, in two tiles of 16.
pub(crate) const GROUP: usize = 32;
/// Elements of one tile: 16 pairs of inputs by 16 outputs.
pub(crate) const TILE: usize = 512;

/// A weight matrix `[out, in]` as `[out / 32][in / 32][2 tiles][16 pairs][16 outputs x 2]`: one linear stream in the
/// order of traversal. Missing rows and columns are zeros.
pub struct Weight<T> {
    data: Buffer<T>,
    outputs: usize,
    inputs: usize,
}

impl<T: Element + Plain> Weight<T> {
    /// A matrix of zeros; `what` names it in an out-of-memory error.
    pub fn zeros(device: &Device, outputs: usize, inputs: usize, what: &str) -> Result<Self, KernelError> {
        let elements = outputs
            .checked_next_multiple_of(GROUP)
            .and_then(|rows| rows.checked_mul(inputs.checked_next_multiple_of(BLOCK)?))
            .ok_or_else(|| KernelError::Unsupported {
                operation: "linear",
                reason: format!("{what}: {outputs} x {inputs} elements overflow"),
            })?;
        Ok(Weight { data: Buffer::zeros(device, elements, what)?, outputs, inputs })
    }

    /// Rows of the matrix, the width of `y`.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of the matrix, the width of `x`.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes held, padding included.
    pub fn bytes(&self) -> u64 {
        self.data.bytes()
    }

    /// Writes all rows, read group by group by the threads of `device`: `read(rows, values)` fills `values`, row-major,
    /// with the given rows (at most 32). Values are rounded to `T`. The first error ends the filling.
    pub fn fill<E: Send>(
        &mut self,
        device: &Device,
        read: impl Fn(Range<usize>, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let (outputs, inputs) = (self.outputs, self.inputs);
        if outputs == 0 || inputs == 0 {
            return Ok(());
        }
        let failure = Mutex::new(None);
        let stride = inputs.div_ceil(BLOCK) * 2 * TILE;
        let fill_group = |group: usize, packed: &mut [T]| {
            let rows = group * GROUP..outputs.min((group + 1) * GROUP);
            let mut values = vec![0.0; rows.len() * inputs];
            if lock(&failure).is_some() {
                return;
            }
            match read(rows, &mut values) {
                Ok(()) => pack_group(packed, &values, inputs),
                Err(error) => drop(lock(&failure).get_or_insert(error)),
            }
        };
        let data = self.data.as_mut_slice();
        match device {
            Device::Cpu(cpu) => cpu::for_each_group(cpu, data, stride, fill_group),
            // The matrix is in host memory, whose device was another: this thread does it all.
            Device::Cuda(_) => {
                data.chunks_exact_mut(stride)
                    .enumerate()
                    .for_each(|(group, packed)| fill_group(group, packed));
            }
        }
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Reads one row back, widened. Panics when `row` or `out` do not fit: callers check token ids first.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.outputs && out.len() == self.inputs);
        let data = self.data.as_slice();
        let tile = row / GROUP * (self.inputs.div_ceil(BLOCK) * 2 * TILE) + row % GROUP / 16 * TILE;
        for (input, value) in out.iter_mut().enumerate() {
            let pair = tile + input / BLOCK * 2 * TILE + input % BLOCK / 2 * 32;
            *value = data[pair + T::pair_offset(row % 16, input % 2)].widen();
        }
    }

    pub(crate) fn packed(&self) -> &[T] {
        self.data.as_slice()
    }
}

/// Up to 32 rows, row-major, into their group of the packed layout.
fn pack_group<T: Element>(packed: &mut [T], values: &[f32], inputs: usize) {
    for (row, values) in values.chunks_exact(inputs).enumerate() {
        let (even, odd) = (T::pair_offset(row % 16, 0), T::pair_offset(row % 16, 1));
        for (block, values) in values.chunks(BLOCK).enumerate() {
            let tile = &mut packed[(2 * block + row / 16) * TILE..][..TILE];
            for (pair, values) in values.chunks(2).enumerate() {
                tile[pair * 32 + even] = T::round(values[0]);
                if let Some(&second) = values.get(1) {
                    tile[pair * 32 + odd] = T::round(second);
                }
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `y = x · weightᵀ`; see the module for shapes and the order of summation.
pub fn linear<T: Kernels>(
    device: &Device,
    x: View<'_, T>,
    weight: &Weight<T>,
    y: ViewMut<'_, f32>,
) -> Result<(), KernelError> {
    let rows = y.len().checked_div(weight.outputs).unwrap_or(0);
    KernelError::check_len("linear", "y", y.len(), rows * weight.outputs)?;
    if weight.outputs == 0 {
        return Ok(());
    }
    KernelError::check_len("linear", "x", x.len(), rows * weight.inputs)?;
    let cpu = device.require_cpu("linear")?;
    if weight.inputs == 0 {
        // A rank may own no inputs at all; its part of the sum is zero.
        y.host_mut().fill(0.0);
        return Ok(());
    }
    cpu::linear(cpu, x.host(), weight, y.host_mut())
}

/// Takes the scratch memory that calls with up to `rows` rows of `inputs` elements use on `device`, so that no step has
/// to; returns its bytes.
pub fn reserve<T: Kernels>(device: &Device, rows: usize, inputs: usize) -> Result<u64, KernelError> {
    cpu::reserve::<T>(device.require_cpu("linear")?, rows, inputs)
}

/// Storage types for which every kernel is compiled: all of [`Element`]'s.
#[expect(private_bounds, reason = "how lanes load an element is the kernels' own business")]
pub trait Kernels: LanesElement + Plain {}
impl<T: LanesElement + Plain> Kernels for T {}
