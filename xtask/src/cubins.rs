//! `cargo xtask cubins`: every CUDA text compiled for every architecture, judged, and written where a release build
//! embeds it from (`CONSORT_CUBINS_DIR`).
//!
//! Needs no GPU, no driver and no toolkit: NVRTC and the disassembler are Python wheels, installed into target/ once.
//! Fails on spills, local memory, compiler warnings, promised blocks that do not fit, and instructions that rules ask
//! for and that are not there; prints what each kernel takes. Compiled texts are kept in target/, so that only what
//! changed is compiled again.

mod gate;
mod occupancy;
mod report;
mod rules;
mod sass;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use anyhow::{Context, Result, bail};
use consort_kernels::cuda::{
    arch::Arch,
    cubins::{
        Cubin, Cubins,
        manifest::{Entry, FILE_NAME, Manifest, sha256},
    },
    settings::Settings,
    sources::{SOURCES, Source},
};

use self::gate::Verdict;
use crate::{venv, workspace::Workspace};

/// The wheels, in one environment: their headers are what [`crate::abi`] wants.
pub(crate) const REQUIREMENTS: &str = "xtask/src/cubins/requirements.txt";
const LIBRARY: &str = "nvidia/cuda_nvrtc/lib";
const DISASSEMBLER: &str = "nvidia/cu13/bin/nvdisasm";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where cubins and their manifest go.
    #[arg(long, value_name = "DIR", default_value = "target/cubins")]
    out: PathBuf,
    /// Compile for this architecture instead of sm_80, sm_90a and sm_100a; may be given several times.
    #[arg(long, value_name = "SM", conflicts_with = "all")]
    arch: Vec<Arch>,
    /// Compile for all architectures of a release: also sm_86, sm_89 and sm_120.
    #[arg(long)]
    all: bool,
    /// Print the table as it stands in docs/kernels.md.
    #[arg(long)]
    markdown: bool,
    /// Disassemble, and check that the instructions are there that the kernels were written for.
    #[arg(long)]
    sass: bool,
    /// Take this NVRTC, a file or its folder, instead of the one from PyPI.
    #[arg(long, value_name = "PATH")]
    nvrtc: Option<PathBuf>,
}

/// Compiles for the architectures that are always checked, into `out`.
pub(crate) fn make(workspace: &Workspace, out: &Path) -> Result<()> {
    let args = Args {
        out: out.to_path_buf(),
        arch: Vec::new(),
        all: false,
        markdown: false,
        sass: false,
        nvrtc: None,
    };
    run(workspace, &args)
}

/// A text compiled for one architecture, and what was found.
struct Built {
    source: Source,
    arch: Arch,
    cubin: Cubin,
    verdict: Verdict,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let started = Instant::now();
    let archs = args.architectures();
    let venv = match (&args.nvrtc, args.sass) {
        (Some(_), false) => None,
        _ => Some(venv::ensure(workspace, "venv-cubins", REQUIREMENTS)?),
    };
    let library = match (&args.nvrtc, &venv) {
        (Some(path), _) => path.canonicalize().with_context(|| format!("no NVRTC at {}", path.display()))?,
        (None, Some(venv)) => venv.package_file(LIBRARY)?,
        (None, None) => bail!("no environment to take NVRTC from"),
    };
    let cache = workspace.root().join("target/cubin-cache");
    let cubins = Cubins::new(Settings { library: Some(library), cache: Some(cache), ..Settings::default() });
    let compiler =
        format!("NVRTC {}", cubins.compiler(*archs.first().context("no architecture")?)?.version());

    let (mut built, mut problems) = compile(&cubins, &archs);
    problems.extend(built.iter().flat_map(|built| built.verdict.problems.iter().cloned()));
    let kernels =
        built.iter_mut().flat_map(|built| std::mem::take(&mut built.verdict.kernels)).collect::<Vec<_>>();
    let out = workspace.root().join(&args.out);
    let manifest = write_cubins(&out, &compiler, &built)?;
    if let (true, Some(venv)) = (args.sass, &venv) {
        problems.extend(check_instructions(&venv.package_file(DISASSEMBLER)?, &out, &manifest, &kernels)?);
    }
    print!("{}", if args.markdown { report::markdown(&kernels) } else { report::text(&kernels) });
    if !problems.is_empty() {
        problems.iter().for_each(|problem| eprintln!("error: {problem}"));
        bail!("problems with the CUDA kernels: {}", problems.len());
    }
    manifest.write(&out)?;
    eprintln!(
        "{} cubins of {} texts by {compiler} in {} after {:.1} s",
        manifest.entries.len(),
        manifest.texts.len(),
        out.display(),
        started.elapsed().as_secs_f32()
    );
    Ok(())
}

