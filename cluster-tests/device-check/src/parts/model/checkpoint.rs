//! A checkpoint of random weights, in memory that nobody else sees where that can be had, and gone when it is loaded.
//!
//! Sixteen gigabytes are written by all processors: files of a block of random numbers, repeated from another place of
//! it in each tensor. What a model computes from them means nothing; how much it reads is right.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{FileExt, symlink},
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use consort_parallel::checkpoint::Checkpoint;
use half::bf16;
use rustix::fs::{MemfdFlags, memfd_create, statvfs};
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};
use serde_json::{Map, json};

use super::Shape;
use crate::session::Noise;

/// Numbers that the weights repeat: a prime, so that no two rows of a matrix are equal.
const BLOCK: usize = 4_194_301;
/// Where a tensor begins in them: so much further than the one before. Prime, too.
const STRIDE: usize = 1_299_709;
/// Longest time for writing all of it.
const WRITE_LIMIT: Duration = Duration::from_secs(25);
/// What is left free of a folder, and of memory.
const ROOM: u64 = 1 << 30;
const MEMORY_ROOM: u64 = 4 << 30;
/// Bytes of one write.
const PIECE: usize = 8 << 20;

/// One that was made and opened.
pub(super) struct RandomCheckpoint {
    pub(super) checkpoint: Arc<Checkpoint>,
    /// Where it is.
    pub(super) place: String,
    pub(super) seconds: f64,
}

/// Where files can be.
#[derive(Clone, Debug)]
enum Place {
    /// Files without names, reached by way of this process's open ones.
    Memory,
    Folder(PathBuf),
}

/// A tensor of BF16.
struct Tensor {
    name: String,
    shape: Vec<usize>,
    fill: Fill,
}

/// What is in it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fill {
    Ones,
    /// Random numbers of standard deviation 2^-n, which is near the one that keeps a product's size.
    Random(u32),
}

/// Bytes of tensors by what is in them.
type Blocks = BTreeMap<Fill, Vec<u8>>;

/// Makes it where there is room, and opens it. Its files have no names any more when this returns.
pub(super) fn make(shape: &Shape) -> Result<RandomCheckpoint> {
    let shards = shards(shape);
    let bytes: u64 = shards.iter().flatten().map(Tensor::bytes).sum();
    let blocks = blocks(&shards);
    let started = Instant::now();
    let mut refusals = Vec::new();
    for place in [Place::Memory, Place::Folder("/dev/shm".into()), Place::Folder(std::env::temp_dir())] {
        let made = place
            .check_room(bytes)
            .and_then(|()| write_and_open(&place, shape, &shards, &blocks, started + WRITE_LIMIT));
        match made {
            Ok(checkpoint) => {
                let seconds = started.elapsed().as_secs_f64();
                return Ok(RandomCheckpoint { checkpoint, place: place.name(), seconds });
            }
            Err(error) => refusals.push(format!("{}: {error:#}", place.name())),
        }
    }
    bail!("no place for {:.1} GB of weights: {}", bytes as f64 / 1e9, refusals.join("; "))
}

impl Place {
    fn name(&self) -> String {
        match self {
            Place::Memory => "memory".to_owned(),
            Place::Folder(path) => path.display().to_string(),
        }
    }

    fn check_room(&self, bytes: u64) -> Result<()> {
        let (free, room) = match self {
            Place::Memory => (available_memory()?, MEMORY_ROOM),
            Place::Folder(path) => {
                let facts = statvfs(path)?;
                (facts.f_bavail.saturating_mul(facts.f_frsize), ROOM)
            }
        };
        if free < bytes.saturating_add(room) {
            bail!("{:.1} GB are free", free as f64 / 1e9);
        }
        Ok(())
    }

    /// A new file that can be opened by this name in `folder`.
    fn create(&self, folder: &Path, name: &str) -> Result<File> {
        let path = folder.join(name);
        match self {
            Place::Memory => {
                let file: OwnedFd = memfd_create(name, MemfdFlags::CLOEXEC)?;
                symlink(format!("/proc/self/fd/{}", file.as_raw_fd()), path)?;
                Ok(file.into())
            }
            Place::Folder(_) => Ok(File::options().write(true).create_new(true).open(path)?),
        }
    }

