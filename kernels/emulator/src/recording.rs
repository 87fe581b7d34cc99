//! What kernels read and wrote, kept in files: on a GPU the same launches must do the same.
//!
//! `CONSORT_EMULATOR_RECORD` names a folder. Every launch of its kind that [`launch`](crate::launch) runs becomes a
//! file there, `KERNEL-HASH.safetensors`: all of each [`Memory`](crate::Memory) that an argument points into, before
//! (`0.before`) and, where something changed, after (`0.after`); in its metadata the launch, and where in the
//! arguments the pointers are. A launch that changes nothing shows nothing and is left out. Launches of one kind, that
//! is of equal kernel, grid and arguments other than pointers, are recorded once; [`SNAPSHOT_MAX`] and [`KINDS_MAX`]
//! bound them. Grids that wait for each other are not recorded.
#![allow(unsafe_code)]

use std::{
    collections::{BTreeMap, HashMap, HashSet, hash_map::DefaultHasher},
    env, fs,
    hash::{Hash, Hasher},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use safetensors::{Dtype, View};
use serde_json::json;

use crate::{Fault, Grid};

/// Bytes of all memory of a recorded launch, at most.
pub const SNAPSHOT_MAX: usize = 1 << 20;
/// Recorded launches of one kernel, at most.
pub const KINDS_MAX: usize = 48;

/// A piece of memory that lives.
#[derive(Clone, Copy)]
struct Living {
    bytes: usize,
    dtype: Dtype,
}

/// All memory that lives, by address, and what was recorded.
struct Recorder {
    folder: PathBuf,
    living: Mutex<BTreeMap<usize, Living>>,
    kinds: Mutex<HashMap<String, HashSet<u64>>>,
}

/// Where one argument points.
struct Pointer {
    argument: usize,
    /// Bytes from the argument's beginning.
    at: usize,
    memory: usize,
    /// Bytes from the memory's beginning.
    offset: usize,
}

/// A launch before it is run.
pub(crate) struct Begun {
    kernel: String,
    kind: u64,
    file: PathBuf,
    metadata: HashMap<String, String>,
    memories: Vec<(usize, Living)>,
    before: Vec<Vec<u8>>,
}

static RECORDER: OnceLock<Option<Recorder>> = OnceLock::new();

/// The same as the variable, for a program that asks before it makes any memory. False where it is too late.
pub fn record_to(folder: &Path) -> bool {
    RECORDER.set(Some(Recorder::new(folder.to_path_buf()))).is_ok()
}

fn recorder() -> Option<&'static Recorder> {
    let folder = || env::var_os("CONSORT_EMULATOR_RECORD").filter(|folder| !folder.is_empty());
    RECORDER.get_or_init(|| Some(Recorder::new(folder()?.into()))).as_ref()
}

