//! Reports on made-up machines, and the command on one without CUDA.

mod command;
mod reports;

use super::{
    facts::{
        Card, CubinCache, Driver, Facts, Host, HugePages, InstructionSets, Kernels, Libraries, Library, Link,
        Problem,
    },
    report::report,
    wanted::{Asked, WantedDevice, judge},
    *,
};

fn problem(text: &str, looked_at: &[&str]) -> Problem {
    let looked_at = looked_at.iter().map(|&place| place.to_owned()).collect();
    Problem { problem: text.to_owned(), looked_at }
}

fn library(name: &str, version: &str) -> Library {
    let file = PathBuf::from(format!("/lib/{name}"));
    Library::Found { file, version: version.to_owned(), architectures: Vec::new() }
}

fn card(ordinal: u32) -> Card {
    Card {
        ordinal,
        name: "NVIDIA H100 80GB HBM3".to_owned(),
        uuid: format!("GPU-8f6d0f0e-0123-4567-89ab-cdef0001020{ordinal}"),
        pci: format!("0000:{ordinal}7:00.0"),
        compute_capability: "9.0".to_owned(),
        multiprocessors: 132,
        memory_bytes: 85_000_000_000,
        free_bytes: Some(84_500_000_000),
        kernels: Kernels::BuiltIn { architecture: "sm_90a".to_owned() },
    }
}

/// All pairs of `cards`, those in `peers` with access and NVLink in both directions.
fn links(cards: u32, peers: &[(u32, u32)]) -> Vec<Link> {
    let mut links = Vec::new();
    for from in 0..cards {
        for to in (0..cards).filter(|&to| to != from) {
            let peer_access = peers.contains(&(from, to)) || peers.contains(&(to, from));
            links.push(Link { from, to, peer_access, atomics: peer_access, nvlink: Some(peer_access) });
        }
    }
    links
}

/// A machine in which nothing is missing, with these cards.
fn machine(cards: Vec<Card>) -> Facts {
    let pairs: Vec<(u32, u32)> =
        cards.iter().flat_map(|one| cards.iter().map(|other| (one.ordinal, other.ordinal))).collect();
    Facts {
        version: "0.1.0",
        driver: Driver::Found {
            file: "/lib/libcuda.so.1".into(),
            cuda_version: "12.8".to_owned(),
            driver_version: Some("570.86.15".to_owned()),
        },
        kernel_module_version: Some("570.86.15".to_owned()),
        cards_on_bus: Some(cards.len()),
        links: links(cards.len() as u32, &pairs),
        cards,
        nvlink_problem: None,
        libraries: Libraries {
            cublaslt: library("libcublasLt.so.12", "12.9.1"),
            nvrtc: library("libnvrtc.so.12", "12.9"),
            nccl: library("libnccl.so.2", "2.27.3"),
        },
        embedded_cubins: vec!["sm_80".to_owned(), "sm_90a".to_owned()],
        cubin_cache: Some(CubinCache {
            folder: "/root/.cache/consort/cubins".into(),
            cubins: 3,
            bytes: 150_000,
            problem: None,
        }),
        host: Host {
            cpu_model: Some("A Processor".to_owned()),
            cores: 16,
            isa: InstructionSets {
                used: "avx2".to_owned(),
                available: vec!["portable".to_owned(), "avx2".to_owned()],
                asked: None,
                processor_has_amx: false,
            },
            memory_bytes: Some(128_000_000_000),
            available_bytes: Some(120_000_000_000),
            memory_limit_bytes: None,
            transparent_huge_pages: Some("madvise".to_owned()),
            huge_pages: Some(HugePages { total: 0, free: 0, page_bytes: 2 << 20 }),
            locked_memory_limit_bytes: None,
        },
        environment: Vec::new(),
    }
}

/// A machine without any of NVIDIA's.
fn without_cuda() -> Facts {
    let missing = |name: &str| Library::Missing(problem(&format!("no usable {name}"), &["/x: not there"]));
    Facts {
        driver: Driver::Missing(problem(
            "no CUDA driver",
            &["the loader's path: libcuda.so.1: no such file"],
        )),
        kernel_module_version: None,
        libraries: Libraries {
            cublaslt: missing("cuBLASLt"),
            nvrtc: missing("NVRTC"),
            nccl: missing("NCCL"),
        },
        ..machine(Vec::new())
    }
}

fn text(facts: &Facts) -> String {
    report(facts, None).text()
}

/// The lines of gaps.
fn gaps(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix("  ! ")).collect()
}

fn wanted(names: &[&str]) -> Vec<WantedDevice> {
    names.iter().map(|name| name.parse().expect("a device")).collect()
}

fn ranks(names: &[&str]) -> Vec<Asked> {
    let devices = wanted(names).into_iter().enumerate();
    devices
        .map(|(rank, device)| match device {
            WantedDevice::Named(device) => Asked::rank(rank, device),
            WantedDevice::AnyCard => panic!("a topology names each"),
        })
        .collect()
}
