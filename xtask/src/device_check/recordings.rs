//! What kernels do on the emulator, recorded while their own tests run there, and a choice of it.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use consort_kernels::cuda::cubins::manifest::sha256;

use super::silently;
use crate::{process, workspace::Workspace};

/// Launches of one kernel, at most.
const LAUNCHES_MAX: usize = 8;
/// What recordings are made from.
const SOURCES: [&str; 2] = ["kernels/src", "kernels/emulator"];
const STAMP: &str = "made-from.txt";

/// The folder of all recordings, made anew when the kernels, their tests or the emulator have changed.
pub(super) fn ensure(workspace: &Workspace, work: &Path) -> Result<PathBuf> {
    let folder = work.join("recorded");
    let mut sources = Vec::new();
    for source in SOURCES {
        digests(&workspace.root().join(source), &mut sources)?;
    }
    sources.sort_unstable();
    let stamp = sha256(sources.join("\n").as_bytes());
    if fs::read_to_string(folder.join(STAMP)).is_ok_and(|found| found == stamp) {
        return Ok(folder);
    }
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut tests = workspace.cargo();
    // One test after another: which launch of a kind is the first does not depend on threads then.
    tests.args([
        "test",
        "--quiet",
        "--package",
        "consort-kernels",
        "--lib",
        "emulator",
        "--",
        "--test-threads=1",
    ]);
    tests.env("CONSORT_EMULATOR_RECORD", &folder);
    process::run(silently(&mut tests))?;
    fs::write(folder.join(STAMP), stamp).context("cannot write the recordings' stamp")?;
    Ok(folder)
}

fn digests(path: &Path, found: &mut Vec<String>) -> Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            digests(&entry?.path(), found)?;
        }
        return Ok(());
    }
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    found.push(format!("{} {}", path.display(), sha256(&bytes)));
    Ok(())
}

/// Copies some launches of each of `kernels`, which must all have one: the smallest and the largest in turns, while
/// there is room, since small ones are about edges and large ones about loops.
pub(super) fn choose(from: &Path, to: &Path, kernels: &[&str], bytes_max: u64) -> Result<()> {
    let mut by_kernel: BTreeMap<String, Vec<(u64, PathBuf)>> = BTreeMap::new();
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((kernel, _)) = name.strip_suffix(".safetensors").and_then(|name| name.rsplit_once('-'))
        else {
            continue;
        };
        by_kernel.entry(kernel.to_owned()).or_default().push((entry.metadata()?.len(), entry.path()));
    }
    let missing: Vec<&str> =
        kernels.iter().copied().filter(|kernel| !by_kernel.contains_key(*kernel)).collect();
    if !missing.is_empty() {
        bail!("no emulated test of consort-kernels launches {}", missing.join(", "));
    }
    fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    let mut wanted: Vec<&Vec<(u64, PathBuf)>> =
        kernels.iter().filter_map(|kernel| by_kernel.get(*kernel)).collect();
    // What those with little leave is for those with much.
    wanted.sort_by_key(|files| bytes_of(files));
    let mut left = bytes_max;
    for (at, files) in wanted.iter().enumerate() {
        let chosen = choice(files, left / (wanted.len() - at) as u64);
        for (bytes, file) in chosen {
            let name = file.file_name().context("a file without a name")?;
            super::copy(file, &to.join(name))?;
            left = left.saturating_sub(*bytes);
        }
    }
    Ok(())
}

fn bytes_of(files: &[(u64, PathBuf)]) -> u64 {
    files.iter().map(|(bytes, _)| bytes).sum()
}

/// At least the smallest.
fn choice(files: &[(u64, PathBuf)], bytes_max: u64) -> Vec<&(u64, PathBuf)> {
    let mut left: Vec<&(u64, PathBuf)> = files.iter().collect();
    left.sort_unstable();
    let (mut chosen, mut bytes) = (Vec::new(), 0);
    while chosen.len() < LAUNCHES_MAX && !left.is_empty() {
        let fits = |file: &&(u64, PathBuf)| chosen.is_empty() || bytes + file.0 <= bytes_max;
        let at = match chosen.len() % 2 {
            0 => left.iter().position(fits),
            _ => left.iter().rposition(fits),
        };
        let Some(at) = at else { break };
        let file = left.remove(at);
        bytes += file.0;
        chosen.push(file);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(sizes: &[u64]) -> Vec<(u64, PathBuf)> {
        sizes.iter().map(|size| (*size, PathBuf::from(size.to_string()))).collect()
    }

    fn chosen(sizes: &[u64], bytes_max: u64) -> Vec<String> {
        choice(&files(sizes), bytes_max).iter().map(|(_, file)| file.display().to_string()).collect()
    }

    #[test]
    fn the_smallest_and_the_largest_that_fit_are_taken_in_turns() {
        assert_eq!(chosen(&[40, 10, 30, 20], 85), ["10", "40", "20"]);
        assert_eq!(chosen(&[100, 10, 30], 45), ["10", "30"]);
        assert_eq!(chosen(&[50], 10), ["50"], "one at least");
        assert!(chosen(&[], 10).is_empty());
        assert_eq!(chosen(&[1; 40], 1000).len(), LAUNCHES_MAX);
    }
}
