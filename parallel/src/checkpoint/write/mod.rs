//! An opened checkpoint, written as the folder that `transformers` loads: safetensors, `config.json` and
//! `generation_config.json`.
//!
//! Rows are read, rounded and written a few megabytes at a time, so that a model of any size passes through the
//! same small buffer. Values are rounded as loading in that [`DType`] rounds them; BF16 numbers so small that kernels
//! take them for zero ([`BF16_SMALLEST`](consort_kernels::element::BF16_SMALLEST)) are written as they are. What
//! belongs to text (tokenizer, chat template) is not this crate's, and neither is making the folder appear whole or
//! not at all: the caller gives an empty folder and disposes of it after an error.

mod config;
mod error;
mod files;
mod llama3;
#[cfg(test)]
mod tests;

use std::{
    fs::File,
    io::Write,
    ops::{ControlFlow, Range},
    path::Path,
};

use consort_kernels::{DType, element::bf16};
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};
use serde_json::{Map, json};

use super::Checkpoint;

pub use config::write_config;
pub use error::WriteError;
pub use files::{copy_if_present, write_file};

/// Elements that are in memory at a time: 4 MB as f32 beside at most as much of output. Large enough that neither
/// system calls nor progress reports show, small beside any model. A multiple of every quantised block.
const CHUNK_ELEMENTS: usize = 1 << 20;

/// Safetensors files begin their data at a multiple of this.
const HEADER_ALIGNMENT: usize = 8;

/// How weights are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOptions {
    /// Type of every tensor. `BF16` rounds to nearest, ties to even.
    pub dtype: DType,
    /// Most bytes of tensors in one file; a larger tensor has a file of its own. Models that fit into one file are
    /// written as one, others with an index.
    pub max_shard_bytes: u64,
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of these tensors.
    pub bytes: u64,
    /// Names of the files that hold them.
    pub files: Vec<String>,
    /// Tensors that the model does not need and that are stored in a type that cannot be read.
    pub left_out: Vec<String>,
}

/// Told bytes written and bytes in all after every few megabytes; a break ends the work with
/// [`WriteError::Interrupted`].
pub type WriteProgress<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

/// Writes all tensors into `folder`, as `model.safetensors` or as several files and their index.
pub fn write_weights(
    checkpoint: &Checkpoint,
    folder: &Path,
    options: &WriteOptions,
    progress: &mut WriteProgress<'_>,
) -> Result<Written, WriteError> {
    let shards = shards(checkpoint, options);
    let mut written =
        Written { left_out: checkpoint.unreadable.keys().cloned().collect(), ..Written::default() };
    let total = shards.iter().map(|shard| shard.bytes).sum();
    let mut weight_map = Map::new();
    for (at, shard) in shards.iter().enumerate() {
        let name = file_name(at, shards.len());
        let path = folder.join(&name);
        let io = |source| WriteError::io(&path, total, source);
        let mut file = File::create_new(&path).map_err(io)?;
        file.write_all(&header(shard, options.dtype)?).map_err(io)?;
        for (tensor, shape) in &shard.tensors {
            let mut sink = |bytes: &[u8]| -> Result<(), WriteError> {
                file.write_all(bytes).map_err(io)?;
                written.bytes += bytes.len() as u64;
                match progress(written.bytes, total) {
                    ControlFlow::Continue(()) => Ok(()),
                    ControlFlow::Break(()) => Err(WriteError::Interrupted),
                }
            };
            stream(checkpoint, tensor, &Shape::of(shape), options.dtype, &mut sink)?;
            checkpoint.release_pages(tensor);
            weight_map.insert((*tensor).to_owned(), json!(name));
        }
        // A full disk may show only here; and a rename must not become durable before its data.
        file.sync_all().map_err(io)?;
        written.tensors += shard.tensors.len();
        written.files.push(name);
    }
    if shards.len() > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_json(&folder.join(INDEX_FILE), &index)?;
    }
    Ok(written)
}

const INDEX_FILE: &str = "model.safetensors.index.json";

fn file_name(at: usize, of: usize) -> String {
    if of == 1 {
        "model.safetensors".to_owned()
    } else {
        format!("model-{:05}-of-{of:05}.safetensors", at + 1)
    }
}

/// The tensors of one file.
#[derive(Default)]
struct Shard<'a> {
    tensors: Vec<(&'a str, &'a [usize])>,
    bytes: u64,
}

