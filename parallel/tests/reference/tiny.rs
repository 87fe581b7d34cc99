//! Two random checkpoints of every shape that is awkward: untied and tied, llama3 scaling, odd widths.

use consort_kernels::DType;
use consort_parallel::checkpoint::Checkpoint;
use serde_json::Value;

use crate::harness::{Differences, fixtures, floats, teacher_forced};

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
            let got = teacher_forced(&checkpoint, width, DType::F32, chunk, &prompts);
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
