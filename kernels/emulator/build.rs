//! Compiles the emulator and every `kernel*.cu` of the kernels' operations with the C++ compiler.
//!
//! `CONSORT_SANITIZE` = `address` or `thread` compiles them with that sanitizer; whoever sets it links it, too (`cargo
//! xtask emulate` does both).

use std::{
    env, fs,
    path::{Path, PathBuf},
};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let home = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let (cpp, operations) = (home.join("cpp"), home.parent().ok_or("no parent folder")?.join("src"));
    let prelude = operations.join("cuda");
    // A new text is listed in `sources.rs`, too; other Rust files are nothing to the emulator.
    println!("cargo:rerun-if-changed={}", cpp.display());
    println!("cargo:rerun-if-changed={}", prelude.join("sources.rs").display());
    for text in texts(&operations, &["cu", "cuh"])? {
        println!("cargo:rerun-if-changed={}", text.display());
    }
    println!("cargo:rerun-if-env-changed=CONSORT_SANITIZE");
    let sanitizer = env::var("CONSORT_SANITIZE").unwrap_or_default();
    let sanitizer = match sanitizer.as_str() {
        "" => None,
        "address" => Some(("-fsanitize=address", "CONSORT_ASAN")),
        "thread" => Some(("-fsanitize=thread", "CONSORT_TSAN")),
        other => return Err(format!("CONSORT_SANITIZE is `{other}`; it can be `address` or `thread`").into()),
    };
    println!("cargo:rustc-check-cfg=cfg(consort_race_detector)");
    if sanitizer.is_some_and(|(_, define)| define == "CONSORT_TSAN") {
        println!("cargo:rustc-cfg=consort_race_detector");
    }
    let common = || {
        let mut build = cc::Build::new();
        build.cpp(true).std("c++20").opt_level(2).warnings(false).include(&cpp).include(&prelude);
        build.flag("-fno-strict-aliasing").flag("-ffp-contract=off").flag("-fno-omit-frame-pointer");
        build.flag("-Wall").flag("-Wno-unknown-pragmas").flag("-Wno-unused-function");
        build.define("CONSORT_EMULATOR", None);
        if let Some((_, define)) = sanitizer {
            build.define(define, None).flag("-g1");
        }
        build
    };

    // The machine itself is not watched: its doings are not the kernels'.
    let mut machine = common();
    for file in sources(&cpp)?.into_iter().filter(|file| !file.ends_with(WATCHED)) {
        machine.file(file);
    }
    let mut watched = common();
    if let Some((flag, _)) = sanitizer {
        watched.flag(flag);
    }
    let mut kernels = write_units(&operations, &out)?;
    kernels.push(cpp.join(WATCHED));
    watched.files(&kernels);
    // One archive, since both need each other.
    let machine = machine.try_compile_intermediates()?;
    watched.objects(&machine);
    watched.try_compile("consort_emulator")?;
    // For the software driver, whose library holds the machine, and the kernels compiled in a way of its own.
    println!("cargo::metadata=machine={}", joined(&machine)?);
    println!("cargo::metadata=kernels={}", joined(&kernels)?);
    println!("cargo::metadata=include={}", joined(&[cpp, prelude])?);
    Ok(())
}

/// Paths as one word of metadata.
fn joined(paths: &[PathBuf]) -> Result<String, Failure> {
    Ok(env::join_paths(paths)?.into_string().map_err(|_| "a path that is no text")?)
}

/// The machine's file that is compiled as kernels are.
const WATCHED: &str = "accesses.cpp";

/// C++ and assembler files of a folder, in order.
fn sources(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut files =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, Failure>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "cpp" || extension == "S"));
    files.sort();
    Ok(files)
}

/// One C++ file for each kernel text, in a namespace of its own so that helpers of the same name do not meet, and one
/// that makes the linker keep them all.
fn write_units(operations: &Path, out: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut units = Vec::new();
    let mut anchors = String::new();
    for text in texts(operations, &["cu"])? {
        let name: String = text
            .strip_prefix(operations)?
            .to_string_lossy()
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        let unit = out.join(format!("{name}.cpp"));
        let include = text.display();
        fs::write(
            &unit,
            format!(
                "#include \"prelude.cuh\"\nnamespace {{\n#include \"{include}\"\n}}\n\
                 extern \"C\" const int emulator_anchor_{name} = 0;\n"
            ),
        )?;
        anchors += &format!("extern \"C\" const int emulator_anchor_{name};\n");
        anchors += &format!("const int* emulator_anchor_of_{name} = &emulator_anchor_{name};\n");
        units.push(unit);
    }
    // The Rust side refers to `emulator_anchors`, this file to all units, so none is left out.
    anchors += "extern \"C\" const int emulator_anchors = 1;\n";
    let file = out.join("anchors.cpp");
    fs::write(&file, anchors)?;
    units.push(file);
    Ok(units)
}

/// Files of these kinds in the operations' folders, in order.
fn texts(operations: &Path, kinds: &[&str]) -> Result<Vec<PathBuf>, Failure> {
    let mut texts = Vec::new();
    for folder in fs::read_dir(operations)? {
        let folder = folder?.path();
        if folder.is_dir() {
            for file in fs::read_dir(folder)? {
                let file = file?.path();
                if file.extension().is_some_and(|extension| kinds.iter().any(|kind| extension == *kind)) {
                    texts.push(file);
                }
            }
        }
    }
    texts.sort();
    Ok(texts)
}
