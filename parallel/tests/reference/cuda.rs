//! The whole forward through the CUDA kernels, on emulated devices: the same texts that a GPU runs.

mod device;
mod model;

use std::num::NonZeroUsize;

use consort_emulator::{Copies, Order, Settings};
use consort_kernels::{
    DType,
    attention::{PagedSpan, cuda::Chunks},
    linear::cuda::Invariance,
};
use consort_parallel::{checkpoint::Checkpoint, partition::Partition};

use self::{
    device::{MULTIPROCESSORS, Stream},
    model::{BLOCK_SIZE, CudaRank, Exchange, Step, Ways},
};
use crate::{
    harness::{Differences, Setup, fixtures, teacher_forced, top},
    smollm2, tiny,
};

/// The fastest for each shape.
const FAST: Ways = Ways {
    invariance: Invariance::None,
    chunks: Chunks::Fill { multiprocessors: MULTIPROCESSORS },
    exchange: Exchange::Fused,
};

/// The same bits in any company.
const INVARIANT: Ways = Ways {
    invariance: Invariance::Batch,
    chunks: Chunks::Fixed(NonZeroUsize::new(64).unwrap()),
    exchange: Exchange::Fused,
};

/// Logits `[tokens, vocabulary]` of each sequence, which advance in the same steps, each by at most `chunk` tokens.
/// Asserts that all ranks hold the same bits.
fn logits(
    checkpoint: &Checkpoint,
    width: usize,
    ways: Ways,
    settings: Settings,
    chunk: usize,
    sequences: &[Vec<u32>],
) -> Vec<Vec<f32>> {
    let partition = Partition::new(checkpoint.config(), width, None).unwrap();
    let pages_of = |tokens: &Vec<u32>| tokens.len().div_ceil(BLOCK_SIZE);
    let page_count: usize = sequences.iter().map(pages_of).sum();
    let rows_max = sequences.iter().map(|tokens| tokens.len().min(chunk)).sum();
    let mut ranks: Vec<CudaRank> = (0..width)
        .map(|rank| CudaRank::load(checkpoint, &partition, rank, ways, rows_max, page_count))
        .collect();
    let peers: Vec<_> = ranks.iter().map(CudaRank::addresses).collect();
    let vocabulary = checkpoint.config().vocab_size;
    let mut all = vec![Vec::new(); sequences.len()];
    let mut fed = 0;
    while sequences.iter().any(|tokens| tokens.len() > fed) {
        let (step, owners) = step(sequences, fed, chunk, page_count);
        let streams: Vec<Stream> = (0..width).map(Stream::new).collect();
        for (rank, stream) in ranks.iter_mut().zip(&streams) {
            rank.enqueue(stream, &peers, &step);
        }
        // Ranks and the step's buffers, which they keep, are alive.
        device::run(&streams, settings, &ranks);
        let mut results: Vec<Vec<f32>> = ranks.iter_mut().map(CudaRank::take_logits).collect();
        let first = results.swap_remove(0);
        let same = |other: &Vec<f32>| other.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(results.iter().all(same), "ranks disagree");
        for (owner, row) in owners.iter().zip(first.chunks_exact(vocabulary)) {
            all[*owner].extend_from_slice(row);
        }
        fed += chunk;
    }
    all
}

/// The step that feeds each sequence its next tokens, and which sequence each row is of. Pages go to sequences in
/// descending order, so that a table is never the identity.
fn step(sequences: &[Vec<u32>], fed: usize, chunk: usize, page_count: usize) -> (Step, Vec<usize>) {
    let mut step = Step { tokens: Vec::new(), positions: Vec::new(), spans: Vec::new(), tables: Vec::new() };
    let mut owners = Vec::new();
    let mut free = (0..page_count as u32).rev();
    for (owner, tokens) in sequences.iter().enumerate() {
        let table = step.tables.len();
        step.tables.extend(free.by_ref().take(tokens.len().div_ceil(BLOCK_SIZE)));
        let new = fed.min(tokens.len())..tokens.len().min(fed + chunk);
        if new.is_empty() {
            continue;
        }
        let first = step.tokens.len();
        step.tokens.extend(&tokens[new.clone()]);
        step.positions.extend(new.start as u32..new.end as u32);
        owners.extend(std::iter::repeat_n(owner, new.len()));
        let (rows, table) = (first..step.tokens.len(), table..step.tables.len());
        step.spans.push(PagedSpan { rows, context_len: new.end, table });
    }
    (step, owners)
}

/// Compares with the reference, and with what the CPU's bfloat16 path differs from it.
fn compare(name: &str, widths: &[usize], ways: Ways, chunk: usize, settings: Settings) {
    let checkpoint = Checkpoint::open(&fixtures().join(name)).unwrap();
    let (prompts, expected) = tiny::reference(name);
    let vocabulary = checkpoint.config().vocab_size;
    let differ = |got: &[Vec<f32>]| {
        let mut differences = Differences::default();
        for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
            differences.add(*got, *expected);
        }
        differences
    };
    let cpu = differ(&teacher_forced(&checkpoint, Setup::new(1, DType::BF16, 1000), &prompts));
    for &width in widths {
        let got = logits(&checkpoint, width, ways, settings, chunk, &prompts);
        let cuda = differ(&got);
        assert_eq!(cuda.count(), expected.iter().map(Vec::len).sum::<usize>());
        println!(
            "{name} CUDA width {width} chunk {chunk}: largest difference {:.2e} (CPU {:.2e}), RMS {:.2e} (CPU {:.2e})",
            cuda.largest,
            cpu.largest,
            cuda.rms(),
            cpu.rms()
        );
        // Both round the same inputs of the same products to BF16; only the order of sums and the exponential differ.
        assert!(cuda.rms() < 1.5 * cpu.rms() && cuda.largest < 2.0 * cpu.largest, "{name} width {width}");
        for (got, expected) in got
            .iter()
            .flatten()
            .copied()
            .collect::<Vec<_>>()
            .chunks_exact(vocabulary)
            .zip(expected.iter().flatten().copied().collect::<Vec<_>>().chunks_exact(vocabulary))
        {
            let (ours, theirs) = (top(got) as usize, top(expected) as usize);
            let margin = expected[theirs] - expected[ours];
            assert!(
                margin <= 2.0 * cpu.largest,
                "{name} width {width}: {ours} over {theirs}, {margin} apart"
            );
        }
    }
}

