//! Which instructions kernels must hold: what they were written for, and what a compiler may silently take away.
//!
//! One row for each family of kernels. A row without a kernel is an error, so the table cannot rot; a row whose text is
//! not listed in `kernels/src/cuda/sources.rs` yet waits for it.

use consort_kernels::cuda::{declarations::fits, sources::Source};

use super::{gate::Kernel, sass::Function};

/// What kernels of some name must hold.
pub(super) struct Rule {
    /// The text that they are in.
    text: &'static str,
    /// A name, or the beginning of several followed by `*`.
    kernels: &'static str,
    /// Of each group at least one instruction.
    must: &'static [&'static [&'static str]],
    /// Loads from global memory in innermost loops that load 16 bytes at a time.
    narrow_loads: NarrowLoads,
}

/// Whether a loop over wide loads may hold narrow ones.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NarrowLoads {
    /// Page numbers, lengths, scales.
    Allowed,
    /// All that the loop reads are rows: a narrow load means that the compiler split a wide one.
    Forbidden,
}

/// Memory-bound kernels: 16 bytes a load, into registers or straight into shared memory.
const WIDE: &[&str] = &["LDG.128", "LDGSTS.128"];
/// Another device's memory: 16 bytes a load, and never out of a cache that does not hear of that device's stores.
const FROM_PEERS: &[&str] = &["LDG.128.STRONG.SYS"];
/// Matrix kernels: BF16 tensor cores with sums in float, fed by `ldmatrix`.
const MATRIX: &[&[&str]] = &[&["HMMA.16816.F32.BF16"], &["LDSM"], WIDE];

/// In no kernel: local memory.
const NEVER: &[&str] = &["STL", "LDL"];

/// What only kernels with shared memory hold.
const SHARED: &[&str] = &["LDS", "STS", "LDSM", "STSM", "ATOMS", "LDGSTS"];

/// Loads that are narrower than 16 bytes have none of these.
const WIDE_LOADS: &[&str] = &["LDG.128", "LDG.256", "LDG.ENL2"];

/// The table.
pub(super) const RULES: &[Rule] = &[
    Rule {
        text: "all_reduce/kernel.cu",
        kernels: "all_*",
        must: &[FROM_PEERS],
        narrow_loads: NarrowLoads::Allowed,
    },
    matrix("attention/decode.cu", "attention_decode_*"),
    matrix("attention/prefill.cu", "attention_prefill_*"),
    memory_bound("embedding/kernel.cu", "embedding_bf16", NarrowLoads::Allowed),
    memory_bound("kv_copy/kernel.cu", "kv_copy", NarrowLoads::Allowed),
    matrix("linear/gemm.cu", "linear_gemm_*"),
    memory_bound("linear/gemv.cu", "linear_gemv", NarrowLoads::Forbidden),
    memory_bound("rms_norm/kernel.cu", "rms_norm_1", NarrowLoads::Forbidden),
    memory_bound("rms_norm/kernel.cu", "rms_norm_2", NarrowLoads::Forbidden),
    memory_bound("rms_norm/kernel.cu", "rms_norm_4", NarrowLoads::Forbidden),
    memory_bound("rms_norm/kernel.cu", "rms_norm_wide", NarrowLoads::Forbidden),
    memory_bound("swiglu/kernel.cu", "swiglu_*", NarrowLoads::Allowed),
];

const fn memory_bound(text: &'static str, kernels: &'static str, narrow_loads: NarrowLoads) -> Rule {
    Rule { text, kernels, must: &[WIDE], narrow_loads }
}

const fn matrix(text: &'static str, kernels: &'static str) -> Rule {
    Rule { text, kernels, must: MATRIX, narrow_loads: NarrowLoads::Allowed }
}

/// Rules that no kernel fits. Says which ones wait for their text.
pub(super) fn without_kernels(rules: &[Rule], sources: &[Source], kernels: &[Kernel]) -> Vec<String> {
    let mut problems = Vec::new();
    for Rule { text, kernels: names, .. } in rules {
        if !sources.iter().any(|source| source.name == *text) {
            eprintln!("the rule for {names} waits for {text}");
        } else if !kernels.iter().any(|kernel| kernel.source == *text && fits(names, &kernel.name)) {
            problems.push(format!(
                "a rule of xtask/src/cubins/rules.rs is for {names} of {text}, which holds no such kernel"
            ));
        }
    }
    problems
}

/// What is wrong with a kernel's instructions.
pub(super) fn judge(rules: &[Rule], kernel: &Kernel, function: &Function) -> Vec<String> {
    let mut problems = Vec::new();
    for pattern in NEVER.iter().filter(|pattern| function.has(pattern)) {
        problems.push(format!("it holds {pattern}: local memory"));
    }
    problems.extend(shared_memory(kernel, function));
    for rule in rules.iter().filter(|rule| rule.text == kernel.source && fits(rule.kernels, &kernel.name)) {
        for group in rule.must {
            if !group.iter().any(|pattern| function.has(pattern)) {
                problems.push(format!("it holds no {}", group.join(" and no ")));
            }
        }
        if rule.narrow_loads == NarrowLoads::Forbidden {
            problems.extend(
                narrow_loads(function)
                    .map(|opcode| format!("a loop that loads 16 bytes at a time also holds {opcode}")),
            );
        }
    }
    problems
}

/// Shared memory that nobody declared, or that was declared for nothing.
fn shared_memory(kernel: &Kernel, function: &Function) -> Option<String> {
    let used = SHARED.iter().find(|pattern| function.has(pattern));
    let (fixed, dynamic) = (kernel.block.static_shared_bytes, kernel.block.dynamic_shared_bytes);
    match used {
        Some(pattern) if fixed == 0 && dynamic == 0 => Some(format!(
            "it holds {pattern}, but its text does not say how much shared memory it is launched with; add \
             `// dynamic shared memory: {} BYTES bytes`",
            kernel.name
        )),
        None if dynamic > 0 => Some(format!(
            "its text says that it is launched with {dynamic} bytes of shared memory; it uses none"
        )),
        _ => None,
    }
}

/// A narrow load of each loop that also holds a wide one.
fn narrow_loads(function: &Function) -> impl Iterator<Item = &str> {
    function.innermost_loops().into_iter().filter_map(|body| {
        let is_wide =
            |opcode: &&super::sass::Instruction| WIDE_LOADS.iter().any(|pattern| opcode.is(pattern));
        body.iter().find(is_wide)?;
        let narrow = body.iter().find(|instruction| instruction.is("LDG") && !is_wide(instruction))?;
        Some(narrow.opcode.as_str())
    })
}

#[cfg(test)]
mod tests;
