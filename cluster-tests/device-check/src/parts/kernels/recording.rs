//! A launch as the emulator recorded it; `consort_emulator::recording` says what the files hold.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

/// One launch, with the memory that it uses before and after.
pub(super) struct Recording {
    pub(super) launch: Launch,
    pub(super) memories: Vec<Memory>,
}

/// In the terms of `cuLaunchKernel`.
#[derive(Deserialize)]
pub(super) struct Launch {
    pub(super) kernel: String,
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
    /// Bytes of each argument.
    pub(super) arguments: Vec<Vec<u8>>,
    /// Argument, bytes into it, memory, bytes into that.
    pub(super) pointers: Vec<[usize; 4]>,
}

/// What one piece of memory held.
pub(super) struct Memory {
    pub(super) elements: Elements,
    pub(super) before: Vec<u8>,
    /// Where it differs.
    pub(super) after: Option<Vec<u8>>,
}

/// What memory consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Elements {
    BFloat16,
    Float32,
    /// Integers, bits, and words that hold any of these and floats.
    Words,
    Bytes,
}

/// The files of a folder by kernel and name.
pub(super) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let listed = std::fs::read_dir(folder).with_context(|| {
        format!("no recordings at {}; `cargo xtask device-check` makes them", folder.display())
    })?;
    let mut files = listed.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    Ok(files)
}

impl Recording {
    pub(super) fn read(file: &Path) -> Result<Recording> {
        let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        Recording::parse(&bytes).with_context(|| format!("{} is no recording", file.display()))
    }

    fn parse(bytes: &[u8]) -> Result<Recording> {
        let (_, metadata) = SafeTensors::read_metadata(bytes)?;
        let launch = metadata.metadata().as_ref().and_then(|metadata| metadata.get("launch"));
        let launch: Launch = serde_json::from_str(launch.context("it has no launch")?)?;
        let tensors = SafeTensors::deserialize(bytes)?;
        let mut memories = Vec::new();
        while let Ok(before) = tensors.tensor(&format!("{}.before", memories.len())) {
            let after = tensors.tensor(&format!("{}.after", memories.len()));
            let elements = match before.dtype() {
                Dtype::BF16 => Elements::BFloat16,
                Dtype::F32 => Elements::Float32,
                Dtype::U32 | Dtype::U64 => Elements::Words,
                _ => Elements::Bytes,
            };
            let after = after.ok().map(|after| after.data().to_vec());
            memories.push(Memory { elements, before: before.data().to_vec(), after });
        }
        for &[argument, at, memory, offset] in &launch.pointers {
            let fits = launch.arguments.get(argument).is_some_and(|bytes| at + 8 <= bytes.len());
            if !fits || memories.get(memory).is_none_or(|memory| offset > memory.before.len()) {
                bail!("argument {argument} points nowhere");
            }
        }
        if memories
            .iter()
            .any(|memory| memory.after.as_ref().is_some_and(|after| after.len() != memory.before.len()))
        {
            bail!("memory has another size afterwards");
        }
        Ok(Recording { launch, memories })
    }
}