#[test]
fn emulator_runs_the_tiny_llama_at_widths_1_and_3_like_transformers() {
    let late = Settings { order: Order::Shuffled, copies: Copies::Late, seed: 7 };
    compare("tiny_llama", &[1, 2, 3], FAST, 1000, Settings::PLAIN);
    compare("tiny_llama_odd", &[1, 3], FAST, 1000, late);
    // Prefill in parts, sums over ranks in two shots.
    compare("tiny_llama_odd", &[3], Ways { exchange: Exchange::TwoShot, ..FAST }, 7, Settings::PLAIN);
}

#[test]
fn emulator_runs_windows_and_stretched_rotations_like_transformers() {
    let far = Settings { order: Order::FarWarp, copies: Copies::ByChance, seed: 3 };
    for name in ["tiny_mistral", "tiny_yarn", "tiny_linear", "tiny_wide"] {
        compare(name, &[1, 3], FAST, 1000, far);
    }
}

#[test]
fn emulator_gives_a_row_the_same_bits_however_its_prompt_is_cut_in_batch_invariant_mode() {
    for (name, width) in [("tiny_llama", 1), ("tiny_llama_odd", 3)] {
        let checkpoint = Checkpoint::open(&fixtures().join(name)).unwrap();
        let (prompts, _) = tiny::reference(name);
        let run = |ways, chunk, prompts: &[Vec<u32>]| {
            logits(&checkpoint, width, ways, Settings::PLAIN, chunk, prompts)
        };
        let whole = run(INVARIANT, 1000, &prompts);
        let bits = |rows: &[f32]| rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (chunk, what) in [(1, "decoded token by token"), (7, "in parts of seven")] {
            for (got, expected) in run(INVARIANT, chunk, &prompts).iter().zip(&whole) {
                assert!(bits(got) == bits(expected), "{name} width {width}: {what}");
            }
        }
        let alone = run(INVARIANT, 1000, &prompts[1..]);
        assert!(bits(&alone[0]) == bits(&whole[1]), "{name} width {width}: alone");
        let two_shots = run(Ways { exchange: Exchange::TwoShot, ..INVARIANT }, 1000, &prompts);
        assert!(bits(&two_shots[0]) == bits(&whole[0]), "{name} width {width}: in two shots");
    }
}

#[test]
#[ignore = "a minute and more: every multiplication of SmolLM2 by emulated threads"]
fn emulator_runs_smollm2_for_a_few_tokens_like_transformers() {
    let (reference, checkpoint) = (smollm2::reference(), smollm2::gguf());
    let prompt = reference.prompts.iter().min_by_key(|prompt| prompt.tokens.len()).unwrap();
    let forced = [[&prompt.tokens[..], &prompt.greedy[..3]].concat()];
    let differ = |logits: &[f32]| {
        let mut differences = Differences::default();
        for at in 0..prompt.tokens.len() {
            let expected = &prompt.probes[at * reference.probe_ids.len()..];
            for (id, expected) in reference.probe_ids.iter().zip(expected) {
                differences.add(logits[at * reference.vocabulary + *id as usize], *expected);
            }
        }
        differences
    };
    let cpu = differ(&teacher_forced(&checkpoint, Setup::new(1, DType::BF16, 256), &forced)[0]);
    for width in [1, 3] {
        // Steps of eight rows: the kernels of decode.
        let logits = logits(&checkpoint, width, FAST, Settings::PLAIN, 8, &forced).swap_remove(0);
        let cuda = differ(&logits);
        let last = prompt.tokens.len() - 1;
        let answer: Vec<u32> = (last..last + 3)
            .map(|at| top(&logits[at * reference.vocabulary..(at + 1) * reference.vocabulary]))
            .collect();
        println!(
            "SmolLM2 CUDA width {width}: {} tokens, {} logits, largest difference {:.2e} (CPU {:.2e}), RMS {:.2e} (CPU \
             {:.2e}), answer {answer:?}, transformers {:?}",
            forced[0].len(),
            cuda.count(),
            cuda.largest,
            cpu.largest,
            cuda.rms(),
            cpu.rms(),
            &prompt.greedy[..3]
        );
        // The bounds of the CPU's bfloat16 path, which over all prompts and widths comes to 0.74 and 0.077.
        assert!(cuda.largest < 1.0 && cuda.rms() < 0.15, "width {width}");
        for (step, token) in answer.iter().enumerate() {
            assert!(
                *token == prompt.greedy[step] || prompt.greedy_margins[step] <= 1.0,
                "width {width}: {answer:?}"
            );
        }
    }
}
