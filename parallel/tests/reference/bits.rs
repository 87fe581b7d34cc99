//! A sequence's logits are the same bits however it is scheduled, in any company, on every instruction set.

use std::{ops::Range, sync::Arc};

use consort_kernels::{
    DType,
    device::{Device, Isa},
};
use consort_parallel::{
    batch::{Batch, BatchSpan},
    checkpoint::Checkpoint,
    collective::LocalGroup,
    ids::{BlockId, Rank},
    kv::KvStore,
    model::{AllReduce, LoadOptions, Model, STEP_LIMIT, kv_layout, load},
    partition::Partition,
};

use crate::{
    harness::{Random, Setup, fixtures, kept_logits, teacher_forced},
    smollm2,
};

/// Others in the batch, of 1 to 12 tokens.
const COMPANY: usize = 32;

pub(crate) fn assert_same_bits(got: &[f32], expected: &[f32], context: &str) {
    assert_eq!(got.len(), expected.len(), "{context}");
    let differs = got.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(differs, None, "{context}: the first logit that differs");
}

/// A sequence alone in several chunks, and whole and in company, on `isas`, against the best one in one step.
fn every_way(
    checkpoint: &Arc<Checkpoint>,
    dtype: DType,
    width: usize,
    sequence: &[u32],
    chunks: &[usize],
    isas: &[Isa],
) {
    let vocabulary = checkpoint.config().vocab_size;
    let plain = Setup::new(width, dtype, 1024);
    let expected = teacher_forced(checkpoint, plain, &[sequence.to_vec()]).remove(0);
    let mut random = Random(5);
    let mut crowd = vec![sequence.to_vec()];
    for _ in 0..COMPANY {
        let len = random.below(12) + 1;
        crowd.push(random.tokens(len, vocabulary));
    }
    for &isa in isas {
        let alone = chunks.iter().map(|&chunk| (Setup { isa, chunk, ..plain }, &crowd[..1]));
        let company = Setup { isa, chunk: 6 * crowd.len(), threads: 3, together: true, ..plain };
        for (setup, sequences) in alone.chain([(company, &crowd[..])]) {
            let got = teacher_forced(checkpoint, setup, sequences).remove(0);
            assert_same_bits(&got, &expected, &format!("{setup:?}, {} sequences", sequences.len()));
        }
    }
}

#[test]
fn small_models_give_the_same_bits_in_every_chunk_company_and_instruction_set() {
    let isas: Vec<Isa> = Isa::available().collect();
    for (name, widths) in [
        ("tiny_llama", &[1][..]),
        ("tiny_llama_odd", &[1, 3]),
        ("tiny_mistral", &[1]),
        ("tiny_yarn", &[1]),
        ("tiny_linear", &[1]),
        ("tiny_wide", &[1, 3]),
    ] {
        let checkpoint = Checkpoint::open(&fixtures().join(name)).unwrap();
        let sequence = Random(1).tokens(90, checkpoint.config().vocab_size);
        for dtype in [DType::F32, DType::BF16] {
            for &width in widths {
                every_way(&checkpoint, dtype, width, &sequence, &[1, 7, 16, 64, 1024], &isas);
            }
        }
    }
}

#[test]
fn the_real_model_gives_the_same_bits_in_every_chunk_company_and_instruction_set() {
    let checkpoint = smollm2::gguf();
    let sequence = Random(2).tokens(70, checkpoint.config().vocab_size);
    // Without hardware for fused multiply-adds a whole crowd would take minutes: fewer tokens, all the same paths.
    let fast: Vec<Isa> = Isa::available().filter(|isa| *isa != Isa::Portable).collect();
    let (best, lower) =
        fast.split_last().map_or((&fast[..], &fast[..]), |(_, lower)| (&fast[lower.len()..], lower));
    every_way(&checkpoint, DType::BF16, 1, &sequence, &[1, 7, 16, 64], best);
    every_way(&checkpoint, DType::BF16, 1, &sequence, &[1024], lower);
    let few = [sequence[..18].to_vec()];
    let setup = Setup::new(1, DType::BF16, 1024);
    let expected = teacher_forced(&checkpoint, setup, &few).remove(0);
    let got = teacher_forced(&checkpoint, Setup { isa: Isa::Portable, ..setup }, &few).remove(0);
    assert_same_bits(&got, &expected, "portable");
}

/// Sequences that advance by random amounts in random company, and now and then lose their pages and start over.
struct Schedule<'a> {
    sequences: &'a [Vec<u32>],
    computed: Vec<usize>,
    tables: Vec<Vec<BlockId>>,
    free: Vec<BlockId>,
    random: Random,
    preemptions: usize,
}

const BLOCK_SIZE: usize = 16;

