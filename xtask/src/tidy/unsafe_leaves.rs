//! `unsafe` stands in named leaves only, and the file or the module file above it allows it.

use std::collections::BTreeSet;

use super::{Findings, source::Source};

/// Folders (ending in `/`) and files that may hold unsafe code. Everything else is safe Rust.
pub(super) const LEAVES: &[&str] = &[
    // Launches of CUDA kernels, whose arguments nobody checks but the file.
    "kernels/src/all_reduce/cuda.rs",
    // Kernels' compute: SIMD intrinsics, and views of one buffer handed to the threads of a team.
    "kernels/src/attention/cpu.rs",
    "kernels/src/attention/cuda.rs",
    "kernels/src/attention/lanes.rs",
    "kernels/src/attention/tiles.rs",
    "kernels/src/buffer.rs",
    "kernels/src/embedding/cpu.rs",
    "kernels/src/kv_append/cpu.rs",
    "kernels/src/linear/cpu.rs",
    "kernels/src/linear/finish.rs",
    "kernels/src/linear/peak.rs",
    "kernels/src/linear/rows.rs",
    "kernels/src/linear/cuda.rs",
    "kernels/src/linear/tiles.rs",
    "kernels/src/rms_norm/cpu.rs",
    "kernels/src/rope/cpu.rs",
    "kernels/src/sampling/cuda.rs",
    "kernels/src/simd/",
    "kernels/src/swiglu/cpu.rs",
    "kernels/src/team.rs",
    // Launches of CUDA kernels: views of device memory, and arguments that must be the kernel's.
    "kernels/src/cuda/mod.rs",
    "kernels/src/cuda/slice.rs",
    "kernels/src/swiglu/cuda.rs",
    "kernels/src/testing/emulated.rs",
    // The emulator that runs CUDA text in tests: its C++ machine, memory for kernels.
    "kernels/emulator/src/",
    "kernels/emulator/tests/planted.rs",
    "kernels/emulator/driver/tests/driver/",
    "kernels/emulator/driver/tests/abi/facts.rs",
    "kernels/emulator/driver/tests/abi/library.rs",
    "kernels/emulator/driver/tests/cublaslt/harness.rs",
    "parallel/tests/reference/cuda/",
    "kernels/src/attention/cuda/tests/frames.rs",
    // Ranks that read each other's device memory.
    "parallel/src/model/cuda/meeting.rs",
    "parallel/src/model/cuda/sums.rs",
    "cluster-tests/device-check/src/parts/all_reduce/ranks.rs",
    "cluster-tests/device-check/src/parts/processes/adder.rs",
    "kernels/src/embedding/cuda.rs",
    "kernels/src/kv_copy/cuda.rs",
    "kernels/src/qkv/cuda.rs",
    "kernels/src/rms_norm/cuda.rs",
    "kernels/src/rope/cuda.rs",
    // The operating system: memory; and parts of one slice for several threads.
    "kernels/src/sys/",
    // NVIDIA's libraries, loaded at run time: the loader, NVRTC, NCCL, the driver and cuBLASLt.
    "kernels/src/cuda/dynamic.rs",
    "kernels/src/cuda/nccl/",
    "kernels/src/cuda/nvrtc/library.rs",
    "kernels/src/cuda/device/raw/",
    // CUDA devices: views of their memory, and copies from and to memory of the host.
    "kernels/src/cuda/device/arena.rs",
    "kernels/src/cuda/device/graph.rs",
    "kernels/src/cuda/device/landing.rs",
    "kernels/src/cuda/device/launcher.rs",
    "kernels/src/cuda/device/matrix.rs",
    "kernels/src/cuda/device/offload.rs",
    "kernels/src/cuda/device/staging.rs",
    "kernels/src/cuda/device/tests/operations.rs",
    "kernels/src/cuda/device/tests/sharing.rs",
    "kernels/src/cuda/device/transfer.rs",
    "kernels/src/cuda/device/uploader.rs",
    "kernels/src/cuda/device/words.rs",
    // Memory that processes share.
    "parallel/src/collective/shared_memory/",
    // What a new process does before it runs its program.
    "runtime/src/shard_process/parent.rs",
    // Files mapped into memory.
    "parallel/src/checkpoint/mapped.rs",
    // Launches that were recorded, those that are, and those that fail on purpose.
    "cluster-tests/device-check/src/parts/faults.rs",
    "cluster-tests/device-check/src/parts/kernels/replay.rs",
    "cluster-tests/device-check/src/parts/nccl.rs",
    "cluster-tests/device-check/tests/software_driver/recorded.rs",
    // An allocator that counts, for a test.
    "parallel/tests/fuzz/allocation.rs",
];

pub(super) fn check(sources: &[Source], leaves: &[&str]) -> Findings {
    let mut found = Findings::default();
    let mut unused_leaves: BTreeSet<&str> = leaves.iter().copied().collect();
    let rust: Vec<&Source> = sources.iter().filter(|source| source.path.ends_with(".rs")).collect();
    let mut permits = BTreeSet::new();
    for source in &rust {
        let Some(line) = permission(source) else { continue };
        permits.insert(source.path.as_str());
        let covers =
            |leaf: &&str| source.path == *leaf || leaf.ends_with('/') && source.path.starts_with(*leaf);
        match leaves.iter().copied().find(covers) {
            Some(leaf) => drop(unused_leaves.remove(leaf)),
            None => found.errors.push(format!(
                "{}:{line}: allows unsafe code, but is not a leaf named in xtask/src/tidy/unsafe_leaves.rs",
                source.path
            )),
        }
    }
    let mut needed = BTreeSet::new();
    for source in &rust {
        let Some(line) = source.line_of_word("unsafe") else { continue };
        match heads(&source.path).into_iter().find(|head| permits.contains(head.as_str())) {
            Some(head) => drop(needed.insert(head)),
            None => {
                found.errors.push(format!("{}:{line}: unsafe code, not allowed in this file", source.path))
            }
        }
    }
    let idle = permits.iter().filter(|path| !needed.contains(**path));
    found
        .errors
        .extend(idle.map(|path| format!("{path}: allows unsafe code and holds none: drop the permission")));
    let unused = unused_leaves.iter();
    found
        .errors
        .extend(unused.map(|leaf| format!("{leaf} is a leaf without unsafe code: take it off the list")));
    found
}

/// The line that allows unsafe code, for the file and the modules below it or for one item.
fn permission(source: &Source) -> Option<usize> {
    let allows = |line: &str| line.contains("allow(unsafe_code") || line.contains("expect(unsafe_code");
    source.code.lines().position(allows).map(|at| at + 1)
}

/// The files that may speak for `path`: itself, then the module files above it. Not the crate's root: nobody may open
/// a whole crate.
fn heads(path: &str) -> Vec<String> {
    let mut heads = vec![path.to_owned()];
    let mut folder = path;
    while let Some((parent, _)) = folder.rsplit_once('/') {
        heads.push(format!("{parent}/mod.rs"));
        heads.push(format!("{parent}.rs"));
        folder = parent;
    }
    heads
}

#[cfg(test)]
mod tests;
