//! A matrix product, as a library may be asked to do it.

use half::bf16;

use super::{DeviceSlice, DeviceSliceMut};
use crate::KernelError;

/// `y = x · weightᵀ + bias`, of whole rows.
#[derive(Debug)]
pub struct Product<'a> {
    /// `[rows][stride]`.
    pub x: DeviceSlice<'a, bf16>,
    /// `[outputs][stride]`.
    pub weight: DeviceSlice<'a, bf16>,
    /// `[outputs]`.
    pub bias: Option<DeviceSlice<'a, f32>>,
    /// `[rows][outputs]`, overwritten.
    pub y: DeviceSliceMut<'a, f32>,
    /// Memory for sums that are not finished: what it holds does not matter. More of it allows more algorithms.
    pub scratch: DeviceSliceMut<'a, f32>,
    /// Rows of `x` and `y`.
    pub rows: usize,
    /// Rows of the weight.
    pub outputs: usize,
    /// Columns of `x` and the weight, those beyond the inputs included: they are zero in both.
    pub stride: usize,
}

impl Product<'_> {
    /// Whether the views are as long as the shape says.
    pub(crate) fn check(&self) -> Result<(), KernelError> {
        let elements = |a: usize, b: usize| a.saturating_mul(b);
        let check = |argument, got, expected| KernelError::check_len("product", argument, got, expected);
        check("x", self.x.len(), elements(self.rows, self.stride))?;
        check("weight", self.weight.len(), elements(self.outputs, self.stride))?;
        check("y", self.y.len(), elements(self.rows, self.outputs))?;
        self.bias.map_or(Ok(()), |bias| check("bias", bias.len(), self.outputs))
    }
}
