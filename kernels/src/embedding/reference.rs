//! The truth over a row-major table.

/// Rows of `table [.., width]`, whose row 0 belongs to token `first`; zeros for tokens outside.
pub fn embedding(tokens: &[u32], table: &[f32], width: usize, first: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for &token in tokens {
        let row = (token as usize).checked_sub(first).and_then(|row| table.chunks_exact(width).nth(row));
        match row {
            Some(row) => out.extend_from_slice(row),
            None => out.extend(std::iter::repeat_n(0.0, width)),
        }
    }
    out
}
