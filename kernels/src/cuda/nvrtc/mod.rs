//! NVRTC, NVIDIA's run-time compiler, found when it is needed.
//!
//! Turns a CUDA text into a cubin and a log. Needs neither a driver nor a GPU, and the crate builds without it.
//! Versions 12 and 13 are known to work. Who wants a cubin asks [`super::cubins`], which comes here last.

mod library;
pub mod usage;

use std::{
    ffi::CString,
    fmt,
    path::{Path, PathBuf},
};

use self::library::{CallError, Header, Library, LoadError, Outcome};
use super::{
    arch::Arch,
    cubins::manifest::OPTIONS,
    dynamic,
    search::{self, NVRTC, Place},
    settings::Settings,
    sources::{PRELUDE, Source},
};

/// The oldest version whose C++17, instructions and log are known.
const VERSION_MIN: (i32, i32) = (12, 0);

/// What the texts include.
const PRELUDE_NAME: &str = "prelude.cuh";

/// A loaded NVRTC. Several threads may compile at once.
pub struct Nvrtc {
    library: Library,
    version: Version,
    file: PathBuf,
}

/// Version of a compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Major part.
    pub major: i32,
    /// Minor part.
    pub minor: i32,
}

/// What a compilation yields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The binary.
    pub cubin: Vec<u8>,
    /// Warnings, and what [`usage::parse`] reads.
    pub log: String,
}

/// Why there is no compiler, or no cubin from it.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum NvrtcError {
    /// No library that can be used.
    #[error(
        "no usable NVRTC, CUDA's run-time compiler ({}.{} or newer). Looked at:{looked}\nInstall it \
         (`pip install nvidia-cuda-nvrtc-cu12` into the active Python environment, or a CUDA toolkit), or let \
         CONSORT_CUDA_LIB_PATH name the library or its folder",
        VERSION_MIN.0, VERSION_MIN.1
    )]
    NotFound {
        /// One line for each place, each after a line's end, with what was wrong there.
        looked: String,
    },
    /// This NVRTC is too old for a device, or too new.
    #[error(
        "NVRTC {version} at {} does not compile for {arch}, only for {known}: a newer device needs a newer NVRTC \
         (`pip install --upgrade nvidia-cuda-nvrtc`, or CONSORT_CUDA_LIB_PATH)",
        file.display()
    )]
    Arch {
        /// The library.
        file: PathBuf,
        /// Its version.
        version: Version,
        /// What was asked for.
        arch: Arch,
        /// What it knows.
        known: String,
    },
    /// The text is wrong.
    #[error("NVRTC {version} refuses {name} for {arch}:\n{log}")]
    Refused {
        /// Its version.
        version: Version,
        /// The text.
        name: String,
        /// The architecture.
        arch: Arch,
        /// What the compiler says, with file and line.
        log: String,
    },
    /// A text that cannot be handed to a C function.
    #[error("{name} holds a NUL byte")]
    Nul {
        /// The text.
        name: String,
    },
    /// A call failed for a reason that is not the text's.
    #[error("NVRTC's {function} failed for {name}: {reason}")]
    Call {
        /// The function.
        function: &'static str,
        /// The text, or the architecture asked about.
        name: String,
        /// NVRTC's word for it.
        reason: String,
    },
}

impl Nvrtc {
    /// The first usable one that compiles for `arch`: `CONSORT_CUDA_LIB_PATH` alone if that is set, else on the
    /// loader's path, in the toolkits' usual folders and in those of the Python wheels. One too old for a device hides
    /// no newer one; only if none is new enough, the first is named.
    pub fn open(settings: &Settings, arch: Arch) -> Result<Nvrtc, NvrtcError> {
        Nvrtc::first(settings, |nvrtc| nvrtc.require(arch))
    }

    /// The first usable one, whatever it compiles for.
    pub fn find(settings: &Settings) -> Result<Nvrtc, NvrtcError> {
        Nvrtc::first(settings, |_| Ok(()))
    }

    fn first(
        settings: &Settings,
        suits: impl Fn(&Nvrtc) -> Result<(), NvrtcError>,
    ) -> Result<Nvrtc, NvrtcError> {
        let mut looked = String::new();
        let mut unsuited = None;
        for place in search::places(&NVRTC, settings, Path::new("/")) {
            for opened in Nvrtc::open_at(&place) {
                match opened.map(|nvrtc| suits(&nvrtc).map(|()| nvrtc)) {
                    Ok(Ok(nvrtc)) => return Ok(nvrtc),
                    Ok(Err(error)) => unsuited = unsuited.or(Some(error)),
                    Err(reason) => looked += &format!("\n  {reason}"),
                }
            }
        }
        Err(unsuited.unwrap_or(NvrtcError::NotFound { looked }))
    }

