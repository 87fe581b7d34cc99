//! Sequences whose keys and values lie in pages all over the memory, and what attention over them is to give.

use anyhow::Result;
use consort_kernels::{attention::AttentionShape, cuda::device::DeviceBuffer, kv_append::PageShape};
use half::bf16;

use crate::session::{Noise, Session, WORK_LIMIT};

/// Tokens of a page, as many as a pool has unless it is told otherwise.
const BLOCK_SIZE: usize = 16;

/// Heads of one layer on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heads {
    pub(super) queries: usize,
    pub(super) kv: usize,
    pub(super) dim: usize,
}

impl Heads {
    pub(super) fn shape(self) -> Result<AttentionShape> {
        Ok(AttentionShape {
            pages: PageShape::new(BLOCK_SIZE, self.kv, self.dim)?,
            kv_of_query: (0..self.queries).map(|query| query * self.kv / self.queries).collect(),
            scale: (self.dim as f32).sqrt().recip(),
            window: None,
        })
    }

    /// Bytes of a token's keys and values.
    pub(super) fn token_bytes(self) -> usize {
        2 * self.kv * self.dim * size_of::<bf16>()
    }
}

/// Keys and values of sequences that are all as long, one layer of them.
pub(super) struct Sequences {
    pub(super) shape: AttentionShape,
    pub(super) pages: DeviceBuffer<bf16>,
    pub(super) page_count: usize,
    /// Pages of a sequence.
    pub(super) table_len: usize,
    pub(super) context: usize,
    tables: Vec<u32>,
}

impl Sequences {
    pub(super) fn new(session: &Session, heads: Heads, context: usize, count: usize) -> Result<Sequences> {
        let shape = heads.shape()?;
        let table_len = context.div_ceil(BLOCK_SIZE);
        let page_count = table_len * count;
        let mut pages = session.buffer::<bf16>(page_count * shape.pages.page_elements(), "pages")?;
        session.fill(&mut pages, 1.0, 3)?;
        let tables = shuffled(page_count);
        Ok(Sequences { shape, pages, page_count, table_len, context, tables })
    }

    /// Block tables of `count` sequences from `first` on.
    pub(super) fn tables(&self, first: usize, count: usize) -> &[u32] {
        &self.tables[first * self.table_len..][..count * self.table_len]
    }

    /// Keys and values of one head of a sequence, `[tokens][head dim]` each.
    pub(super) fn head(&self, session: &Session, sequence: usize, kv_head: usize) -> Result<[Vec<f32>; 2]> {
        let page_elements = self.shape.pages.page_elements();
        let half = page_elements / self.shape.pages.kv_heads() / 2;
        let both = |page: u32| page as usize * page_elements + 2 * kv_head * half;
        let mut elements = vec![bf16::ZERO; 2 * half];
        let [mut keys, mut values] = [Vec::new(), Vec::new()];
        for &page in self.tables(sequence, 1) {
            let from = self.pages.slice(both(page)..both(page) + 2 * half);
            session.device.download(from, &mut elements, WORK_LIMIT)?;
            keys.extend(elements[..half].iter().map(|x| x.to_f32()));
            values.extend(elements[half..].iter().map(|x| x.to_f32()));
        }
        let dim = half / BLOCK_SIZE;
        keys.truncate(self.context * dim);
        values.truncate(self.context * dim);
        Ok([keys, values])
    }
}

/// The numbers below `count`, in an order that is always the same.
fn shuffled(count: usize) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count as u32).collect();
    let mut noise = Noise::new(4);
    for left in (1..count).rev() {
        numbers.swap(left, (noise.next_u64() % (left as u64 + 1)) as usize);
    }
    numbers
}

/// Attention of one query over `keys` and `values`, `[tokens][dim]` each: the result, and for each element the root of
/// the sum of squares of what was added.
pub(super) fn truth(query: &[f32], keys: &[f32], values: &[f32], scale: f32) -> Vec<(f64, f64)> {
    let dim = query.len();
    let score = |key: &[f32]| -> f64 {
        query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * f64::from(scale)
    };
    let scores: Vec<f64> = keys.chunks_exact(dim).map(score).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut sums = vec![(0.0, 0.0); dim];
    for (weight, value) in weights.iter().zip(values.chunks_exact(dim)) {
        for ((sum, squares), value) in sums.iter_mut().zip(value) {
            let part = weight / total * f64::from(*value);
            *sum += part;
            *squares += part * part;
        }
    }
    sums.into_iter().map(|(sum, squares)| (sum, squares.sqrt())).collect()
}

/// How far `got` is from the truth, as a share of what rounding may make.
///
/// Weights are rounded to BF16 before they multiply the values, to 2^-9 of each at most, which for many of them is a
/// random walk; 2^-6 is beyond ten times its deviation. The result is rounded to BF16 once.
pub(super) fn error(got: f32, (expected, spread): (f64, f64)) -> f64 {
    const TINY: f64 = 1e-6;
    (f64::from(got) - expected).abs() / (spread / 64.0 + expected.abs() / 256.0 + TINY)
}

#[cfg(test)]
mod tests {
    use consort_kernels::attention::attention_reference;

    use super::*;

    #[test]
    fn tables_hold_every_page_once_and_in_no_order() {
        let numbers = shuffled(1000);
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq(0..1000));
        assert!(numbers.windows(2).filter(|pair| pair[1] == pair[0] + 1).count() < 10);
    }

    #[test]
    fn the_truth_is_the_references_and_one_wrong_page_is_beyond_all_tolerance() {
        let (dim, tokens) = (64, 2048);
        let mut noise = Noise::new(5);
        let mut numbers = |len| noise.by_ref().take(len).collect::<Vec<f32>>();
        let (query, keys, mut values) = (numbers(dim), numbers(dim * tokens), numbers(dim * tokens));
        let known = truth(&query, &keys, &values, 0.125);
        let expected = attention_reference(&query, &keys, &values, 0.125, None, None);
        let errors =
            |got: &[f32]| got.iter().zip(&known).map(|(got, known)| error(*got, *known)).fold(0.0, f64::max);
        assert!(errors(&expected) < 0.01);
        values[..BLOCK_SIZE * dim].fill(0.0);
        let wrong = attention_reference(&query, &keys, &values, 0.125, None, None);
        assert!(errors(&wrong) > 3.0);
        assert!(error(f32::NAN, known[0]).is_nan());
    }
}
