//! NVIDIA's libraries, loaded at run time.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, OsStr, c_void},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// A library that stays loaded for the life of the process: it has state of its own, and threads may still be in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library {
    handle: *mut c_void,
}

// SAFETY: the handle of a library that is never closed; the loader's functions may be called from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// Who else may use a library's functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// Nobody.
    Local,
    /// Libraries loaded later, too.
    Global,
}

impl Library {
    /// Loads `file`, an absolute path or a name for the loader to find; else returns what the loader says.
    pub(super) fn open(file: &OsStr, scope: Scope) -> Result<Library, String> {
        let name = CString::new(file.as_bytes()).map_err(|_| "its name holds a NUL".to_owned())?;
        let scope = match scope {
            Scope::Local => libc::RTLD_LOCAL,
            Scope::Global => libc::RTLD_GLOBAL,
        };
        // SAFETY: `name` is a C string. Loading runs the library's constructors; that the file is the library it is
        // called is the contract of whoever configured the path.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | scope) };
        if handle.is_null() { Err(loader_error()) } else { Ok(Library { handle }) }
    }

    /// The address of a function, if the library has it.
    pub(super) fn address(self, name: &CStr) -> Option<*const c_void> {
        // SAFETY: an open library and a C string.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!address.is_null()).then_some(address.cast_const())
    }

    /// The function called `name`.
    ///
    /// # Safety
    /// `T` is a pointer to a function of that function's type.
    pub(super) unsafe fn function<T: Copy>(self, name: &CStr) -> Option<T> {
        const { assert!(size_of::<T>() == size_of::<*const c_void>()) };
        // SAFETY: of the same size by the assertion, a function of that type by the caller's word.
        self.address(name).map(|address| unsafe { std::mem::transmute_copy(&address) })
    }

    /// The file that holds the function called `name`, if the loader knows.
    pub(super) fn file_of(self, name: &CStr) -> Option<PathBuf> {
        let address = self.address(name)?;
        // SAFETY: zeros are a value of this structure of pointers.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: any address may be asked for; `info` has room for the answer.
        let found = unsafe { libc::dladdr(address, &mut info) } != 0 && !info.dli_fname.is_null();
        if !found {
            return None;
        }
        // SAFETY: a C string of the loader's, for as long as the library is loaded.
        let name = unsafe { CStr::from_ptr(info.dli_fname) };
        Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
    }
}

/// `file` for the loader: a relative path without a slash would be looked for on the loader's path.
pub(super) fn absolute(file: &Path) -> PathBuf {
    std::path::absolute(file).unwrap_or_else(|_| file.to_path_buf())
}

/// What the loader last complained of on this thread.
fn loader_error() -> String {
    // SAFETY: returns null or a C string that lives until this thread's next call of the loader.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader does not say why".to_owned();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
