//! Runs a checkpoint over a group of threads and compares logits with a fixture.

use std::{
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use consort_kernels::{
    DType,
    cuda::{device::CudaDevice, settings::Settings},
    device::{Device, Isa},
};
use consort_parallel::{
    batch::{Batch, BatchSpan},
    checkpoint::Checkpoint,
    collective::{Collective, LocalGroup, Seat, SharedMemory, SharedMemoryGroup},
    ids::{BlockId, Rank},
    kv::{KvGroups, KvStore},
    model::{self, AllReduce, LoadOptions, Model, STEP_LIMIT, kv_layout, load},
    partition::Partition,
};
use safetensors::{Dtype as SafeDtype, tensor::TensorView};
use serde_json::Value;

pub(crate) const BLOCK_SIZE: usize = 16;

/// Folder of the committed fixtures.
pub(crate) fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// Little-endian floats of a fixture.
pub(crate) fn floats(path: PathBuf) -> Vec<f32> {
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// A small generator (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// Uniform in `0..limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }

    pub(crate) fn tokens(&mut self, count: usize, vocabulary: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocabulary) as u32).collect()
    }
}

/// How a group computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) width: usize,
    pub(crate) dtype: DType,
    /// Most tokens of one step.
    pub(crate) chunk: usize,
    pub(crate) threads: usize,
    pub(crate) isa: Isa,
    /// Whether all sequences advance in the same steps, each by a share of `chunk`, instead of one after the other.
    pub(crate) together: bool,
    pub(crate) place: Place,
    /// What CUDA ranks sum with; our kernels unless said otherwise.
    pub(crate) all_reduce: AllReduce,
}

/// Where a group computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Place {
    Cpu,
    /// Each rank on the CUDA device of its number.
    Cuda {
        deterministic: bool,
    },
    /// The same, deterministic, with ranks that know nothing of each other, as if each were a process: they map each
    /// other's memory.
    Mapped,
}

impl Setup {
    pub(crate) fn new(width: usize, dtype: DType, chunk: usize) -> Self {
        let threads = if width == 1 { 2 } else { 1 };
        Setup {
            width,
            dtype,
            chunk,
            threads,
            isa: Isa::detect(),
            together: false,
            place: Place::Cpu,
            all_reduce: AllReduce::Kernels,
        }
    }
}

impl Setup {
    pub(crate) fn options(self) -> LoadOptions {
        LoadOptions {
            dtype: self.dtype,
            max_batch_tokens: self.chunk,
            block_size: BLOCK_SIZE,
            max_num_seqs: self.chunk,
            max_model_len: 4096,
            num_blocks: 4096,
            step_limit: STEP_LIMIT,
            deterministic: self.place != Place::Cuda { deterministic: false },
            separate_processes: self.place == Place::Mapped,
            all_reduce: self.all_reduce,
        }
    }

    pub(crate) fn device(self, rank: Rank) -> Device {
        match self.place {
            Place::Cpu => Device::cpu_with(self.threads, self.isa).unwrap(),
            Place::Cuda { .. } | Place::Mapped => {
                let selector = format!("cuda:{}", rank.0).parse().unwrap();
                Device::Cuda(CudaDevice::open(&selector, &Settings::of_process()).unwrap())
            }
        }
    }

    /// The members of a group, and what must live as long.
    fn group(self) -> (Vec<Box<dyn Collective>>, Vec<Seat>) {
        if self.place != Place::Mapped {
            let members = LocalGroup::new(self.width).into_iter();
            return (members.map(|member| Box::new(member) as _).collect(), Vec::new());
        }
        let seats = SharedMemoryGroup::create_with_mailboxes(self.width).unwrap();
        let own = |descriptor: BorrowedFd<'_>| descriptor.try_clone_to_owned().unwrap();
        let attach = |seat: &Seat| {
            let member = SharedMemory::attach(own(seat.descriptor()), seat.rank()).unwrap();
            Box::new(member.with_mailbox(seat.mailbox().into_iter().map(own).collect()).unwrap()) as _
        };
        (seats.iter().map(attach).collect(), seats)
    }
}

/// Logits `[tokens, vocabulary]` of each of several token sequences, computed as `setup` says. Asserts that all ranks
/// hold the same bits.
pub(crate) fn teacher_forced(
    checkpoint: &Arc<Checkpoint>,
    setup: Setup,
    sequences: &[Vec<u32>],
) -> Vec<Vec<f32>> {
    teacher_forced_weighted(checkpoint, setup, None, sequences)
}

