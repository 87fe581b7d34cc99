//! Lines about CUDA.

use std::collections::BTreeSet;

use super::{Group, counted};
use crate::{
    cli::{
        doctor::facts::{Card, Driver, Facts, Kernels, Library, Link, Problem},
        report::size,
    },
    topology::GPU_MEMORY_UTILIZATION,
};

const INSTALL_DRIVER: &str = "install NVIDIA's driver for CUDA 12.0 (525.60) or newer; a container must be started \
                              with the cards (`docker run --gpus all`)";
const INSTALL_NVRTC: &str = "`pip install nvidia-cuda-nvrtc-cu12` into the active Python environment, or a CUDA \
                             toolkit, or a build with these kernels in it";
const INSTALL_CUBLASLT: &str =
    "`pip install nvidia-cublas-cu12` into the active Python environment, or a CUDA toolkit";

pub(super) fn driver(facts: &Facts) -> Group {
    let mut group = Group::new("driver", "Driver");
    if let Some(version) = &facts.kernel_module_version {
        group.fact("kernel module", version);
    }
    match &facts.driver {
        Driver::Found { file, cuda_version, driver_version } => {
            group.fact("library", file.display().to_string());
            group.fact("CUDA", format!("up to {cuda_version}"));
            group.fact("version", driver_version.as_deref().unwrap_or("not told, without NVML"));
        }
        Driver::Missing(Problem { looked_at, .. }) => {
            group.fact("library", "not found");
            looked(&mut group, looked_at);
            missing(&mut group, facts);
        }
        Driver::TooOld { file, problem } => {
            group.fact("library", file.display().to_string());
            group.gap(format!("the driver is too old: {problem}"), INSTALL_DRIVER);
        }
        Driver::NoDevice(Problem { problem, .. }) => {
            group.gap(
                format!("the driver has no card for this process: {problem}"),
                "nothing to do for serving on CPUs; for GPUs see `nvidia-smi -L`, and start a container with the cards",
            );
        }
        Driver::Failed(Problem { problem, .. }) => group.gap(
            format!("the driver does not work: {problem}"),
            "see `nvidia-smi`; after an update of the driver, start the machine again",
        ),
        Driver::Unanswered(Problem { problem, .. }) => group.gap(
            format!("nothing is known of CUDA: {problem}"),
            "see `nvidia-smi` and the system's log (`dmesg`) for a card that hangs",
        ),
    }
    group
}

fn missing(group: &mut Group, facts: &Facts) {
    let is_set = facts.environment.iter().any(|variable| variable.name == "CONSORT_CUDA_LIB_PATH");
    let too = if is_set {
        "; CONSORT_CUDA_LIB_PATH, which is set, must name the folder of libcuda.so.1"
    } else {
        ""
    };
    let install = format!("{INSTALL_DRIVER}{too}");
    match facts.cards_on_bus {
        Some(0) => group.gap(
            "no CUDA driver, and no NVIDIA card on the PCI bus",
            format!("nothing to do for serving on CPUs; for GPUs, a machine with one{too}"),
        ),
        Some(count) => {
            let cards = counted(count, "NVIDIA card");
            group.gap(format!("no CUDA driver for the {cards} on the PCI bus"), install);
        }
        None => {
            group.gap("no CUDA driver", format!("nothing to do for serving on CPUs; for GPUs, {install}"));
        }
    }
}

/// The places, a line each.
fn looked(group: &mut Group, places: &[String]) {
    for place in places {
        group.fact("  looked at", place);
    }
}

pub(super) fn cards(facts: &Facts) -> Group {
    let mut group = Group::new("cards", "Cards");
    for card in &facts.cards {
        group.fact(card.label(), format!("{}, compute capability {}", card.name, card.compute_capability));
        group.fact("  identity", format!("{}, PCI {}", card.uuid, card.pci));
        let free = card.free_bytes.map_or_else(|| "not told".to_owned(), size);
        let all = size(card.memory_bytes);
        let multiprocessors = counted(card.multiprocessors as usize, "multiprocessor");
        group.fact("  memory", format!("{all}, free {free}; {multiprocessors}"));
        group.fact("  kernels", kernels(&card.kernels));
    }
    for card in &facts.cards {
        card_gaps(card, &mut group);
    }
    group
}

