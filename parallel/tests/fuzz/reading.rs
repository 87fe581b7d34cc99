//! What is asked of a reader, whatever the input.

use std::{
    error::Error,
    fmt,
    ops::{ControlFlow, Range},
    path::Path,
};

use consort_kernels::DType;
use consort_parallel::checkpoint::{
    Checkpoint, CheckpointError,
    write::{WriteError, WriteOptions, write_config, write_weights},
};

use crate::{allocation::peak_of, random::Random};

/// Bytes that opening may hold at most per byte of a file of weights or an index. Arrays of bytes become integers of
/// four; entries of some thirty bytes become nodes of a few hundred.
const WEIGHTS_FACTOR: usize = 8;
/// The same for a configuration, which becomes a tree: an element of an array takes two bytes in the file, and 72
/// in a vector that may have room for as many again and be copied as it grows. Such files end at 1 MiB.
const CONFIG_FACTOR: usize = 128;
/// And on top, whatever the input: names, paths, errors, the system's buffers.
const OPEN_BYTES: usize = 16 << 10;
/// Most bytes of `f32` per byte stored: blocks of 18 bytes hold 32 elements.
const READ_FACTOR: usize = 8;

/// Opened inputs of which one is written: files are brought to the disk, which takes longer than all else.
const WRITTEN_ONCE_IN: usize = 32;

/// What became of one case, or of many.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) opened: u64,
    tensors: u64,
    written: u64,
    /// Bytes held while opening, in percent of what is allowed.
    peak_percent: usize,
}

impl Outcome {
    pub(crate) fn add(&mut self, other: &Outcome) {
        self.opened += other.opened;
        self.tensors += other.tensors;
        self.written += other.written;
        self.peak_percent = self.peak_percent.max(other.peak_percent);
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { opened, tensors, written, peak_percent } = self;
        write!(f, "{opened} opened, {tensors} tensors read, {written} written anew, ")?;
        write!(f, "at most {peak_percent} % of the memory allowed")
    }
}

/// Sizes of a checkpoint's files.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InputBytes {
    /// Weights and the index of them.
    pub(crate) weights: usize,
    /// Configurations.
    pub(crate) config: usize,
}

/// Opens a checkpoint and reads all of it.
pub(crate) fn exercise(path: &Path, input: InputBytes, random: &mut Random) -> Outcome {
    let allowed = WEIGHTS_FACTOR * input.weights + CONFIG_FACTOR * input.config + OPEN_BYTES;
    let (opened, peak) = peak_of(|| Checkpoint::open(path));
    assert!(peak <= allowed, "opening {input:?} held {peak} bytes, {allowed} are allowed");
    let mut outcome = Outcome { peak_percent: peak * 100 / allowed, ..Outcome::default() };
    match opened {
        Err(error) => check_error(&error, path),
        Ok(checkpoint) => {
            outcome.opened = 1;
            outcome.tensors = read_all(&checkpoint, input.weights, random);
            // Drawn last, so that cases read the same whether or not they are written.
            if random.once_in(WRITTEN_ONCE_IN) {
                write_and_compare(&checkpoint, random);
                outcome.written = 1;
            }
        }
    }
    outcome
}

fn check_error(error: &CheckpointError, path: &Path) {
    let text = error.to_string();
    let place = path.to_str().unwrap();
    assert!(text.contains(place), "the error does not name the file: {text}");
    let mut cause = error.source();
    while let Some(error) = cause {
        assert!(!error.to_string().is_empty());
        cause = error.source();
    }
}

