//! GPUs by name: what their data sheets and drivers say.
//!
//! Memory is what the driver reports in all (`nvidia-smi`), which is neither the name's figure nor what a program can
//! have. Rates are peaks of data sheets: bytes of memory a second, dense BF16 operations with f32 sums a second, bytes
//! a second over a link in one direction (NVLink where the card has it, else PCIe with 16 lanes).
//!
//! Sources: NVIDIA's data sheets of A100, H100, H200, L40S and L4; the DGX B200 data sheet, by eight; the Ada and
//! Blackwell architecture white papers for RTX 4090 and 5090, the GA102 white paper for RTX 3090.

use std::borrow::Cow;

const MIB: u64 = 1 << 20;
/// PCIe with 16 lanes, one direction: generations 4 and 5.
const PCIE_4: f64 = 31.5e9;
const PCIE_5: f64 = 63.0e9;
/// Cards of one group at most.
const CARDS_MAX: usize = 1024;

/// One GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuSpec {
    /// How people call it.
    pub name: Cow<'static, str>,
    /// Bytes that its driver reports.
    pub memory_bytes: u64,
    /// Bytes of its memory a second, if known.
    pub memory_bandwidth: Option<f64>,
    /// Dense BF16 operations a second, if known.
    pub flops: Option<f64>,
    /// Bytes a second to another card in one direction, if known.
    pub link_bandwidth: Option<f64>,
    /// Multiprocessors.
    pub multiprocessors: u32,
}

/// A description of GPUs that means nothing.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "`{given}` names no GPUs: {problem}. Write 3xH100-80GB, H200 or 2x48GB@864GBps, several with commas between; known \
     are {}",
    names().collect::<Vec<_>>().join(", ")
)]
pub struct UnknownGpu {
    /// What was asked for.
    pub given: String,
    /// What is wrong with it.
    pub problem: String,
}

struct Entry {
    name: &'static str,
    aliases: &'static [&'static str],
    /// Words that the driver's name of the card has.
    driver: &'static [&'static str],
    memory_mib: u64,
    memory_gb_per_second: f64,
    tera_flops: f64,
    link: f64,
    multiprocessors: u32,
}

const TABLE: [Entry; 11] = [
    Entry {
        name: "A100-40GB",
        aliases: &["a10040g", "a100sxm440gb", "a100pcie40gb"],
        driver: &["A100", "40GB"],
        memory_mib: 40_960,
        memory_gb_per_second: 1555.0,
        tera_flops: 312.0,
        link: 300e9,
        multiprocessors: 108,
    },
    Entry {
        name: "A100-80GB",
        aliases: &["a100", "a10080g", "a100sxm480gb"],
        driver: &["A100", "80GB"],
        memory_mib: 81_920,
        memory_gb_per_second: 2039.0,
        tera_flops: 312.0,
        link: 300e9,
        multiprocessors: 108,
    },
    Entry {
        name: "H100-80GB",
        aliases: &["h100", "h100sxm", "h100sxm5", "h100sxm80gb", "h10080gbhbm3"],
        driver: &["H100", "HBM3"],
        memory_mib: 81_559,
        memory_gb_per_second: 3350.0,
        tera_flops: 989.0,
        link: 450e9,
        multiprocessors: 132,
    },
    Entry {
        name: "H100-PCIe-80GB",
        aliases: &["h100pcie"],
        driver: &["H100", "PCIe"],
        memory_mib: 81_559,
        memory_gb_per_second: 2000.0,
        tera_flops: 756.0,
        link: PCIE_5,
        multiprocessors: 114,
    },
    Entry {
        name: "H200",
        aliases: &["h200141gb", "h200sxm"],
        driver: &["H200"],
        memory_mib: 143_771,
        memory_gb_per_second: 4800.0,
        tera_flops: 989.0,
        link: 450e9,
        multiprocessors: 132,
    },
    Entry {
        name: "B200",
        aliases: &["b200180gb", "b200192gb"],
        driver: &["B200"],
        memory_mib: 183_359,
        memory_gb_per_second: 8000.0,
        tera_flops: 2250.0,
        link: 900e9,
        multiprocessors: 148,
    },
    Entry {
        name: "L40S",
        aliases: &["l40s48gb"],
        driver: &["L40S"],
        memory_mib: 46_068,
        memory_gb_per_second: 864.0,
        tera_flops: 362.0,
        link: PCIE_4,
        multiprocessors: 142,
    },
    Entry {
        name: "L4",
        aliases: &["l424gb"],
        driver: &["L4"],
        memory_mib: 23_034,
        memory_gb_per_second: 300.0,
        tera_flops: 121.0,
        link: PCIE_4,
        multiprocessors: 58,
    },
    Entry {
        name: "RTX3090",
        aliases: &["3090", "geforcertx3090", "rtx309024gb"],
        driver: &["RTX", "3090"],
        memory_mib: 24_576,
        memory_gb_per_second: 936.0,
        tera_flops: 71.0,
        link: PCIE_4,
        multiprocessors: 82,
    },
    Entry {
        name: "RTX4090",
        aliases: &["4090", "geforcertx4090", "rtx409024gb"],
        driver: &["RTX", "4090"],
        memory_mib: 24_564,
        memory_gb_per_second: 1008.0,
        tera_flops: 165.0,
        link: PCIE_4,
        multiprocessors: 128,
    },
    Entry {
        name: "RTX5090",
        aliases: &["5090", "geforcertx5090", "rtx509032gb"],
        driver: &["RTX", "5090"],
        memory_mib: 32_607,
        memory_gb_per_second: 1792.0,
        tera_flops: 209.5,
        link: PCIE_5,
        multiprocessors: 170,
    },
];

