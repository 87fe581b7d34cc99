//! Lines about the host.

use super::{Group, counted};
use crate::cli::{
    doctor::facts::{Facts, Host, InstructionSets},
    report::size,
};

/// What adapters between machines want to lock is some tens of MB at least.
const LOCKED_BYTES_MIN: u64 = 64 << 20;
/// Explicit huge pages beyond this part of the memory are missed.
const SET_ASIDE_PART: u64 = 20;

const UNKNOWN: &str = "not told by the system";

pub(super) fn host(facts: &Facts) -> Group {
    let host = &facts.host;
    let mut group = Group::new("host", "Host");
    let cores = counted(host.cores, "core");
    group.fact("CPU", format!("{}; {cores} for this process", host.cpu_model.as_deref().unwrap_or(UNKNOWN)));
    instruction_sets(&host.isa, &mut group);
    memory(host, &mut group);
    pages(host, &mut group);
    locked_memory(facts, &mut group);
    group
}

fn instruction_sets(isa: &InstructionSets, group: &mut Group) {
    let by = if isa.asked.is_some() && isa.available.last() != Some(&isa.used) { ", as asked" } else { "" };
    group.fact("instructions", format!("{}{by}; available: {}", isa.used, isa.available.join(", ")));
    let is_available = |name: &str| isa.available.iter().any(|one| one.eq_ignore_ascii_case(name.trim()));
    if let Some(asked) = isa.asked.as_deref().filter(|asked| !is_available(asked)) {
        group.gap(
            format!("the environment asks for the instruction set {}, which is not to be had", asked.trim()),
            format!("unset CONSORT_CPU_ISA, or let it be one of {}", isa.available.join(", ")),
        );
    }
    if isa.processor_has_amx && !is_available("amx") {
        group.gap(
            "the processor has AMX, and the system does not let this process use it",
            "Linux 5.16 or newer is needed, and a container that may call arch_prctl; until then prompts are read \
             more slowly",
        );
    }
    if cfg!(target_arch = "x86_64") && isa.available.len() == 1 {
        group.gap(
            "neither AVX2 nor AVX-512 here",
            "use a newer processor; a virtual machine must pass its host's through (`-cpu host`)",
        );
    }
}

fn memory(host: &Host, group: &mut Group) {
    let Some(all) = host.memory_bytes else {
        group.fact("memory", UNKNOWN);
        return;
    };
    let available =
        host.available_bytes.map_or_else(String::new, |bytes| format!(", available {}", size(bytes)));
    let limit = host
        .memory_limit_bytes
        .map_or_else(String::new, |bytes| format!("; this container may use {}", size(bytes)));
    group.fact("memory", format!("{}{available}{limit}", size(all)));
}

fn pages(host: &Host, group: &mut Group) {
    let transparent = host.transparent_huge_pages.as_deref();
    group.fact("huge pages", format!("transparent: {}", transparent.unwrap_or(UNKNOWN)));
    if transparent == Some("never") {
        group.gap(
            "transparent huge pages are off",
            "`echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`: from small pages, weights are \
             read more slowly",
        );
    }
    let Some(pages) = host.huge_pages else { return };
    let aside = pages.free.saturating_mul(pages.page_bytes);
    let each = pages.page_bytes >> 10;
    group.fact("", format!("explicit: {} of {each} KiB, {} free; not used", pages.total, pages.free));
    if host.memory_bytes.is_some_and(|all| aside > all / SET_ASIDE_PART) {
        group.gap(
            format!("{} are set aside as explicit huge pages, which Consort does not use", size(aside)),
            "`sudo sysctl vm.nr_hugepages=0`, unless another program wants them",
        );
    }
}

fn locked_memory(facts: &Facts, group: &mut Group) {
    let Some(limit) = facts.host.locked_memory_limit_bytes else {
        group.fact("locked memory", "no limit");
        return;
    };
    group.fact("locked memory", format!("at most {}", size(limit)));
    // Nothing is locked for CPUs.
    if !facts.cards.is_empty() && limit < LOCKED_BYTES_MIN {
        group.gap(
            format!("page-locked memory is limited to {}", size(limit)),
            "`ulimit -l unlimited`, LimitMEMLOCK=infinity for a service, `--ulimit memlock=-1` for a container; \
             adapters between machines need it, copies to cards of this machine seldom do",
        );
    }
}
