//! Rows of inputs in the layout that products read, so that whoever makes them writes them there.
//!
//! `[rows / 32][inputs / 32][rows of the panel][32]`: a panel has 32 rows, the last one those that are left. So a block
//! of 32 inputs of a panel is one stream of lines, which tiles take as it is, and a single row is a row. Inputs beyond
//! the last, up to a whole block, are zeros.
#![allow(unsafe_code)]

use std::ops::Range;

use super::BLOCK;
use crate::{
    Element, KernelError,
    buffer::{Buffer, Plain},
    device::Device,
    sys::SharedMut,
};

/// Rows of one panel.
pub(crate) const PANEL: usize = 32;

/// Memory for rows of inputs.
pub struct Rows<T> {
    data: Buffer<T>,
    inputs: usize,
}

/// So many rows of inputs.
#[derive(Clone, Copy, Debug)]
pub struct RowsView<'a, T> {
    data: &'a [T],
    shape: Shape,
}

/// So many rows of inputs, to write. What they held before means nothing.
#[derive(Debug)]
pub struct RowsMut<'a, T> {
    data: &'a mut [T],
    shape: Shape,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    inputs: usize,
}

impl Shape {
    #[inline(always)]
    fn blocks(self) -> usize {
        self.inputs.div_ceil(BLOCK)
    }

    fn elements(self) -> usize {
        self.rows * self.blocks() * BLOCK
    }

    /// Rows of the panel that `row` is in.
    #[inline(always)]
    fn height(self, row: usize) -> usize {
        PANEL.min(self.rows - row / PANEL * PANEL)
    }

    /// Offset of a block of a row.
    #[inline(always)]
    fn block(self, row: usize, block: usize) -> usize {
        (row / PANEL * PANEL * self.blocks() + block * self.height(row) + row % PANEL) * BLOCK
    }

    #[inline(always)]
    fn at(self, row: usize, input: usize) -> usize {
        self.block(row, input / BLOCK) + input % BLOCK
    }
}

impl<T: Element + Plain> Rows<T> {
    /// Room for `rows` rows; `what` names it in an out-of-memory error.
    pub fn zeros(device: &Device, rows: usize, inputs: usize, what: &str) -> Result<Rows<T>, KernelError> {
        let elements = inputs.checked_next_multiple_of(BLOCK).and_then(|inputs| inputs.checked_mul(rows));
        let elements = elements.ok_or_else(|| KernelError::Unsupported {
            operation: "rows",
            reason: format!("{what}: {rows} x {inputs} elements overflow"),
        })?;
        Ok(Rows { data: Buffer::zeros(device, elements, what)?, inputs })
    }

    /// Row-major values, rounded, as rows.
    pub fn of(device: &Device, values: &[f32], inputs: usize) -> Result<Rows<T>, KernelError> {
        let rows = values.len().checked_div(inputs).unwrap_or(0);
        let mut made = Rows::zeros(device, rows, inputs, "rows")?;
        let shape = Shape { rows, inputs };
        let data = made.data.as_mut_slice();
        for (row, values) in values.chunks_exact(inputs.max(1)).enumerate() {
            values.iter().enumerate().for_each(|(input, x)| data[shape.at(row, input)] = T::round(*x));
        }
        Ok(made)
    }

    /// Columns.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.data.bytes()
    }

    /// The first `rows` of them, as they were written with so many. Panics where there is no room for so many.
    pub fn view(&self, rows: usize) -> RowsView<'_, T> {
        let shape = Shape { rows, inputs: self.inputs };
        RowsView { data: &self.data.as_slice()[..shape.elements()], shape }
    }

    /// Likewise, to write.
    pub fn view_mut(&mut self, rows: usize) -> RowsMut<'_, T> {
        let shape = Shape { rows, inputs: self.inputs };
        let data = &mut self.data.as_mut_slice()[..shape.elements()];
        let width = shape.inputs % BLOCK;
        if width > 0 {
            // With another number of rows other numbers were there.
            for row in 0..rows {
                data[shape.block(row, shape.blocks() - 1)..][width..BLOCK].fill(T::default());
            }
        }
        RowsMut { data, shape }
    }

    /// Takes `range` of `from`'s rows, as the first ones here. Panics where they do not fit.
    pub fn copy_rows(&mut self, from: RowsView<'_, T>, range: Range<usize>) {
        assert!(from.shape.inputs == self.inputs && range.end <= from.shape.rows);
        let to = Shape { rows: range.len(), inputs: self.inputs };
        let data = &mut self.data.as_mut_slice()[..to.elements()];
        for (row, source) in range.enumerate() {
            for block in 0..to.blocks() {
                let block_of_source = &from.data[from.shape.block(source, block)..][..BLOCK];
                data[to.block(row, block)..][..BLOCK].copy_from_slice(block_of_source);
            }
        }
    }
}

impl<'a, T: Element> RowsView<'a, T> {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Columns.
    pub fn inputs(&self) -> usize {
        self.shape.inputs
    }

    /// The element of a row and column. Panics where there is none.
    pub fn get(&self, row: usize, input: usize) -> T {
        assert!(row < self.shape.rows && input < self.shape.inputs);
        self.data[self.shape.at(row, input)]
    }

    /// All values, row-major and widened.
    pub fn to_vec(&self) -> Vec<f32> {
        let places = (0..self.rows()).flat_map(|row| (0..self.inputs()).map(move |input| (row, input)));
        places.map(|(row, input)| self.get(row, input).widen()).collect()
    }

    /// A block of a row.
    pub(super) fn block(&self, row: usize, block: usize) -> &'a [T] {
        &self.data[self.shape.block(row, block)..][..BLOCK]
    }

    /// The rows of the panel that begins with `row`: its blocks one after the other, and how many rows it has.
    pub(super) fn panel(&self, row: usize) -> (&'a [T], usize) {
        let height = self.shape.height(row);
        (&self.data[self.shape.block(row, 0)..][..height * self.shape.blocks() * BLOCK], height)
    }
}

impl<'a, T: Element> RowsMut<'a, T> {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Columns.
    pub fn inputs(&self) -> usize {
        self.shape.inputs
    }

    /// For several threads, each of which writes its own part.
    pub(crate) fn shared(self) -> SharedRows<'a, T> {
        SharedRows { data: SharedMut::new(self.data), shape: self.shape }
    }
}

/// Rows that several threads write.
pub(crate) struct SharedRows<'a, T> {
    data: SharedMut<'a, T>,
    shape: Shape,
}

impl<T: Element> SharedRows<'_, T> {
    /// Columns.
    pub(crate) fn inputs(&self) -> usize {
        self.shape.inputs
    }

    /// The columns of a row from `input` on, `len` of them, which lie in one block. Panics where they do not.
    ///
    /// # Safety
    /// While the result lives, nobody else may reach these.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's contract")]
    pub(crate) unsafe fn part(&self, row: usize, input: usize, len: usize) -> &mut [T] {
        assert!(row < self.shape.rows && input % BLOCK + len <= BLOCK);
        let at = self.shape.at(row, input);
        // SAFETY: the caller's.
        unsafe { self.data.range_mut(at..at + len) }
    }
}
