//! Builds the software libraries into `OUT_DIR/lib`: the driver over the emulator; cuBLASLt, NVRTC and NCCL
//! over the driver.
//!
//! The driver holds the emulator's machine as it is, and the kernels compiled once more, so that every access to memory
//! is told to it (`cpp/touches.h`).

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let cpp = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("cpp");
    let lib = PathBuf::from(env::var("OUT_DIR")?).join("lib");
    fs::create_dir_all(&lib)?;
    println!("cargo:rerun-if-changed={}", cpp.display());
    let driver = lib.join("libcuda.so.1");
    let mut objects = driver_objects(&cpp)?;
    objects.extend(paths("DEP_CONSORT_EMULATOR_MACHINE")?);
    objects.extend(recorded_kernels()?);
    link(
        &driver,
        "libcuda.so",
        &objects,
        &[&format!("-Wl,--version-script={}", cpp.join("exports.map").display())],
    )?;
    // For those that are loaded before the driver.
    link_again(&lib, "libcuda.so.1", "libcuda.so")?;
    library(&cpp.join("cublaslt"), &lib.join("libcublasLt.so.13"), "libcublasLt.so", &[driver.as_path()])?;
    link_again(&lib, "libcublasLt.so.13", "libcublasLt.so.12")?;
    library(&cpp.join("nvrtc"), &lib.join("libnvrtc.so.12"), "libnvrtc.so", &[])?;
    library(&cpp.join("nccl"), &lib.join("libnccl.so.2"), "libnccl.so", &[driver.as_path()])?;
    Ok(())
}

/// How everything is compiled.
fn compiler() -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++20").opt_level(2).pic(true).warnings(true);
    build.flag("-fvisibility=hidden").flag("-fno-strict-aliasing");
    build
}

fn driver_objects(cpp: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut build = compiler();
    build.files(sources(cpp)?).include(cpp).include(&paths("DEP_CONSORT_EMULATOR_INCLUDE")?[0]);
    Ok(build.try_compile_intermediates()?)
}

/// The emulator's kernels, with a call for every access to memory.
fn recorded_kernels() -> Result<Vec<PathBuf>, Failure> {
    let mut build = compiler();
    build.files(paths("DEP_CONSORT_EMULATOR_KERNELS")?).includes(paths("DEP_CONSORT_EMULATOR_INCLUDE")?);
    build.define("CONSORT_EMULATOR", None).define("CONSORT_RECORDED", None);
    build.flag("-ffp-contract=off").flag("-fno-omit-frame-pointer");
    build.flag("-Wno-unknown-pragmas").flag("-Wno-unused-function").flag("-Wno-unused-parameter");
    build.flag("-fsanitize=kernel-address");
    let clang = build.get_compiler().is_like_clang();
    for option in ["asan-instrumentation-with-call-threshold=0", "asan-stack=0", "asan-globals=0"] {
        if clang {
            build.flag("-mllvm").flag(format!("-{option}"));
        } else {
            build.flag(format!("--param={option}"));
        }
    }
    Ok(build.try_compile_intermediates()?)
}

/// A library of all C++ files of a folder, if there are any.
fn library(folder: &Path, library: &Path, name: &str, over: &[&Path]) -> Result<(), Failure> {
    let files = sources(folder).unwrap_or_default();
    if files.is_empty() {
        return Ok(());
    }
    let mut build = compiler();
    // Products and sums are rounded separately on every machine.
    build.files(files).include(folder).flag("-ffp-contract=off");
    let mut objects = build.try_compile_intermediates()?;
    objects.extend(over.iter().map(|path| path.to_path_buf()));
    // Beside the driver, wherever the folder is.
    link(library, name, &objects, &["-Wl,-rpath,$ORIGIN"])
}

/// A shared library that stays loaded, since threads of its own run in it. Its name has no version: whoever asks for
/// `libcuda.so` when it is loaded already is given it.
fn link(library: &Path, name: &str, objects: &[PathBuf], options: &[&str]) -> Result<(), Failure> {
    let mut command: Command = compiler().try_get_compiler()?.to_command();
    command
        .arg("-shared")
        .arg("-o")
        .arg(library)
        .arg(format!("-Wl,-soname,{name}"))
        .args(objects)
        .args(options);
    command.args(["-Wl,-z,nodelete", "-Wl,-z,defs", "-Wl,-Bsymbolic", "-lpthread", "-ldl"]);
    if env::var("CONSORT_SANITIZE").is_ok_and(|sanitizer| !sanitizer.is_empty()) {
        // The emulator's machine asks for the sanitizer, which is in the program.
        command.arg("-Wl,-z,undefs");
    }
    let status = command.status()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("linking {} failed: {status}", library.display()).into())
    }
}

/// The same library under another name.
fn link_again(lib: &Path, library: &str, name: &str) -> Result<(), Failure> {
    let other = lib.join(name);
    if fs::symlink_metadata(&other).is_ok() {
        fs::remove_file(&other)?;
    }
    if lib.join(library).exists() {
        std::os::unix::fs::symlink(library, other)?;
    }
    Ok(())
}

/// Paths that the emulator's build script left.
fn paths(variable: &str) -> Result<Vec<PathBuf>, Failure> {
    println!("cargo:rerun-if-env-changed={variable}");
    let joined =
        env::var_os(variable).ok_or(format!("{variable} is not set: the emulator's build script sets it"))?;
    let all: Vec<PathBuf> = env::split_paths(&joined).collect();
    for path in &all {
        println!("cargo:rerun-if-changed={}", path.display());
    }
    Ok(all)
}

/// C++ files of a folder itself, in order.
fn sources(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut files =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, Failure>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "cpp"));
    files.sort();
    Ok(files)
}