impl Schedule<'_> {
    /// A step over some of the sequences that have tokens left, and whose tokens its rows are.
    fn step(&mut self, budget: usize) -> (Batch, Vec<(usize, Range<usize>)>) {
        let (mut batch, mut rows) = (Batch::new(1), Vec::new());
        let first = self.random.below(self.sequences.len());
        for at in 0..self.sequences.len() {
            let at = (first + at) % self.sequences.len();
            if self.random.below(12) == 0 && self.computed[at] > 0 {
                self.computed[at] = 0;
                self.free.append(&mut self.tables[at]);
                self.preemptions += 1;
            }
            let left = (self.sequences[at].len() - self.computed[at]).min(budget - batch.tokens.len());
            if left == 0 || self.random.below(3) == 0 {
                continue;
            }
            let most = [1, 2, 33, left][self.random.below(4)];
            let new = self.computed[at]..self.computed[at] + self.random.below(left.min(most)) + 1;
            while self.tables[at].len() < new.end.div_ceil(BLOCK_SIZE) {
                let block = self.random.below(self.free.len());
                self.tables[at].push(self.free.swap_remove(block));
            }
            let (row, block) = (batch.tokens.len(), batch.tables[0].len());
            batch.tokens.extend(&self.sequences[at][new.clone()]);
            batch.positions.extend(new.start as u32..new.end as u32);
            batch.tables[0].extend(&self.tables[at]);
            let (span, table) = (row..batch.tokens.len(), block..batch.tables[0].len());
            batch.spans.push(BatchSpan { rows: span, context_len: new.end, table });
            self.computed[at] = new.end;
            rows.push((at, new));
        }
        batch.output_rows = (0..batch.tokens.len()).collect();
        (batch, rows)
    }

    fn is_done(&self) -> bool {
        self.computed.iter().zip(self.sequences).all(|(computed, tokens)| *computed == tokens.len())
    }
}

/// Runs `sequences` by a random schedule, and compares every row of logits with `expected`.
fn scattered(
    checkpoint: &Arc<Checkpoint>,
    dtype: DType,
    seed: u64,
    sequences: &[Vec<u32>],
    expected: &[Vec<f32>],
) {
    const BUDGET: usize = 100;
    let mut random = Random(seed);
    let isas: Vec<Isa> = Isa::available().collect();
    let (isa, threads) = (isas[random.below(isas.len())], random.below(3) + 1);
    let device = Device::cpu_with(threads, isa).unwrap();
    let partition = Partition::new(checkpoint.config(), 1, None).unwrap();
    let options = LoadOptions {
        dtype,
        max_batch_tokens: BUDGET,
        block_size: BLOCK_SIZE,
        max_num_seqs: BUDGET,
        max_model_len: 4096,
        num_blocks: 4096,
        step_limit: STEP_LIMIT,
        deterministic: true,
        separate_processes: false,
        all_reduce: AllReduce::Auto,
    };
    let mut comm = LocalGroup::new(1).remove(0);
    let mut model: Box<dyn Model> =
        load(&device, checkpoint, &partition, Rank(0), &options, &|_, _| {}).unwrap();
    let blocks: usize = sequences.iter().map(|tokens| tokens.len().div_ceil(BLOCK_SIZE)).sum();
    let layout = kv_layout(checkpoint.config(), partition.share(Rank(0)), dtype, BLOCK_SIZE).unwrap();
    let mut kv = KvStore::new(&device, layout, blocks).unwrap();
    let mut schedule = Schedule {
        sequences,
        computed: vec![0; sequences.len()],
        tables: vec![Vec::new(); sequences.len()],
        free: (0..blocks as u32).map(BlockId).collect(),
        random,
        preemptions: 0,
    };
    let vocabulary = model.vocab_size();
    for step in 0.. {
        if schedule.is_done() && schedule.preemptions > 2 {
            return;
        }
        let (batch, spans) = schedule.step(BUDGET);
        if batch.tokens.is_empty() {
            continue;
        }
        model.forward(&batch, &mut kv, &mut comm).unwrap();
        let got = kept_logits(&mut *model, &mut comm, batch.tokens.len());
        let mut got = got.chunks(vocabulary);
        for (at, positions) in spans {
            for position in positions {
                let row = &expected[at][position * vocabulary..][..vocabulary];
                let context =
                    format!("seed {seed} {isa} {threads} threads: step {step}, {at}, position {position}");
                assert_same_bits(got.next().unwrap(), row, &context);
            }
        }
    }
}

#[test]
fn random_schedules_with_preemptions_give_the_bits_of_one_undisturbed_run() {
    for name in ["tiny_llama_odd", "tiny_wide"] {
        let checkpoint = Checkpoint::open(&fixtures().join(name)).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            for seed in 0..6 {
                let mut random = Random(1000 + seed);
                let mut sequence = || {
                    let len = random.below(80) + 1;
                    random.tokens(len, checkpoint.config().vocab_size)
                };
                let sequences: Vec<Vec<u32>> = (0..7).map(|_| sequence()).collect();
                let expected = teacher_forced(&checkpoint, Setup::new(1, dtype, 1024), &sequences);
                scattered(&checkpoint, dtype, seed, &sequences, &expected);
            }
        }
    }
}
