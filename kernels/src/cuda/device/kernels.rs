//! The kernels of a device, by name.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use super::{
    CudaError, lock,
    raw::{Context, Kernel, Module},
};
use crate::cuda::{
    Launch,
    arch::Arch,
    cubins::{Cubin, Cubins},
    image,
    sources::{SOURCES, Source},
};

/// Threads that compile at once, at most.
const COMPILING_MAX: usize = 8;

/// What an ELF file begins with, as all cubins are.
const ELF: &[u8] = b"\x7fELF";

/// Loads a text's cubin when a kernel of it is wanted, or all of them.
pub(super) struct Kernels {
    cubins: Arc<Cubins>,
    arch: Arch,
    ready: RwLock<HashMap<String, Arc<Ready>>>,
    /// Loaded texts. Held while one is loaded, so that none is loaded twice.
    modules: Mutex<BTreeMap<&'static str, Arc<Module>>>,
    all_loaded: AtomicBool,
}

/// A kernel that can be launched.
pub(super) struct Ready {
    pub(super) kernel: Kernel,
    /// Bytes of its parameters, where its cubin or the driver says them.
    parameters: Option<Vec<usize>>,
}

impl Ready {
    /// Whether a launch has the kernel's parameters, in number and size: a device does not tell.
    pub(super) fn check(&self, launch: &Launch<'_>) -> Result<(), String> {
        match &self.parameters {
            Some(expected) if !launch.args.sizes().eq(expected.iter().copied()) => {
                let got: Vec<usize> = launch.args.sizes().collect();
                Err(format!("{} takes parameters of {expected:?} bytes and was given {got:?}", launch.kernel))
            }
            _ => Ok(()),
        }
    }
}

impl Kernels {
    pub(super) fn new(cubins: Arc<Cubins>, arch: Arch) -> Kernels {
        Kernels {
            cubins,
            arch,
            ready: RwLock::default(),
            modules: Mutex::default(),
            all_loaded: AtomicBool::new(false),
        }
    }

    /// The kernel called `name`, loaded if it was not yet.
    pub(super) fn get(&self, context: &Arc<Context>, name: &str) -> Result<Arc<Ready>, CudaError> {
        if let Some(ready) = self.known(name) {
            return Ok(ready);
        }
        let mut modules = lock(&self.modules);
        for source in likely_sources(name) {
            if !modules.contains_key(source.name) {
                let cubin = self.cubin(context, source)?;
                self.load(context, &mut modules, source, &cubin)?;
            }
            if let Some(ready) = self.known(name) {
                return Ok(ready);
            }
            let Some(module) = modules.get(source.name) else { continue };
            let doing = format!("find {name}");
            if let Some(kernel) = module.kernel(name, shared_bytes(name), &doing)? {
                let parameters = kernel.parameters(&doing)?;
                return Ok(self.insert(name, Ready { kernel, parameters }));
            }
        }
        Err(failure(context, name, "no text has a kernel of this name"))
    }

    /// Loads what is not loaded yet, which waits for the device and may not happen while launches are recorded.
    /// Compiles in several threads, where there is something to compile.
    pub(super) fn load_all(&self, context: &Arc<Context>) -> Result<(), CudaError> {
        if self.all_loaded.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut modules = lock(&self.modules);
        let missing: Vec<&Source> =
            SOURCES.iter().filter(|source| !modules.contains_key(source.name)).collect();
        for (source, cubin) in missing.iter().zip(self.cubins_of(context, &missing)) {
            self.load(context, &mut modules, source, &cubin?)?;
        }
        self.all_loaded.store(true, Ordering::Release);
        Ok(())
    }

    fn cubins_of(&self, context: &Context, sources: &[&Source]) -> Vec<Result<Cubin, CudaError>> {
        let next = AtomicUsize::new(0);
        let found = Mutex::new(BTreeMap::new());
        let threads = thread::available_parallelism().map_or(1, usize::from).min(COMPILING_MAX);
        thread::scope(|scope| {
            for _ in 0..threads.min(sources.len()) {
                scope.spawn(|| {
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        let Some(source) = sources.get(at) else { return };
                        let cubin = self.cubin(context, source);
                        lock(&found).insert(at, cubin);
                    }
                });
            }
        });
        found.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
    }

    fn cubin(&self, context: &Context, source: &Source) -> Result<Cubin, CudaError> {
        self.cubins
            .cubin(source, self.arch)
            .map_err(|error| failure(context, source.name, &error.to_string()))
    }

    fn load(
        &self,
        context: &Arc<Context>,
        modules: &mut BTreeMap<&'static str, Arc<Module>>,
        source: &Source,
        cubin: &Cubin,
    ) -> Result<(), CudaError> {
        let doing = format!("load the kernels of {}", source.name);
        let listed = if cubin.bytes.starts_with(ELF) {
            image::kernels(&cubin.bytes).map_err(|error| failure(context, source.name, &error.to_string()))?
        } else {
            Vec::new()
        };
        let module = Arc::new(Module::load(context, &cubin.bytes, &doing)?);
        for image::Kernel { name, parameters, .. } in listed {
            let Some(kernel) = module.kernel(&name, shared_bytes(&name), &doing)? else {
                return Err(failure(
                    context,
                    source.name,
                    &format!("the driver does not find {name} in its cubin"),
                ));
            };
            let parameters = parameters.iter().map(|parameter| parameter.bytes as usize).collect();
            self.insert(&name, Ready { kernel, parameters: Some(parameters) });
        }
        modules.insert(source.name, module);
        Ok(())
    }

    fn known(&self, name: &str) -> Option<Arc<Ready>> {
        self.ready.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    fn insert(&self, name: &str, ready: Ready) -> Arc<Ready> {
        let mut known = self.ready.write().unwrap_or_else(PoisonError::into_inner);
        known.entry(name.to_owned()).or_insert_with(|| Arc::new(ready)).clone()
    }
}

/// All texts, first those of the operation that the kernel's name begins with.
fn likely_sources(kernel: &str) -> impl Iterator<Item = &'static Source> {
    let (likely, others): (Vec<&'static Source>, Vec<&'static Source>) = SOURCES.iter().partition(|source| {
        source.name.split('/').next().is_some_and(|operation| kernel.starts_with(operation))
    });
    likely.into_iter().chain(others)
}

/// The most dynamic shared memory that a kernel is launched with.
fn shared_bytes(kernel: &str) -> u32 {
    // A malformed declaration fails the tests of the texts, long before it gets here.
    let declared = SOURCES.iter().filter_map(|source| source.dynamic_shared_bytes(kernel).ok());
    declared.max().unwrap_or(0)
}

fn failure(context: &Context, text: &str, reason: &str) -> CudaError {
    CudaError::Kernels {
        device: context.label().to_owned(),
        text: text.to_owned(),
        reason: reason.to_owned(),
    }
}