    /// Where the checkpoint's folder is.
    fn folder(&self) -> PathBuf {
        let parent = match self {
            Place::Memory => std::env::temp_dir(),
            Place::Folder(path) => path.clone(),
        };
        parent.join(format!("consort-device-check-{}.model", std::process::id()))
    }
}

/// Bytes that programs may still take without paging.
fn available_memory() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")).map(|kib| kib.trim().parse::<u64>());
    let kib = kib.context("/proc/meminfo has no MemAvailable")?.context("MemAvailable is no number")?;
    Ok(kib * 1024)
}

/// A folder that goes with this value.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // What is mapped stays until it is unmapped.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn write_and_open(
    place: &Place,
    shape: &Shape,
    shards: &[Vec<Tensor>],
    blocks: &Blocks,
    deadline: Instant,
) -> Result<Arc<Checkpoint>> {
    let path = place.folder();
    fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
    let folder = Folder(path);
    let names: Vec<String> =
        (1..=shards.len()).map(|at| format!("model-{at:05}-of-{:05}.safetensors", shards.len())).collect();
    let files: Vec<File> = names.iter().map(|name| place.create(&folder.0, name)).collect::<Result<_>>()?;
    write_all(&files, shards, blocks, deadline)?;
    let of_file = |(name, shard): (&String, &Vec<Tensor>)| {
        shard.iter().map(|tensor| (tensor.name.clone(), json!(name))).collect::<Vec<_>>()
    };
    let weight_map: Map<_, _> = names.iter().zip(shards).flat_map(of_file).collect();
    let index = json!({"metadata": {}, "weight_map": weight_map});
    fs::write(folder.0.join("model.safetensors.index.json"), index.to_string())?;
    fs::write(folder.0.join("config.json"), shape.config().to_string())?;
    Ok(Checkpoint::open(&folder.0)?)
}

/// Writes all files, each by one of as many threads as there are processors.
fn write_all(files: &[File], shards: &[Vec<Tensor>], blocks: &Blocks, deadline: Instant) -> Result<()> {
    let (next, threads) = (&AtomicUsize::new(0), thread::available_parallelism().map_or(1, usize::from));
    let work = move || -> Result<()> {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some((file, shard)) = files.get(at).zip(shards.get(at)) else { return Ok(()) };
            write_shard(file, shard, at, blocks, deadline)?;
        }
    };
    thread::scope(|scope| {
        let writers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        writers
            .into_iter()
            .try_for_each(|writer| writer.join().unwrap_or_else(|_| bail!("a thread that writes panicked")))
    })
}

fn write_shard(
    file: &File,
    shard: &[Tensor],
    number: usize,
    blocks: &Blocks,
    deadline: Instant,
) -> Result<()> {
    let mut end = 0;
    let tensors = shard.iter().map(|tensor| {
        let start = end;
        end += tensor.bytes() as usize;
        let info = TensorInfo { dtype: Dtype::BF16, shape: tensor.shape.clone(), data_offsets: (start, end) };
        (tensor.name.clone(), info)
    });
    let metadata = Metadata::new(Some([("format".to_owned(), "pt".to_owned())].into()), tensors.collect())?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    file.write_all_at(&(header.len() as u64).to_le_bytes(), 0)?;
    file.write_all_at(&header, 8)?;
    let mut at = 8 + header.len() as u64;
    for (order, tensor) in shard.iter().enumerate() {
        let block = blocks.get(&tensor.fill).context("a tensor that nothing was made for")?;
        let start = (number * 16 + order + 1) * STRIDE * size_of::<bf16>() % block.len();
        write_repeated(file, at, tensor.bytes(), block, start, deadline)?;
        at += tensor.bytes();
    }
    Ok(())
}

/// Writes `bytes` of a block that goes round, from `start` of it on.
fn write_repeated(
    file: &File,
    mut at: u64,
    bytes: u64,
    block: &[u8],
    start: usize,
    deadline: Instant,
) -> Result<()> {
    let (end, mut from) = (at + bytes, start);
    while at < end {
        if Instant::now() > deadline {
            bail!("writing takes longer than {} s", WRITE_LIMIT.as_secs());
        }
        let len = (block.len() - from).min(PIECE).min((end - at) as usize);
        file.write_all_at(&block[from..from + len], at)?;
        at += len as u64;
        from = (from + len) % block.len();
    }
    Ok(())
}