fn kernels(kernels: &Kernels) -> String {
    match kernels {
        Kernels::BuiltIn { architecture } => format!("built in, for {architecture}"),
        Kernels::Nvrtc { architecture } => {
            format!("for {architecture}, compiled by NVRTC at their first use and kept")
        }
        Kernels::Nowhere { architecture, .. } => format!("for {architecture}: not built in, and no compiler"),
        Kernels::Unsupported { .. } => "none for such a card".to_owned(),
    }
}

fn card_gaps(card: &Card, group: &mut Group) {
    let label = card.label();
    match &card.kernels {
        Kernels::Unsupported { problem } => {
            group.gap(format!("{label}: {problem}"), "use a newer card, or the CPU");
        }
        Kernels::Nowhere { architecture, problem } => {
            let what = format!("{label}: this build has no kernels for {architecture}, and {problem}");
            group.gap(what, INSTALL_NVRTC);
        }
        Kernels::BuiltIn { .. } | Kernels::Nvrtc { .. } => {}
    }
    match card.free_bytes {
        None => group.gap(
            format!("{label} cannot be opened"),
            "another process may have it for itself (`nvidia-smi -q -d COMPUTE`), or it must be reset",
        ),
        Some(free) if (free as f64) < card.memory_bytes as f64 * GPU_MEMORY_UTILIZATION => {
            let percent = GPU_MEMORY_UTILIZATION * 100.0;
            group.gap(
                format!("{label}: {} of {} are free", size(free), size(card.memory_bytes)),
                format!(
                    "{percent:.0} % are used unless a topology says otherwise: end what else is on the card \
                     (`nvidia-smi`), or lower cache.gpu_memory_utilization"
                ),
            );
        }
        Some(_) => {}
    }
}

pub(super) fn links(facts: &Facts) -> Group {
    let mut group = Group::new("links", "Links, from the card of the line to that of the column");
    if facts.links.is_empty() {
        return group;
    }
    let labels: Vec<String> = facts.cards.iter().map(Card::label).collect();
    let width = labels.iter().map(String::len).max().unwrap_or(0).max("atomics".len()) + 2;
    let row = |cells: &mut dyn Iterator<Item = &str>| -> String {
        cells.map(|cell| format!("{cell:width$}")).collect()
    };
    group.fact("", row(&mut labels.iter().map(String::as_str)));
    for from in &facts.cards {
        let mut cells = facts.cards.iter().map(|to| link_cell(facts, from.ordinal, to.ordinal));
        group.fact(from.label(), row(&mut cells));
    }
    let shown: BTreeSet<&str> = facts.links.iter().map(cell).collect();
    for (word, meaning) in MEANINGS {
        if shown.contains(word) {
            group.fact("", format!("{word}: {meaning}"));
        }
    }
    if facts.links.iter().any(|link| link.nvlink.is_none()) {
        let reason = facts.nvlink_problem.as_ref().map_or("NVML does not say", |problem| &problem.problem);
        group.fact("NVLink", format!("not told: {reason}"));
    }
    let refused: Vec<String> = facts
        .links
        .iter()
        .filter(|link| !link.peer_access)
        .map(|link| format!("cuda:{} from cuda:{}", link.to, link.from))
        .collect();
    if !refused.is_empty() {
        group.gap(
            format!("no access to the memory of {}", refused.join(", ")),
            "such cards cannot be ranks of one model; P2P may be off in the machine's firmware (IOMMU, ACS) or in a \
             virtual machine: see `nvidia-smi topo -p2p r`",
        );
    }
    group
}

