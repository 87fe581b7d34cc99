//! Random checkpoints of every shape that is awkward: untied and tied, each rotary scaling, a window, odd widths.

use std::{num::NonZeroUsize, path::Path, sync::Arc};

use consort_kernels::DType;
use consort_parallel::{
    checkpoint::Checkpoint,
    config::{Architecture, RopeScaling},
    partition::Partition,
};
use serde_json::{Value, json};

use crate::harness::{
    Differences, Setup, evenly_spread, fixtures, floats, made_up, teacher_forced, teacher_forced_weighted,
};

/// Logits of the two prompts of a fixture, and the largest one.
pub(crate) fn reference(name: &str) -> (Vec<Vec<u32>>, Vec<Vec<f32>>) {
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
    assert_eq!(config.layer_windows, vec![NonZeroUsize::new(7); config.num_layers]);
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
fn heads_for_tiles_and_a_window_of_40_equal_transformers_at_widths_1_to_6() {
    compare("tiny_wide", 1..=6);
}

#[test]
fn the_odd_fixture_has_the_shape_that_divides_badly() {
    let config = Checkpoint::open(&fixtures().join("tiny_llama_odd")).unwrap().config().clone();
    assert_eq!((config.num_heads, config.num_kv_heads, config.num_layers), (10, 5, 3));
    assert_eq!((config.vocab_size, config.intermediate_size), (263, 136));
}

/// Logits of a fixture's long prompt after a change to its config.json.
fn told_otherwise(name: &str, change: impl FnOnce(&mut Value)) -> Vec<f32> {
    let folder = tempfile::tempdir().unwrap();
    let from = fixtures().join(name);
    let mut config: Value =
        serde_json::from_str(&std::fs::read_to_string(from.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let (prompts, _) = reference(name);
    teacher_forced(&checkpoint, Setup::new(1, DType::F32, 1000), &prompts[1..]).swap_remove(0)
}

#[test]
fn a_wrong_window_or_scaling_would_not_pass_for_right() {
    for (name, group, key, wrong) in [
        ("tiny_mistral", None, "sliding_window", json!(6)),
        ("tiny_mistral", None, "sliding_window", json!(8)),
        ("tiny_mistral", None, "sliding_window", Value::Null),
        ("tiny_linear", Some("rope_parameters"), "factor", json!(2.4)),
        ("tiny_yarn", Some("rope_scaling"), "type", json!("default")),
        ("tiny_yarn", Some("rope_scaling"), "factor", json!(5)),
        ("tiny_yarn", Some("rope_scaling"), "mscale_all_dim", Value::Null),
        ("tiny_yarn", Some("rope_scaling"), "original_max_position_embeddings", json!(33)),
        ("tiny_yarn", Some("rope_scaling"), "truncate", json!(true)),
        ("tiny_yarn", Some("rope_scaling"), "beta_fast", json!(5)),
        ("tiny_yarn", Some("rope_scaling"), "beta_slow", json!(0.2)),
    ] {
        let got = told_otherwise(name, |config| {
            let object = if let Some(group) = group { &mut config[group] } else { config };
            assert_ne!(object[key], wrong);
            object[key] = wrong.clone();
        });
        let expected = &reference(name).1[1];
        let largest = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest > 0.01, "{name} {key} {wrong}: {largest}");
    }
}

/// A random model with fewer MLP columns and vocabulary rows than its 9 query heads allow ranks.
fn narrow(folder: &Path) -> Arc<Checkpoint> {
    const COLUMNS: usize = 5;
    const VOCABULARY: usize = 7;
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": COLUMNS,
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false, "eos_token_id": 0,
    });
    made_up(folder, &config, evenly_spread())
}

#[test]
fn ranks_that_own_no_columns_or_no_vocabulary_take_part() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = narrow(folder.path());
    let partition = Partition::new(checkpoint.config(), 9, None).unwrap();
    assert!(partition.shares().iter().filter(|share| share.columns.is_empty()).count() == 4);
    assert!(partition.shares().iter().filter(|share| share.vocabulary.is_empty()).count() == 2);
    let sequences: Vec<Vec<u32>> = vec![(0..40).map(|at| at * 3 % 7).collect(), vec![6]];
    for dtype in [DType::F32, DType::BF16] {
        let alone = teacher_forced(&checkpoint, Setup::new(1, dtype, 16), &sequences);
        let spread = alone.iter().flatten().fold(0.0f32, |most, logit| most.max(logit.abs()));
        assert!(spread > 0.5, "logits of {spread} would show nothing");
        for width in 2..=9 {
            let got = teacher_forced(&checkpoint, Setup::new(width, dtype, 16), &sequences);
            let differences = got.iter().flatten().zip(alone.iter().flatten()).map(|(a, b)| (a - b).abs());
            let (largest, bound) =
                (differences.fold(0.0, f32::max), if dtype == DType::F32 { 1e-4 } else { 0.1 });
            println!("narrow {dtype} width {width}: largest difference from width 1 {largest:.1e}");
            assert!(largest < bound, "{dtype} width {width}: {largest}");
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
