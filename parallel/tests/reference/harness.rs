//! Runs a checkpoint over a group of threads and compares logits with a fixture.

use std::{path::PathBuf, sync::Arc, thread};

use consort_kernels::{DType, device::Device};
use consort_parallel::{
    batch::{Batch, BatchSpan},
    checkpoint::Checkpoint,
    collective::{Collective, LocalGroup},
    ids::BlockId,
    kv::KvStore,
    model::{LoadOptions, Model, kv_layout, load},
    partition::Partition,
};

const BLOCK_SIZE: usize = 16;

/// Folder of the committed fixtures.
pub(crate) fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// Little-endian floats of a fixture.
pub(crate) fn floats(path: PathBuf) -> Vec<f32> {
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Logits `[tokens, vocabulary]` of each of several token sequences, computed by `width` ranks; prompts are fed in
/// chunks of `chunk` tokens. Asserts that all ranks hold the same bits.
pub(crate) fn teacher_forced(
    checkpoint: &Arc<Checkpoint>,
    width: usize,
    dtype: DType,
    chunk: usize,
    sequences: &[Vec<u32>],
) -> Vec<Vec<f32>> {
    let partition = &Partition::new(checkpoint.config(), width, None).unwrap();
    let longest = sequences.iter().map(Vec::len).max().unwrap();
    let options = &LoadOptions { dtype, max_batch_tokens: chunk, block_size: BLOCK_SIZE };
    let mut results: Vec<Vec<Vec<f32>>> = thread::scope(|scope| {
        let ranks: Vec<_> = LocalGroup::new(width)
            .into_iter()
            .map(|mut comm| {
                scope.spawn(move || {
                    let rank = comm.rank();
                    let device = Device::cpu(if width == 1 { 2 } else { 1 }).unwrap();
                    let mut model = load(&device, checkpoint, partition, rank, options, &|_, _| {}).unwrap();
                    let share = partition.share(rank);
                    let layout = kv_layout(checkpoint.config(), share, dtype, BLOCK_SIZE).unwrap();
                    let mut kv = KvStore::new(&device, layout, longest.div_ceil(BLOCK_SIZE) + 1).unwrap();
                    let run =
                        |tokens: &Vec<u32>| one_sequence(&mut *model, &mut kv, &mut comm, chunk, tokens);
                    sequences.iter().map(run).collect()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let first = results.swap_remove(0);
    assert!(results.iter().all(|other| *other == first), "ranks disagree");
    first
}

fn one_sequence(
    model: &mut dyn Model,
    kv: &mut KvStore,
    comm: &mut dyn Collective,
    chunk: usize,
    tokens: &[u32],
) -> Vec<f32> {
    // Blocks in descending order, so that a table is never the identity.
    let blocks: Vec<BlockId> = (0..kv.num_blocks() as u32).rev().map(BlockId).collect();
    let mut all = Vec::new();
    for first in (0..tokens.len()).step_by(chunk) {
        let last = tokens.len().min(first + chunk);
        let rows = last - first;
        let batch = Batch {
            tokens: tokens[first..last].to_vec(),
            positions: (first as u32..last as u32).collect(),
            spans: vec![BatchSpan { rows: 0..rows, context_len: last, table: 0..blocks.len() }],
            blocks: blocks.clone(),
            output_rows: (0..rows).collect(),
        };
        model.forward(&batch, kv, comm).unwrap();
        for start in (0..rows).step_by(model.logit_rows_max()) {
            let end = rows.min(start + model.logit_rows_max());
            all.extend_from_slice(model.logits(start..end, comm).unwrap());
        }
    }
    all
}

/// Largest and root-mean-square difference.
#[derive(Default)]
pub(crate) struct Differences {
    pub(crate) largest: f32,
    squares: f64,
    count: usize,
}

impl Differences {
    pub(crate) fn add(&mut self, got: f32, expected: f32) {
        let difference = (got - expected).abs();
        assert!(difference.is_finite(), "{got} against {expected}");
        self.largest = self.largest.max(difference);
        self.squares += f64::from(difference).powi(2);
        self.count += 1;
    }

    pub(crate) fn rms(&self) -> f64 {
        (self.squares / self.count as f64).sqrt()
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }
}

/// Index of the largest logit, the lowest among equals.
pub(crate) fn top(logits: &[f32]) -> u32 {
    consort_kernels::sampling::argmax(logits)
}
