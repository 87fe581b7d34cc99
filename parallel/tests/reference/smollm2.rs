//! SmolLM2-135M-Instruct over 1, 2 and 3 ranks against `transformers` in float32.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use consort_kernels::{DType, Element, element::bf16};
use consort_parallel::checkpoint::Checkpoint;
use safetensors::{Dtype as SafeDtype, tensor::TensorView};
use serde_json::{Value, json};

use crate::harness::{Differences, Setup, fixtures, floats, teacher_forced, top};

struct Prompt {
    name: String,
    tokens: Vec<u32>,
    greedy: Vec<u32>,
    greedy_margins: Vec<f32>,
    top_ids: Vec<Vec<u32>>,
    margins: Vec<f32>,
    probes: Vec<f32>,
    tops: Vec<f32>,
    last_row: Vec<f32>,
}

struct Reference {
    vocabulary: usize,
    probe_ids: Vec<u32>,
    stride: usize,
    prompts: Vec<Prompt>,
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn reference() -> Reference {
    let json = std::fs::read_to_string(fixtures().join("smollm2_logits.json")).unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    let all = floats(fixtures().join("smollm2_logits.bin"));
    let size = |value: &Value| value.as_u64().unwrap() as usize;
    let (vocabulary, stride) = (size(&json["vocab_size"]), size(&json["last_row_stride"]));
    let probe_ids = ids(&json["probe_ids"]);
    let prompt = |p: &Value| {
        let (tokens, top_ids) =
            (ids(&p["token_ids"]), p["top_ids"].as_array().unwrap().iter().map(ids).collect());
        let slice = |key: &str, len: usize| all[size(&p[key])..size(&p[key]) + len].to_vec();
        Prompt {
            name: p["name"].as_str().unwrap().to_owned(),
            greedy: ids(&p["greedy_ids"]),
            greedy_margins: numbers(&p["greedy_margins"]),
            margins: numbers(&p["margins"]),
            probes: slice("probe_at", tokens.len() * probe_ids.len()),
            tops: slice("top_at", tokens.len() * 8),
            last_row: slice("last_row_at", vocabulary.div_ceil(stride)),
            tokens,
            top_ids,
        }
    };
    let prompts = json["prompts"].as_array().unwrap().iter().map(prompt).collect();
    Reference { vocabulary, probe_ids, stride, prompts }
}

/// The GGUF file that `cargo xtask model` fetched.
pub(crate) fn gguf() -> Arc<Checkpoint> {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.exists(), "{} is missing: run `cargo xtask model` first", path.display());
    Checkpoint::open(&path).unwrap()
}

/// The same model with every weight rounded to BF16, as a safetensors folder: what the reference ran.
fn bf16_folder() -> Arc<Checkpoint> {
    let from = gguf();
    let config = from.config();
    let json = json!({
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": config.eos_token_ids,
    });
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = from
        .names()
        .map(|name| {
            let info = from.tensor(name).unwrap();
            let mut values = vec![0.0; info.rows() * info.cols()];
            from.read_rows(name, 0..info.rows(), 0..info.cols(), &mut values).unwrap();
            let bytes = values.iter().flat_map(|x| bf16::round(*x).to_le_bytes()).collect();
            (name.to_owned(), info.shape, bytes)
        })
        .collect();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| (name, TensorView::new(SafeDtype::BF16, shape.clone(), bytes).unwrap()));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("smollm2-bf16");
    std::fs::create_dir_all(&folder).unwrap();
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("config.json"), json.to_string()).unwrap();
    Checkpoint::open(&folder).unwrap()
}

/// Compares every kept logit; a top-1 token may differ only where the reference's own margin is at most `margin`.
fn compare(
    reference: &Reference,
    checkpoint: &Arc<Checkpoint>,
    width: usize,
    dtype: DType,
    margin: f32,
) -> Differences {
    let forced: Vec<Vec<u32>> =
        reference.prompts.iter().map(|p| [&p.tokens[..], &p.greedy[..]].concat()).collect();
    let got = teacher_forced(checkpoint, Setup::new(width, dtype, 256), &forced);
    let mut differences = Differences::default();
    let vocabulary = reference.vocabulary;
    for (prompt, logits) in reference.prompts.iter().zip(&got) {
        let row = |at: usize| &logits[at * vocabulary..(at + 1) * vocabulary];
        for at in 0..prompt.tokens.len() {
            for (id, expected) in
                reference.probe_ids.iter().zip(&prompt.probes[at * reference.probe_ids.len()..])
            {
                differences.add(row(at)[*id as usize], *expected);
            }
            for (id, expected) in prompt.top_ids[at].iter().zip(&prompt.tops[at * 8..]) {
                differences.add(row(at)[*id as usize], *expected);
            }
            if prompt.margins[at] > margin {
                assert_eq!(
                    top(row(at)),
                    prompt.top_ids[at][0],
                    "{} position {at} width {width}",
                    prompt.name
                );
            }
        }
        let last = prompt.tokens.len() - 1;
        for (logit, expected) in row(last).iter().step_by(reference.stride).zip(&prompt.last_row) {
            differences.add(*logit, *expected);
        }
        for (step, (token, step_margin)) in prompt.greedy.iter().zip(&prompt.greedy_margins).enumerate() {
            if *step_margin > margin {
                assert_eq!(
                    top(row(last + step)),
                    *token,
                    "{} answer token {step} width {width}",
                    prompt.name
                );
            }
        }
    }
    println!(
        "SmolLM2 {dtype} width {width}: {} logits, largest difference {:.2e}, RMS {:.2e}",
        differences.count(),
        differences.largest,
        differences.rms()
    );
    differences
}

#[test]
fn float32_logits_are_within_1e_3_of_transformers_at_widths_1_2_and_3() {
    let reference = reference();
    assert_eq!(reference.prompts.len(), 8);
    let checkpoint = bf16_folder();
    for width in 1..=3 {
        let differences = compare(&reference, &checkpoint, width, DType::F32, 0.01);
        assert!(differences.largest < 1e-3, "width {width}: {}", differences.largest);
    }
}

#[test]
fn bfloat16_never_flips_a_clear_choice_and_stays_within_1_of_transformers() {
    let reference = reference();
    for width in [1, 3] {
        let differences = compare(&reference, &gguf(), width, DType::BF16, 1.0);
        assert!(differences.largest < 1.0 && differences.rms() < 0.15, "width {width}");
    }
}
