use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::config::{Architecture, RopeConfig, RopeScaling};

fn model(num_heads: usize, num_kv_heads: usize, intermediate_size: usize, vocab_size: usize) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: 64,
        num_layers: 1,
        num_heads,
        num_kv_heads,
        head_dim: 16,
        intermediate_size,
        vocab_size,
        max_position_embeddings: 128,
        rms_norm_eps: 1e-5,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::None },
        layer_windows: vec![None],
        tie_word_embeddings: true,
        eos_token_ids: vec![],
        bos_token_id: None,
    }
}

fn lens(partition: &Partition, of: fn(&Share) -> &Range<usize>) -> Vec<usize> {
    partition.shares().iter().map(|share| of(share).len()).collect()
}

#[test]
fn a_hundred_twenty_billion_parameters_divide_over_three_cards() {
    let partition = Partition::new(&model(64, 8, 2880, 201_088), 3, None).unwrap();
    assert_eq!(lens(&partition, |s| &s.kv_heads), [3, 3, 2]);
    assert_eq!(lens(&partition, |s| &s.query_heads), [24, 24, 16]);
    assert_eq!(lens(&partition, |s| &s.columns), [960, 960, 960]);
    assert_eq!(lens(&partition, |s| &s.vocabulary), [67_072, 67_008, 67_008]);
}

#[test]
fn three_shards_of_smollm2_hold_three_query_heads_and_one_kv_head_each() {
    let partition = Partition::new(&model(9, 3, 1536, 49_152), 3, None).unwrap();
    assert_eq!(lens(&partition, |s| &s.query_heads), [3, 3, 3]);
    assert_eq!(lens(&partition, |s| &s.kv_heads), [1, 1, 1]);
    assert_eq!(lens(&partition, |s| &s.columns), [512, 512, 512]);
    assert_eq!(lens(&partition, |s| &s.vocabulary), [16_384, 16_384, 16_384]);
}

#[test]
fn more_ranks_than_kv_heads_divide_query_heads_and_copy_kv_heads() {
    let partition = Partition::new(&model(10, 5, 192, 263), 8, None).unwrap();
    assert_eq!(lens(&partition, |s| &s.query_heads), [2, 2, 1, 1, 1, 1, 1, 1]);
    assert_eq!(partition.share(Rank(3)).kv_heads, 2..3);
    let partition = Partition::new(&model(64, 4, 1536, 151_936), 3, None).unwrap();
    assert_eq!(lens(&partition, |s| &s.query_heads), [32, 16, 16]);
}

#[test]
fn weights_shift_the_shares_and_nobody_is_left_without_attention() {
    let partition = Partition::new(&model(32, 8, 4096, 32_000), 3, Some(&[2.0, 1.0, 1.0])).unwrap();
    assert_eq!(lens(&partition, |s| &s.kv_heads), [4, 2, 2]);
    let partition = Partition::new(&model(32, 8, 4096, 32_000), 3, Some(&[1000.0, 1.0, 1.0])).unwrap();
    assert_eq!(lens(&partition, |s| &s.kv_heads), [6, 1, 1]);
    assert_eq!(lens(&partition, |s| &s.columns), [3968, 64, 64]);
}

#[test]
fn impossible_divisions_say_why() {
    let model = model(9, 3, 1536, 49_152);
    assert_eq!(Partition::new(&model, 0, None).unwrap_err(), PartitionError::Ranks { ranks: 0 });
    let error = Partition::new(&model, 10, None).unwrap_err().to_string();
    assert!(error.contains("at most 9 ranks"), "{error}");
    assert!(Partition::new(&model, 2, Some(&[1.0, f32::NAN])).is_err());
    assert!(Partition::new(&model, 2, Some(&[1.0])).is_err());
}

proptest! {
    #[test]
    fn fewer_columns_or_rows_than_ranks_leave_some_ranks_without(
        columns in 1usize..12, vocabulary in 1usize..12, ranks in 1usize..12,
    ) {
        let model = model(12, 4, columns, vocabulary);
        let partition = Partition::new(&model, ranks, None).unwrap();
        let (of_columns, of_rows) = (lens(&partition, |s| &s.columns), lens(&partition, |s| &s.vocabulary));
        for (lens, total) in [(of_columns, columns), (of_rows, vocabulary)] {
            prop_assert_eq!(lens.iter().filter(|len| **len > 0).count(), total.min(ranks), "{:?}", lens);
        }
    }

    #[test]
    fn every_shape_is_covered_by_every_width(
        kv in 1usize..12, group in 1usize..9, columns in 1usize..5000, vocabulary in 1usize..5000, ranks in 1usize..12,
        weights in proptest::collection::vec(0.01f32..10.0, 12),
    ) {
        let model = model(kv * group, kv, columns, vocabulary);
        for weights in [None, Some(&weights[..ranks])] {
            match Partition::new(&model, ranks, weights) {
                Ok(partition) => {
                    partition.check_invariants(&model);
                    for share in partition.shares() {
                        // What a rank copies of the KV heads is what its queries read, and no more.
                        let read: BTreeSet<usize> = share.kv_of_query.iter().copied().collect();
                        prop_assert!(read.into_iter().eq(0..share.kv_heads.len()), "{share:?}");
                        prop_assert!(share.kv_heads.end <= kv);
                    }
                    if weights.is_none() {
                        let unit = if ranks <= kv { group } else { 1 };
                        let heads = lens(&partition, |share| &share.query_heads);
                        let (least, most) = (heads.iter().min().unwrap(), heads.iter().max().unwrap());
                        prop_assert!(most - least <= unit, "{heads:?} is uneven");
                    }
                }
                Err(error) => {
                    let too_many = matches!(error, PartitionError::TooManyRanks { .. });
                    prop_assert!(too_many && ranks > kv * group);
                }
            }
        }
    }
}