/// The same with shares in proportion to `weights`.
pub(crate) fn teacher_forced_weighted(
    checkpoint: &Arc<Checkpoint>,
    setup: Setup,
    weights: Option<&[f32]>,
    sequences: &[Vec<u32>],
) -> Vec<Vec<f32>> {
    let Setup { width, dtype, chunk, together, .. } = setup;
    let partition = &Partition::new(checkpoint.config(), width, weights).unwrap();
    let groups = KvGroups::of(checkpoint.config()).count();
    let blocks_of = |tokens: &Vec<u32>| groups * tokens.len().div_ceil(BLOCK_SIZE);
    let blocks: usize = sequences.iter().map(blocks_of).sum();
    let options = &setup.options();
    let (members, _seats) = setup.group();
    let mut results: Vec<Vec<Vec<f32>>> = thread::scope(|scope| {
        let ranks: Vec<_> = members
            .into_iter()
            .map(|mut comm| {
                scope.spawn(move || {
                    let rank = comm.rank();
                    let device = setup.device(rank);
                    let mut model = load(&device, checkpoint, partition, rank, options, &|_, _| {}).unwrap();
                    if let Device::Cuda(cuda) = &device {
                        let config = checkpoint.config();
                        let multiprocessors = cuda.facts().multiprocessors;
                        let known =
                            model::cuda::memory(config, partition, rank, options, multiprocessors).unwrap();
                        let taken = model.weight_bytes() + model.workspace_bytes();
                        assert_eq!(taken, known.total_bytes(), "as headers told");
                    }
                    model.join(&mut *comm).unwrap();
                    let share = partition.share(rank);
                    let layout = kv_layout(checkpoint.config(), share, dtype, BLOCK_SIZE).unwrap();
                    let mut kv = KvStore::new(&device, layout, blocks).unwrap();
                    let mut run = |part: &[Vec<u32>]| {
                        some_sequences(&mut *model, &mut kv, &mut *comm, (groups, chunk), part)
                    };
                    let logits =
                        if together { run(sequences) } else { sequences.chunks(1).flat_map(run).collect() };
                    // A rank that leaves ends the group, in which others may still wait for its device.
                    comm.barrier().unwrap();
                    logits
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let first = results.swap_remove(0);
    assert!(results.iter().all(|other| *other == first), "ranks disagree");
    first
}

/// Feeds sequences side by side, each step a share of `chunk` from every one that has tokens left.
fn some_sequences(
    model: &mut dyn Model,
    kv: &mut KvStore,
    comm: &mut dyn Collective,
    (groups, chunk): (usize, usize),
    sequences: &[Vec<u32>],
) -> Vec<Vec<f32>> {
    let mut logits = vec![Vec::new(); sequences.len()];
    let mut fed = vec![0; sequences.len()];
    let share = chunk / sequences.len();
    while fed.iter().zip(sequences).any(|(fed, tokens)| *fed < tokens.len()) {
        let mut batch = Batch::new(groups);
        let mut owners = Vec::new();
        // Blocks in descending order, so that a table is never the identity.
        let mut free = (0..kv.num_blocks() as u32).rev().map(BlockId);
        for (at, tokens) in sequences.iter().enumerate() {
            let table = batch.tables[0].len();
            for tables in &mut batch.tables {
                tables.extend(free.by_ref().take(tokens.len().div_ceil(BLOCK_SIZE)));
            }
            let new = fed[at]..tokens.len().min(fed[at] + share);
            if new.is_empty() {
                continue;
            }
            let first = batch.tokens.len();
            batch.tokens.extend(&tokens[new.clone()]);
            batch.positions.extend(new.start as u32..new.end as u32);
            owners.extend(std::iter::repeat_n(at, new.len()));
            let (rows, table) = (first..batch.tokens.len(), table..batch.tables[0].len());
            batch.spans.push(BatchSpan { rows, context_len: new.end, table });
            fed[at] = new.end;
        }
        batch.output_rows = (0..batch.tokens.len()).collect();
        model.forward(&batch, kv, comm).unwrap();
        let rows = kept_logits(model, comm, batch.tokens.len());
        for (owner, row) in owners.into_iter().zip(rows.chunks_exact(model.vocab_size())) {
            logits[owner].extend_from_slice(row);
        }
    }
    logits
}

/// The logits of all rows that the last step kept.
pub(crate) fn kept_logits(model: &mut dyn Model, comm: &mut dyn Collective, kept: usize) -> Vec<f32> {
    let mut logits = Vec::with_capacity(kept * model.vocab_size());
    for start in (0..kept).step_by(model.logit_rows_max()) {
        let rows = start..kept.min(start + model.logit_rows_max());
        logits.extend_from_slice(model.logits(rows, comm).unwrap());
    }
    logits
}

/// A model of the given configuration whose weights are what `next` yields, in the order of their names.
pub(crate) fn made_up(folder: &Path, config: &Value, mut next: impl FnMut() -> f32) -> Arc<Checkpoint> {
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let (hidden, columns, vocabulary) = (size("hidden_size"), size("intermediate_size"), size("vocab_size"));
    let wide = |heads: &str| size(heads) * size("head_dim");
    let (queries, keys) = (wide("num_attention_heads"), wide("num_key_value_heads"));
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden]),
        ("lm_head.weight".to_owned(), vec![vocabulary, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    for layer in 0..size("num_hidden_layers") {
        for (name, shape) in [
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![queries, hidden]),
            ("self_attn.k_proj", vec![keys, hidden]),
            ("self_attn.v_proj", vec![keys, hidden]),
            ("self_attn.o_proj", vec![hidden, queries]),
            ("mlp.gate_proj", vec![columns, hidden]),
            ("mlp.up_proj", vec![columns, hidden]),
            ("mlp.down_proj", vec![hidden, columns]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let bytes = (0..shape.iter().product()).flat_map(|_| next().to_le_bytes()).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| (name, TensorView::new(SafeDtype::F32, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    Checkpoint::open(folder).unwrap()
}

/// Multiples of an irrational number, modulo 1: spread evenly over -0.5..0.5, the same on every run.
pub(crate) fn evenly_spread() -> impl FnMut() -> f32 {
    let mut at = 0u32;
    move || {
        at += 1;
        (f64::from(at) * 0.618_033_988_75).fract() as f32 - 0.5
    }
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
