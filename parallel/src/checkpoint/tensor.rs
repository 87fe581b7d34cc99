//! One tensor of a mapped file: where it is, its shape, and how a slice of it is read.

use std::ops::Range;

use super::encoding::Encoding;

/// What is known of a tensor without reading it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Dimensions, outermost first; the last one varies fastest.
    pub shape: Vec<usize>,
    /// How the elements are stored.
    pub encoding: Encoding,
    /// Bytes that the tensor takes in its file.
    pub stored_bytes: u64,
}

impl TensorInfo {
    /// Rows that [`read_rows`](super::Checkpoint::read_rows) sees: the product of all dimensions but the last;
    /// a vector is one row.
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// Columns that [`read_rows`](super::Checkpoint::read_rows) sees: the last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// A tensor within its file. The constructor proves that every row lies inside the file.
#[derive(Clone, Debug)]
pub(super) struct StoredTensor {
    /// Index of the file in the checkpoint.
    pub(super) file: usize,
    /// Where the first row starts.
    pub(super) offset: usize,
    /// Shape, encoding and size.
    pub(super) info: TensorInfo,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    /// Width of a head whose rows are stored pairwise; see [`StoredTensor::pair_rows`].
    paired_head_dim: Option<usize>,
}

impl StoredTensor {
    /// A tensor at `offset` of a file of `file_len` bytes, or the reason why it cannot be there.
    pub(super) fn new(
        file: usize,
        file_len: usize,
        offset: usize,
        shape: Vec<usize>,
        encoding: Encoding,
    ) -> Result<Self, String> {
        let too_large = || format!("its shape {shape:?} overflows");
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape
            .split_last()
            .map_or(Some(1), |(_, outer)| outer.iter().try_fold(1_usize, |n, dim| n.checked_mul(*dim)))
            .ok_or_else(too_large)?;
        rows.checked_mul(cols).ok_or_else(too_large)?;
        let row_bytes = encoding.row_bytes(cols).ok_or_else(|| {
            format!("rows of {cols} elements cannot be {encoding} blocks of {}", encoding.block().0)
        })?;
        let bytes = rows.checked_mul(row_bytes).ok_or_else(too_large)?;
        if offset.checked_add(bytes).is_none_or(|end| end > file_len) {
            return Err(format!("its {bytes} bytes from {offset} go past the end of the file at {file_len}"));
        }
        let info = TensorInfo { shape, encoding, stored_bytes: bytes as u64 };
        Ok(Self { file, offset, info, rows, cols, row_bytes, paired_head_dim: None })
    }

    /// Declares that the rows of each head are stored as pairs (0, d/2, 1, d/2 + 1, ...), as GGUF does for
    /// rotation of neighbours. Rows are then handed out in the order of the halves (0, 1, ..., d/2, ...).
    pub(super) fn pair_rows(&mut self, head_dim: usize) -> Result<(), String> {
        if head_dim == 0 || !head_dim.is_multiple_of(2) || !self.rows.is_multiple_of(head_dim) {
            return Err(format!("its {} rows are not whole heads of {head_dim}", self.rows));
        }
        self.paired_head_dim = Some(head_dim);
        Ok(())
    }

    /// Whether such a slice exists and fills `out_len` values.
    pub(super) fn has(&self, rows: &Range<usize>, cols: &Range<usize>, out_len: usize) -> bool {
        let within = |range: &Range<usize>, len| range.start <= range.end && range.end <= len;
        within(rows, self.rows)
            && within(cols, self.cols)
            && rows.len().checked_mul(cols.len()) == Some(out_len)
    }

    /// Converts a slice that [`StoredTensor::has`]. `file` is the whole file.
    pub(super) fn read(&self, file: &[u8], rows: Range<usize>, cols: Range<usize>, out: &mut [f32]) {
        if cols.is_empty() {
            return;
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(cols.len())) {
            let start = self.offset + self.stored_row(row) * self.row_bytes;
            self.info.encoding.decode(&file[start..start + self.row_bytes], cols.clone(), out);
        }
    }

    /// Bytes of the file that hold `rows`, rounded out to whole heads where rows are paired.
    pub(super) fn byte_range(&self, rows: Range<usize>) -> Range<usize> {
        let unit = self.paired_head_dim.unwrap_or(1);
        let start = (rows.start.min(self.rows) / unit) * unit;
        let end = rows.end.min(self.rows).div_ceil(unit) * unit;
        self.offset + start * self.row_bytes..self.offset + end * self.row_bytes
    }

    /// Where row `row` of the model is stored: within a head, row `half * d/2 + i` is stored at `2 i + half`.
    fn stored_row(&self, row: usize) -> usize {
        match self.paired_head_dim {
            None => row,
            Some(head_dim) => {
                let (head, within) = (row / head_dim, row % head_dim);
                let (half, i) = (within / (head_dim / 2), within % (head_dim / 2));
                head * head_dim + 2 * i + half
            }
        }
    }
}