impl Recorder {
    fn new(folder: PathBuf) -> Recorder {
        Recorder { folder, living: Mutex::default(), kinds: Mutex::default() }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory of `T` has come to be.
pub(crate) fn born<T>(start: *const u8, bytes: usize) {
    let Some(recorder) = recorder() else { return };
    let name = std::any::type_name::<T>();
    let dtype = match name.rsplit("::").next().unwrap_or(name) {
        "bf16" => Dtype::BF16,
        "f32" => Dtype::F32,
        "u32" => Dtype::U32,
        "u64" => Dtype::U64,
        _ => Dtype::U8,
    };
    lock(&recorder.living).insert(start as usize, Living { bytes, dtype });
}

/// And is no more.
pub(crate) fn gone(start: *const u8) {
    if let Some(recorder) = recorder() {
        lock(&recorder.living).remove(&(start as usize));
    }
}

/// Keeps what a launch will read, if it is of a new kind.
pub(crate) fn begin(grid: &Grid<'_>) -> Option<Begun> {
    let recorder = recorder()?;
    // SAFETY: pointers to as many bytes, by the promise to `launch`.
    let arguments: Vec<Vec<u8>> = (grid.arguments.iter().zip(&grid.argument_bytes))
        .map(|(&at, &bytes)| unsafe { std::slice::from_raw_parts(at.cast::<u8>(), bytes as usize) }.to_vec())
        .collect();
    let (pointers, memories) = pointers_of(&arguments, &lock(&recorder.living));
    if memories.iter().map(|(_, living)| living.bytes).sum::<usize>() > SNAPSHOT_MAX {
        return None;
    }
    let kind = kind_of(grid, &arguments, &pointers);
    let mut kinds = lock(&recorder.kinds);
    let known = kinds.entry(grid.kernel.to_owned()).or_default();
    if known.len() >= KINDS_MAX || !known.insert(kind) {
        return None;
    }
    drop(kinds);
    let pointers: Vec<_> = (pointers.iter())
        .map(|pointer| json!([pointer.argument, pointer.at, pointer.memory, pointer.offset]))
        .collect();
    let launch = json!({
        "kernel": grid.kernel,
        "grid": grid.grid,
        "threads": grid.threads[0],
        "shared_bytes": grid.shared_bytes,
        "arguments": arguments,
        // Argument, bytes into it, memory, bytes into that.
        "pointers": pointers,
    });
    let before = memories.iter().map(|&(start, living)| bytes_at(start, living.bytes)).collect();
    Some(Begun {
        kernel: grid.kernel.to_owned(),
        kind,
        file: recorder.folder.join(format!("{}-{kind:016x}.safetensors", grid.kernel)),
        metadata: HashMap::from([("launch".to_owned(), launch.to_string())]),
        memories,
        before,
    })
}

impl Begun {
    /// Writes what a launch has read and written.
    pub(crate) fn end(self) -> Result<(), Fault> {
        let Begun { kernel, kind, file, metadata, memories, before } = self;
        let unchanged = |(&(start, living), before): (&(usize, Living), &Vec<u8>)| {
            bytes_at(start, living.bytes) == *before
        };
        if memories.iter().zip(&before).all(unchanged) {
            if let Some(recorder) = recorder() {
                lock(&recorder.kinds).entry(kernel).or_default().remove(&kind);
            }
            return Ok(());
        }
        let mut tensors = Vec::new();
        for (at, (&(start, living), before)) in memories.iter().zip(before).enumerate() {
            let after = bytes_at(start, living.bytes);
            if after != before {
                tensors.push((format!("{at}.after"), Tensor::new(living.dtype, after)));
            }
            tensors.push((format!("{at}.before"), Tensor::new(living.dtype, before)));
        }
        write(&file, tensors, metadata)
            .map_err(|error| Fault(format!("cannot record {}: {error}", file.display())))
    }
}

fn write(
    file: &Path,
    tensors: Vec<(String, Tensor)>,
    metadata: HashMap<String, String>,
) -> Result<(), String> {
    let folder = file.parent().ok_or("no folder")?;
    fs::create_dir_all(folder).map_err(|error| error.to_string())?;
    let bytes = safetensors::serialize(tensors, Some(metadata)).map_err(|error| error.to_string())?;
    fs::write(file, bytes).map_err(|error| error.to_string())
}

/// All words of the arguments that are addresses of memory, and that memory: the same memory once.
fn pointers_of(
    arguments: &[Vec<u8>],
    living: &BTreeMap<usize, Living>,
) -> (Vec<Pointer>, Vec<(usize, Living)>) {
    let (mut pointers, mut memories) = (Vec::new(), Vec::<(usize, Living)>::new());
    for (argument, bytes) in arguments.iter().enumerate() {
        for (word, value) in bytes.chunks_exact(8).enumerate() {
            let value = usize::from_ne_bytes(value.try_into().expect("eight bytes"));
            let Some((&start, &found)) = living.range(..=value).next_back() else { continue };
            // One beyond the end is an address of it, too: of nothing.
            if value > start + found.bytes {
                continue;
            }
            let memory = memories.iter().position(|(known, _)| *known == start).unwrap_or_else(|| {
                memories.push((start, found));
                memories.len() - 1
            });
            pointers.push(Pointer { argument, at: 8 * word, memory, offset: value - start });
        }
    }
    (pointers, memories)
}

/// The same for launches that differ in addresses and contents of memory only.
fn kind_of(grid: &Grid<'_>, arguments: &[Vec<u8>], pointers: &[Pointer]) -> u64 {
    let mut arguments = arguments.to_vec();
    for pointer in pointers {
        arguments[pointer.argument][pointer.at..pointer.at + 8].fill(0);
    }
    let mut hasher = DefaultHasher::new();
    (grid.kernel, grid.grid, grid.threads, grid.shared_bytes, arguments).hash(&mut hasher);
    hasher.finish()
}

fn bytes_at(start: usize, bytes: usize) -> Vec<u8> {
    // SAFETY: memory that lives: whoever launches holds it.
    unsafe { std::slice::from_raw_parts(start as *const u8, bytes) }.to_vec()
}

struct Tensor {
    dtype: Dtype,
    shape: [usize; 1],
    bytes: Vec<u8>,
}

impl Tensor {
    fn new(dtype: Dtype, bytes: Vec<u8>) -> Tensor {
        let element = match dtype {
            Dtype::U64 => 8,
            Dtype::F32 | Dtype::U32 => 4,
            Dtype::BF16 => 2,
            _ => 1,
        };
        Tensor { dtype, shape: [bytes.len() / element], bytes }
    }
}

impl View for Tensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        (&self.bytes).into()
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
