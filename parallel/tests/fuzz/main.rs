//! Mutational fuzzing of both weight readers: valid files are damaged at random and by structure, opened, and read in
//! full and in part. Whatever the damage, nothing panics or hangs, an error names the file, memory stays within a
//! small multiple of the input, and what can be read is the same in part as in full.
//!
//! Every case follows from its seed. `CONSORT_FUZZ_SECONDS` is the length for each reader, `CONSORT_FUZZ_SEED` starts
//! another sequence of cases, and `CONSORT_FUZZ_CASE` runs the one whose seed a failure printed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "figures for the reader of --nocapture")]

mod allocation;
mod campaign;
mod folder;
mod gguf;
mod json;
mod mutate;
mod random;
mod reading;

use std::{
    fs::OpenOptions,
    io::Write,
    path::{Path, PathBuf},
};

/// A file of the crate's fixtures.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// Replaces a file's contents. Not by truncating it first: some file systems bring such a file to the disk at once, at
/// the price of milliseconds.
fn write(path: &Path, bytes: &[u8]) {
    let mut file = OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
    file.write_all(bytes).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
}
