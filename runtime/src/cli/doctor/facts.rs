//! What was seen of a machine, as plain values. Their names are those of `--json`.

use std::path::PathBuf;

use serde::Serialize;

/// Everything.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Facts {
    /// Consort's.
    pub(super) version: &'static str,
    pub(super) driver: Driver,
    /// Version of the driver's part in the kernel; null where none is loaded.
    pub(super) kernel_module_version: Option<String>,
    /// NVIDIA's cards on the PCI bus, with or without a driver; null where the bus cannot be read.
    pub(super) cards_on_bus: Option<usize>,
    pub(super) cards: Vec<Card>,
    pub(super) links: Vec<Link>,
    /// Why it is not told of which links are NVLink.
    pub(super) nvlink_problem: Option<Problem>,
    pub(super) libraries: Libraries,
    /// Architectures of the kernels that this build holds.
    pub(super) embedded_cubins: Vec<String>,
    /// Null where no folder is configured.
    pub(super) cubin_cache: Option<CubinCache>,
    pub(super) host: Host,
    pub(super) environment: Vec<Variable>,
}

/// What is wrong, and each place that was looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Problem {
    pub(super) problem: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) looked_at: Vec<String>,
}

/// The driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub(super) enum Driver {
    Found {
        file: PathBuf,
        /// The newest CUDA that it is for.
        cuda_version: String,
        /// Its own, such as 570.86.15, if that is told.
        driver_version: Option<String>,
    },
    Missing(Problem),
    TooOld {
        file: PathBuf,
        problem: String,
    },
    /// It is there, and has no device for this process.
    NoDevice(Problem),
    Failed(Problem),
    Unanswered(Problem),
}

/// One card, as the driver has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Card {
    pub(super) ordinal: u32,
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) pci: String,
    pub(super) compute_capability: String,
    pub(super) multiprocessors: u32,
    pub(super) memory_bytes: u64,
    /// Null where the card could not be opened.
    pub(super) free_bytes: Option<u64>,
    pub(super) kernels: Kernels,
}

/// Where a card's kernels come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "from", rename_all = "snake_case")]
pub(super) enum Kernels {
    BuiltIn {
        /// What they were compiled for.
        architecture: String,
    },
    /// Compiled at their first use, and kept.
    Nvrtc { architecture: String },
    /// Neither.
    Nowhere { architecture: String, problem: String },
    /// There are none for such a card.
    Unsupported { problem: String },
}

/// From one card to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Link {
    pub(super) from: u32,
    pub(super) to: u32,
    /// Whether kernels of the one can use memory of the other.
    pub(super) peer_access: bool,
    /// Whether atomic operations work over it.
    pub(super) atomics: bool,
    /// Null where that is not told.
    pub(super) nvlink: Option<bool>,
}

/// NVIDIA's libraries besides the driver's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Libraries {
    pub(super) cublaslt: Library,
    pub(super) nvrtc: Library,
    pub(super) nccl: Library,
}

/// One library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub(super) enum Library {
    Found {
        file: PathBuf,
        version: String,
        /// What a compiler compiles for.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        architectures: Vec<String>,
    },
    Missing(Problem),
}

/// Kernels that were compiled on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct CubinCache {
    pub(super) folder: PathBuf,
    pub(super) cubins: usize,
    pub(super) bytes: u64,
    /// Why it cannot be written, if so.
    pub(super) problem: Option<String>,
}

/// The machine itself. Null is what the system does not tell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Host {
    pub(super) cpu_model: Option<String>,
    /// Cores that this process may use.
    pub(super) cores: usize,
    pub(super) isa: InstructionSets,
    pub(super) memory_bytes: Option<u64>,
    pub(super) available_bytes: Option<u64>,
    /// What the container may use, where that is less than all.
    pub(super) memory_limit_bytes: Option<u64>,
    /// `always`, `madvise` or `never`.
    pub(super) transparent_huge_pages: Option<String>,
    pub(super) huge_pages: Option<HugePages>,
    /// Null where there is no limit.
    pub(super) locked_memory_limit_bytes: Option<u64>,
}

/// Instruction sets of the CPU's kernels, by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct InstructionSets {
    /// The one that is used unless a topology or a flag says otherwise.
    pub(super) used: String,
    /// Slowest first.
    pub(super) available: Vec<String>,
    /// What the environment asks for.
    pub(super) asked: Option<String>,
    /// Whether the processor has AMX, which the system may keep from us.
    pub(super) processor_has_amx: bool,
}

/// Pages that were set aside for programs that ask for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct HugePages {
    pub(super) total: u64,
    pub(super) free: u64,
    pub(super) page_bytes: u64,
}

/// An environment variable that Consort heeds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Variable {
    pub(super) name: String,
    /// Null where it is not shown.
    pub(super) value: Option<String>,
}

impl Card {
    /// `cuda:0`.
    pub(super) fn label(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    /// Why a rank cannot be on it, in short; `None` where it can.
    pub(super) fn hindrance(&self) -> Option<&'static str> {
        match self.kernels {
            Kernels::Unsupported { .. } => Some("the kernels do not support it"),
            Kernels::Nowhere { .. } => Some("there are no kernels for it"),
            _ if self.free_bytes.is_none() => Some("it cannot be opened"),
            _ => None,
        }
    }
}

impl Facts {
    /// Cards that a rank can be on.
    pub(super) fn usable_cards(&self) -> impl Iterator<Item = &Card> {
        self.cards.iter().filter(|card| card.hindrance().is_none())
    }
}
