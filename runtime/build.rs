//! Hashes the sources that decide what ranks of an engine say to each other, so that processes of different builds are
//! told apart before they compute together.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Crates whose sources count, from this one's folder.
const CRATES: [&str; 4] = [".", "../actors", "../parallel", "../kernels"];

/// What is compiled for tests only.
const TESTS: [&str; 3] = ["tests", "testing", "simulation"];

fn main() -> ExitCode {
    match hash() {
        Ok(hash) => {
            println!("cargo::rustc-env=CONSORT_BUILD_HASH={hash:032x}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("cargo::error=the sources cannot be hashed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn hash() -> io::Result<u128> {
    println!("cargo::rerun-if-changed=build.rs");
    let mut hash = Fnv::new();
    let variable = |name: &str| env::var(name).unwrap_or_default();
    for name in ["CARGO_PKG_VERSION", "TARGET"] {
        hash.add(variable(name).as_bytes());
    }
    let compiler = Command::new(variable("RUSTC")).arg("--version").output()?;
    hash.add(&compiler.stdout);
    for of in CRATES {
        let mut files = Vec::new();
        sources(&Path::new(of).join("src"), &mut files)?;
        files.sort();
        for file in files {
            println!("cargo::rerun-if-changed={}", file.display());
            hash.add(file.to_string_lossy().as_bytes());
            hash.add(&fs::read(&file)?);
        }
    }
    Ok(hash.0)
}

/// All sources below a folder, without tests.
fn sources(folder: &Path, into: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        if TESTS.contains(&stem.as_str()) || stem.ends_with("_tests") {
            continue;
        }
        if path.is_dir() {
            sources(&path, into)?;
        } else if path
            .extension()
            .is_some_and(|extension| ["rs", "cu", "cuh"].iter().any(|of| extension == *of))
        {
            into.push(path);
        }
    }
    Ok(())
}

/// FNV-1a of 128 bits: builds differ by accident, not by malice.
struct Fnv(u128);

impl Fnv {
    fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes.iter().chain(&(bytes.len() as u64).to_le_bytes()) {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
}