/// The tensors of each file, the largest first.
fn shards(shape: &Shape) -> Vec<Vec<Tensor>> {
    let Shape { hidden, intermediate, vocabulary, .. } = *shape;
    let (queries, keys) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let norm = |name: String| Tensor { name, shape: vec![hidden], fill: Fill::Ones };
    let matrix = |name: String, outputs: usize, inputs: usize| {
        let deviation = (inputs as f64).sqrt().log2().round() as u32;
        Tensor { name, shape: vec![outputs, inputs], fill: Fill::Random(deviation) }
    };
    let embedding = Tensor {
        name: "model.embed_tokens.weight".to_owned(),
        shape: vec![vocabulary, hidden],
        fill: Fill::Random(0),
    };
    let head = matrix("lm_head.weight".to_owned(), vocabulary, hidden);
    let mut shards = vec![vec![embedding], vec![head, norm("model.norm.weight".to_owned())]];
    for layer in 0..shape.layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        shards.push(vec![
            norm(name("input_layernorm")),
            matrix(name("self_attn.q_proj"), queries, hidden),
            matrix(name("self_attn.k_proj"), keys, hidden),
            matrix(name("self_attn.v_proj"), keys, hidden),
            matrix(name("self_attn.o_proj"), hidden, queries),
            norm(name("post_attention_layernorm")),
            matrix(name("mlp.gate_proj"), intermediate, hidden),
            matrix(name("mlp.up_proj"), intermediate, hidden),
            matrix(name("mlp.down_proj"), hidden, intermediate),
        ]);
    }
    shards
}

/// What all these tensors are made of.
fn blocks(shards: &[Vec<Tensor>]) -> Blocks {
    let noise: Vec<f32> = Noise::new(1).take(BLOCK).collect();
    let bytes = |values: &mut dyn Iterator<Item = f32>| -> Vec<u8> {
        values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect()
    };
    let mut blocks = Blocks::new();
    for tensor in shards.iter().flatten() {
        blocks.entry(tensor.fill).or_insert_with(|| match tensor.fill {
            Fill::Ones => bytes(&mut std::iter::repeat_n(1.0, BLOCK)),
            Fill::Random(deviation) => {
                let scale = 0.5f32.powi(deviation as i32);
                bytes(&mut noise.iter().map(|value| value * scale))
            }
        });
    }
    blocks
}

impl Tensor {
    fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * size_of::<bf16>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_checkpoint_opens_has_its_shapes_and_leaves_nothing_behind() {
        let shape = Shape::SMALL;
        let made = make(&shape).unwrap();
        assert_eq!(made.place, "memory");
        assert!(!Place::Memory.folder().exists());
        let checkpoint = made.checkpoint;
        assert_eq!(checkpoint.config().num_layers, shape.layers);
        let mut row = vec![0.0; shape.hidden];
        let mut read = |name: &str, at: usize| {
            checkpoint.read_rows(name, at..at + 1, 0..shape.hidden, &mut row).unwrap();
            row.clone()
        };
        let first = read("model.layers.0.self_attn.q_proj.weight", 0);
        assert_ne!(first, read("model.layers.0.self_attn.q_proj.weight", 1));
        assert_ne!(first, read("model.layers.1.self_attn.q_proj.weight", 0));
        let size = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>();
        assert!((0.3..3.0).contains(&size(&first)), "a row keeps a product's size");
        assert!(read("model.norm.weight", 0).iter().all(|x| *x == 1.0));
    }

    #[test]
    fn files_of_a_folder_are_deleted_as_soon_as_they_are_mapped() {
        let parent = tempfile::tempdir().unwrap();
        let (place, shape) = (Place::Folder(parent.path().to_owned()), Shape::SMALL);
        let shards = shards(&shape);
        let deadline = Instant::now() + WRITE_LIMIT;
        let checkpoint = write_and_open(&place, &shape, &shards, &blocks(&shards), deadline).unwrap();
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
        let mut row = vec![0.0; shape.hidden];
        checkpoint.read_rows("lm_head.weight", 5..6, 0..shape.hidden, &mut row).unwrap();
        assert!(row.iter().any(|x| *x != 0.0));
        assert!(place.check_room(u64::MAX).is_err());
    }

    #[test]
    fn eight_billion_parameters_are_eight_billion() {
        let parameters: u64 =
            shards(&Shape::EIGHT_BILLION).iter().flatten().map(Tensor::bytes).sum::<u64>() / 2;
        assert_eq!(parameters, 8_030_261_248);
    }
}