impl Args {
    fn architectures(&self) -> Vec<Arch> {
        if self.all {
            return Arch::RELEASED.to_vec();
        }
        if self.arch.is_empty() { Arch::CHECKED.to_vec() } else { self.arch.clone() }
    }
}

/// Compiles every text for every architecture, on all cores. What cannot be compiled is a problem beside the others.
fn compile(cubins: &Cubins, archs: &[Arch]) -> (Vec<Built>, Vec<String>) {
    let jobs: Vec<(Source, Arch)> =
        SOURCES.iter().flat_map(|source| archs.iter().map(|arch| (*source, *arch))).collect();
    let results = on_all_cores(&jobs, |(source, arch)| -> Result<Built> {
        let cubin = cubins.compiled(source, *arch)?;
        let verdict = gate::judge(source, *arch, &cubin)?;
        Ok(Built { source: *source, arch: *arch, cubin, verdict })
    });
    let (mut built, mut problems) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(found) => built.push(found),
            Err(error) => problems.push(format!("{error:#}")),
        }
    }
    (built, problems)
}

/// The results of `job` for each of `items`, in their order, computed by as many threads as there are cores.
fn on_all_cores<'a, T: Sync, R: Send>(items: &'a [T], job: impl Fn(&'a T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, R)>> = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((at, item)) = next_item(&next, items) {
                    let result = job(item);
                    results.lock().unwrap_or_else(PoisonError::into_inner).push((at, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

fn next_item<'a, T>(next: &AtomicUsize, items: &'a [T]) -> Option<(usize, &'a T)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    items.get(at).map(|item| (at, item))
}

/// Writes the cubins, and no manifest yet: without it nothing embeds them.
fn write_cubins(out: &Path, compiler: &str, built: &[Built]) -> Result<Manifest> {
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    for entry in fs::read_dir(out)? {
        let path = entry?.path();
        let is_ours =
            path.extension().is_some_and(|extension| extension == "cubin") || path.ends_with(FILE_NAME);
        if is_ours {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    let texts = SOURCES.iter().map(|source| (source.name.to_owned(), source.digest())).collect();
    let mut manifest = Manifest { compiler: compiler.to_owned(), texts, entries: Vec::new() };
    for Built { source, arch, cubin, .. } in built {
        let file = format!("{}.{arch}.cubin", source.name.trim_end_matches(".cu").replace('/', "-"));
        let path = out.join(&file);
        fs::write(&path, &cubin.bytes).with_context(|| format!("cannot write {}", path.display()))?;
        manifest.entries.push(Entry {
            source: source.name.to_owned(),
            arch: arch.to_string(),
            file,
            sha256: sha256(&cubin.bytes),
        });
    }
    Ok(manifest)
}

/// Disassembles the cubins and holds them against the rules.
fn check_instructions(
    disassembler: &Path,
    out: &Path,
    manifest: &Manifest,
    kernels: &[gate::Kernel],
) -> Result<Vec<String>> {
    let listings = on_all_cores(&manifest.entries, |entry| {
        let functions = sass::disassemble(disassembler, &out.join(&entry.file))?;
        Ok((entry, functions))
    });
    let listings = listings.into_iter().collect::<Result<Vec<_>>>()?;
    let mut problems = rules::without_kernels(rules::RULES, SOURCES, kernels);
    for (entry, functions) in &listings {
        for function in functions {
            let kernel = kernels.iter().find(|kernel| {
                kernel.arch.to_string() == entry.arch
                    && kernel.source == entry.source
                    && kernel.name == function.name
            });
            let Some(kernel) = kernel else { continue };
            let found = rules::judge(rules::RULES, kernel, function);
            problems
                .extend(found.into_iter().map(|what| format!("{} for {}: {what}", kernel.name, entry.arch)));
        }
    }
    let judged: usize = listings.iter().map(|(_, functions)| functions.len()).sum();
    eprintln!("{judged} kernels disassembled and held against {} rules", rules::RULES.len());
    Ok(problems)
}

#[cfg(test)]
mod tests;