const MEANINGS: [(&str, &str); 4] = [
    ("PCI", "kernels read the other card's memory, not over NVLink"),
    ("atomics", "kernels read the other card's memory, and atomic operations work there, as over NVLink"),
    ("yes", "kernels read the other card's memory"),
    ("no", "they cannot"),
];

fn link_cell(facts: &Facts, from: u32, to: u32) -> &'static str {
    facts.links.iter().find(|link| (link.from, link.to) == (from, to)).map_or("-", cell)
}

fn cell(link: &Link) -> &'static str {
    match (link.peer_access, link.nvlink) {
        (false, _) => "no",
        (true, Some(true)) => "NVLink",
        (true, Some(false)) => "PCI",
        (true, None) if link.atomics => "atomics",
        (true, None) => "yes",
    }
}

pub(super) fn libraries(facts: &Facts) -> Group {
    let mut group = Group::new("libraries", "Libraries");
    // Of a driver that did not answer, nobody asked for them.
    if matches!(facts.driver, Driver::Unanswered(_)) {
        return group;
    }
    let needs_compiler = facts
        .cards
        .iter()
        .any(|card| matches!(card.kernels, Kernels::Nvrtc { .. } | Kernels::Nowhere { .. }));
    let without_cards = facts.cards.is_empty();
    library(&mut group, "cuBLASLt", &facts.libraries.cublaslt, |group, problem| {
        if without_cards {
            group.fact("cuBLASLt", format!("not found; for GPUs, {INSTALL_CUBLASLT}"));
            return;
        }
        group.fact("cuBLASLt", "not found");
        looked(group, &problem.looked_at);
        let slower = "; until then our own kernels multiply many rows, more slowly";
        group.gap(&problem.problem, format!("{INSTALL_CUBLASLT}{slower}"));
    });
    library(&mut group, "NVRTC", &facts.libraries.nvrtc, |group, problem| {
        if without_cards {
            group.fact("NVRTC", format!("not found; for GPUs, {INSTALL_NVRTC}"));
        } else if needs_compiler {
            group.fact("NVRTC", "not found, and needed");
            looked(group, &problem.looked_at);
        } else {
            group.fact("NVRTC", "not found, and not needed: the kernels of all cards are built in");
        }
    });
    library(&mut group, "NCCL", &facts.libraries.nccl, |group, _| {
        group.fact(
            "NCCL",
            "not found, and not used yet: a later release takes it for ranks in several processes \
             (`pip install nvidia-nccl-cu12`)",
        );
    });
    group
}

fn library(group: &mut Group, name: &str, library: &Library, missing: impl FnOnce(&mut Group, &Problem)) {
    match library {
        Library::Found { file, version, architectures } => {
            group.fact(name, format!("{version}, {}", file.display()));
            if !architectures.is_empty() {
                group.fact("  compiles for", architectures.join(", "));
            }
        }
        Library::Missing(problem) => missing(group, problem),
    }
}

pub(super) fn cubins(facts: &Facts) -> Group {
    let mut group = Group::new("cubin_cache", "CUDA kernels");
    let built_in = match facts.embedded_cubins.as_slice() {
        [] => "none: NVRTC compiles them at their first use".to_owned(),
        architectures => architectures.join(", "),
    };
    group.fact("built in", built_in);
    if matches!(facts.driver, Driver::Unanswered(_)) {
        return group;
    }
    let Some(cache) = &facts.cubin_cache else {
        group.gap("no folder to keep compiled kernels in", "set CONSORT_CACHE_DIR, XDG_CACHE_HOME or HOME");
        return group;
    };
    group.fact("cache", cache.folder.display().to_string());
    let writable = if cache.problem.is_some() { "not writable" } else { "writable" };
    group.fact("", format!("{}, {}; {writable}", counted(cache.cubins, "cubin"), size(cache.bytes)));
    if let Some(problem) = &cache.problem {
        group.gap(
            format!("compiled kernels cannot be kept: {problem}"),
            "let CONSORT_CACHE_DIR name a folder that this user may write; else each start compiles them again",
        );
    }
    group
}
