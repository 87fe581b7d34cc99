//! The few functions of NVRTC that are called, found in the library at run time.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, OsStr, c_char, c_int, c_void},
    path::{Path, PathBuf},
    ptr,
};

use crate::cuda::dynamic::{self, Scope};

/// A log or cubin beyond this is taken for a broken library, before memory is asked for it.
const OUTPUT_BYTES_MAX: usize = 1 << 30;

type Status = c_int;
type Program = *mut c_void;

/// `nvrtcResult` of a call that did what it should.
const SUCCESS: Status = 0;
/// `NVRTC_ERROR_INVALID_OPTION`.
const INVALID_OPTION: Status = 5;
/// `NVRTC_ERROR_COMPILATION`.
const COMPILATION: Status = 6;

/// NVRTC, loaded. It stays loaded for the life of the process: it has state of its own and threads may still be in it.
pub(super) struct Library {
    path: Option<PathBuf>,
    functions: Functions,
}

/// As declared in `nvrtc.h`, the same in versions 12 and 13.
struct Functions {
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    count_architectures: unsafe extern "C" fn(*mut c_int) -> Status,
    list_architectures: unsafe extern "C" fn(*mut c_int) -> Status,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log_bytes: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    cubin_bytes: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
}

/// Why a file is not the library that is needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LoadError {
    /// The loader refuses it; what it says.
    Refused(String),
    /// It lacks a function.
    Lacks(&'static CStr),
    /// It does not say its version.
    NoVersion,
    /// Its version.
    TooOld(i32, i32),
}

/// A call that failed, and NVRTC's word for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallError {
    pub(super) function: &'static str,
    pub(super) reason: String,
}

/// How a compilation ended.
pub(super) enum Outcome {
    Compiled {
        cubin: Vec<u8>,
        log: String,
    },
    /// The text or an option is wrong; the log says where.
    Refused {
        log: String,
    },
}

/// A header handed over in memory.
pub(super) struct Header {
    pub(super) name: CString,
    pub(super) text: CString,
}

impl Library {
    /// Loads `file`, a path or a name for the loader to find, and returns it with its version.
    pub(super) fn open(file: &OsStr, version_min: (i32, i32)) -> Result<(Library, (i32, i32)), LoadError> {
        let loaded = dynamic::Library::open(file, Scope::Local).map_err(LoadError::Refused)?;
        // SAFETY (all of them): the types are those of nvrtc.h.
        let get_version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status =
            unsafe { symbol(loaded, c"nvrtcVersion") }?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both point to integers.
        if unsafe { get_version(&mut major, &mut minor) } != SUCCESS {
            return Err(LoadError::NoVersion);
        }
        if (major, minor) < version_min {
            return Err(LoadError::TooOld(major, minor));
        }
        // SAFETY: as above.
        let functions = unsafe { Functions::of(loaded) }?;
        let path = loaded.file_of(c"nvrtcVersion");
        Ok((Library { path, functions }, (major, minor)))
    }

    /// The file, if the loader knows it.
    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Numbers of the architectures that it compiles for.
    pub(super) fn architectures(&self) -> Result<Vec<i32>, CallError> {
        let mut count = 0;
        // SAFETY: points to an integer.
        let status = unsafe { (self.functions.count_architectures)(&mut count) };
        self.check("nvrtcGetNumSupportedArchs", status)?;
        let mut numbers =
            vec![0; usize::try_from(count).unwrap_or(0).min(OUTPUT_BYTES_MAX / size_of::<c_int>())];
        if !numbers.is_empty() {
            // SAFETY: room for as many numbers as it just said.
            let status = unsafe { (self.functions.list_architectures)(numbers.as_mut_ptr()) };
            self.check("nvrtcGetSupportedArchs", status)?;
        }
        Ok(numbers)
    }

