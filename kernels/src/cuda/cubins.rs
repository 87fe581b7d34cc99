//! From a CUDA text to a cubin, by the shortest way: built in, else from the disk cache, else from NVRTC.

mod cache;
mod embedded;
pub mod manifest;

use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

pub use self::cache::CacheFacts;
use self::{
    cache::Cache,
    embedded::{EMBEDDED, Embedded},
    manifest::OPTIONS,
};
use super::{
    arch::Arch,
    nvrtc::{Compiled, Nvrtc, NvrtcError},
    settings::Settings,
    sources::{SOURCES, Source},
};

/// A text compiled for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// The binary that `cuModuleLoadData` takes.
    pub bytes: Cow<'static, [u8]>,
    /// What the compiler said; empty for one that was built in.
    pub log: String,
    /// Where it comes from.
    pub origin: Origin,
}

/// Where a cubin comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Built into this executable.
    Embedded,
    /// Compiled earlier on this machine.
    Cache,
    /// Compiled now.
    Compiler,
}

/// Gives cubins. Holds each architecture's compiler once it was needed, and may be asked by several threads.
#[derive(Debug)]
pub struct Cubins {
    settings: Settings,
    cache: Option<Cache>,
    compilers: Mutex<BTreeMap<Arch, Result<Arc<Nvrtc>, NvrtcError>>>,
}

impl Cubins {
    /// Looks for the compiler and keeps the cache where `settings` say.
    pub fn new(settings: Settings) -> Cubins {
        let cache = cache_of(&settings);
        if cache.is_none() {
            tracing::debug!("no folder for compiled kernels: neither CONSORT_CACHE_DIR nor HOME is set");
        }
        Cubins { settings, cache, compilers: Mutex::default() }
    }

    /// The cubin of a text for an architecture.
    pub fn cubin(&self, source: &Source, arch: Arch) -> Result<Cubin, NvrtcError> {
        if let Some(bytes) = embedded(EMBEDDED, source, arch) {
            return Ok(Cubin { bytes: Cow::Borrowed(bytes), log: String::new(), origin: Origin::Embedded });
        }
        self.compiled(source, arch)
    }

    /// The same, whatever is built in: with the compiler's log.
    pub fn compiled(&self, source: &Source, arch: Arch) -> Result<Cubin, NvrtcError> {
        let compiler = self.compiler(arch)?;
        let key = key(&compiler.identity(), source, arch);
        let cached = self.cache.as_ref().and_then(|cache| cache.get(&key));
        let (Compiled { cubin, log }, origin) = match cached {
            Some(compiled) => (compiled, Origin::Cache),
            None => {
                let started = std::time::Instant::now();
                let compiled = compiler.compile(source, arch)?;
                let elapsed_ms = started.elapsed().as_millis();
                tracing::info!(source = source.name, %arch, elapsed_ms, "compiled CUDA kernels");
                if let Some(cache) = &self.cache {
                    cache.put(&key, &compiled);
                }
                (compiled, Origin::Compiler)
            }
        };
        Ok(Cubin { bytes: Cow::Owned(cubin), log, origin })
    }

    /// The compiler for an architecture; looked for once.
    pub fn compiler(&self, arch: Arch) -> Result<Arc<Nvrtc>, NvrtcError> {
        let mut compilers = self.compilers.lock().unwrap_or_else(PoisonError::into_inner);
        compilers.entry(arch).or_insert_with(|| Nvrtc::open(&self.settings, arch).map(Arc::new)).clone()
    }
}

/// The architectures for which this build holds cubins of all its texts, as `sm_80`; none in a plain build.
pub fn embedded_architectures() -> Vec<&'static str> {
    let mut names: Vec<&str> = EMBEDDED.iter().map(|embedded| embedded.arch).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The architecture whose cubins, built in for all texts, a device of `arch` runs; `None` where at least one text must
/// be compiled for it.
pub fn built_in_for(arch: Arch) -> Option<Arch> {
    let all = SOURCES.iter().all(|source| embedded(EMBEDDED, source, arch).is_some());
    let built = embedded_architectures().into_iter().filter_map(|name| name.parse().ok());
    built.filter(|&built: &Arch| all && arch.runs(built)).max()
}

/// What is in the cache of compiled kernels; `None` where no folder is configured.
pub fn cache_facts(settings: &Settings) -> Option<CacheFacts> {
    cache_of(settings).map(|cache| cache.facts())
}

fn cache_of(settings: &Settings) -> Option<Cache> {
    settings.cache.as_ref().map(|folder| Cache::new(folder.join("cubins")))
}

/// The built-in cubin of exactly this text for this architecture, or for an older one whose cubins it runs.
fn embedded(table: &[Embedded], source: &Source, arch: Arch) -> Option<&'static [u8]> {
    let digest = source.digest();
    let runs = |embedded: &&Embedded| {
        let fits = embedded.arch.parse().is_ok_and(|built: Arch| arch.runs(built));
        fits && embedded.source == source.name && embedded.digest == digest
    };
    let newest = |embedded: &&Embedded| embedded.arch.parse().map_or(0, Arch::number);
    table.iter().filter(runs).max_by_key(newest).map(|embedded| embedded.bytes)
}

/// Name of a cached cubin: everything that it depends on. The text's name is part of its log.
fn key(compiler: &str, source: &Source, arch: Arch) -> String {
    let digest = source.digest();
    manifest::sha256(
        format!("{compiler}\n{}\n{arch}\n{digest}\n{}", OPTIONS.join(" "), source.name).as_bytes(),
    )
}

#[cfg(test)]
mod tests;
