//! Looks at CUDA: the driver, cards, links, libraries, and where kernels come from.

use consort_kernels::cuda::{
    arch::Arch,
    cubins,
    device::{self, CudaError, DeviceFacts, LibraryFacts, ManagementFacts},
    nvrtc::{Nvrtc, NvrtcError},
    settings::Settings,
};

use super::facts::{Card, CubinCache, Driver, Kernels, Libraries, Library, Link, Problem};

/// All of it.
pub(super) struct CudaFacts {
    pub(super) driver: Driver,
    pub(super) cards: Vec<Card>,
    pub(super) links: Vec<Link>,
    pub(super) nvlink_problem: Option<Problem>,
    pub(super) libraries: Libraries,
    pub(super) embedded_cubins: Vec<String>,
    pub(super) cubin_cache: Option<CubinCache>,
}

impl CudaFacts {
    /// Asks the libraries that are there; each card is opened for a moment.
    pub(super) fn look(settings: &Settings) -> CudaFacts {
        let [started, cublaslt] = device::libraries(settings);
        let libraries = Libraries {
            cublaslt: library(cublaslt),
            nvrtc: nvrtc(settings),
            nccl: library(device::nccl(settings)),
        };
        let mut seen = CudaFacts { libraries, ..CudaFacts::nothing(settings) };
        let found = device::devices(settings).and_then(|cards| Ok((device::links(settings)?, cards)));
        let (links, cards) = match found {
            Ok(found) => found,
            Err(error) => return CudaFacts { driver: trouble(error), ..seen },
        };
        let uuids: Vec<_> = cards.iter().map(|card| card.uuid).collect();
        let management = device::management(settings, &uuids);
        if let Ok(LibraryFacts { file, version, .. }) = started {
            let cuda_version = version.trim_start_matches("CUDA ").to_owned();
            let driver_version = management.as_ref().ok().map(|told| told.driver_version.clone());
            seen.driver = Driver::Found { file, cuda_version, driver_version };
        }
        let place = |ordinal| cards.iter().position(|card| card.ordinal == ordinal);
        let nvlink = |from, to| told(management.as_ref().ok()?, place(from)?, place(to)?);
        seen.links = links
            .iter()
            .map(|link| Link {
                from: link.from,
                to: link.to,
                peer_access: link.reaches,
                atomics: link.atomics,
                nvlink: nvlink(link.from, link.to),
            })
            .collect();
        seen.cards = cards.into_iter().map(|card| describe(card, settings)).collect();
        seen.nvlink_problem = management.err().map(|text| problem(&text));
        seen
    }

    /// What is known where asking did not come to an end: nothing but the reason.
    pub(super) fn unanswered(reason: String) -> CudaFacts {
        let problem = Problem { problem: reason, looked_at: Vec::new() };
        CudaFacts { driver: Driver::Unanswered(problem), ..CudaFacts::nothing(&Settings::default()) }
    }

    fn nothing(settings: &Settings) -> CudaFacts {
        let unknown =
            || Library::Missing(Problem { problem: "not looked for".to_owned(), ..Problem::default() });
        CudaFacts {
            driver: Driver::Missing(Problem::default()),
            cards: Vec::new(),
            links: Vec::new(),
            nvlink_problem: None,
            libraries: Libraries { cublaslt: unknown(), nvrtc: unknown(), nccl: unknown() },
            embedded_cubins: cubins::embedded_architectures().into_iter().map(str::to_owned).collect(),
            cubin_cache: cubins::cache_facts(settings).map(|cache| CubinCache {
                folder: cache.folder,
                cubins: cache.cubins,
                bytes: cache.bytes,
                problem: cache.refusal,
            }),
        }
    }
}

fn told(management: &ManagementFacts, from: usize, to: usize) -> Option<bool> {
    management.nvlinks.get(&(from, to)).copied()
}

fn trouble(error: CudaError) -> Driver {
    let plain = |problem: String| Problem { problem, looked_at: Vec::new() };
    match error {
        CudaError::NoDriver { looked } => {
            Driver::Missing(Problem { problem: "no CUDA driver".to_owned(), looked_at: lines(&looked) })
        }
        CudaError::DriverTooOld { file, reason } => Driver::TooOld { file, problem: reason },
        CudaError::NoDevice { reason, .. } => Driver::NoDevice(plain(reason)),
        other => Driver::Failed(plain(one_line(&other.to_string()))),
    }
}

fn describe(card: DeviceFacts, settings: &Settings) -> Card {
    let (major, minor) = card.capability;
    Card {
        ordinal: card.ordinal,
        name: card.name,
        uuid: card.uuid.to_string(),
        pci: card.pci,
        compute_capability: format!("{major}.{minor}"),
        multiprocessors: card.multiprocessors,
        memory_bytes: card.memory_bytes,
        free_bytes: free_bytes(card.ordinal, settings),
        kernels: kernels(card.capability, settings),
    }
}

