//! Looks at the host: processor, memory, pages, and cards on its bus. What cannot be read is not told.

use std::{
    fs::{self, File},
    io::Read,
    path::Path,
};

use consort_kernels::{device::Isa, sys::available_cores};
use rustix::process::{Resource, getrlimit};

use super::facts::{Host, HugePages, InstructionSets};
use crate::topology::{Environment, isa_variables};

/// Files of the kernel's are short; those of a thousand cores have some megabytes.
const FILE_BYTES_MAX: u64 = 8 << 20;
/// Devices of a PCI bus that are looked at.
const BUS_DEVICES_MAX: usize = 4096;
/// NVIDIA, on the PCI bus.
const VENDOR_NVIDIA: &str = "0x10de";
/// How classes of displays begin there: VGA 0x0300, 3D 0x0302.
const CLASS_DISPLAY: &str = "0x03";

/// The machine below `root`, which is `/` but for tests.
pub(super) fn look(root: &Path, environment: &Environment) -> Host {
    let read = |path: &str| read(&root.join(path)).unwrap_or_default();
    let processors = read("proc/cpuinfo");
    let memory = read("proc/meminfo");
    let memory_bytes = memory_line(&memory, "MemTotal");
    let limits = [read("sys/fs/cgroup/memory.max"), read("sys/fs/cgroup/memory/memory.limit_in_bytes")];
    let limit = limits.iter().filter_map(|limit| limit.trim().parse::<u64>().ok()).min();
    Host {
        cpu_model: line(&processors, "model name").filter(|name| !name.is_empty()).map(str::to_owned),
        cores: available_cores(),
        isa: instruction_sets(&processors, environment),
        memory_bytes,
        available_bytes: memory_line(&memory, "MemAvailable"),
        memory_limit_bytes: limit.filter(|&limit| memory_bytes.is_none_or(|all| limit < all)),
        transparent_huge_pages: chosen(&read("sys/kernel/mm/transparent_hugepage/enabled")),
        huge_pages: huge_pages(&memory),
        locked_memory_limit_bytes: getrlimit(Resource::Memlock).current,
    }
}

/// NVIDIA's cards on the PCI bus; `None` where the bus cannot be read.
pub(super) fn cards_on_bus(root: &Path) -> Option<usize> {
    let devices = fs::read_dir(root.join("sys/bus/pci/devices")).ok()?;
    let begins = |device: &Path, file: &str, beginning: &str| {
        read(&device.join(file)).is_some_and(|text| text.starts_with(beginning))
    };
    let cards = devices.flatten().take(BUS_DEVICES_MAX).filter(|device| {
        let path = device.path();
        begins(&path, "vendor", VENDOR_NVIDIA) && begins(&path, "class", CLASS_DISPLAY)
    });
    Some(cards.count())
}

/// Version of NVIDIA's kernel module, if it is loaded.
pub(super) fn kernel_module_version(root: &Path) -> Option<String> {
    let version = read(&root.join("sys/module/nvidia/version"))?;
    Some(version.trim().to_owned()).filter(|version| !version.is_empty())
}

fn instruction_sets(processors: &str, environment: &Environment) -> InstructionSets {
    let asked = isa_variables().find_map(|name| {
        environment.get(&name).filter(|value| !value.is_empty() && !value.eq_ignore_ascii_case("auto"))
    });
    let usable = asked.and_then(|asked| asked.trim().parse::<Isa>().ok()).filter(|isa| isa.is_available());
    InstructionSets {
        used: usable.unwrap_or_else(Isa::detect).name().to_owned(),
        available: Isa::available().map(|isa| isa.name().to_owned()).collect(),
        asked: asked.map(str::to_owned),
        processor_has_amx: line(processors, "flags")
            .is_some_and(|flags| flags.split(' ').any(|flag| flag == "amx_bf16")),
    }
}

/// A text file, if it can be read, whatever is in it.
fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The value of the first line `name : value`.
fn line<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, v)| v.trim())
}

