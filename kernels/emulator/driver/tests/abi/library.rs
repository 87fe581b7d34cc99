//! What a software library says of its own interface.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, c_char},
    fs,
    os::unix::ffi::OsStrExt,
    path::Path,
};

use super::facts::Facts;

/// The facts that `function` of the library in `file` returns.
pub(super) fn facts(file: &Path, function: &CStr) -> Facts {
    let name = CString::new(file.as_os_str().as_bytes()).expect("paths hold no NUL");
    // SAFETY: a C string; the library's constructors do nothing but set up its own state.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    // SAFETY: null, or a C string that lives until the next call.
    let reason = || unsafe { libc::dlerror().as_ref().map(|text| CStr::from_ptr(text)) };
    assert!(!library.is_null(), "{}: {:?}", file.display(), reason());
    // SAFETY: an open library and a C string.
    let address = unsafe { libc::dlsym(library, function.as_ptr()) };
    assert!(!address.is_null(), "{} has no {function:?}", file.display());
    // SAFETY: declared so in the library.
    let function =
        unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> *const c_char>(address) };
    // SAFETY: it returns a text that lives as long as the library, which is never closed.
    Facts::of(unsafe { CStr::from_ptr(function()) }.to_str().expect("names are ASCII"))
}

/// The names that a library may export and that begin with `start` and a capital letter: all such words between the
/// NULs of its file, where the table of symbols has its names.
pub(super) fn words(file: &Path, start: &str) -> Vec<String> {
    let bytes = fs::read(file).expect("the library was built");
    let is_name = |word: &&str| {
        let rest = word.strip_prefix(start).unwrap_or("");
        rest.starts_with(|first: char| first.is_ascii_uppercase())
            && rest.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    let words = bytes.split(|&byte| byte == 0).filter_map(|word| std::str::from_utf8(word).ok());
    let mut names: Vec<String> = words.filter(is_name).map(str::to_owned).collect();
    names.sort();
    names.dedup();
    names
}
