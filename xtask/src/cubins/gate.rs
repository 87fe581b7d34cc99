//! What a kernel may take, and what it takes.

use anyhow::{Context, Result};
use consort_kernels::cuda::{
    arch::Arch,
    cubins::Cubin,
    image,
    nvrtc::usage::{self, Usage},
    sources::Source,
};

use super::occupancy::{self, Block, Limit, Occupancy};

/// One kernel on one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kernel {
    pub(super) source: &'static str,
    pub(super) arch: Arch,
    pub(super) name: String,
    pub(super) block: Block,
    pub(super) occupancy: Occupancy,
}

/// What one text compiled for one architecture shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) kernels: Vec<Kernel>,
    pub(super) problems: Vec<String>,
}

/// Judges by two witnesses, the compiler's log and the cubin itself; an error where either is not understood.
pub(super) fn judge(source: &Source, arch: Arch, cubin: &Cubin) -> Result<Verdict> {
    let about = || format!("{} for {arch}", source.name);
    let functions = usage::parse(&cubin.log).with_context(about)?;
    let images = image::kernels(&cubin.bytes).with_context(about)?;
    let mut verdict = Verdict::default();
    verdict.problems.extend(warnings(&cubin.log).map(|line| format!("{}: {line}", about())));
    for function in &functions {
        verdict.problems.extend(
            local_memory(function).map(|what| format!("{} in {}: {what}", function.function, about())),
        );
    }
    for image in &images {
        let used = functions.iter().find(|function| function.function == image.name);
        let used = used.with_context(|| format!("the log of {} says nothing of {}", about(), image.name))?;
        match judge_kernel(source, arch, image, used)? {
            Ok(kernel) => verdict.kernels.push(kernel),
            Err(what) => verdict.problems.push(format!("{} in {}: {what}", image.name, about())),
        }
    }
    verdict.problems.extend(broken_promises(source, &verdict.kernels));
    for declared in source.dynamic_shared()? {
        if !images.iter().any(|image| declared.fits(&image.name)) {
            let what = "a line on its dynamic shared memory, but no such kernel";
            verdict.problems.push(format!("{} in {}: {what}", declared.kernels, about()));
        }
    }
    Ok(verdict)
}

/// What a kernel takes, or what is wrong with it.
fn judge_kernel(
    source: &Source,
    arch: Arch,
    image: &image::Kernel,
    used: &Usage,
) -> Result<Result<Kernel, String>> {
    if (used.registers, used.stack_frame_bytes) != (image.registers, image.frame_bytes) {
        return Ok(Err(format!(
            "the log tells {} registers and a frame of {} bytes, the cubin {} and {}",
            used.registers, used.stack_frame_bytes, image.registers, image.frame_bytes
        )));
    }
    let Some(threads) = image.threads_max else {
        return Ok(Err("it has no launch bounds; declare it with KERNEL".to_owned()));
    };
    let block = Block {
        threads,
        registers: used.registers,
        static_shared_bytes: used.shared_bytes,
        dynamic_shared_bytes: source.dynamic_shared_bytes(&image.name)?,
    };
    let limits = occupancy::limits(arch)?;
    Ok(occupancy::of(&block, limits).map(|occupancy| Kernel {
        source: source.name,
        arch,
        name: image.name.clone(),
        block,
        occupancy,
    }))
}

/// Architectures with the shared memory that kernels are laid out for: from this on,
const LAID_OUT_FOR: u32 = 90;
/// and before these, which have 100 KiB again.
const CONSUMER: u32 = 120;

/// Launch bounds of the text that the compiler or the multiprocessor does not keep.
fn broken_promises(source: &Source, kernels: &[Kernel]) -> Vec<String> {
    let mut problems = Vec::new();
    for bounds in source.bounds() {
        let Some(kernel) = kernels.iter().find(|kernel| kernel.name == bounds.kernel) else { continue };
        let (arch, fit) = (kernel.arch, kernel.occupancy.blocks);
        let about = format!("{} in {} for {arch}", kernel.name, source.name);
        if bounds.threads != kernel.block.threads {
            problems.push(format!(
                "{about}: {} threads in the text, {} in the cubin",
                bounds.threads, kernel.block.threads
            ));
        }
        // Some devices hold fewer warps and blocks than others, whatever a kernel takes, and those before 9.0 less
        // shared memory than stages are laid out for; there one block is enough.
        let is_kernels_doing = match kernel.occupancy.limit {
            Limit::Registers => true,
            Limit::SharedMemory => arch.number() >= LAID_OUT_FOR && arch.number() < CONSUMER,
            _ => false,
        };
        if fit < bounds.blocks && is_kernels_doing {
            problems.push(format!(
                "{about}: KERNEL promises {} blocks on a multiprocessor, {fit} fit (by {})",
                bounds.blocks, kernel.occupancy.limit
            ));
        }
    }
    problems
}

fn warnings(log: &str) -> impl Iterator<Item = &str> {
    // The compiler's hint on how to silence warnings is none.
    log.lines().filter(|line| line.contains("warning") && !line.starts_with("Remark"))
}

fn local_memory(function: &Usage) -> Option<String> {
    let Usage { stack_frame_bytes: frame, spill_store_bytes: stores, spill_load_bytes: loads, .. } =
        *function;
    if stores > 0 || loads > 0 {
        return Some(format!(
            "it spills registers: {stores} bytes stored, {loads} bytes loaded, a stack frame of {frame} bytes"
        ));
    }
    let advice = "an array indexed by a value that is known only at run time (of a parameter too, unless that is \
                  `const __grid_constant__`) does not stay in registers";
    (frame > 0).then(|| format!("it keeps {frame} bytes in local memory: {advice}"))
}

#[cfg(test)]
mod tests;