/// Bytes of a line such as `MemTotal: 24570412 kB`.
fn memory_line(text: &str, name: &str) -> Option<u64> {
    line(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn huge_pages(memory: &str) -> Option<HugePages> {
    let count = |name: &str| line(memory, name)?.parse().ok();
    Some(HugePages {
        total: count("HugePages_Total")?,
        free: count("HugePages_Free")?,
        page_bytes: memory_line(memory, "Hugepagesize")?,
    })
}

/// The word in brackets, as in `always [madvise] never`.
fn chosen(words: &str) -> Option<String> {
    words.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']')).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: impl AsRef<[u8]>) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a new folder");
        fs::write(path, text).expect("the test folder is writable");
    }

    #[test]
    fn files_of_the_kernel_are_read_as_they_are_written() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let root = root.path();
        let processor = "processor\t: 0\nmodel name\t: A Processor @ 2.00GHz\nflags\t\t: fpu amx_bf16 avx2\n";
        write(root, "proc/cpuinfo", processor.repeat(2));
        let memory = "MemTotal:       24570412 kB\nMemAvailable:   20000000 kB\nHugePages_Total:      16\n\
                      HugePages_Free:        6\nHugepagesize:       2048 kB\n";
        write(root, "proc/meminfo", memory);
        write(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        write(root, "sys/fs/cgroup/memory.max", "1073741824\n");
        for (device, vendor, class) in
            [("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x8086", "0x030000")]
        {
            write(root, &format!("sys/bus/pci/devices/{device}/vendor"), format!("{vendor}\n"));
            write(root, &format!("sys/bus/pci/devices/{device}/class"), format!("{class}\n"));
        }
        write(root, "sys/module/nvidia/version", "570.86.15\n");
        let host = look(root, &Environment::empty());
        assert_eq!(kernel_module_version(root).as_deref(), Some("570.86.15"));
        assert_eq!(host.cpu_model.as_deref(), Some("A Processor @ 2.00GHz"));
        assert_eq!(host.memory_bytes, Some(24_570_412 << 10));
        assert_eq!(host.available_bytes, Some(20_000_000 << 10));
        assert_eq!(host.memory_limit_bytes, Some(1 << 30));
        assert_eq!(host.transparent_huge_pages.as_deref(), Some("madvise"));
        assert_eq!(host.huge_pages, Some(HugePages { total: 16, free: 6, page_bytes: 2 << 20 }));
        assert!(host.isa.processor_has_amx && host.cores >= 1);
        assert_eq!(cards_on_bus(root), Some(1), "a card's sound is no card");
        write(root, "sys/fs/cgroup/memory.max", "max\n");
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(look(root, &Environment::empty()).memory_limit_bytes, None);
    }

    #[test]
    fn files_that_are_absent_or_nonsense_are_not_told() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let root = root.path();
        let nothing = look(root, &Environment::empty());
        assert_eq!((&nothing.cpu_model, nothing.memory_bytes, nothing.huge_pages), (&None, None, None));
        assert_eq!((&nothing.transparent_huge_pages, nothing.memory_limit_bytes), (&None, None));
        assert_eq!((cards_on_bus(root), kernel_module_version(root)), (None, None));
        write(root, "proc/cpuinfo", b"\xff\xfe::: no : sense\nmodel name\n:\n");
        write(
            root,
            "proc/meminfo",
            "MemTotal: 99999999999999999999 kB\nMemAvailable: -1 kB\nHugePages_Total: x\n",
        );
        write(root, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise] [never");
        write(root, "sys/fs/cgroup/memory.max", [0; 100]);
        fs::create_dir_all(root.join("sys/bus/pci/devices/a/vendor"))
            .expect("a folder where a file should be");
        assert_eq!(look(root, &Environment::empty()), nothing);
        assert_eq!(cards_on_bus(root), Some(0));
    }

    #[test]
    fn the_environment_says_which_instruction_set_is_used_if_the_machine_has_it() {
        let sets = |value: &str| {
            let environment: Environment = [("CONSORT_CPU_ISA", value)].into_iter().collect();
            instruction_sets("", &environment)
        };
        let portable = sets("Portable");
        assert_eq!((portable.used.as_str(), portable.asked.as_deref()), ("portable", Some("Portable")));
        let unknown = sets("sse9");
        assert_eq!((unknown.used, unknown.asked.as_deref()), (Isa::detect().name().to_owned(), Some("sse9")));
        assert_eq!(sets("auto").asked, None);
        assert_eq!(portable.available.last().map(String::as_str), Some(Isa::detect().name()));
    }
}
