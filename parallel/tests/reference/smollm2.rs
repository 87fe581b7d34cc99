//! SmolLM2-135M-Instruct over 1 to 9 ranks against `transformers` in float32.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Arc,
};

use consort_kernels::DType;
use consort_parallel::{
    checkpoint::{
        Checkpoint,
        write::{WriteOptions, write_config, write_weights},
    },
    partition::Partition,
};
use serde_json::Value;

use crate::harness::{Differences, Setup, fixtures, floats, teacher_forced, top};

pub(crate) struct Prompt {
    pub(crate) name: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) greedy: Vec<u32>,
    pub(crate) greedy_margins: Vec<f32>,
    pub(crate) top_ids: Vec<Vec<u32>>,
    pub(crate) margins: Vec<f32>,
    pub(crate) probes: Vec<f32>,
    pub(crate) tops: Vec<f32>,
    pub(crate) last_row: Vec<f32>,
}

pub(crate) struct Reference {
    pub(crate) vocabulary: usize,
    pub(crate) probe_ids: Vec<u32>,
    pub(crate) stride: usize,
    pub(crate) prompts: Vec<Prompt>,
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

pub(crate) fn reference() -> Reference {
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
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("smollm2-bf16");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let options = WriteOptions { dtype: DType::BF16, max_shard_bytes: u64::MAX };
    write_config(&from, &folder, options.dtype).unwrap();
    write_weights(&from, &folder, &options, &mut |_, _| ControlFlow::Continue(())).unwrap();
    Checkpoint::open(&folder).unwrap()
}

/// What [`compare`] found of a width.
struct Compared {
    /// Against the reference.
    differences: Differences,
    /// Positions of the reference's answers whose largest logit is the reference's token.
    greedy_equal: usize,
    /// Tokens of the reference's answers.
    greedy: usize,
    /// `[tokens, vocabulary]` of each prompt with its answer.
    logits: Vec<Vec<f32>>,
}

/// Compares every kept logit of some prompts; a top-1 token may differ only where the reference's own margin is at most
/// `margin`.
fn compare(
    reference: &Reference,
    prompts: &[&Prompt],
    checkpoint: &Arc<Checkpoint>,
    width: usize,
    dtype: DType,
    margin: f32,
) -> Compared {
    let forced: Vec<Vec<u32>> = prompts.iter().map(|p| [&p.tokens[..], &p.greedy[..]].concat()).collect();
    let logits = teacher_forced(checkpoint, Setup::new(width, dtype, 256), &forced);
    let mut differences = Differences::default();
    let (mut greedy_equal, mut greedy) = (0, 0);
    for (prompt, logits) in prompts.iter().zip(&logits) {
        let row = |at: usize| &logits[at * reference.vocabulary..(at + 1) * reference.vocabulary];
        for at in 0..prompt.tokens.len() {
            let probes = &prompt.probes[at * reference.probe_ids.len()..];
            let kept = reference.probe_ids.iter().zip(probes);
            for (id, expected) in kept.chain(prompt.top_ids[at].iter().zip(&prompt.tops[at * 8..])) {
                differences.add(row(at)[*id as usize], *expected);
            }
            let (got, expected) = (top(row(at)), prompt.top_ids[at][0]);
            let clear = prompt.margins[at] > margin;
            assert!(!clear || got == expected, "{} position {at} {dtype} width {width}", prompt.name);
        }
        let last = prompt.tokens.len() - 1;
        for (logit, expected) in row(last).iter().step_by(reference.stride).zip(&prompt.last_row) {
            differences.add(*logit, *expected);
        }
        for (step, (token, step_margin)) in prompt.greedy.iter().zip(&prompt.greedy_margins).enumerate() {
            let equal = top(row(last + step)) == *token;
            assert!(
                equal || *step_margin <= margin,
                "{} answer token {step} {dtype} width {width}",
                prompt.name
            );
            greedy_equal += usize::from(equal);
            greedy += 1;
        }
    }
    println!(
        "SmolLM2 {dtype} width {width}: {} logits, largest difference {:.2e}, RMS {:.2e}, {greedy_equal} of {greedy} \
         greedy tokens equal",
        differences.count(),
        differences.largest,
        differences.rms()
    );
    Compared { differences, greedy_equal, greedy, logits }
}

/// Up to one rank for each of the 3 KV heads, and on to one for each of the 9 query heads.
const WIDTHS: [usize; 8] = [1, 2, 3, 4, 5, 6, 7, 9];
/// Prompts that every width computes in float32; the first widths compute all eight.
const CHOSEN: [&str; 2] = ["chat", "french"];

#[test]
fn float32_logits_at_every_width_are_within_1e_3_of_transformers_and_of_width_1() {
    let reference = reference();
    assert_eq!(reference.prompts.len(), 8);
    let checkpoint = bf16_folder();
    // The chosen ones first.
    let mut prompts: Vec<&Prompt> = reference.prompts.iter().collect();
    prompts.sort_by_key(|prompt| !CHOSEN.contains(&&*prompt.name));
    let mut alone: Option<Vec<Vec<f32>>> = None;
    for width in WIDTHS {
        let prompts = if width <= 3 { &prompts[..] } else { &prompts[..CHOSEN.len()] };
        let compared = compare(&reference, prompts, &checkpoint, width, DType::F32, 0.01);
        assert!(compared.differences.largest < 1e-3, "width {width}: {}", compared.differences.largest);
        assert_eq!(compared.greedy_equal, compared.greedy, "width {width}: answers differ");
        let alone = alone.get_or_insert_with(|| compared.logits[..CHOSEN.len()].to_vec());
        let mut from_width_1 = Differences::default();
        for (got, expected) in compared.logits.iter().zip(alone) {
            assert_eq!(got.len(), expected.len());
            got.iter().zip(expected).for_each(|(got, expected)| from_width_1.add(*got, *expected));
        }
        println!(
            "SmolLM2 float32 width {width}: {} logits, largest difference from width 1 {:.2e}",
            from_width_1.count(),
            from_width_1.largest
        );
        assert!(from_width_1.largest < 1e-3, "width {width}: {} from width 1", from_width_1.largest);
    }
}

#[test]
fn bfloat16_at_every_width_never_flips_a_clear_choice_and_stays_within_1_of_transformers() {
    let (reference, checkpoint) = (reference(), gguf());
    let prompts: Vec<&Prompt> = reference.prompts.iter().collect();
    for width in WIDTHS {
        let compared = compare(&reference, &prompts, &checkpoint, width, DType::BF16, 1.0);
        let Compared { differences, greedy_equal, greedy, .. } = compared;
        assert!(differences.largest < 1.0, "width {width}: {}", differences.largest);
        assert!(differences.rms() < 0.15, "width {width}: {}", differences.rms());
        // Only choices that were close may flip; 2 of the 256 are the most that any width was seen to.
        assert!(20 * greedy_equal >= 19 * greedy, "width {width}: {greedy_equal} of {greedy}");
    }
}

#[test]
fn more_ranks_than_kv_heads_copy_them_and_every_rank_has_work() {
    let config = gguf().config().clone();
    for (width, query_heads, kv_heads) in [
        (3, vec![3, 3, 3], vec![0..1, 1..2, 2..3]),
        (4, vec![3, 2, 2, 2], vec![0..1, 1..2, 1..3, 2..3]),
        (9, vec![1; 9], vec![0..1, 0..1, 0..1, 1..2, 1..2, 1..2, 2..3, 2..3, 2..3]),
    ] {
        let partition = Partition::new(&config, width, None).unwrap();
        let shares = partition.shares();
        assert_eq!(shares.iter().map(|share| share.query_heads.len()).collect::<Vec<_>>(), query_heads);
        assert_eq!(shares.iter().map(|share| share.kv_heads.clone()).collect::<Vec<_>>(), kv_heads);
        assert!(shares.iter().all(|share| !share.columns.is_empty() && !share.vocabulary.is_empty()));
    }
}
