//! The truth, one row at a time, made of the operations' own references.

use half::bf16;

use crate::{
    rms_norm::rms_norm_reference,
    rope::{Pairs, rope_reference},
};

/// What every row shares.
#[derive(Clone, Debug)]
pub struct QkvReference {
    /// Query heads.
    pub query_heads: usize,
    /// Key heads, and as many value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Added to a row.
    pub bias: Option<Vec<f32>>,
    /// Weights of the norms of queries and of keys.
    pub norms: Option<[Vec<f32>; 2]>,
    /// Of the norms.
    pub eps: f32,
    /// Of the turning pairs.
    pub frequencies: Vec<f32>,
    /// Multiplies cosines and sines.
    pub attention_factor: f32,
    /// Which dimensions turn together.
    pub pairs: Pairs,
}

/// Heads of one row, side by side, before the last rounding.
#[derive(Clone, Debug, PartialEq)]
pub struct QkvHeads {
    /// Query heads.
    pub queries: Vec<f32>,
    /// Key heads.
    pub keys: Vec<f32>,
    /// Value heads.
    pub values: Vec<f32>,
}

impl QkvReference {
    /// Heads of `row` at `position`.
    pub fn row(&self, row: &[f32], position: u32) -> QkvHeads {
        let mut row = row.to_vec();
        if let Some(bias) = &self.bias {
            row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
        }
        let keys_at = self.query_heads * self.head_dim;
        let values_at = keys_at + self.kv_heads * self.head_dim;
        let (queries, rest) = row.split_at(keys_at);
        let (keys, values) = rest.split_at(values_at - keys_at);
        let [query_norm, key_norm] = match &self.norms {
            Some([queries, keys]) => [Some(&queries[..]), Some(&keys[..])],
            None => [None, None],
        };
        QkvHeads {
            queries: self.turned(queries, query_norm, position),
            keys: self.turned(keys, key_norm, position),
            values: values.to_vec(),
        }
    }

    fn turned(&self, heads: &[f32], norm: Option<&[f32]>, position: u32) -> Vec<f32> {
        let mut out = Vec::new();
        for head in heads.chunks_exact(self.head_dim) {
            let mut head = head.to_vec();
            if let Some(weight) = norm {
                head = rms_norm_reference::<bf16>(&mut head, None, weight, self.eps);
            }
            rope_reference(&mut head, position, &self.frequencies, self.attention_factor, self.pairs);
            out.extend(head);
        }
        out
    }
}