impl Entry {
    fn spec(&self) -> GpuSpec {
        GpuSpec {
            name: Cow::Borrowed(self.name),
            memory_bytes: self.memory_mib * MIB,
            memory_bandwidth: Some(self.memory_gb_per_second * 1e9),
            flops: Some(self.tera_flops * 1e12),
            link_bandwidth: Some(self.link),
            multiprocessors: self.multiprocessors,
        }
    }
}

/// Names of the table.
pub fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|entry| entry.name)
}

/// All cards of the table, smallest first; of equals the one that comes first in it.
pub fn all() -> Vec<GpuSpec> {
    let mut cards: Vec<GpuSpec> = TABLE.iter().map(Entry::spec).collect();
    cards.sort_by_key(|card| card.memory_bytes);
    cards
}

/// Cards as people write them: `3xH100-80GB`, `H200`, `2x48GB@864GBps`, or several of these with commas between.
pub fn parse(text: &str) -> Result<Vec<GpuSpec>, UnknownGpu> {
    let mut cards = Vec::new();
    for part in text.split(',') {
        let refuse = |problem: &str| {
            let given = part.chars().filter(|c| !c.is_control()).take(80).collect();
            UnknownGpu { given, problem: problem.to_owned() }
        };
        let (count, name) = counted(part.trim());
        let count = count.ok_or_else(|| refuse("the number of cards before the x is none"))?;
        if count == 0 || cards.len().saturating_add(count) > CARDS_MAX {
            return Err(refuse(&format!("from 1 to {CARDS_MAX} cards can be planned for")));
        }
        let card = named(name).or_else(|| explicit(name)).ok_or_else(|| refuse("no such card"))?;
        cards.extend(std::iter::repeat_n(card, count));
    }
    Ok(cards)
}

/// The card that a driver calls so, with the memory that it reports.
pub fn of_driver(name: &str, memory_bytes: u64, multiprocessors: u32) -> GpuSpec {
    let words: Vec<&str> = name.split([' ', '-']).collect();
    let known = TABLE.iter().find(|entry| entry.driver.iter().all(|word| words.contains(word)));
    let unknown = GpuSpec {
        name: Cow::Owned(name.to_owned()),
        memory_bytes,
        memory_bandwidth: None,
        flops: None,
        link_bandwidth: None,
        multiprocessors,
    };
    match known {
        Some(entry) => GpuSpec { name: unknown.name, memory_bytes, multiprocessors, ..entry.spec() },
        None => unknown,
    }
}

/// `3xNAME` apart. No number where what stands before the x is not one that can be read.
fn counted(text: &str) -> (Option<usize>, &str) {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (count, rest) = text.split_at(digits);
    let name = rest.trim_start().strip_prefix(['x', 'X', '*', '×']);
    match name {
        Some(name) if digits > 0 => (count.parse().ok(), name.trim()),
        _ => (Some(1), text),
    }
}

fn named(name: &str) -> Option<GpuSpec> {
    let plain = |name: &str| {
        let name: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
        name.to_ascii_lowercase()
    };
    let wanted = plain(name);
    let wanted = wanted.strip_prefix("nvidia").unwrap_or(&wanted);
    let is_it = |entry: &&Entry| plain(entry.name) == wanted || entry.aliases.contains(&wanted);
    TABLE.iter().find(is_it).map(Entry::spec)
}

/// `48GB@864GBps`, or the memory alone. Such a card's links are taken to be PCIe's; how fast it multiplies is unknown.
fn explicit(text: &str) -> Option<GpuSpec> {
    let (memory, bandwidth) = match text.split_once('@') {
        Some((memory, bandwidth)) => (memory, Some(rate(bandwidth)?)),
        None => (text, None),
    };
    let memory_bytes = scaled(memory, &[("GiB", (1u64 << 30) as f64), ("GB", 1e9), ("MiB", MIB as f64)])?;
    Some(GpuSpec {
        name: Cow::Owned(text.to_owned()),
        memory_bytes: memory_bytes as u64,
        memory_bandwidth: bandwidth,
        flops: None,
        link_bandwidth: Some(PCIE_4),
        // Only scratch memory depends on it, and grows with it: as many as any card has.
        multiprocessors: TABLE.iter().map(|entry| entry.multiprocessors).max()?,
    })
}

fn rate(text: &str) -> Option<f64> {
    scaled(text, &[("GBps", 1e9), ("GB/s", 1e9), ("TBps", 1e12), ("TB/s", 1e12)])
}

/// A number with one of these units, within reason.
fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (number, unit) = units.iter().find_map(|(unit, scale)| {
        let at = text.len().checked_sub(unit.len()).filter(|&at| text.is_char_boundary(at))?;
        text[at..].eq_ignore_ascii_case(unit).then_some((&text[..at], scale))
    })?;
    let number = number.trim();
    if !number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        return None;
    }
    let value = number.parse::<f64>().ok()? * unit;
    (1.0..1e18).contains(&value).then_some(value)
}