fn free_bytes(ordinal: u32, settings: &Settings) -> Option<u64> {
    let free = device::free_bytes(settings, ordinal);
    if let Err(error) = &free {
        tracing::debug!(%error, "a device does not tell its free memory");
    }
    free.ok()
}

/// Where the kernels of such a card come from, by the way that opening it takes.
fn kernels((major, minor): (u32, u32), settings: &Settings) -> Kernels {
    let arch = match Arch::of_device(major, minor) {
        Ok(arch) => arch,
        Err(error) => return Kernels::Unsupported { problem: error.to_string() },
    };
    if let Some(built) = cubins::built_in_for(arch) {
        return Kernels::BuiltIn { architecture: built.to_string() };
    }
    let architecture = arch.to_string();
    match Nvrtc::open(settings, arch) {
        Ok(_) => Kernels::Nvrtc { architecture },
        Err(NvrtcError::NotFound { .. }) => {
            Kernels::Nowhere { architecture, problem: "there is no NVRTC to compile them".to_owned() }
        }
        Err(NvrtcError::Arch { version, known, .. }) => {
            let problem = format!("NVRTC {version} compiles for {known} only");
            Kernels::Nowhere { architecture, problem }
        }
        Err(error) => Kernels::Nowhere { architecture, problem: one_line(&error.to_string()) },
    }
}

fn nvrtc(settings: &Settings) -> Library {
    match Nvrtc::find(settings) {
        Ok(found) => Library::Found {
            file: found.file().to_path_buf(),
            version: found.version().to_string(),
            architectures: match found.architectures() {
                Ok(numbers) => numbers.iter().map(|number| format!("sm_{number}")).collect(),
                Err(error) => {
                    tracing::warn!(%error, "NVRTC does not say what it compiles for");
                    Vec::new()
                }
            },
        },
        Err(NvrtcError::NotFound { looked }) => {
            Library::Missing(Problem { problem: "no usable NVRTC".to_owned(), looked_at: lines(&looked) })
        }
        Err(error) => {
            Library::Missing(Problem { problem: one_line(&error.to_string()), looked_at: Vec::new() })
        }
    }
}

fn library(found: Result<LibraryFacts, String>) -> Library {
    match found {
        Ok(LibraryFacts { file, version, .. }) => Library::Found { file, version, architectures: Vec::new() },
        Err(text) => Library::Missing(problem(&text)),
    }
}

/// A reason, and below it a line for each place.
fn problem(text: &str) -> Problem {
    let (reason, places) = text.split_once('\n').unwrap_or((text, ""));
    let reason = reason.trim_end_matches("Looked at:").trim_end().trim_end_matches('.');
    Problem { problem: reason.to_owned(), looked_at: lines(places) }
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

fn one_line(text: &str) -> String {
    lines(text).join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_told_apart_from_the_places_that_were_looked_at() {
        let missing = problem("no usable cuBLASLt. Looked at:\n  /a: not there\n  the loader's path: no\n");
        assert_eq!(missing.problem, "no usable cuBLASLt");
        assert_eq!(missing.looked_at, ["/a: not there", "the loader's path: no"]);
        let plain = problem("it has no ncclGetVersion");
        assert_eq!((plain.problem.as_str(), plain.looked_at.len()), ("it has no ncclGetVersion", 0));
    }

    #[test]
    fn what_is_wrong_with_the_driver_keeps_its_kind() {
        let looked = "\n  /x/libcuda.so.1: not there".to_owned();
        let Driver::Missing(missing) = trouble(CudaError::NoDriver { looked }) else { panic!("missing") };
        assert_eq!(missing.looked_at, ["/x/libcuda.so.1: not there"]);
        let old = CudaError::DriverTooOld { file: "/x".into(), reason: "it is for CUDA 11.4".into() };
        assert!(matches!(trouble(old), Driver::TooOld { problem, .. } if problem == "it is for CUDA 11.4"));
        let none = CudaError::NoDevice { wanted: "at all".into(), reason: "hidden".into() };
        assert!(matches!(trouble(none), Driver::NoDevice(Problem { problem, .. }) if problem == "hidden"));
    }

    #[test]
    fn a_card_before_its_time_has_no_kernels() {
        let nowhere = std::env::temp_dir().join("consort-doctor-no-such-folder");
        let settings = Settings { library: Some(nowhere), ..Settings::default() };
        let Kernels::Unsupported { problem } = kernels((7, 5), &settings) else { panic!("unsupported") };
        assert!(problem.contains("7.5 is too old"), "{problem}");
        match kernels((9, 0), &settings) {
            Kernels::BuiltIn { architecture } => assert_eq!(architecture, "sm_90a"),
            Kernels::Nowhere { architecture, problem } => {
                assert_eq!(
                    (architecture.as_str(), problem.contains("no NVRTC")),
                    ("sm_90a", true),
                    "{problem}"
                );
            }
            other => panic!("{other:?}"),
        }
    }
}
