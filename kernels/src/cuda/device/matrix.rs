//! Products by cuBLASLt, with the algorithm chosen once for a shape.
#![allow(unsafe_code)]

use std::{
    collections::BTreeMap,
    ops::RangeInclusive,
    sync::{Arc, Mutex},
};

use super::{
    CudaError, LibraryFacts, lock,
    raw::{
        Context, Stream,
        matrix::{Algorithm, Circumstances, Matrices},
    },
};
use crate::cuda::{DeviceSlice, Product};

/// What cuBLASLt takes an address for, unless it is told less.
const ALIGNMENT_MAX: u64 = 256;

/// The library and what it chose.
pub(super) struct MatrixLibrary {
    matrices: Matrices,
    /// `None` for what no algorithm takes.
    chosen: Mutex<BTreeMap<Key, Option<Algorithm>>>,
}

/// What an algorithm is chosen for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    rows: usize,
    outputs: usize,
    stride: usize,
    has_bias: bool,
    circumstances: Circumstances,
}

impl MatrixLibrary {
    pub(super) fn new(context: &Arc<Context>, facts: LibraryFacts) -> Result<MatrixLibrary, CudaError> {
        Ok(MatrixLibrary { matrices: Matrices::new(context, facts)?, chosen: Mutex::default() })
    }

    pub(super) fn facts(&self) -> &LibraryFacts {
        self.matrices.facts()
    }

    /// Enqueues a product whose views are as long as its shape says; false where the library has no algorithm for it.
    pub(super) fn multiply(&self, stream: &Stream, product: &Product<'_>) -> Result<bool, CudaError> {
        match self.algorithm(product, product.rows)? {
            // SAFETY: lengths are the caller's word, the scratch memory is aligned or not used.
            Some((algorithm, scratch_bytes)) => unsafe {
                self.matrices.multiply(stream, product, &algorithm, scratch_bytes)
            },
            None => Ok(false),
        }
    }

    /// Chooses the algorithms of a product with these numbers of rows, and has each multiply the rows that there are.
    pub(super) fn rehearse(
        &self,
        stream: &Stream,
        product: &Product<'_>,
        rows: RangeInclusive<usize>,
    ) -> Result<(), CudaError> {
        let mut done = Vec::new();
        let mut next = *rows.start();
        while next <= *rows.end() {
            if let Some((algorithm, scratch_bytes)) = self.algorithm(product, next)?
                && !done.contains(&algorithm)
            {
                // SAFETY: as above. One that does not take so few rows is not done, and asked again for more.
                let taken = unsafe { self.matrices.multiply(stream, product, &algorithm, scratch_bytes)? };
                if taken {
                    done.push(algorithm);
                } else {
                    tracing::debug!(rows = next, "cuBLASLt's algorithm for these rows takes no single one");
                }
            }
            next = bucket(next) + 1;
        }
        Ok(())
    }

    /// What multiplies so many rows, and the bytes of scratch memory that it may use.
    fn algorithm(&self, product: &Product<'_>, rows: usize) -> Result<Option<(Algorithm, usize)>, CudaError> {
        let Product { outputs, stride, .. } = *product;
        if rows == 0 || outputs == 0 || stride == 0 || !product.bias.is_none_or(is_aligned) {
            return Ok(None);
        }
        let aligned = product.scratch.address().is_multiple_of(ALIGNMENT_MAX);
        let scratch_bytes = if aligned { product.scratch.len() * size_of::<f32>() } else { 0 };
        let addresses = [product.x.address(), product.weight.address(), product.y.address()];
        let circumstances = Circumstances { alignment: addresses.map(alignment), scratch_bytes };
        let has_bias = product.bias.is_some();
        let key = Key { rows: bucket(rows), outputs, stride, has_bias, circumstances };
        let algorithm = {
            let mut chosen = lock(&self.chosen);
            match chosen.get(&key) {
                Some(algorithm) => *algorithm,
                None => {
                    let algorithm = self.matrices.choose(product, key.rows, circumstances)?;
                    if algorithm.is_none() {
                        tracing::debug!(
                            rows = key.rows,
                            outputs,
                            stride,
                            "cuBLASLt takes no product of this shape"
                        );
                    }
                    *chosen.entry(key).or_insert(algorithm)
                }
            }
        };
        Ok(algorithm.map(|algorithm| (algorithm, scratch_bytes)))
    }
}

/// Whether a bias starts where all algorithms take it: the library cannot be told how one is aligned.
fn is_aligned(bias: DeviceSlice<'_, f32>) -> bool {
    bias.address().is_multiple_of(16)
}

/// The number of rows that an algorithm is chosen for: a few for each doubling, so that every length of a prompt need
/// not have its own. It depends on the rows alone, not on which product came first.
fn bucket(rows: usize) -> usize {
    const STEP_MIN: usize = 64;
    /// Steps in a doubling.
    const STEPS: usize = 4;
    let doubling = rows.checked_next_power_of_two().unwrap_or(rows) / 2;
    rows.checked_next_multiple_of((doubling / STEPS).max(STEP_MIN)).unwrap_or(rows)
}

/// Bytes that an address is a multiple of, as far as it matters.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(ALIGNMENT_MAX.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_serves_numbers_of_rows_that_differ_little() {
        let buckets = [1, 64, 65, 128, 129, 512, 513, 640, 641, 1024, 1025, 2048, 8192].map(bucket);
        assert_eq!(buckets, [64, 64, 128, 128, 192, 512, 640, 640, 768, 1024, 1280, 2048, 8192]);
        for rows in 1..10_000 {
            assert!(bucket(rows) >= rows && bucket(rows) - rows < (rows / 4).max(64), "{rows}");
        }
    }

    #[test]
    fn an_address_is_as_aligned_as_it_is_and_no_more_than_matters() {
        assert_eq!([0x1000, 0x1010, 0x1004, 0x1100].map(alignment), [256, 16, 4, 256]);
    }
}