    /// Compiles `text`, called `name` in messages. Safe to call from several threads at once.
    pub(super) fn compile(
        &self,
        name: &CStr,
        text: &CStr,
        headers: &[Header],
        options: &[CString],
    ) -> Result<Outcome, CallError> {
        let mut program = OpenProgram { library: self, program: ptr::null_mut() };
        let header_texts: Vec<_> = headers.iter().map(|header| header.text.as_ptr()).collect();
        let header_names: Vec<_> = headers.iter().map(|header| header.name.as_ptr()).collect();
        // SAFETY: C strings and arrays as long as said, all alive during the call, which copies them.
        let status = unsafe {
            (self.functions.create)(
                &mut program.program,
                text.as_ptr(),
                name.as_ptr(),
                c_int::try_from(headers.len()).unwrap_or(c_int::MAX),
                header_texts.as_ptr(),
                header_names.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", status)?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(options.len()).unwrap_or(c_int::MAX);
        // SAFETY: an open program and `count` C strings.
        let status = unsafe { (self.functions.compile)(program.program, count, options.as_ptr()) };
        let log = program.log()?;
        if matches!(status, COMPILATION | INVALID_OPTION) {
            return Ok(Outcome::Refused { log });
        }
        self.check("nvrtcCompileProgram", status)?;
        Ok(Outcome::Compiled { cubin: program.cubin()?, log })
    }

    fn check(&self, function: &'static str, status: Status) -> Result<(), CallError> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: takes any number; the result is a constant C string.
        let text = unsafe { (self.functions.error_string)(status) };
        let reason = if text.is_null() {
            format!("error {status}")
        } else {
            // SAFETY: not null, and a C string by its documentation.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(CallError { function, reason })
    }
}

impl Functions {
    /// # Safety
    /// `library` is NVRTC.
    unsafe fn of(library: dynamic::Library) -> Result<Functions, LoadError> {
        // SAFETY: by the caller's word; the types are those of nvrtc.h.
        unsafe {
            Ok(Functions {
                error_string: symbol(library, c"nvrtcGetErrorString")?,
                count_architectures: symbol(library, c"nvrtcGetNumSupportedArchs")?,
                list_architectures: symbol(library, c"nvrtcGetSupportedArchs")?,
                create: symbol(library, c"nvrtcCreateProgram")?,
                destroy: symbol(library, c"nvrtcDestroyProgram")?,
                compile: symbol(library, c"nvrtcCompileProgram")?,
                log_bytes: symbol(library, c"nvrtcGetProgramLogSize")?,
                log: symbol(library, c"nvrtcGetProgramLog")?,
                cubin_bytes: symbol(library, c"nvrtcGetCUBINSize")?,
                cubin: symbol(library, c"nvrtcGetCUBIN")?,
            })
        }
    }
}

/// A program that is destroyed whatever happens.
struct OpenProgram<'a> {
    library: &'a Library,
    program: Program,
}

impl OpenProgram<'_> {
    fn log(&self) -> Result<String, CallError> {
        let functions = &self.library.functions;
        let mut log =
            self.read("nvrtcGetProgramLogSize", functions.log_bytes, "nvrtcGetProgramLog", functions.log)?;
        // It counts the final NUL.
        log.truncate(log.iter().position(|&byte| byte == 0).unwrap_or(log.len()));
        Ok(String::from_utf8_lossy(&log).into_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, CallError> {
        let functions = &self.library.functions;
        self.read("nvrtcGetCUBINSize", functions.cubin_bytes, "nvrtcGetCUBIN", functions.cubin)
    }

    /// The usual pair of calls: how many bytes, then the bytes.
    fn read(
        &self,
        size_name: &'static str,
        size: unsafe extern "C" fn(Program, *mut usize) -> Status,
        get_name: &'static str,
        get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, CallError> {
        let mut bytes = 0;
        // SAFETY: an open program, and a place for the number.
        self.library.check(size_name, unsafe { size(self.program, &mut bytes) })?;
        if bytes > OUTPUT_BYTES_MAX {
            return Err(CallError {
                function: size_name,
                reason: format!("{bytes} bytes are beyond all reason"),
            });
        }
        let mut out = vec![0u8; bytes];
        if bytes > 0 {
            // SAFETY: an open program, and room for as many bytes as it just said.
            self.library.check(get_name, unsafe { get(self.program, out.as_mut_ptr().cast()) })?;
        }
        Ok(out)
    }
}

impl Drop for OpenProgram<'_> {
    fn drop(&mut self) {
        if self.program.is_null() {
            return;
        }
        // SAFETY: created by this library, and not used after this.
        let status = unsafe { (self.library.functions.destroy)(&mut self.program) };
        if let Err(error) = self.library.check("nvrtcDestroyProgram", status) {
            tracing::warn!(reason = error.reason, "NVRTC could not destroy a program");
        }
    }
}

/// The function called `name`.
///
/// # Safety
/// `T` is a pointer to a function of that function's type.
unsafe fn symbol<T: Copy>(library: dynamic::Library, name: &'static CStr) -> Result<T, LoadError> {
    // SAFETY: the caller's word.
    unsafe { library.function(name) }.ok_or(LoadError::Lacks(name))
}
