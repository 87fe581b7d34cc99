//! Who holds what: the share of every rank, from the model's shape alone.
//!
//! Units that are never cut: a KV group (one KV head and the query heads that read it), 64 MLP columns, 64 rows of
//! the vocabulary. With more ranks than KV heads the query heads are divided instead and each rank holds a copy of
//! the KV heads that its queries read. Experts are divided inside each, by columns; formats that store blocks of
//! columns make the unit larger. Everything that needs a bound asks this value; nothing computes its own.

use std::ops::Range;

use crate::{config::ModelConfig, ids::Rank};

/// Columns of the MLP that stay together where there are enough of them.
const COLUMN_UNIT: usize = 64;
/// Rows of the vocabulary that stay together where there are enough of them.
const VOCABULARY_UNIT: usize = 64;
/// Most ranks of a group; a bound against typing errors, far above any machine.
pub const RANKS_MAX: usize = 1024;

/// What is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dividend {
    /// Query heads.
    pub query_heads: usize,
    /// KV heads; divides the query heads. One where all heads read the same latent vector.
    pub kv_heads: usize,
    /// Columns of the dense MLP; 0 where no layer has one.
    pub columns: usize,
    /// Columns of each expert; 0 where there are none.
    pub expert_columns: usize,
    /// Columns that a format stores together, in the dense MLP and in experts; 1 where it stores single numbers.
    pub column_block: usize,
    /// Rows of embedding and head.
    pub vocabulary: usize,
}

impl From<&ModelConfig> for Dividend {
    fn from(config: &ModelConfig) -> Dividend {
        Dividend {
            query_heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            columns: config.intermediate_size,
            expert_columns: 0,
            column_block: 1,
            vocabulary: config.vocab_size,
        }
    }
}

/// The shares of all ranks.
#[derive(Clone, Debug, PartialEq, Eq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct Partition {
    shares: Vec<Share>,
}

/// What one rank holds. Ranges are in the whole model's numbering.
#[derive(Clone, Debug, PartialEq, Eq, wincode::SchemaRead, wincode::SchemaWrite)]
pub struct Share {
    /// Query heads.
    pub query_heads: Range<usize>,
    /// KV heads; ranks may overlap when there are more ranks than KV heads.
    pub kv_heads: Range<usize>,
    /// For each query head of this rank, the KV head it reads, counted within `kv_heads`.
    pub kv_of_query: Vec<usize>,
    /// Columns of the MLP.
    pub columns: Range<usize>,
    /// Columns of every expert.
    pub expert_columns: Range<usize>,
    /// Rows of embedding and head.
    pub vocabulary: Range<usize>,
}

/// Why a model cannot be divided as asked.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum PartitionError {
    /// No ranks, or absurdly many.
    #[error("tensor_parallel_size is {ranks}; it must be between 1 and {RANKS_MAX}")]
    Ranks {
        /// What was asked for.
        ranks: usize,
    },
    /// More ranks than query heads: some rank would have no attention at all.
    #[error(
        "tensor_parallel_size is {ranks}, but the model has {query_heads} query heads: at most {query_heads} ranks \
         can share its attention"
    )]
    TooManyRanks {
        /// What was asked for.
        ranks: usize,
        /// Heads to divide.
        query_heads: usize,
    },
    /// Weights of the ranks that make no sense.
    #[error("rank weights {weights:?}: one positive finite number for each of the {ranks} ranks is needed")]
    Weights {
        /// What was given.
        weights: Vec<f32>,
        /// Ranks.
        ranks: usize,
    },
}

impl Partition {
    /// Divides `config`'s model over `ranks`, evenly or in proportion to `weights` (one per rank).
    pub fn new(
        config: &ModelConfig,
        ranks: usize,
        weights: Option<&[f32]>,
    ) -> Result<Partition, PartitionError> {
        Partition::of(&Dividend::from(config), ranks, weights)
    }

    /// The same for any model: heads, columns and rows are all that counts.
    pub fn of(whole: &Dividend, ranks: usize, weights: Option<&[f32]>) -> Result<Partition, PartitionError> {
        if ranks == 0 || ranks > RANKS_MAX {
            return Err(PartitionError::Ranks { ranks });
        }
        if ranks > whole.query_heads {
            return Err(PartitionError::TooManyRanks { ranks, query_heads: whole.query_heads });
        }
        let even = vec![1.0; ranks];
        let weights = weights.unwrap_or(&even);
        if weights.len() != ranks || weights.iter().any(|w| !w.is_finite() || *w <= 0.0) {
            return Err(PartitionError::Weights { weights: weights.to_vec(), ranks });
        }
        let block = whole.column_block.max(1);
        let columns_of = |columns| divide_in_units(columns, column_unit(columns, block), block, weights);
        let shares = divide_attention(whole, weights)
            .into_iter()
            .zip(columns_of(whole.columns))
            .zip(columns_of(whole.expert_columns))
            .zip(divide_in_units(whole.vocabulary, VOCABULARY_UNIT, 1, weights))
            .map(|(((query_heads, columns), expert_columns), vocabulary)| {
                let group = whole.query_heads / whole.kv_heads;
                let kv_heads = query_heads.start / group..(query_heads.end - 1) / group + 1;
                let kv_of_query = query_heads.clone().map(|head| head / group - kv_heads.start).collect();
                Share { query_heads, kv_heads, kv_of_query, columns, expert_columns, vocabulary }
            })
            .collect();
        let partition = Partition { shares };
        partition.check_whole(whole);
        Ok(partition)
    }

