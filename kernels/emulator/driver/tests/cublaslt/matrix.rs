//! Matrices on the host, and the plain product that the library's is held against.

use cudarc::cublaslt::sys::cudaDataType_t as Type;
use half::{bf16, f16};

/// What lies between the columns of a matrix; nobody may change it.
const BETWEEN: f32 = 77.0;

/// Column-major matrices, one or several behind each other, with room between their columns.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Matrix {
    pub(crate) kind: Type,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) leading: usize,
    pub(crate) batches: usize,
    values: Vec<f32>,
}

impl Matrix {
    /// One whose element (row, column) of a batch is `value(batch, row, column)`.
    pub(crate) fn new(
        kind: Type,
        (rows, columns): (usize, usize),
        leading: usize,
        batches: usize,
        value: impl Fn(usize, usize, usize) -> f32,
    ) -> Matrix {
        let values = vec![BETWEEN; leading * columns * batches];
        let mut matrix = Matrix { kind, rows, columns, leading, batches, values };
        for batch in 0..batches {
            for column in 0..columns {
                for row in 0..rows {
                    matrix.values[(batch * columns + column) * leading + row] = value(batch, row, column);
                }
            }
        }
        matrix
    }

    pub(crate) fn at(&self, batch: usize, row: usize, column: usize) -> f32 {
        self.values[(batch * self.columns + column) * self.leading + row]
    }

    /// Elements from one of the batch to the next.
    pub(crate) fn stride(&self) -> usize {
        self.leading * self.columns
    }

    /// The bits of all elements, those between columns included.
    pub(crate) fn bits(&self) -> Vec<u32> {
        self.values.iter().map(|value| value.to_bits()).collect()
    }

    /// As the device has it.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let bytes = |value: &f32| match self.kind {
            Type::CUDA_R_32F => value.to_le_bytes().to_vec(),
            Type::CUDA_R_16F => f16::from_f32(*value).to_le_bytes().to_vec(),
            Type::CUDA_R_16BF => bf16::from_f32(*value).to_le_bytes().to_vec(),
            other => panic!("no matrices of {other:?}"),
        };
        self.values.iter().flat_map(bytes).collect()
    }

    /// One like this, read from the device's bytes.
    pub(crate) fn read(&self, bytes: &[u8]) -> Matrix {
        let short = |pair: &[u8]| [pair[0], pair[1]];
        let values = match self.kind {
            Type::CUDA_R_32F => bytes
                .chunks_exact(4)
                .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]))
                .collect(),
            Type::CUDA_R_16F => {
                bytes.chunks_exact(2).map(|pair| f16::from_le_bytes(short(pair)).to_f32()).collect()
            }
            _ => bytes.chunks_exact(2).map(|pair| bf16::from_le_bytes(short(pair)).to_f32()).collect(),
        };
        Matrix { values, ..self.clone() }
    }
}

/// Whole numbers from -4 to 4, which look random: their products' sums are exact in f32, whatever the order.
pub(crate) fn whole(seed: usize) -> impl Fn(usize, usize, usize) -> f32 {
    move |batch, row, column| {
        let mixed = (seed + batch * 31 + row * 7919 + column * 104_729).wrapping_mul(0x9E37_79B9);
        ((mixed >> 7) % 9) as f32 - 4.0
    }
}

/// Numbers between -1 and 1 whose sums depend on the order, exact in BF16.
pub(crate) fn fractions(seed: usize) -> impl Fn(usize, usize, usize) -> f32 {
    move |batch, row, column| {
        let mixed = (seed + batch * 31 + row * 7919 + column * 104_729).wrapping_mul(0x9E37_79B9) >> 5;
        bf16::from_f32((mixed % 20_001) as f32 / 10_000.0 - 1.0).to_f32()
    }
}

/// Whether an operand is read by its columns or by its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    AsItIs,
    Transposed,
}

impl Read {
    /// Rows and columns of the matrix that is read as `rows` by `columns`.
    pub(crate) fn shape(self, rows: usize, columns: usize) -> (usize, usize) {
        if self == Read::Transposed { (columns, rows) } else { (rows, columns) }
    }
}

/// `op(a) * op(b)` with `finish(batch, row, column, sum)` on top, in a matrix like `like`.
pub(crate) fn product(
    (a, read_a): (&Matrix, Read),
    (b, read_b): (&Matrix, Read),
    like: &Matrix,
    finish: impl Fn(usize, usize, usize, f64) -> f64,
) -> Matrix {
    let element = |matrix: &Matrix, read: Read, batch: usize, row: usize, column: usize| {
        let (row, column) = read.shape(row, column);
        f64::from(matrix.at(batch.min(matrix.batches - 1), row, column))
    };
    let k = if read_a == Read::Transposed { a.rows } else { a.columns };
    Matrix::new(like.kind, (like.rows, like.columns), like.leading, like.batches, |batch, row, column| {
        let sum = (0..k)
            .map(|i| element(a, read_a, batch, row, i) * element(b, read_b, batch, i, column))
            .sum::<f64>();
        finish(batch, row, column, sum) as f32
    })
}