/// Reads every tensor in full, and parts of it that must be the same; returns how many there are.
fn read_all(checkpoint: &Checkpoint, weight_bytes: usize, random: &mut Random) -> u64 {
    assert!(format!("{checkpoint:?}").contains("Checkpoint"));
    assert!(checkpoint.stored_bytes() <= weight_bytes as u64, "tensors hold more than the files");
    if let Some(gguf) = checkpoint.gguf() {
        for key in gguf.keys() {
            let answers = [
                gguf.string(key).is_some(),
                gguf.u32(key).is_some(),
                gguf.f32(key).is_some(),
                gguf.bool(key).is_some(),
                gguf.strings(key).is_some(),
                gguf.i32s(key).is_some(),
                gguf.f32s(key).is_some(),
            ];
            let count = answers.into_iter().filter(|is_of_type| *is_of_type).count();
            assert!(gguf.contains(key) && count <= 1, "`{key}` is of {count} types");
        }
    }
    let (mut tensors, mut elements) = (0, 0);
    for name in checkpoint.names() {
        let info = checkpoint.tensor(name).unwrap();
        let (rows, cols) = (info.rows(), info.cols());
        elements += rows * cols;
        assert!(elements * size_of::<f32>() <= READ_FACTOR * weight_bytes, "{name}: {:?}", info.shape);
        let mut whole = vec![f32::NAN; rows * cols];
        let (read, held) = peak_of(|| checkpoint.read_rows(name, 0..rows, 0..cols, &mut whole));
        read.unwrap();
        assert_eq!(held, 0, "reading needs no memory of its own");
        for _ in 0..3 {
            let (rows, cols) = (range(random, rows), range(random, cols));
            check_part(checkpoint, name, (rows, cols), info.cols(), &whole);
        }
        let beyond = checkpoint.read_rows(name, 0..rows, 0..cols.wrapping_add(1), &mut whole);
        assert!(matches!(beyond, Err(CheckpointError::Slice { .. })), "{name}: {beyond:?}");
        checkpoint.release_pages(name);
        tensors += 1;
    }
    assert_eq!(checkpoint.parameter_count(), elements as u64);
    tensors
}

/// Writes the model as `consort convert` does, and finds the same tensors in what was written.
fn write_and_compare(checkpoint: &Checkpoint, random: &mut Random) {
    let folder = tempfile::tempdir().unwrap();
    let dtype = if random.once_in(2) { DType::F32 } else { DType::BF16 };
    let options = WriteOptions { dtype, max_shard_bytes: [1 << 14, u64::MAX][random.below(2)] };
    let (mut reported, mut announced) = (0, None);
    let mut progress = |written, total| {
        assert!(reported < written && written <= total && announced.is_none_or(|before| before == total));
        (reported, announced) = (written, Some(total));
        ControlFlow::Continue(())
    };
    let written = write_weights(checkpoint, folder.path(), &options, &mut progress).unwrap();
    assert_eq!(written.bytes, checkpoint.parameter_count() * dtype.bytes() as u64);
    assert_eq!(written.tensors, checkpoint.names().count());
    match write_config(checkpoint, folder.path(), dtype) {
        Ok(()) => {}
        Err(WriteError::NoSpelling { .. }) => return,
        Err(error) => panic!("{error}"),
    }
    let copy = Checkpoint::open(folder.path()).unwrap();
    assert!(copy.names().eq(checkpoint.names()));
    for name in copy.names() {
        assert_eq!(copy.tensor(name).unwrap().shape, checkpoint.tensor(name).unwrap().shape, "{name}");
    }
}

/// A part of a dimension: mostly a short one, at times all or nothing.
fn range(random: &mut Random, len: usize) -> Range<usize> {
    let (a, b) = (random.up_to(len), random.up_to(len));
    a.min(b)..a.max(b)
}

fn check_part(
    checkpoint: &Checkpoint,
    name: &str,
    (rows, cols): (Range<usize>, Range<usize>),
    row_len: usize,
    whole: &[f32],
) {
    // A dimension of a tensor without elements can be of any size.
    if cols.is_empty() || rows.is_empty() {
        checkpoint.read_rows(name, rows, cols, &mut []).unwrap();
        return;
    }
    let mut part = vec![f32::NAN; rows.len() * cols.len()];
    checkpoint.read_rows(name, rows.clone(), cols.clone(), &mut part).unwrap();
    for (row, values) in rows.clone().zip(part.chunks_exact(cols.len())) {
        let expected = &whole[row * row_len..][cols.clone()];
        let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        assert!(values.iter().zip(expected).all(is_same), "{name}: row {row}, columns {cols:?}");
    }
    checkpoint.release_rows(name, rows);
}