    /// Those of a place, one after the other, or what is wrong with each.
    fn open_at(place: &Place) -> Box<dyn Iterator<Item = Result<Nvrtc, String>> + '_> {
        match place {
            Place::Loader => Box::new(NVRTC.names.iter().map(|name| {
                Nvrtc::load(PathBuf::from(name)).map_err(|error| match error {
                    LoadError::Refused(reason) => format!("the loader's path: {reason}"),
                    error => format!("{name}: {}", shown(&error)),
                })
            })),
            Place::File(file) => Box::new(std::iter::once(Nvrtc::load_file(file))),
            Place::Folder(folder) => {
                let files = NVRTC.names.iter().map(|name| folder.join(name));
                let files: Vec<PathBuf> = files.filter(|file| file.exists()).collect();
                if files.is_empty() {
                    let nothing = format!("{}: no {}", folder.display(), NVRTC.names.join(", no "));
                    return Box::new(std::iter::once(Err(nothing)));
                }
                Box::new(files.into_iter().map(|file| Nvrtc::load_file(&file)))
            }
        }
    }

    fn load_file(file: &Path) -> Result<Nvrtc, String> {
        let file = dynamic::absolute(file);
        Nvrtc::load(file.clone()).map_err(|error| format!("{}: {}", file.display(), shown(&error)))
    }

    /// `file` is an absolute path, or a name for the loader to find.
    fn load(file: PathBuf) -> Result<Nvrtc, LoadError> {
        let (library, (major, minor)) = Library::open(file.as_os_str(), VERSION_MIN)?;
        let file = library.path().map_or(file, Path::to_path_buf);
        Ok(Nvrtc { library, version: Version { major, minor }, file })
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The file that it was loaded from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The architectures that it compiles for, as compute capabilities times ten: 80, 90, 120.
    pub fn architectures(&self) -> Result<Vec<u32>, NvrtcError> {
        let numbers = self.library.architectures().map_err(|CallError { function, reason }| {
            NvrtcError::Call { function, name: "its architectures".to_owned(), reason }
        })?;
        Ok(numbers.into_iter().filter_map(|number| u32::try_from(number).ok()).collect())
    }

    /// A text that tells apart the builds of one version: part of the cubin cache's key.
    pub(super) fn identity(&self) -> String {
        let bytes = self.file.metadata().map_or(0, |metadata| metadata.len());
        format!("NVRTC {}, {bytes} bytes", self.version)
    }

    /// Compiles a text for an architecture.
    pub fn compile(&self, source: &Source, arch: Arch) -> Result<Compiled, NvrtcError> {
        let name = || source.name.to_owned();
        let failed = |CallError { function, reason }| NvrtcError::Call { function, name: name(), reason };
        self.require(arch)?;
        let c_string = |text: &str| CString::new(text).map_err(|_| NvrtcError::Nul { name: name() });
        let (file, text) = (c_string(source.name)?, c_string(source.text)?);
        let headers = std::iter::once((PRELUDE_NAME, PRELUDE))
            .chain(source.headers.iter().map(|header| (header.file_name(), header.text)))
            .map(|(name, text)| Ok(Header { name: c_string(name)?, text: c_string(text)? }))
            .collect::<Result<Vec<_>, NvrtcError>>()?;
        let options = std::iter::once(format!("--gpu-architecture={arch}"))
            .chain(OPTIONS.iter().map(|&option| option.to_owned()))
            .map(|option| c_string(&option))
            .collect::<Result<Vec<_>, _>>()?;
        match self.library.compile(&file, &text, &headers, &options).map_err(failed)? {
            Outcome::Compiled { cubin, log } => Ok(Compiled { cubin, log }),
            Outcome::Refused { log } => {
                let log = log.trim_end().to_owned();
                Err(NvrtcError::Refused { version: self.version, name: name(), arch, log })
            }
        }
    }

    fn require(&self, arch: Arch) -> Result<(), NvrtcError> {
        let known = self.library.architectures().map_err(|CallError { function, reason }| {
            NvrtcError::Call { function, name: arch.to_string(), reason }
        })?;
        if known.iter().any(|&number| u32::try_from(number) == Ok(arch.number())) {
            return Ok(());
        }
        let known = known.iter().map(|number| format!("sm_{number}")).collect::<Vec<_>>().join(", ");
        Err(NvrtcError::Arch { file: self.file.clone(), version: self.version, arch, known })
    }
}

fn shown(error: &LoadError) -> String {
    match error {
        LoadError::Refused(reason) => reason.clone(),
        LoadError::Lacks(function) => {
            format!("not NVRTC, or too old: it has no {}", function.to_string_lossy())
        }
        LoadError::NoVersion => "it does not say its version".to_owned(),
        LoadError::TooOld(major, minor) => {
            format!("version {major}.{minor} is too old, {}.{} is needed", VERSION_MIN.0, VERSION_MIN.1)
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("version", &self.version).field("file", &self.file).finish()
    }
}

#[cfg(test)]
mod tests;
