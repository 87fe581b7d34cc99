//! Random checkpoints of every shape that is awkward: untied and tied, each rotary scaling, a window, odd widths.

use std::num::NonZeroUsize;

use consort_kernels::{DType, device::Isa};
use consort_parallel::{
    checkpoint::Checkpoint,
    config::{Architecture, RopeScaling},
};
use serde_json::Value;

use crate::harness::{Differences, Setup, fixtures, floats, teacher_forced, teacher_forced_weighted};

/// Logits of the two prompts of a fixture, and the largest one.
fn reference(name: &str) -> (Vec<Vec<u32>>, Vec<Vec<f32>>) {
    let folder = fixtures().join(name);
    let json = std::fs::read_to_string(folder.join("reference.json")).unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    let vocabulary = json["vocab_size"].as_u64().unwrap() as usize;
    let all = floats(folder.join("reference.bin"));
    json["prompts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|prompt| {
            let tokens: Vec<u32> = prompt["token_ids"]
                .as_array()
                .unwrap()
                .iter()
                .map(|id| id.as_u64().unwrap() as u32)
                .collect();
            let at = prompt["logits_at"].as_u64().unwrap() as usize;
            let logits = all[at..at + tokens.len() * vocabulary].to_vec();
            (tokens, logits)
        })
        .unzip()
}

fn compare(name: &str, widths: impl Iterator<Item = usize>) {
    let checkpoint = Checkpoint::open(&fixtures().join(name)).unwrap();
    let (prompts, expected) = reference(name);
    for width in widths {
        for chunk in [1000, 7] {
            let got = teacher_forced(&checkpoint, Setup::new(width, DType::F32, chunk), &prompts);
            let mut differences = Differences::default();
            for (got, expected) in got.iter().zip(&expected) {
                assert_eq!(got.len(), expected.len());
                got.iter().zip(expected).for_each(|(got, expected)| differences.add(*got, *expected));
            }
            assert!(differences.largest < 1e-3, "{name} width {width}: {}", differences.largest);
            println!("{name} width {width} chunk {chunk}: largest difference {:.1e}", differences.largest);
        }
    }
}

#[test]
fn llama3_scaled_model_with_its_own_head_equals_transformers_at_widths_1_to_4() {
    compare("tiny_llama", 1..=4);
}

#[test]
fn odd_heads_and_a_prime_vocabulary_equal_transformers_at_widths_1_to_9() {
    compare("tiny_llama_odd", 1..=9);
}

#[test]
fn mistral_with_a_window_of_7_equals_transformers_at_widths_1_to_9() {
    let config = Checkpoint::open(&fixtures().join("tiny_mistral")).unwrap().config().clone();
    assert_eq!(config.architecture, Architecture::Mistral);
    assert_eq!(config.sliding_window.map(NonZeroUsize::get), Some(7));
    assert_ne!(config.num_heads * config.head_dim, config.hidden_size);
    compare("tiny_mistral", 1..=9);
}

#[test]
fn yarn_past_its_original_context_equals_transformers_at_widths_1_to_8() {
    let config = Checkpoint::open(&fixtures().join("tiny_yarn")).unwrap().config().clone();
    let RopeScaling::Yarn { yarn, .. } = config.rope.scaling else { panic!("{:?}", config.rope) };
    assert!(reference("tiny_yarn").0.iter().any(|prompt| prompt.len() > 2 * yarn.original_context));
    compare("tiny_yarn", 1..=8);
}

#[test]
fn linear_scaling_equals_transformers_at_widths_1_to_8() {
    compare("tiny_linear", 1..=8);
}

#[test]
fn the_odd_fixture_has_the_shape_that_divides_badly() {
    let config = Checkpoint::open(&fixtures().join("tiny_llama_odd")).unwrap().config().clone();
    assert_eq!((config.num_heads, config.num_kv_heads, config.num_layers), (10, 5, 3));
    assert_eq!((config.vocab_size, config.intermediate_size), (263, 136));
}

#[test]
fn logits_are_the_same_bits_in_any_company_chunk_team_and_instruction_set() {
    for name in ["tiny_llama", "tiny_llama_odd", "tiny_mistral", "tiny_yarn", "tiny_linear"] {
        let checkpoint = Checkpoint::open(&fixtures().join(name)).unwrap();
        let vocabulary = checkpoint.config().vocab_size as u32;
        let (mut sequences, _) = reference(name);
        sequences.push((0..70).map(|i| i * 31 % vocabulary).collect());
        sequences.push(vec![7]);
        for dtype in [DType::F32, DType::BF16] {
            for width in [1, 3] {
                let plain = Setup::new(width, dtype, 1000);
                let expected = teacher_forced(&checkpoint, plain, &sequences);
                let mut others = vec![
                    Setup { chunk: 1, ..plain },
                    Setup { chunk: 7, ..plain },
                    Setup { chunk: 16, ..plain },
                    Setup { chunk: 64, ..plain },
                    Setup { chunk: 8, together: true, ..plain },
                    Setup { together: true, ..plain },
                    Setup { threads: 3, chunk: 33, ..plain },
                ];
                others.extend(Isa::available().map(|isa| Setup { isa, chunk: 20, together: true, ..plain }));
                for setup in others {
                    let got = teacher_forced(&checkpoint, setup, &sequences);
                    for (got, expected) in got.iter().zip(&expected) {
                        assert_eq!(got.len(), expected.len());
                        let same = got.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{name} {setup:?} differs from {plain:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn very_uneven_weights_leave_ranks_with_little_and_change_nothing() {
    let checkpoint = Checkpoint::open(&fixtures().join("tiny_llama_odd")).unwrap();
    let (prompts, expected) = reference("tiny_llama_odd");
    for weights in [&[1.0, 50.0][..], &[40.0, 1.0, 1.0], &[1.0, 1.0, 1.0, 30.0]] {
        let setup = Setup::new(weights.len(), DType::F32, 1000);
        let got = teacher_forced_weighted(&checkpoint, setup, Some(weights), &prompts);
        for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
            assert!((got - expected).abs() < 1e-3, "{weights:?}");
        }
    }
}
