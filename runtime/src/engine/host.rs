//! The memory of the machine that CPU ranks share.

use std::{fs, path::Path};

/// Bytes that this process may have: the machine's memory, or what its control group allows of it. Nothing where
/// neither can be read.
pub(crate) fn memory_bytes(root: &Path) -> Option<u64> {
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    let in_all = read("proc/meminfo").and_then(|text| total(&text));
    let limits = ["sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limits = limits.iter().filter_map(|path| read(path)?.trim().parse::<u64>().ok());
    limits.chain(in_all).min()
}

/// Of a line such as `MemTotal: 24570412 kB`.
fn total(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_group_may_allow_less_than_the_machine_has() {
        let root = tempfile::tempdir().expect("a temporary folder");
        assert_eq!(memory_bytes(root.path()), None);
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a new folder");
            fs::write(path, text).expect("the test folder is writable");
        };
        write("proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\n");
        assert_eq!(memory_bytes(root.path()), Some(16 << 20));
        write("sys/fs/cgroup/memory.max", "max\n");
        assert_eq!(memory_bytes(root.path()), Some(16 << 20));
        write("sys/fs/cgroup/memory.max", "1048576\n");
        assert_eq!(memory_bytes(root.path()), Some(1 << 20));
    }
}