    /// Ranks.
    pub fn size(&self) -> usize {
        self.shares.len()
    }

    /// One rank's share. Panics for a rank outside the group.
    pub fn share(&self, rank: Rank) -> &Share {
        &self.shares[rank.index()]
    }

    /// All shares, rank order.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// Panics unless every head, column and row has an owner, only KV heads may have several, and no rank is without
    /// query heads.
    pub fn check_invariants(&self, config: &ModelConfig) {
        self.check_whole(&Dividend::from(config));
    }

    fn check_whole(&self, whole: &Dividend) {
        let covers = |of: fn(&Share) -> &Range<usize>, total: usize| {
            let mut next = 0;
            for share in &self.shares {
                assert_eq!(of(share).start, next, "a gap or an overlap: {self:?}");
                next = of(share).end;
            }
            assert_eq!(next, total, "not all are owned: {self:?}");
        };
        covers(|share| &share.query_heads, whole.query_heads);
        covers(|share| &share.columns, whole.columns);
        covers(|share| &share.expert_columns, whole.expert_columns);
        covers(|share| &share.vocabulary, whole.vocabulary);
        let group = whole.query_heads / whole.kv_heads;
        for share in &self.shares {
            assert!(!share.query_heads.is_empty(), "a rank without query heads: {self:?}");
            for (query, kv) in share.query_heads.clone().zip(&share.kv_of_query) {
                assert_eq!(
                    query / group,
                    share.kv_heads.start + kv,
                    "a query head reads another's keys: {self:?}"
                );
                assert!(share.kv_heads.start + kv < share.kv_heads.end);
            }
        }
    }
}

fn divide_attention(whole: &Dividend, weights: &[f32]) -> Vec<Range<usize>> {
    let group = whole.query_heads / whole.kv_heads;
    let unit = if weights.len() <= whole.kv_heads { group } else { 1 };
    let counts = at_least_one(apportion(whole.query_heads / unit, weights));
    ranges(counts.into_iter().map(|count| count * unit))
}

/// Columns that stay together: whole units and blocks where the columns are a multiple of both, else whole blocks.
fn column_unit(columns: usize, block: usize) -> usize {
    let mut both = block;
    while !both.is_multiple_of(COLUMN_UNIT) {
        both += block;
    }
    if block == 1 || columns.is_multiple_of(both) { both } else { block }
}

/// `total` in multiples of `unit` where every rank can have one, else of `block`, which is never cut; the last rank may
/// get less.
fn divide_in_units(total: usize, unit: usize, block: usize, weights: &[f32]) -> Vec<Range<usize>> {
    let unit = if total.div_ceil(unit) >= weights.len() { unit } else { block };
    let units = total.div_ceil(unit);
    let counts = apportion(units, weights);
    let counts = if units >= weights.len() { at_least_one(counts) } else { counts };
    let mut left = total;
    ranges(counts.into_iter().map(|count| {
        let size = left.min(count * unit);
        left -= size;
        size
    }))
}

/// `units` in proportion to `weights` by largest remainder, ties to the lower rank.
fn apportion(units: usize, weights: &[f32]) -> Vec<usize> {
    let total: f64 = weights.iter().map(|w| f64::from(*w)).sum();
    let exact: Vec<f64> = weights.iter().map(|w| units as f64 * f64::from(*w) / total).collect();
    let mut counts: Vec<usize> = exact.iter().map(|x| x.floor() as usize).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    // Remainders are compared in steps of 1e-9, so that rounding of equal shares cannot decide.
    let remainder = |rank: usize| ((exact[rank] - exact[rank].floor()) * 1e9).round() as u64;
    order.sort_by_key(|&rank| (std::cmp::Reverse(remainder(rank)), rank));
    let mut missing = units - counts.iter().sum::<usize>().min(units);
    for &rank in order.iter().cycle() {
        if missing == 0 {
            break;
        }
        counts[rank] += 1;
        missing -= 1;
    }
    counts
}

/// Moves units from the largest counts to empty ones. Needs at least as many units as ranks.
fn at_least_one(mut counts: Vec<usize>) -> Vec<usize> {
    while let Some(empty) = counts.iter().position(|count| *count == 0) {
        let largest = (0..counts.len()).max_by_key(|&rank| (counts[rank], std::cmp::Reverse(rank)));
        let Some(largest) = largest.filter(|&rank| counts[rank] > 1) else { break };
        counts[largest] -= 1;
        counts[empty] += 1;
    }
    counts
}

fn ranges(sizes: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let mut next = 0;
    sizes
        .map(|size| {
            next += size;
            next - size..next
        })
        .collect()
}

#[cfg(test)]
mod tests;
