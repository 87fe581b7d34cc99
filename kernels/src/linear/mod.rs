//! `y = x · Wᵀ` with weights packed once at load, and what is done with the sums while they are at hand.
//!
//! | argument | shape |
//! |---|---|
//! | `x` | `[rows, in]`, `T`, in panels (see [`Rows`]) |
//! | `weight` | `[out, in]`, packed (see [`Weight`]) |
//! | `y` | `[rows, out]`, f32, overwritten by [`linear`] and added to by [`linear_add`] |
//! | `out` of [`linear_swiglu`] | `[rows, out / 2]`, `T`, in panels: of a [paired](Weight::paired) matrix |
//!
//! **Order of summation**, the same on every instruction set, for any number of rows and any split over threads: per
//! block of 32 inputs, one chain of fused multiply-adds over the 16 even and one over the 16 odd inputs, both from
//! zero; then `sum += even + odd`. This is what AMX's `tdpbf16ps` computes, which `tiles` uses where there is AMX. In
//! BF16, inputs that are neither zero nor at least [`crate::element::BF16_SMALLEST`] may tell tiles from lanes:
//! [`Element::round`] makes none.

mod cpu;
pub mod cuda;
mod finish;
mod peak;
mod reference;
mod rows;
#[cfg(test)]
mod tests;
mod tiles;

pub use peak::peak_flops;
pub use reference::linear as linear_reference;
pub(crate) use rows::SharedRows;
pub use rows::{Rows, RowsMut, RowsView};

use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use self::finish::{Add, Gate, Store};
use crate::{
    Element, KernelError,
    buffer::{Buffer, Plain, ViewMut},
    device::{CpuDevice, Device},
    simd::LanesElement,
    sys::SharedMut,
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
    /// Outputs of each of the two matrices that it pairs.
    paired: Option<usize>,
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
        Ok(Weight { data: Buffer::zeros(device, elements, what)?, outputs, inputs, paired: None })
    }

    /// Two matrices of zeros, `[width, in]` each, whose groups hold 16 outputs of one beside the same 16 of the other:
    /// gates and ups, for [`linear_swiglu`].
    pub fn paired(device: &Device, width: usize, inputs: usize, what: &str) -> Result<Self, KernelError> {
        let outputs = width.checked_next_multiple_of(GROUP / 2).and_then(|width| width.checked_mul(2));
        let mut weight = Weight::zeros(device, outputs.unwrap_or(usize::MAX), inputs, what)?;
        weight.paired = Some(width);
        Ok(weight)
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
    /// with the given rows (at most 32). Rows of a paired matrix are those of the first and then those of the second.
    /// Values are rounded to `T`. The first error ends the filling.
    pub fn fill<E: Send>(
        &mut self,
        device: &Device,
        read: impl Fn(Range<usize>, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let (outputs, inputs, paired) = (self.outputs, self.inputs, self.paired);
        if outputs == 0 || inputs == 0 {
            return Ok(());
        }
        let failure = Mutex::new(None);
        let stride = inputs.div_ceil(BLOCK) * 2 * TILE;
        let fill_group = |group: usize, packed: &mut [T]| {
            let pieces = match paired {
                None => [(0, group * GROUP..outputs.min((group + 1) * GROUP)), (0, 0..0)],
                Some(width) => {
                    let of_one = group * GROUP / 2..width.min((group + 1) * GROUP / 2);
                    [(0, of_one.clone()), (GROUP / 2, width + of_one.start..width + of_one.end)]
                }
            };
            for (first, rows) in pieces.into_iter().filter(|(_, rows)| !rows.is_empty()) {
                let mut values = vec![0.0; rows.len() * inputs];
                if lock(&failure).is_some() {
                    return;
                }
                match read(rows, &mut values) {
                    Ok(()) => pack_rows(packed, first, &values, inputs),
                    Err(error) => drop(lock(&failure).get_or_insert(error)),
                }
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

    fn groups(&self) -> usize {
        self.outputs.div_ceil(GROUP)
    }

    pub(crate) fn packed(&self) -> &[T] {
        self.data.as_slice()
    }
}

/// Rows, row-major, into their group of the packed layout, from its row `first` on.
fn pack_rows<T: Element>(packed: &mut [T], first: usize, values: &[f32], inputs: usize) {
    for (row, values) in (first..).zip(values.chunks_exact(inputs)) {
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
    x: RowsView<'_, T>,
    weight: &Weight<T>,
    y: ViewMut<'_, f32>,
) -> Result<(), KernelError> {
    let Some(cpu) = check(device, x, weight, y.len(), weight.outputs)? else {
        // A rank may own no inputs at all; its part of the sum is zero.
        y.host_mut().fill(0.0);
        return Ok(());
    };
    cpu::linear(cpu, x, weight, &Store { y: SharedMut::new(y.host_mut()), outputs: weight.outputs });
    Ok(())
}

/// `y += x · weightᵀ`: the sum first, as [`linear`] makes it.
pub fn linear_add<T: Kernels>(
    device: &Device,
    x: RowsView<'_, T>,
    weight: &Weight<T>,
    y: ViewMut<'_, f32>,
) -> Result<(), KernelError> {
    let Some(cpu) = check(device, x, weight, y.len(), weight.outputs)? else { return Ok(()) };
    cpu::linear(cpu, x, weight, &Add { y: SharedMut::new(y.host_mut()), outputs: weight.outputs });
    Ok(())
}

/// `out = silu(x · gateᵀ) · (x · upᵀ)`, rounded to `T`, of a [paired](Weight::paired) matrix.
pub fn linear_swiglu<T: Kernels>(
    device: &Device,
    x: RowsView<'_, T>,
    gate_up: &Weight<T>,
    out: RowsMut<'_, T>,
) -> Result<(), KernelError> {
    let width = gate_up.paired.ok_or_else(|| KernelError::Unsupported {
        operation: "linear",
        reason: "a matrix that is not paired has no gates".to_owned(),
    })?;
    KernelError::check_len("linear", "columns of out", out.inputs(), width)?;
    let Some(cpu) = check(device, x, gate_up, out.rows() * width, width)? else {
        return Err(KernelError::Unsupported {
            operation: "linear",
            reason: "gates without inputs".to_owned(),
        });
    };
    cpu::linear(cpu, x, gate_up, &Gate { out: out.shared() });
    Ok(())
}

/// Refuses shapes that do not fit; `None` where there are no inputs, and so nothing to sum.
fn check<'a, T: Kernels>(
    device: &'a Device,
    x: RowsView<'_, T>,
    weight: &Weight<T>,
    elements: usize,
    width: usize,
) -> Result<Option<&'a CpuDevice>, KernelError> {
    let cpu = device.require_cpu("linear")?;
    KernelError::check_len("linear", "columns of x", x.inputs(), weight.inputs)?;
    KernelError::check_len("linear", "y", elements, x.rows() * width)?;
    Ok((weight.inputs > 0).then_some(&**cpu))
}

/// Storage types for which every kernel is compiled: all of [`Element`]'s.
#[expect(private_bounds, reason = "how lanes load an element is the kernels' own business")]
pub trait Kernels: LanesElement + Plain {}
impl<T: LanesElement + Plain> Kernels for T {}
