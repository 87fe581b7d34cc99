//! The truth: plain loops over ranks.

/// The sum over ranks, rank 0 first. All buffers are as long as the first.
pub fn all_reduce(buffers: &[Vec<f32>]) -> Vec<f32> {
    let mut sum = buffers.first().cloned().unwrap_or_default();
    for buffer in buffers.iter().skip(1) {
        sum.iter_mut().zip(buffer).for_each(|(sum, x)| *sum += x);
    }
    sum
}

/// Row by row, the ranks' rows side by side. Rank `p` has `rows` rows of `widths[p]`.
pub fn all_gather(buffers: &[Vec<f32>], rows: usize, widths: &[usize]) -> Vec<f32> {
    let mut all = Vec::with_capacity(rows * widths.iter().sum::<usize>());
    for row in 0..rows {
        for (buffer, &width) in buffers.iter().zip(widths) {
            all.extend_from_slice(&buffer[row * width..][..width]);
        }
    }
    all
}