/// Fills one file after the other, in the order of names. There is at least one.
fn shards<'a>(checkpoint: &'a Checkpoint, options: &WriteOptions) -> Vec<Shard<'a>> {
    let mut shards = vec![Shard::default()];
    for (name, tensor) in &checkpoint.tensors {
        let bytes = tensor_bytes(&tensor.info.shape, options.dtype);
        let full = |shard: &Shard<'_>| {
            !shard.tensors.is_empty() && shard.bytes.saturating_add(bytes) > options.max_shard_bytes
        };
        if shards.last().is_some_and(full) {
            shards.push(Shard::default());
        }
        if let Some(shard) = shards.last_mut() {
            shard.tensors.push((name, &tensor.info.shape));
            shard.bytes += bytes;
        }
    }
    shards
}

/// Opening has held the number of elements to what the file stores, so the product cannot overflow.
fn tensor_bytes(shape: &[usize], dtype: DType) -> u64 {
    (shape.iter().product::<usize>() * dtype.bytes()) as u64
}

/// Length and header of a file. The crate's `Metadata` checks that the tensors follow one another without a gap.
fn header(shard: &Shard<'_>, dtype: DType) -> Result<Vec<u8>, WriteError> {
    let dtype_name = match dtype {
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::BF16,
    };
    let mut end = 0;
    let tensors = shard.tensors.iter().map(|(name, shape)| {
        let start = end;
        end += tensor_bytes(shape, dtype) as usize;
        let info = TensorInfo { dtype: dtype_name, shape: shape.to_vec(), data_offsets: (start, end) };
        ((*name).to_owned(), info)
    });
    // transformers refuses files that do not say for which framework they are.
    let format = [("format".to_owned(), "pt".to_owned())].into();
    let metadata = Metadata::new(Some(format), tensors.collect()).map_err(WriteError::Header)?;
    let mut json = serde_json::to_vec(&metadata).map_err(WriteError::Json)?;
    json.resize(json.len().next_multiple_of(HEADER_ALIGNMENT), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}

/// A tensor as [`Checkpoint::read_rows`] sees it.
struct Shape {
    rows: usize,
    cols: usize,
}

impl Shape {
    fn of(shape: &[usize]) -> Self {
        let (cols, outer) = shape.split_last().map_or((1, &[][..]), |(cols, outer)| (*cols, outer));
        Self { rows: outer.iter().product(), cols }
    }

    /// Parts of at most [`CHUNK_ELEMENTS`], in storage order: whole rows, or parts of one row where rows are longer.
    fn parts(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + use<> {
        // Without columns there is nothing to hand out, and there may be more such rows than can be counted through.
        let (rows, cols) = (if self.cols == 0 { 0 } else { self.rows }, self.cols);
        let cols_step = cols.clamp(1, CHUNK_ELEMENTS);
        let rows_step = if cols > CHUNK_ELEMENTS { 1 } else { CHUNK_ELEMENTS / cols_step };
        (0..rows).step_by(rows_step).flat_map(move |row| {
            let rows = row..(row + rows_step).min(rows);
            (0..cols).step_by(cols_step).map(move |col| (rows.clone(), col..(col + cols_step).min(cols)))
        })
    }
}

/// Hands the bytes of a tensor to `sink`, part by part.
fn stream(
    checkpoint: &Checkpoint,
    name: &str,
    shape: &Shape,
    dtype: DType,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), WriteError>,
) -> Result<(), WriteError> {
    let (mut values, mut bytes) = (Vec::new(), Vec::new());
    for (rows, cols) in shape.parts() {
        values.resize(rows.len() * cols.len(), 0.0);
        checkpoint.read_rows(name, rows.clone(), cols, &mut values)?;
        bytes.clear();
        match dtype {
            DType::F32 => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
            DType::BF16 => {
                bytes.extend(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()));
            }
        }
        sink(&bytes)?;
        // The map must not grow with the tensor either. Rows of a head that is cut here are faulted in again.
        checkpoint.release_rows(name, rows);
    }
    Ok(())
}

/// Writes a JSON file, indented.
fn write_json(path: &Path, value: &serde_json::Value) -> Result<(), WriteError> {
    let mut text = serde_json::to_vec_pretty(value).map_err(WriteError::Json)?;
    text.push(b'\n');
    write_file(path, &text)
}
